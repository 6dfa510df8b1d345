//! Members of a family that are drawn from ranges, and what splits those to train on from those held out.
//!
//! The split is one of structure: a key that the held-out ranges name has no value there that the training ranges have, so
//! a held-out member is never a drawn one with other noise. Members that have a name are trained on beside those: some share
//! one value with what is held out, none all of them. Which member is drawn depends on the seed
//! alone. What a key means is the family's business: a range gives a value to any key of its workloads.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Uniform};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Value;

use super::error::{ConfigError, Problem};
use super::{FamilyConfig, FamilyName, require};
use crate::workload::{Family, ReadFamily, WorkloadConfig};

/// Draws for each member that is wanted, of which some make no valid, small or new one.
const DRAWS_PER_MEMBER: usize = 200;

/// How names of drawn members say their structure. Values of other keys are no structure, and not part of the name.
const LETTERS: [(&str, &str); 9] = [
    ("arch", ""),
    ("layers", "d"),
    ("depth", "d"),
    ("width", "w"),
    ("heads", "h"),
    ("patch", "p"),
    ("sequence", "s"),
    ("image_size", "i"),
    ("batch", "b"),
];

/// The side of the split that a member is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Members to train on.
    Train,
    /// Members of another structure, to judge by.
    HeldOut,
}

/// The ranges that members are drawn from: the table `[members]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Members {
    /// Most floating-point operations in an iteration (see [`WorkloadConfig::flops`]), so that recording takes seconds.
    pub flops_max: f64,
    /// What each key of a member to train on is drawn from.
    pub train: BTreeMap<String, Range>,
    /// The same for held-out members; the other keys are as in training.
    pub held_out: BTreeMap<String, Range>,
}

impl Members {
    fn ranges(&self, split: Split) -> BTreeMap<&str, &Range> {
        let held_out = self.held_out.iter().filter(|_| split == Split::HeldOut);
        self.train.iter().chain(held_out).map(|(key, range)| (key.as_str(), range)).collect()
    }
}

/// What the value of one key is drawn from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Value")]
pub enum Range {
    /// Any of some values, each as likely as the others: `{ choice = [64, 128] }`, or the only value: `64`.
    Choice(Vec<Value>),
    /// Between two numbers, both included: `{ uniform = [2, 6] }`, of whole numbers if both are whole.
    Uniform(Span),
    /// The same, with its logarithm uniform: `{ log_uniform = [1e-4, 1e-2] }`.
    LogUniform(Span),
}

/// From one number to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    least: f64,
    most: f64,
    whole: bool,
}

impl TryFrom<Value> for Range {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let expected =
            "expected a value, { choice = [..] }, { uniform = [least, most] } or { log_uniform = [least, most] }";
        let Value::Table(table) = value else { return Ok(Range::Choice(vec![value])) };
        let mut entries = table.into_iter();
        let (Some((name, Value::Array(values))), None) = (entries.next(), entries.next()) else {
            return Err(expected.to_owned());
        };
        match name.as_str() {
            "choice" if !values.is_empty() => Ok(Range::Choice(values)),
            "choice" => Err("expected at least one value to choose".to_owned()),
            "uniform" => Ok(Range::Uniform(Span::of(&values)?)),
            "log_uniform" => {
                let span = Span::of(&values)?;
                if span.least > 0.0 { Ok(Range::LogUniform(span)) } else { Err("expected numbers above 0".to_owned()) }
            }
            other => Err(format!("{expected}, found `{other}`")),
        }
    }
}

impl Span {
    fn of(values: &[Value]) -> Result<Self, String> {
        let ends: Option<Vec<f64>> = values.iter().map(number).collect();
        match ends.as_deref() {
            Some(&[least, most]) if least <= most && most - least < 1e15 => {
                Ok(Span { least, most, whole: values.iter().all(Value::is_integer) })
            }
            _ => Err("expected two numbers, the lesser first".to_owned()),
        }
    }

    /// A number between the least and the most, each as likely on the scale that `up` leads to and `down` back from.
    fn draw(self, draw: &mut ChaCha8Rng, up: fn(f64) -> f64, down: fn(f64) -> f64) -> Value {
        // A whole number has as much room as any other.
        let (least, most) = if self.whole { (self.least - 0.5, self.most + 0.5) } else { (self.least, self.most) };
        let uniform = Uniform::new_inclusive(up(least), up(most)).expect("ends are finite and in order");
        let drawn = down(uniform.sample(draw));
        match self.whole {
            true => Value::Integer(drawn.round().clamp(self.least, self.most) as i64),
            false => Value::Float(drawn.clamp(self.least, self.most)),
        }
    }

