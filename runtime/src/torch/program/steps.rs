//! How far the program's schedule has been carried out.

use super::Program;
use crate::schedule::Instruction;
use crate::trace::StorageId;

impl Program {
    /// The next instruction that is due before the next operator.
    pub(crate) fn next_instruction(&mut self) -> Option<Instruction> {
        let &(_, instruction) = self.steps().get(self.progress.step).filter(|_| self.is_due())?;
        self.progress.step += 1;
        Some(instruction)
    }

    /// Whether an instruction is due before the next operator. After a change of programs some lie behind.
    pub(crate) fn is_due(&self) -> bool {
        self.progress.operator >= self.ladder.begins_at()
            && self
                .steps()
                .get(self.progress.step)
                .is_some_and(|&(before, _)| before as usize <= self.progress.operator)
    }

    /// Whether its latest operator has read something out. Before its first one it may have, as a loss between iterations.
    pub(crate) fn has_read_out(&self) -> bool {
        let latest = self.progress.operator.checked_sub(1);
        latest.is_none_or(|latest| self.ladder.rung().known.trace.operators[latest].is_read_out())
    }

    /// The storages of `first` and of the instructions that move together with it. Takes those as well.
    pub(crate) fn with_joining(&mut self, first: StorageId) -> Vec<StorageId> {
        let mut together = vec![first];
        while let Some(&(_, step)) = self.steps().get(self.progress.step)
            && let Instruction::Offload { storage, joins: true, .. } | Instruction::Prefetch { storage, joins: true } =
                step
        {
            together.push(storage);
            self.progress.step += 1;
        }
        together
    }

    /// Leaves out the instructions that were due earlier.
    pub(crate) fn skip_to_here(&mut self) {
        let here = self.step_here();
        self.progress.is_off_plan |= here > self.progress.step;
        self.progress.step = here.max(self.progress.step);
    }

    /// The first step of the plan that was not due before an earlier operator.
    pub(super) fn step_here(&self) -> usize {
        self.steps().partition_point(|&(before, _)| (before as usize) < self.progress.operator)
    }

    /// Whether instructions that were due earlier were left out.
    pub(crate) fn is_off_plan(&self) -> bool {
        self.progress.is_off_plan
    }
}
