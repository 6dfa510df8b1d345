//! Which program leads: the one whose plan is carried out, until other operators come than its own.

use super::{Deviation, Driver, Expected};
use crate::torch::ladder::Fit;
use crate::torch::program::Program;
use crate::torch::shim::RawOperator;
use crate::trace::StorageId;

impl Driver {
    /// Rules out those of the programs that it may be so far for which `holds` says why it is not.
    pub(super) fn ask_programs(&mut self, mut holds: impl FnMut(&mut Program) -> Result<(), String>) {
        for index in 0..self.programs.len() {
            if self.programs[index].matches()
                && let Err(why) = holds(&mut self.programs[index])
            {
                self.rule_out(index, why);
            }
        }
        self.look_at_sizes();
    }

    /// What runs is not this program.
    #[cold]
    fn rule_out(&mut self, program: usize, why: String) {
        self.programs[program].rule_out();
        if self.iteration.leader == Some(program) {
            match self.iteration.wanted.expected {
                Expected::Unknown => self.lose(why),
                Expected::Leader | Expected::Any => self.follow_the_best(why),
            }
        }
    }

    /// The program that the iteration fits best of those that it may be, if any.
    fn best(&self) -> Option<usize> {
        let matching = (0..self.programs.len()).filter(|&program| self.programs[program].matches());
        matching.min_by_key(|&program| self.programs[program].fit())
    }

    /// Where other operators came than the leader's, it may go on with this one; if not, another program may that all was so far.
    pub(super) fn find_again(&mut self, operator: &RawOperator) {
        if let Some(lost) = self.iteration.lost {
            self.look_for(lost, operator);
        }
    }

    #[inline(never)]
    fn look_for(&mut self, lost: usize, operator: &RawOperator) {
        if self.programs[lost].find_again(operator) {
            self.iteration.leader = Some(lost);
        } else if let Some(best) = self.best() {
            self.take_over(best, lost);
        }
        if self.iteration.leader.is_some() {
            self.iteration.lost = None;
            self.look_at_sizes();
        }
    }

    /// Goes on with a program that all was so far, in place of the one `before`. What that has not done until here is left undone.
    fn take_over(&mut self, program: usize, before: usize) {
        self.iteration.leader = Some(program);
        if !self.programs[before].is_waiting() && !self.programs[program].is_waiting() {
            self.programs[program].skip_to_here();
        }
    }

    /// Goes on with the best program. `why` it is not the leader.
    fn follow_the_best(&mut self, why: String) {
        let Some((before, best)) = self.iteration.leader.zip(self.best()) else { return self.lose(why) };
        let acted = self.programs[before].has_acted();
        self.take_over(best, before);
        if acted || self.programs[best].is_off_plan() {
            self.deviates(why);
        }
    }

    /// Nobody leads until the program that did is found again. `why` it is lost.
    fn lose(&mut self, why: String) {
        self.iteration.lost =
            self.iteration.leader.take().filter(|_| self.iteration.acts && !self.iteration.wanted.strictly);
        match self.iteration.lost.is_some_and(|lost| self.programs[lost].has_gaps()) {
            true => self.deviates(why),
            false => self.departs(why),
        }
    }

    /// The leader may have turned out to be at other sizes than it seemed: where another program is at its very sizes, it is that.
    fn look_at_sizes(&mut self) {
        let Some(leader) = self.iteration.leader else { return };
        if let Some(misfit) = self.programs[leader].take_misfit() {
            self.look_at_misfit(leader, misfit);
        }
    }

    #[cold]
    fn look_at_misfit(&mut self, leader: usize, misfit: StorageId) {
        let program = &self.programs[leader];
        let (fit, is_off_plan) = (program.fit(), program.is_off_plan());
        let why = format!("{}: storage {} is of another size", program.place(), misfit.0);
        if self.iteration.wanted.strictly {
            self.rule_out(leader, why);
        } else if program.ladder.is_uncertain() {
            // It is watched to its end, and nobody leads.
            self.iteration.leader = None;
            self.iteration.acts = false;
            self.departs(why);
        } else if fit > Fit::Exact
            && self.iteration.wanted.expected != Expected::Leader
            && self.programs.iter().any(|other| other.matches() && other.fit() == Fit::Exact)
        {
            self.follow_the_best(why);
        } else if is_off_plan {
            self.deviates(why);
        }
    }

    /// Ends the schedule: something else is going on than what it was made for.
    pub(super) fn leave_schedule(&mut self, why: String) {
        self.programs.iter_mut().for_each(Program::rule_out);
        self.iteration.lost = None;
        match self.iteration.leader.take() {
            Some(_) => self.departs(why),
            None => self.deviates(why),
        }
    }

    /// No program is followed any more: that says more than what was left undone of its plan.
    fn departs(&mut self, why: String) {
        self.iteration.deviation = Some(Deviation::Other(why));
    }

    pub(super) fn deviates(&mut self, why: String) {
        self.iteration.deviation.get_or_insert(Deviation::Other(why));
    }

    /// Bytes run out. Where nothing is planned that is no deviation.
    pub(super) fn runs_short(&mut self) {
        if let Some(program) = self.followed().filter(|_| self.iteration.deviation.is_none()) {
            let place = program.place();
            self.iteration.deviation =
                Some(Deviation::RanShort(format!("{place}: more bytes are wanted than are left")));
        }
    }

    /// The program whose plan is carried out.
    pub(super) fn followed(&self) -> Option<&Program> {
        self.iteration.leader.map(|leader| &self.programs[leader]).filter(|program| self.acts_on(program))
    }

    /// Whether a program's plan is carried out, if that is what runs.
    pub(super) fn acts_on(&self, program: &Program) -> bool {
        self.iteration.acts && !program.scheduled().is_reactive()
    }
}
