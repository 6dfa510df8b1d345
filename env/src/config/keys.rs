//! Where keys stand in a TOML text.
//!
//! A scan by line is enough to point at a mistake: it sees `[table]` headers and `key =` at the start of a
//! line, which is how configurations are written. What a value means is the parser's business.

/// A key, by its full path, and the line on which it stands, from one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub line: usize,
    pub path: String,
}

/// Every table header and key in `text`, in order.
fn keys(text: &str) -> impl Iterator<Item = Key> {
    let mut table = String::new();
    text.lines().enumerate().filter_map(move |(index, line)| {
        let line = line.trim();
        let path = if let Some(header) = line.strip_prefix('[') {
            table = header.split(']').next()?.trim().to_owned();
            table.clone()
        } else {
            let name = line.split_once('=')?.0.trim().trim_matches(['"', '\'']);
            let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
            is_name.then_some(())?;
            if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") }
        };
        Some(Key { line: index + 1, path })
    })
}

/// The line, from one, that holds the byte at `offset`.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
}

/// The key whose value, or the table in which, `line` stands.
pub(super) fn key_at(text: &str, line: usize) -> Option<String> {
    keys(text).take_while(|key| key.line <= line).last().map(|key| key.path)
}

/// The line on which the key `path` stands, or else the one of the nearest table around it.
pub(super) fn line_of(text: &str, path: &str) -> Option<usize> {
    let exact = keys(text).find(|key| key.path == path).map(|key| key.line);
    exact.or_else(|| line_of(text, path.rsplit_once('.')?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "family = \"gpt\"\n\n[workloads.a] # small = yes\nlayers = 1\nlist = [\n  \"x\",\n]\n";

    #[test]
    fn keys_have_their_table_and_line() {
        let found: Vec<_> = keys(TEXT).map(|key| (key.line, key.path)).collect();
        let wanted = [(1, "family"), (3, "workloads.a"), (4, "workloads.a.layers"), (5, "workloads.a.list")];
        assert_eq!(found, wanted.map(|(line, path)| (line, path.to_owned())));
    }

    #[test]
    fn places_are_found_both_ways() {
        assert_eq!(line_at(TEXT, TEXT.find("\"x\"").unwrap()), 6);
        assert_eq!(key_at(TEXT, 6).as_deref(), Some("workloads.a.list"));
        assert_eq!(line_of(TEXT, "workloads.a.layers"), Some(4));
        assert_eq!(line_of(TEXT, "workloads.a.missing"), Some(3));
        assert_eq!(line_of(TEXT, "nowhere"), None);
    }
}