    fn holds(self, value: &Value) -> bool {
        number(value).is_some_and(|number| (self.least..=self.most).contains(&number))
    }
}

impl Range {
    fn draw(&self, draw: &mut ChaCha8Rng) -> Value {
        match self {
            Range::Choice(values) => {
                let index = Uniform::new(0, values.len()).expect("there is a value to choose");
                values[index.sample(draw)].clone()
            }
            Range::Uniform(span) => span.draw(draw, |number| number, |number| number),
            Range::LogUniform(span) => span.draw(draw, f64::ln, f64::exp),
        }
    }

    /// Whether some value is in both.
    fn meets(&self, other: &Range) -> bool {
        let span = |range: &Range| match range {
            Range::Choice(_) => None,
            Range::Uniform(span) | Range::LogUniform(span) => Some(*span),
        };
        match (self, other) {
            (Range::Choice(own), Range::Choice(others)) => own.iter().any(|value| {
                others.iter().any(|other| value == other || number(value).is_some_and(|own| number(other) == Some(own)))
            }),
            (Range::Choice(values), range) | (range, Range::Choice(values)) => {
                span(range).is_some_and(|span| values.iter().any(|value| span.holds(value)))
            }
            (own, other) => {
                let [own, other] = [own, other].map(|range| span(range).expect("it is no choice"));
                own.least <= other.most && other.least <= own.most
            }
        }
    }
}

fn number(value: &Value) -> Option<f64> {
    let number = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64))?;
    number.is_finite().then_some(number)
}

/// Reads one drawn member.
struct ReadMember(toml::Table);

impl ReadFamily for ReadMember {
    type Output = Result<WorkloadConfig, toml::de::Error>;

    fn read<C: DeserializeOwned>(self, wrap: fn(C) -> WorkloadConfig) -> Self::Output {
        Value::Table(self.0).try_into().map(wrap)
    }
}

/// `gpt-d4-w128-s64-b8`.
fn name(family: Family, member: &toml::Table) -> String {
    let part = |(key, letter): (&str, &str)| {
        let value = member.get(key)?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Some(format!("-{letter}{text}"))
    };
    LETTERS.into_iter().filter_map(part).fold(family.to_string(), |name, part| name + &part)
}

impl FamilyConfig {
    /// Draws `count` members of different structure, which is none of those trained on by name, and calls them by it. The same seed
    /// gives the same members.
    ///
    /// Fails where the file has no table `[members]`, or its ranges hold too few members.
    pub fn members(&self, split: Split, count: usize, seed: u64) -> Result<Vec<(String, WorkloadConfig)>, ConfigError> {
        let drawn = match (&self.members, self.family) {
            (Some(members), FamilyName::Loops(family)) => {
                draw_members(family, members, &self.trained_by_name(family), split, count, seed)
            }
            _ => require(|| "members".to_owned(), false, "must be there for members to be drawn").map(|()| vec![]),
        };
        drawn.map_err(|(key, problem)| ConfigError::at_key(&self.path, &self.text, key, problem))
    }

    /// What drawn members of the same structure as those that have a name and are trained on would be called.
    fn trained_by_name(&self, family: Family) -> Vec<String> {
        let structure = |workload: &String| {
            let config = toml::Table::try_from(self.workloads.get(workload)?).expect("it was read from a table");
            Some(name(family, &config))
        };
        self.randomisation.workloads.iter().filter_map(structure).collect()
    }
}

/// Checks the ranges of `family`: that the split is one of structure, and that there is a member on either side.
pub(super) fn check(family: Family, members: &Members) -> Result<(), (String, Problem)> {
    let cap = members.flops_max > 0.0 && members.flops_max.is_finite();
    require(|| "members.flops_max".into(), cap, "must be above 0")?;
    require(|| "members.held_out".into(), !members.held_out.is_empty(), "must name a key that differs from training")?;
    for (key, range) in &members.held_out {
        let path = || format!("members.held_out.{key}");
        let trained = members.train.get(key);
        require(path, trained.is_some(), "must be drawn for training, too")?;
        let differs = !trained.is_some_and(|trained| trained.meets(range));
        require(path, differs, "must hold no value that members.train holds")?;
        let structural = LETTERS.iter().any(|(name, _)| name == key);
        require(path, structural, "is no structure: only keys such as depth, width or batch can be held out")?;
    }
    for split in [Split::Train, Split::HeldOut] {
        draw_members(family, members, &[], split, 1, 0)?;
    }
    Ok(())
}

