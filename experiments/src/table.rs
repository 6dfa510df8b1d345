//! Tables in the terminal.

/// Rows of cells under a header, columns as wide as their widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with its header.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Table { rows: vec![header.map(str::to_owned).to_vec()] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        self.rows.push(cells.to_vec());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, cell) in row.iter().enumerate() {
                let pad = widths[column] - cell.chars().count();
                let gap = if column == 0 { "" } else { "  " };
                // Text stands left, numbers stand right.
                let numeric =
                    self.rows.last().is_some_and(|last| last[column].starts_with(|c: char| "+-0123456789".contains(c)));
                if numeric {
                    write!(f, "{gap}{}{cell}", " ".repeat(pad))?;
                } else {
                    write!(f, "{gap}{cell}{}", " ".repeat(pad))?;
                }
            }
            writeln!(f)?;
            if index == 0 {
                writeln!(f, "{}", "─".repeat(widths.iter().sum::<usize>() + 2 * (columns - 1)))?;
            }
        }
        Ok(())
    }
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// A share in percent, with its sign.
pub fn percent(share: f64) -> String {
    format!("{:+.1}%", 100.0 * share)
}

/// Nanoseconds in milliseconds.
pub fn milliseconds(ns: u64) -> String {
    format!("{:.1}", ns as f64 / 1e6)
}
