//! Reruns: a dropped storage is restored from versions that are there, back to roots where it must be.

use super::{Residency, Retained, Stopped, Timeline, reruns_max};
use crate::lineage::{VersionId, Window};
use crate::schedule::Instruction;
use crate::trace::OperatorId;

impl Timeline<'_> {
    /// Reruns what `version` depends on until it stands in its storage. An explicit stack, not recursion: chains
    /// can be as long as the iteration.
    pub(super) fn rebuild(&mut self, version: VersionId) -> Result<(), Stopped> {
        debug_assert!(self.stack.is_empty());
        self.push_rerun(version);
        while let Some(&operator) = self.stack.last() {
            match self.missing_input(operator)? {
                Some(input) => self.push_rerun(input),
                None => self.rerun(operator)?,
            }
        }
        Ok(())
    }

    pub(super) fn push_rerun(&mut self, version: VersionId) {
        let producer = self.lineage.version(version).producer;
        let producer = producer.unwrap_or_else(|| unreachable!("version {} is a lost root", version.0));
        debug_assert!(self.stack.last().is_none_or(|&reader| producer < reader), "reruns only reach back in time");
        self.stack.push(producer);
        for &input in self.lineage.replay_inputs(producer) {
            self.version_locks[input.index()] += 1;
        }
    }

    /// Whether the operator at hand, or a rerun on its behalf, needs what the storage of an evicted window holds.
    pub(super) fn is_locked(&self, window: &Window) -> bool {
        let used_now = window.used_again && window.end as usize == self.operator;
        used_now || self.version_locks[window.version.index()] > 0
    }

    /// The first input of a rerun that has to be rebuilt before it. Inputs in the slow tier are fetched.
    pub(super) fn missing_input(&mut self, operator: OperatorId) -> Result<Option<VersionId>, Stopped> {
        for &input in self.lineage.replay_inputs(operator) {
            let storage = self.lineage.version(input).storage;
            if self.at.beside[input.index()] {
                continue;
            }
            match self.residency_of(input) {
                Residency::Resident => {}
                Residency::Absent | Residency::Dropped => return Ok(Some(input)),
                residency => {
                    let retained_already = residency == Residency::Prefetching;
                    self.materialise(storage)?;
                    if !retained_already {
                        self.retain(Retained::Storage(storage));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Reruns the operator on top of the stack.
    pub(super) fn rerun(&mut self, operator: OperatorId) -> Result<(), Stopped> {
        let (trace, lineage) = (self.trace, self.lineage);
        if self.at.result.reruns >= reruns_max(trace) {
            return Err(Stopped::GivenUp);
        }
        let facts = &trace.operators[operator.index()];
        let mut created = 0;
        for &output in lineage.replay_outputs(operator) {
            if self.at.beside[output.index()] {
                // Kept since an earlier rerun, for another child: this rerun makes it anew.
                self.forget_version(output);
                self.release_version(output);
            }
            if self.predecessor(operator, output).is_none() {
                created += self.bytes(lineage.version(output).storage);
            }
        }
        let demand = created + facts.workspace_bytes;
        self.make_room(demand)?;
        self.note_peak(self.operator, self.resident_bytes() + demand);
        self.emit(Instruction::Rerun(operator));
        self.at.now_ns += facts.cost_ns;
        self.at.result.recompute_ns += facts.cost_ns;
        self.at.result.reruns += 1;
        self.at.excess_bytes += created as i64;
        for &output in lineage.replay_outputs(operator) {
            if let Some(consumed) = self.predecessor(operator, output) {
                debug_assert!(
                    self.at.beside[consumed.index()],
                    "an in-place rerun consumes a version beside its storage"
                );
                self.at.beside[consumed.index()] = false;
                self.forget_version(consumed);
            }
            let storage = lineage.version(output).storage;
            if self.is_dropped(output) {
                self.at.residency[storage.index()] = Residency::Resident;
            } else {
                self.at.beside[output.index()] = true;
            }
        }
        self.stack.pop();
        for &input in lineage.replay_inputs(operator) {
            self.version_locks[input.index()] -= 1;
        }
        for &output in lineage.replay_outputs(operator) {
            let what = if self.at.beside[output.index()] {
                Retained::Version(output)
            } else {
                Retained::Storage(lineage.version(output).storage)
            };
            self.retain(what);
        }
        for &input in lineage.replay_inputs(operator) {
            if self.at.beside[input.index()] && self.version_locks[input.index()] == 0 {
                self.forget_version(input);
                self.retain(Retained::Version(input));
            }
        }
        Ok(())
    }

    /// The version that a rerun of `operator` turns into `output` in place, where it reads one.
    pub(super) fn predecessor(&self, operator: OperatorId, output: VersionId) -> Option<VersionId> {
        let storage = self.lineage.version(output).storage;
        self.lineage
            .replay_inputs(operator)
            .iter()
            .copied()
            .find(|&input| self.lineage.version(input).storage == storage)
    }
}