/// Draws members that are none of those called `others`.
fn draw_members(
    family: Family,
    members: &Members,
    others: &[String],
    split: Split,
    count: usize,
    seed: u64,
) -> Result<Vec<(String, WorkloadConfig)>, (String, Problem)> {
    let (table, stream) = match split {
        Split::Train => ("members.train", 0),
        Split::HeldOut => ("members.held_out", 1),
    };
    let mut draw = ChaCha8Rng::seed_from_u64(seed);
    draw.set_stream(stream);
    let ranges = members.ranges(split);
    let mut drawn: Vec<(String, WorkloadConfig)> = Vec::with_capacity(count);
    let mut why = "they were drawn before".to_owned();
    for _ in 0..DRAWS_PER_MEMBER * count {
        if drawn.len() == count {
            break;
        }
        let values: toml::Table = ranges.iter().map(|(&key, range)| (key.to_owned(), range.draw(&mut draw))).collect();
        let name = name(family, &values);
        let config = family.read(ReadMember(values)).map_err(|error| malformed(table, error))?;
        if others.contains(&name) || drawn.iter().any(|(other, _)| *other == name) {
            continue;
        }
        match config.validate() {
            Err(implausible) => why = implausible.to_string(),
            Ok(()) if config.flops() > members.flops_max => why = format!("{name} takes {:.1e} flops", config.flops()),
            Ok(()) => drawn.push((name, config)),
        }
    }
    let found = drawn.len();
    let rule = format!("must hold {count} members, holds {found}; others were refused, for {why}");
    require(|| table.to_owned(), found == count, &rule)?;
    Ok(drawn)
}

/// What is wrong with a drawn member, and the key if serde names one.
fn malformed(table: &str, error: toml::de::Error) -> (String, Problem) {
    let problem = Problem::of_message(error.message());
    match &problem {
        Problem::UnknownKey { name, .. } => (format!("{table}.{name}"), problem),
        _ => (table.to_owned(), problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Result<Range, String> {
        let table: toml::Table = format!("a = {text}").parse().unwrap();
        Range::try_from(table["a"].clone())
    }

    #[test]
    fn a_range_holds_what_it_draws_and_draws_all_of_it() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for (text, least, most) in [("{ uniform = [2, 6] }", 2, 6), ("{ log_uniform = [2, 6] }", 2, 6), ("4", 4, 4)] {
            let range = range(text).unwrap();
            let mut seen: Vec<i64> = (0..300).map(|_| range.draw(&mut random).as_integer().unwrap()).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, (least..=most).collect::<Vec<_>>(), "{text}");
        }
        let rates = range("{ log_uniform = [1e-4, 1e-2] }").unwrap();
        let below = (0..1000).filter(|_| rates.draw(&mut random).as_float().unwrap() < 1e-3).count();
        assert!((400..600).contains(&below), "half of the logarithms are below the middle, not {below} of 1000");
    }

    #[test]
    fn ranges_that_share_a_value_meet() {
        let meet = |own: &str, other: &str| {
            let (own, other) = (range(own).unwrap(), range(other).unwrap());
            assert_eq!(own.meets(&other), other.meets(&own));
            own.meets(&other)
        };
        assert!(meet("{ uniform = [2, 6] }", "{ log_uniform = [6, 9] }"));
        assert!(!meet("{ uniform = [2, 6] }", "{ uniform = [7, 9] }"));
        assert!(meet("{ uniform = [2, 6] }", "{ choice = [1, 4] }"));
        assert!(!meet("{ uniform = [2, 6] }", "{ choice = [1, 7] }"));
        assert!(meet("{ choice = [1, 2] }", "2.0"));
        assert!(!meet("{ choice = [\"vgg11\"] }", "\"vgg13\""));
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for bad in ["{ unifrom = [1, 2] }", "{ uniform = [2, 1] }", "{ uniform = [1] }", "{ uniform = 1 }"] {
            assert!(range(bad).unwrap_err().starts_with("expected"), "{bad}");
        }
        for bad in ["{ choice = [] }", "{ log_uniform = [0, 1] }", "{ uniform = [\"a\", \"b\"] }", "{}"] {
            assert!(range(bad).unwrap_err().starts_with("expected"), "{bad}");
        }
    }
}
