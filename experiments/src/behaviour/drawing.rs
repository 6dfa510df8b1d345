//! The report's drawing: bytes by kind over time, and the lives of the largest blocks below, as one SVG file.

use std::fmt::Write;

use super::history::{Block, History, Kind};
use crate::svg::escaped;
use crate::table::mib;

const WIDTH: f64 = 1_280.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 64.0;
const AREA_HEIGHT: f64 = 260.0;
const BETWEEN: f64 = 60.0;
const ROW_HEIGHT: f64 = 13.0;
const BOTTOM: f64 = 34.0;
const BLOCKS_MAX: usize = 48;
/// Ticks that an axis has about.
const AXIS_TICKS: f64 = 8.0;

/// Colours that colour-blind readers tell apart (Okabe and Ito), by kind's place in [`Kind::ALL`].
const COLOURS: [&str; Kind::ALL.len()] =
    ["#0072b2", "#d55e00", "#cc79a7", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#999999"];

struct Canvas<'a> {
    history: &'a History,
    svg: String,
    /// Bytes that the area's full height stands for.
    bytes_max: f64,
}

/// Draws `history`.
pub fn draw(history: &History) -> String {
    let mut largest: Vec<&Block> = history.blocks.iter().filter(|block| block.kind != Kind::Workspace).collect();
    largest.sort_by_key(|block| std::cmp::Reverse(block.bytes));
    largest.truncate(BLOCKS_MAX);
    largest.sort_by_key(|block| history.life(block));
    let by_kind = history.bytes_by_kind();
    let peak_bytes = by_kind.iter().map(|kinds| kinds.iter().sum::<u64>()).max().unwrap_or(0);
    let mut canvas = Canvas { history, svg: String::new(), bytes_max: (peak_bytes as f64 * 1.05).max(1.0) };
    canvas.head(largest.len());
    canvas.legend(&by_kind);
    canvas.area(&by_kind);
    canvas.byte_axis();
    canvas.time_axis(TOP + AREA_HEIGHT);
    canvas.lives(&largest);
    canvas.svg.push_str("</svg>\n");
    canvas.svg
}

