//! Carries a schedule out, one instruction after another, as far as what they move is where the plan has it.

use super::Driver;
use crate::hardware::Tier;
use crate::schedule::Instruction;
use crate::torch::ancestry::MakerId;
use crate::torch::recompute::Job;
use crate::torch::residency::{Fault, Live, Place};
use crate::torch::shim::{self, Entry};
use crate::trace::{OperatorId, StorageId};

/// A driver while compute stands still.
struct Standing<'a>(&'a mut Driver);

impl<'a> Standing<'a> {
    fn begin(driver: &'a mut Driver) -> Self {
        driver.residency.engine.compute_stands(true);
        Standing(driver)
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.0.residency.engine.compute_stands(false);
    }
}

impl Driver {
    /// An instruction is not carried out, or not whole, because of `why`.
    fn falls_short_of(&mut self, leader: usize, instruction: Instruction, why: &str) {
        if self.iteration.deviation.is_none() {
            let place = self.programs[leader].place();
            self.deviates(format!("{place}: the plan cannot {instruction}: {why}"));
        }
    }

    /// Whether anything is due before the next operator.
    pub(super) fn is_due(&self) -> bool {
        self.iteration.acts && self.iteration.leader.is_some_and(|leader| self.programs[leader].is_due())
    }

    /// Carries out what is due before the next operator, up to the next rerun. Until then no other operator begins, and those that are
    /// under way in other threads keep what they use. While a CUDA graph is captured it stays due.
    pub(super) fn carry_out(&mut self) -> Option<Job> {
        if shim::is_capturing() {
            return None;
        }
        if self.is_due() && self.iteration.leader.is_some_and(|leader| self.programs[leader].has_read_out()) {
            self.residency.engine.has_read_out();
        }
        Standing::begin(self).0.carry_out_all()
    }

    fn carry_out_all(&mut self) -> Option<Job> {
        while self.iteration.acts
            && let Some(leader) = self.iteration.leader
            && let Some(instruction) = self.programs[leader].next_instruction()
        {
            match self.carry_out_one(leader, instruction) {
                Ok(Some(job)) => return Some(job),
                Ok(None) => {}
                // It stays where it is; the plan goes on without it.
                Err(fault @ (Fault::Copy(_) | Fault::NoRoom(_))) => {
                    self.falls_short_of(leader, instruction, &fault.to_string());
                }
                Err(fault) => self.leave_schedule(fault.to_string()),
            }
        }
        None
    }

    fn carry_out_one(&mut self, leader: usize, instruction: Instruction) -> Result<Option<Job>, Fault> {
        match instruction {
            Instruction::Offload { storage, tier, .. } => {
                let together = self.programs[leader].with_joining(storage);
                if !self.offload(leader, &together, tier)? {
                    self.falls_short_of(leader, instruction, "what it moves is in use or elsewhere");
                }
            }
            Instruction::LeaveAway { storage, tier } => {
                if !self.offload(leader, &[storage], tier)? {
                    self.falls_short_of(leader, instruction, "it is in use or elsewhere");
                }
                let entry = self.programs[leader].entry(storage);
                self.residency.unreleased.extend(entry);
            }
            Instruction::Prefetch { storage, .. } => {
                let together = self.programs[leader].with_joining(storage);
                if !self.prefetch(leader, &together)? {
                    self.falls_short_of(leader, instruction, "what it moves is not in the slow tier");
                }
            }
            Instruction::FinishOffload(storage) => {
                if let Some(entry) = self.programs[leader].entry(storage) {
                    self.residency.finish_offload(entry)?;
                }
            }
            Instruction::Recall(storage) => {
                if let Some(entry) = self.programs[leader].entry(storage) {
                    self.residency.recall(entry)?;
                }
            }
            Instruction::FinishPrefetch(storage) => {
                if let Some(entry) = self.programs[leader].entry(storage) {
                    self.residency.finish_prefetch(entry)?;
                }
            }
            Instruction::Discard(storage) => match self.programs[leader].entry(storage) {
                Some(entry) if self.residency.has_copy(entry) => self.residency.discard(entry)?,
                _ => self.falls_short_of(leader, instruction, "there is no copy of it"),
            },
            Instruction::Drop(storage) => match self.programs[leader].entry(storage) {
                Some(entry) if self.residency.can_drop(entry) => self.residency.drop_bytes(entry)?,
                _ => self.falls_short_of(leader, instruction, "it cannot be made again"),
            },
            Instruction::Rerun(operator) => {
                let job = self.rerun(leader, operator)?;
                if job.is_none() {
                    self.falls_short_of(leader, instruction, "what it reads is not there");
                }
                return Ok(job);
            }
            Instruction::Release(version) => {
                let made_by = self.programs[leader].made_by(version);
                let maker = made_by.and_then(|(operator, _)| self.maker_of(leader, operator));
                if let (Some(maker), Some((_, position))) = (maker, made_by) {
                    let version = self.residency.ancestry.outputs(maker)[position];
                    self.residency.release(version)?;
                }
            }
        }
        Ok(None)
    }

