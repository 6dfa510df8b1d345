//! What is remembered of a plan, that of a program at certain sizes: how it did, and whether the times that it was made with are those that operators take.

use std::collections::VecDeque;

use super::ladder::Fit;
use super::names::RungName;
use super::recording::{RecordedIteration, retime, retime_at_most};
use crate::trace::Trace;

/// Followed iterations that drift is judged by.
const WINDOW: usize = 16;
/// Factor by which measured makespans may drift from what they were in relation to the predicted ones.
const DRIFT: f64 = 1.25;
/// Iterations of a program that may go otherwise than planned, or be disturbed, before it is left with the times that it has.
const TRIES: u32 = 8;
/// What marks on a device may cost an operator; an iteration that they seem to cost more was disturbed by something else. They cost
/// 3 to 14 µs on a host that an H200 waits for.
const MARKS_NS: u64 = 30_000;

/// What is known of a program's times.
#[derive(Default)]
pub(super) enum Times {
    /// Its trace has them.
    #[default]
    Known,
    /// No iteration told them: it is left with those that its trace has.
    Left(Reason),
    /// An iteration is to be measured for a plan of new times.
    Wanted(Reason),
    /// One was, by marks on the device; the next tells what it takes without.
    Marked(Reason, Box<RecordedIteration>),
}

impl Times {
    /// Whether nothing is to be found out about them.
    pub(super) fn are_settled(&self) -> bool {
        matches!(self, Times::Known | Times::Left(_))
    }

    /// Whether those of the trace are, or were, what operators take.
    pub(super) fn are_good(&self) -> bool {
        match self {
            Times::Known => true,
            Times::Left(reason) | Times::Wanted(reason) | Times::Marked(reason, _) => *reason == Reason::Drifted,
        }
    }
}

/// What is wrong with a program's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// They were taken by marks on a device while bytes ran out, or kernels were loaded: none is too small.
    Early,
    /// They no longer are what operators take.
    Drifted,
    /// They are guessed from those at other sizes.
    Guessed,
}

/// An iteration that was measured for a plan of new times.
pub(super) struct Measured {
    reason: Reason,
    recorded: RecordedIteration,
    /// By how much marks on the device made it longer.
    marks_ns: u64,
}

impl Measured {
    /// Puts its times into a trace at the same sizes.
    pub(super) fn retime(&self, trace: &mut Trace) {
        match self.reason {
            Reason::Early => retime_at_most(&self.recorded, trace),
            Reason::Drifted | Reason::Guessed => retime(&[&self.recorded], trace),
        }
        trace.cut_to(trace.makespan_ns.saturating_sub(self.marks_ns));
    }
}

/// What is remembered of a program at certain sizes beside its trace and schedule.
#[derive(Default)]
pub(super) struct Shelf {
    /// Measured ÷ predicted makespan of the latest planned iterations, all of which came `after` the same other.
    pub(super) ratios: VecDeque<f64>,
    pub(super) after: Option<RungName>,
    /// Those since the last of them that came after others.
    pub(super) elsewhere: usize,
    /// What that was when the plan was new.
    pub(super) reference: Option<f64>,
    /// What its operators take.
    pub(super) times: Times,
    /// Iterations that went as planned since the plan is new, and those that did not while its times were wanted.
    pub(super) followed: u32,
    pub(super) astray: u32,
    /// Whether it is planned at the sizes that it was found at, and not for more of them.
    pub(super) is_first: bool,
    /// Whether there was no time to plan it well.
    pub(super) is_hasty: bool,
    /// Planned iterations in a row that ran out of bytes.
    pub(super) pressed: u32,
    /// Bytes that plans leave free, because something else takes them.
    pub(super) margin_bytes: u64,
    /// Whether they cannot leave more.
    pub(super) is_tight: bool,
}

impl Shelf {
    /// Nothing that was learned of plans is true any more.
    pub(super) fn forget_plan(&mut self) {
        *self = Shelf { times: std::mem::take(&mut self.times), is_first: self.is_first, ..Shelf::default() };
    }

    /// There is another plan: what was learned of the last one is void.
    pub(super) fn take_new_plan(&mut self) {
        self.forget_ratios();
        (self.followed, self.pressed) = (0, 0);
        if let Times::Marked(reason, _) = self.times {
            self.times = Times::Wanted(reason);
        }
    }

    fn forget_ratios(&mut self) {
        self.ratios.clear();
        (self.reference, self.elsewhere) = (None, 0);
    }

    /// What an iteration was measured at, where times are wanted and all is known; takes the recording then. What goes otherwise
    /// than planned takes longer than it would, and tells nothing. At other sizes than the plan's, which may never come again, what
    /// marks take is not found out.
    pub(super) fn learn(
        &mut self,
        (followed, fit): (bool, Fit),
        recorded: &mut Option<RecordedIteration>,
        on_device_ns: Option<u64>,
    ) -> Option<Measured> {
        if !followed {
            self.go_astray();
            return None;
        }
        let is_warm = self.followed > 0;
        self.followed += 1;
        match std::mem::take(&mut self.times) {
            Times::Wanted(reason) if is_warm && recorded.as_ref().is_some_and(|recorded| recorded.is_timed) => {
                let recorded = recorded.take()?;
                if !recorded.is_marked || fit != Fit::Exact {
                    return Some(Measured { reason, recorded, marks_ns: 0 });
                }
                self.times = Times::Marked(reason, Box::new(recorded));
            }
            Times::Marked(reason, marked) if fit == Fit::Exact && recorded.is_none() && on_device_ns.is_some() => {
                let marks_ns = marked.makespan_ns().saturating_sub(on_device_ns?);
                if marks_ns <= MARKS_NS * marked.operators() as u64 {
                    return Some(Measured { reason, recorded: *marked, marks_ns });
                }
                self.times = Times::Wanted(reason);
                self.go_astray();
            }
            Times::Marked(reason, marked) if fit != Fit::Exact => {
                self.times = Times::Marked(reason, marked);
                self.go_astray();
            }
            before => self.times = before,
        }
        None
    }

