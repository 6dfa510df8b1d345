//! What programs and the rungs of their ladders are called: places in lists change, names last.

/// A rung: no two of a driver have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RungName(u64);

impl RungName {
    /// The next one.
    pub(crate) fn next(self) -> Self {
        RungName(self.0 + 1)
    }

    #[cfg(test)]
    pub(crate) fn numbered(number: u64) -> Self {
        RungName(number)
    }
}

/// A program: as the rung that was its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ProgramName(pub(crate) RungName);

/// A part of an iteration: its program, and the rung that it went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartName {
    pub(crate) program: ProgramName,
    pub(crate) rung: RungName,
}

#[cfg(test)]
impl ProgramName {
    pub(crate) fn numbered(number: u64) -> Self {
        ProgramName(RungName(number))
    }
}

#[cfg(test)]
impl PartName {
    /// A program at the sizes that it was first seen at.
    pub(crate) fn numbered(number: u64) -> Self {
        PartName { program: ProgramName::numbered(number), rung: RungName(number) }
    }
}