    /// The storages among `storages` for which `wanted` holds.
    fn entries(&self, leader: usize, storages: &[StorageId], wanted: fn(&Place) -> bool) -> Vec<Entry> {
        let entries = storages.iter().filter_map(|&storage| self.programs[leader].entry(storage));
        entries.filter(|&entry| self.residency.get(entry).is_some_and(|live| wanted(&live.place))).collect()
    }

    /// Whether all of it is on its way.
    fn offload(&mut self, leader: usize, storages: &[StorageId], tier: Tier) -> Result<bool, Fault> {
        let is_locked = |entry| self.residency.get(entry).is_some_and(|live| live.locked.is_some());
        let program = &mut self.programs[leader];
        for &storage in storages {
            if program.entry(storage).is_some_and(is_locked) {
                program.miss(storage);
            }
        }
        let gone =
            self.entries(leader, storages, |place| matches!(place, Place::Offloading(_) | Place::Offloaded)).len();
        let mut entries = self.entries(leader, storages, |place| matches!(place, Place::Resident));
        entries.retain(|&entry| self.residency.get(entry).is_some_and(Live::is_idle));
        if !entries.is_empty() {
            if self.residency.swaps.are_refused {
                return Ok(false);
            }
            self.residency.offload(&entries, tier, self.iteration.deviation.is_none())?;
        }
        Ok(gone + entries.len() == storages.len())
    }

    /// Whether all of it is on its way, or was still leaving and is back.
    fn prefetch(&mut self, leader: usize, storages: &[StorageId]) -> Result<bool, Fault> {
        let leaving = self.entries(leader, storages, |place| matches!(place, Place::Offloading(_)));
        leaving.iter().try_for_each(|&entry| self.residency.recall(entry))?;
        let entries = self.entries(leader, storages, |place| matches!(place, Place::Offloaded));
        if !entries.is_empty() {
            let bytes = entries.iter().filter_map(|&entry| self.residency.get(entry)).map(|live| live.bytes).sum();
            self.residency.release_for(bytes)?;
            self.residency.prefetch(&entries)?;
        }
        Ok(leaving.len() + entries.len() == storages.len())
    }

    /// What runs an operator of the leader's again, where it has run.
    fn maker_of(&self, leader: usize, operator: OperatorId) -> Option<MakerId> {
        let nth = self.programs[leader].ran_as(operator)?;
        self.iteration.makers.get(nth).copied().flatten()
    }

    /// None where what the operator reads is not there.
    fn rerun(&mut self, leader: usize, operator: OperatorId) -> Result<Option<Job>, Fault> {
        let ready = self.maker_of(leader, operator).filter(|&maker| {
            let inputs = self.residency.ancestry.inputs(maker);
            inputs.iter().flatten().all(|&input| self.residency.at_hand(input).is_some())
        });
        ready.map(|maker| self.residency.job(maker, false)).transpose()
    }
}
