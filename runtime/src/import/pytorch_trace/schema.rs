//! What an operator's schema says of its arguments.

use crate::trace::AccessMode;

/// How an operator uses each of its arguments, by position, and whether all that it returns are views.
pub(super) struct Schema {
    modes: Vec<AccessMode>,
    pub(super) returns_views: bool,
}

/// Operators that replace all bytes of what they write.
const OVERWRITING: [&str; 3] = ["aten::copy_", "aten::fill_", "aten::zero_"];

impl Schema {
    /// Reads a schema such as `aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)`.
    pub(super) fn parse(text: &str) -> Self {
        let (name, rest) = text.split_once('(').unwrap_or((text, ""));
        let arguments = split(rest);
        let base = name.split('.').next().unwrap_or(name);
        // Its running statistics are written, and the schema does not say so.
        let norm = name.contains("batch_norm") && !name.contains("backward");
        let mode = |argument: &&str| match argument {
            _ if argument.contains('!') && OVERWRITING.contains(&base) => AccessMode::Overwrite,
            _ if argument.contains('!') => AccessMode::Write,
            _ if norm && argument.contains("running_") => AccessMode::SideEffect,
            _ => AccessMode::Read,
        };
        let returned = text.rsplit_once("->").map_or("", |(_, returned)| returned);
        let tensors = returned.matches("Tensor").count();
        let views = returned.matches("Tensor(").count();
        Schema {
            modes: arguments.iter().filter(|argument| **argument != "*").map(mode).collect(),
            returns_views: tensors > 0 && tensors == views && !text.contains('!'),
        }
    }

    /// How the argument at `position` is used.
    pub(super) fn mode(&self, position: usize) -> AccessMode {
        self.modes.get(position).copied().unwrap_or(AccessMode::Read)
    }
}

/// The arguments at the start of `rest`, up to the parenthesis that closes them.
fn split(rest: &str) -> Vec<&str> {
    let (mut depth, mut start) = (0i32, 0);
    let mut arguments = Vec::new();
    for (position, character) in rest.char_indices() {
        match character {
            '(' | '[' => depth += 1,
            ')' if depth == 0 => {
                arguments.push(rest[start..position].trim());
                break;
            }
            ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                arguments.push(rest[start..position].trim());
                start = position + 1;
            }
            _ => {}
        }
    }
    arguments.retain(|argument| !argument.is_empty());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_say_what_is_written() {
        let modes = |text: &str| Schema::parse(text).modes;
        let (read, write) = (AccessMode::Read, AccessMode::Write);
        assert_eq!(
            modes("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"),
            [write, read, read]
        );
        assert_eq!(modes("aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)")[0], AccessMode::Overwrite);
        assert_eq!(modes("aten::sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False) -> Tensor"), [read; 3]);
        assert_eq!(modes("aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other) -> ()"), [write, read]);
        assert_eq!(
            modes("aten::native_batch_norm(Tensor input, Tensor? weight, Tensor? running_mean) -> (Tensor, Tensor)")[2],
            AccessMode::SideEffect
        );
        assert_eq!(modes(""), []);
    }

    #[test]
    fn views_are_told_from_results() {
        let views = |text: &str| Schema::parse(text).returns_views;
        assert!(views("aten::t(Tensor(a) self) -> Tensor(a)"));
        assert!(views("aten::split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"));
        assert!(!views("aten::relu(Tensor self) -> Tensor"));
        assert!(!views("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"));
        assert!(!views("aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other) -> ()"));
    }
}