    /// An iteration told nothing. After some of them the program is left with the times that it has.
    fn go_astray(&mut self) {
        let (Times::Wanted(reason) | Times::Marked(reason, _)) = self.times else { return };
        self.astray += 1;
        if self.astray == TRIES {
            (self.times, self.astray) = (Times::Left(reason), 0);
            self.forget_ratios();
        }
    }

    /// Notes one more ratio of measured to predicted makespan. Drift is a change of their median over a window from what
    /// it was when the plan was new; a prediction that is off by the same factor all the time does not drift. While times are
    /// wanted anyway none is looked for. Those that come `after` the same are disturbed alike; where none does for long, others count.
    pub(super) fn note(&mut self, ratio: f64, after: Option<RungName>) {
        if !self.times.are_settled() {
            return;
        }
        self.elsewhere = if after == self.after { 0 } else { self.elsewhere + 1 };
        if self.ratios.is_empty() || self.elsewhere == WINDOW {
            self.forget_ratios();
            self.after = after;
        } else if self.elsewhere > 0 {
            return;
        }
        if self.ratios.len() == WINDOW {
            self.ratios.pop_front();
        }
        self.ratios.push_back(ratio);
        if self.ratios.len() < WINDOW {
            return;
        }
        let mut sorted: Vec<f64> = self.ratios.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = sorted[WINDOW / 2];
        let reference = *self.reference.get_or_insert(median);
        if median > reference * DRIFT || median < reference / DRIFT {
            self.times = Times::Wanted(Reason::Drifted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_error_of_prediction_is_no_drift_and_a_change_is() {
        let mut shelf = Shelf::default();
        (0..100).for_each(|_| shelf.note(1.6, None));
        assert!(matches!(shelf.times, Times::Known));
        (0..WINDOW).for_each(|_| shelf.note(2.5, None));
        assert!(matches!(shelf.times, Times::Wanted(Reason::Drifted)));
    }

    /// A program whose first times are not good, once it has been planned.
    fn early() -> Shelf {
        let mut shelf = Shelf { times: Times::Wanted(Reason::Early), ..Shelf::default() };
        assert!(
            shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 900)), None).is_none(),
            "the first makes room"
        );
        shelf
    }

    #[test]
    fn times_that_are_wanted_take_an_iteration_with_marks_and_one_without() {
        let mut shelf = early();
        assert!(shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), Some(700)).is_none());
        assert!(matches!(shelf.times, Times::Marked(Reason::Early, _)));
        // Something else comes between.
        assert!(shelf.learn((false, Fit::Exact), &mut None, Some(4_000)).is_none());
        let measured = shelf.learn((true, Fit::Exact), &mut None, Some(640)).expect("all is known");
        assert_eq!((measured.marks_ns, measured.recorded.makespan_ns()), (60, 700));
    }

    #[test]
    fn times_of_another_plan_or_of_an_iteration_that_was_disturbed_do_not_count() {
        let mut shelf = early();
        assert!(shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), Some(700)).is_none());
        shelf.take_new_plan();
        assert!(matches!(shelf.times, Times::Wanted(Reason::Early)) && shelf.followed == 0);
        let mut shelf = early();
        let disturbed = RecordedIteration::marked(10, 700 + 10 * MARKS_NS);
        assert!(shelf.learn((true, Fit::Exact), &mut Some(disturbed), None).is_none());
        assert!(shelf.learn((true, Fit::Exact), &mut None, Some(640)).is_none());
        assert!(matches!(shelf.times, Times::Wanted(Reason::Early)));
    }

    #[test]
    fn a_program_that_is_never_followed_is_left_with_its_times() {
        let mut shelf = early();
        (0..TRIES).for_each(|_| {
            assert!(shelf.learn((false, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), None).is_none())
        });
        assert!(shelf.times.are_settled() && !shelf.times.are_good());
    }

    #[test]
    fn while_times_are_wanted_no_drift_is_looked_for() {
        let mut shelf = Shelf::default();
        (0..WINDOW).for_each(|_| shelf.note(1.0, None));
        (0..WINDOW).for_each(|_| shelf.note(2.0, None));
        assert!(matches!(shelf.times, Times::Wanted(Reason::Drifted)));
        shelf.learn((true, Fit::Exact), &mut None, None);
        shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), None);
        shelf.note(2.0, None);
        assert!(matches!(shelf.times, Times::Marked(Reason::Drifted, _)));
    }

    #[test]
    fn one_slow_iteration_is_no_drift() {
        let mut shelf = Shelf::default();
        (0..WINDOW).for_each(|_| shelf.note(1.0, None));
        shelf.note(50.0, None);
        (0..WINDOW).for_each(|_| shelf.note(1.1, None));
        assert!(matches!(shelf.times, Times::Known));
    }
}
