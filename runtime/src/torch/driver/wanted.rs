//! What is wanted of an iteration, and what is left of it when it ends.

use crate::torch::recording::RecordedIteration;
use crate::torch::report::IterationReport;

/// What to do with an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Whether a schedule is carried out.
    pub(crate) act: bool,
    /// Whether only by the plan for its very sizes, and where all storages are known before the first operator.
    pub(crate) strictly: bool,
    /// Whether the iteration is recorded.
    pub(crate) record: Record,
    /// Whether it is only what comes before the part that programs are told by.
    pub(crate) is_prelude: bool,
    /// What is expected of it.
    pub(crate) expected: Expected,
}

/// What is expected of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The leader, for programs came as was foreseen, lately: it is not given up for one whose sizes fit better.
    Leader,
    /// Any of the programs.
    Any,
    /// None of them: the leader is not given up for another one as long as it goes on, though with gaps.
    Unknown,
}

impl Wanted {
    /// Nothing is expected of a prelude.
    pub(crate) const PRELUDE: Wanted =
        Wanted { act: true, strictly: false, record: Record::Nothing, is_prelude: true, expected: Expected::Any };
}

/// What is recorded of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// Nothing.
    Nothing,
    /// How long it takes on a device that works through operators later.
    Makespan,
    /// What takes how long. Whether storages are filled in past the dispatcher is not found out, which takes time.
    Times,
    /// What there is. A device that works through operators later is asked only what the whole takes: to mark every operator holds up
    /// host and device.
    Program,
    /// All of it.
    Whole,
}

impl Record {
    /// Whether operators are taken down.
    pub(super) fn has_operators(self) -> bool {
        matches!(self, Record::Times | Record::Program | Record::Whole)
    }

    /// The same, without what operators take on a device that works through them later.
    pub(crate) fn without_times(self) -> Self {
        if self == Record::Whole { Record::Program } else { self }
    }
}

/// What is left of an iteration when it ends.
pub(crate) struct Ended {
    pub(crate) report: IterationReport,
    /// The iteration as it was recorded, if it was.
    pub(crate) recorded: Option<RecordedIteration>,
    /// What it took a device that works through operators later, if that was asked for.
    pub(crate) on_device_ns: Option<u64>,
    /// The program that it was, to its end.
    pub(crate) program: Option<usize>,
    /// Whether bytes ran out when everything so far had gone as planned.
    pub(crate) ran_short: bool,
    /// Whether it was only what comes before the part that programs are told by.
    pub(crate) was_prelude: bool,
}