impl Canvas<'_> {
    fn put(&mut self, element: std::fmt::Arguments<'_>) {
        self.svg.write_fmt(element).expect("writing to a string cannot fail");
        self.svg.push('\n');
    }

    fn x(&self, tick: usize) -> f64 {
        let passed = self.history.at(tick) - self.history.at(0);
        LEFT + (WIDTH - LEFT - RIGHT) * passed as f64 / self.history.length().max(1) as f64
    }

    fn y(&self, bytes: f64) -> f64 {
        TOP + AREA_HEIGHT * (1.0 - bytes / self.bytes_max)
    }

    fn head(&mut self, rows: usize) {
        let height = TOP + AREA_HEIGHT + BETWEEN + ROW_HEIGHT * rows as f64 + BOTTOM;
        self.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\">"
        ));
        self.put(format_args!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>"));
        let subject = escaped(&self.history.subject);
        self.put(format_args!("<text x=\"{LEFT}\" y=\"20\" font-size=\"15\">Device memory of {subject}</text>"));
    }

    fn legend(&mut self, by_kind: &[[u64; Kind::ALL.len()]]) {
        let mut x = LEFT;
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            if by_kind.iter().all(|kinds| kinds[place] == 0) {
                continue;
            }
            let (colour, name) = (COLOURS[place], kind.name());
            self.put(format_args!("<rect x=\"{x}\" y=\"34\" width=\"11\" height=\"11\" fill=\"{colour}\"/>"));
            self.put(format_args!("<text x=\"{}\" y=\"44\">{name}</text>", x + 15.0));
            x += 30.0 + 6.5 * name.len() as f64;
        }
    }

    /// Bytes by kind, stacked. Of all ticks in one pixel column the fullest is drawn, so no peak is lost.
    fn area(&mut self, by_kind: &[[u64; Kind::ALL.len()]]) {
        let mut columns: Vec<(f64, [u64; Kind::ALL.len()])> = Vec::new();
        for (tick, kinds) in by_kind.iter().enumerate() {
            let x = self.x(tick).floor();
            match columns.last_mut() {
                Some((last, fullest)) if *last == x => {
                    if kinds.iter().sum::<u64>() > fullest.iter().sum() {
                        *fullest = *kinds;
                    }
                }
                _ => columns.push((x, *kinds)),
            }
        }
        let end = WIDTH - RIGHT;
        for place in 0..Kind::ALL.len() {
            if columns.iter().all(|(_, kinds)| kinds[place] == 0) {
                continue;
            }
            let mut upper = String::new();
            let mut lower = String::new();
            for (position, (x, kinds)) in columns.iter().enumerate() {
                let until = columns.get(position + 1).map_or(end, |(next, _)| *next);
                let below: u64 = kinds[..place].iter().sum();
                let (low, high) = (self.y(below as f64), self.y((below + kinds[place]) as f64));
                let step = |y: f64| format!("{x:.0},{y:.1} {until:.0},{y:.1} ");
                upper.push_str(&step(high));
                lower.insert_str(0, &format!("{until:.0},{low:.1} {x:.0},{low:.1} "));
            }
            let colour = COLOURS[place];
            self.put(format_args!("<polygon points=\"{upper}{lower}\" fill=\"{colour}\"/>"));
        }
    }

    fn byte_axis(&mut self) {
        let step = round_step(self.bytes_max / f64::from(1 << 20) / AXIS_TICKS) * f64::from(1 << 20);
        let mut bytes = 0.0;
        while bytes <= self.bytes_max {
            let (y, label) = (self.y(bytes), bytes / f64::from(1 << 20));
            let end = WIDTH - RIGHT;
            self.put(format_args!(
                "<line x1=\"{LEFT}\" x2=\"{end}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"black\" stroke-opacity=\"0.15\"/>"
            ));
            let (x, y) = (LEFT - 6.0, y + 4.0);
            self.put(format_args!("<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{} MiB</text>", trim(label)));
            bytes += step;
        }
    }

    fn time_axis(&mut self, y: f64) {
        let (scale, unit) = if self.history.timed { (1e6, "ms") } else { (1.0, "events") };
        let length = self.history.length() as f64 / scale;
        let step = round_step(length.max(f64::MIN_POSITIVE) / AXIS_TICKS);
        let mut time = 0.0;
        while time <= length {
            let x = LEFT + (WIDTH - LEFT - RIGHT) * time / length.max(f64::MIN_POSITIVE);
            self.put(format_args!(
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y}\" y2=\"{}\" stroke=\"black\"/>",
                y + 4.0
            ));
            let label = trim(time);
            self.put(format_args!(
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label} {unit}</text>",
                y + 16.0
            ));
            time += step;
        }
    }

    /// One row for each block: pale while it lives, dark while it is accessed.
    fn lives(&mut self, blocks: &[&Block]) {
        let top = TOP + AREA_HEIGHT + BETWEEN;
        let count = blocks.len();
        self.put(format_args!(
            "<text x=\"{LEFT}\" y=\"{}\">The {count} largest storages: pale while they live, dark while they are accessed</text>",
            top - 10.0
        ));
        for (row, block) in blocks.iter().enumerate() {
            let y = top + ROW_HEIGHT * row as f64;
            let (born, died) = self.history.life(block);
            let (start, end) = (self.x(born), self.x(died));
            let place = block.kind.place();
            let colour = COLOURS[place];
            let bar = ROW_HEIGHT - 2.0;
            let pale = if block.accesses.is_empty() { 0.8 } else { 0.35 };
            self.put(format_args!(
                "<rect x=\"{start:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{bar}\" fill=\"{colour}\" \
                 fill-opacity=\"{pale}\"/>",
                (end - start).max(1.0)
            ));
            for &(from, until) in &block.accesses {
                let (from, until) = (self.x(from), self.x(until));
                self.put(format_args!(
                    "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{bar}\" fill=\"{colour}\"/>",
                    (until - from).max(1.0)
                ));
            }
            let label = escaped(&shorten(&block.label, 32));
            self.put(format_args!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"10\">{label} · {} MiB</text>",
                LEFT - 6.0,
                y + 9.0,
                mib(block.bytes)
            ));
        }
        self.time_axis(top + ROW_HEIGHT * blocks.len() as f64 + 2.0);
    }
}

/// 1, 2 or 5 times a power of ten: the least that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    steps.into_iter().map(|digit| digit * power).find(|round| *round >= step * 0.999).unwrap_or(10.0 * power)
}

/// A number without the rounding noise of its steps.
fn trim(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

fn shorten(text: &str, characters_max: usize) -> String {
    let short: String = text.chars().take(characters_max).collect();
    if short.len() < text.len() { format!("{short}…") } else { short }
}
