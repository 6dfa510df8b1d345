//! Whether recorded iterations do the same.

use super::{Local, RecordedIteration, Step};
use crate::lineage::EVICTION_FLOOR_BYTES;
use crate::torch::recorder::RecordError;
use crate::torch::session::operator_name;
use crate::trace::{AccessMode, Phase};

impl RecordedIteration {
    /// What a step lets go of, but for what is locked and what may be disregarded.
    fn frees(&self, step: &Step, may_be: impl Fn(Local) -> bool) -> impl Iterator<Item = Local> {
        let counts = move |local: &Local| self.storage(*local).locked.is_none() && !may_be(*local);
        self.frees[step.frees.range()].iter().copied().filter(counts)
    }

    /// From where autograd first recorded an operator to the last update.
    fn training(&self) -> &[Step] {
        let last = self.steps.iter().rposition(|step| step.phase == Phase::Update);
        let end = last.map_or(self.steps.len(), |last| last + 1);
        self.first_recorded.and_then(|first| self.steps.get(first..end)).unwrap_or_default()
    }

    /// Whether both train alike, in operators and sizes, whatever they do before and after.
    pub(crate) fn trains_like(&self, other: &RecordedIteration) -> bool {
        let does = |iteration: &RecordedIteration, step: &Step| {
            let accesses = iteration.accesses(step).iter().map(|&(local, mode)| (iteration.storage(local).bytes, mode));
            let creates = iteration.creates(step).iter().map(|created| created.bytes);
            (step.name, accesses.collect::<Vec<_>>(), creates.collect::<Vec<_>>())
        };
        let (steps, others) = (self.training(), other.training());
        !steps.is_empty()
            && steps.len() == others.len()
            && steps.iter().zip(others).all(|(step, like)| does(self, step) == does(other, like))
    }

    /// The first of as many operators that does something else, or to other storages. What is too small to be evicted in both does not
    /// tell them apart: which one that it made an iteration reads, and which lives longer, may depend on which of two numbers is the
    /// larger. What is locked may die whenever another thread lets go of it.
    fn differs_at(&self, other: &RecordedIteration) -> Option<usize> {
        let is_small = |local: Local| [self, other].iter().all(|it| it.storage(local).bytes < EVICTION_FLOOR_BYTES);
        let is_number = |local: Local| matches!(local, Local::Created(_)) && is_small(local);
        let does = |step: &Step| (step.name, step.phase, step.not_replayable, step.creates);
        let uses_alike = |a: &[(Local, AccessMode)], b: &[(Local, AccessMode)]| {
            let is_alike = |((local, mode), (like, as_mode)): (&(Local, AccessMode), &(Local, AccessMode))| {
                mode == as_mode && (local == like || is_number(*local) && is_number(*like))
            };
            a.len() == b.len() && a.iter().zip(b).all(is_alike)
        };
        let is_like = |(a, b): (&Step, &Step)| {
            does(a) == does(b)
                && uses_alike(self.accesses(a), other.accesses(b))
                && self.frees(a, is_small).eq(other.frees(b, is_small))
        };
        self.steps.iter().zip(&other.steps).position(|both| !is_like(both))
    }

    /// Whether the same operators do the same to the same storages, which may be of other sizes.
    pub(crate) fn same_but_for_sizes(&self, other: &RecordedIteration) -> bool {
        let locks =
            |iteration: &RecordedIteration| iteration.storages().map(|storage| storage.locked).collect::<Vec<_>>();
        self.steps.len() == other.steps.len()
            && self.initial.len() == other.initial.len()
            && locks(self) == locks(other)
            && self.differs_at(other).is_none()
    }

    /// Whether the same operators do the same to the same storages.
    pub(crate) fn same_steps(&self, other: &RecordedIteration) -> Result<(), RecordError> {
        let differ = |what: String| Err(RecordError::NotRepeating(what));
        if self.steps.len() != other.steps.len() {
            return differ(format!("{} operators, then {}", self.steps.len(), other.steps.len()));
        }
        if self.initial != other.initial || self.created != other.created {
            return differ("as many operators use storages of other sizes".to_owned());
        }
        let Some(index) = self.differs_at(other) else { return Ok(()) };
        let name = |iteration: &RecordedIteration| operator_name(iteration.steps[index].name);
        differ(format!("operator {index} is {}, then {}", name(self), name(other)))
    }
}
