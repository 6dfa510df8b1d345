//! What the bytes of live storages were made from: the lineage of a program while it runs.
//!
//! One version for every write of a storage, one maker for every operator whose recipe is kept. Edges only go back in
//! time. A storage may be dropped while every version that its maker needs can be had again, and stays so until it is
//! restored: that is what *anchors* see to. They go up to the roots, or no further than to what stands, which is held then
//! until the program lets go of it. This file knows nothing of bytes, copies or libtorch: it says which storages must be held
//! alive, and its owner holds them.

mod anchors;

use std::collections::HashSet;

use super::shim::Entry;
use super::span::Span;

/// A live version's place in [`Ancestry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct VersionId(u32);

/// A maker's place in [`Ancestry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MakerId(u32);

/// What a storage holds, or held, between two writes.
#[derive(Debug)]
pub(crate) struct Version {
    /// The storage.
    pub(crate) entry: Entry,
    /// Whether it is a gradient. Autograd adds in place only to what nobody else refers to: to hold one that could be made again would
    /// change what the program runs.
    is_gradient: bool,
    /// What makes it again; none for a root.
    pub(crate) maker: Option<MakerId>,
    /// Whether its storage lives and still holds it.
    pub(crate) is_current: bool,
    /// Whether it is current and its bytes are dropped.
    pub(crate) is_dropped: bool,
    /// The entry that holds its bytes beside the program.
    pub(crate) beside: Option<Entry>,
    /// Reruns under way that read it.
    pub(crate) wanted: u32,
    /// Reruns to come that will read it.
    pub(crate) expected: u32,
    /// Rebuild time of dropped storages that are made from it directly.
    pub(crate) dropped_children_ns: u64,
    /// What it was expected to take to make it again, where its bytes were dropped because bytes ran out.
    pub(crate) expected_ns: u64,
    /// One for being dropped, and one for every anchored maker that reads it.
    anchors: u32,
    hold: Hold,
    /// Makers that read it.
    readers: u32,
    /// Whether it can be made again, as of an epoch.
    rebuildable: (u32, bool),
}

impl Version {
    /// Whether reruns, under way or to come, read it.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted + self.expected > 0
    }
}

/// How a version is anchored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Through its maker, or not at all.
    No,
    /// By its storage, which stands, though it may be that it can be made again.
    Near,
    /// By its storage, for nothing else leads to what was dropped.
    Root,
}

/// An operator that ran and can run again.
#[derive(Debug)]
pub(crate) struct Maker<R> {
    pub(crate) recipe: R,
    /// Time that it took.
    pub(crate) cost_ns: u64,
    /// How many ran before it.
    order: u64,
    inputs: Span,
    outputs: Span,
    /// Outputs that are anchored through it.
    anchors: u32,
}

/// What the owner has to do about a storage that others are to be rebuilt from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Custody {
    /// Keep the storage alive.
    Hold(Entry),
    /// Let go of it.
    Unhold(Entry),
}

/// Versions and makers.
pub(crate) struct Ancestry<R> {
    versions: Vec<Option<Version>>,
    vacant_versions: Vec<u32>,
    makers: Vec<Option<Maker<R>>>,
    vacant_makers: Vec<u32>,
    inputs: Vec<Option<VersionId>>,
    outputs: Vec<VersionId>,
    /// Raised whenever something can be made again no more.
    epoch: u32,
    /// Makers so far, those that are forgotten included.
    ran: u64,
    custody: Vec<Custody>,
    /// Whether anchors go no further than to what stands.
    holds_near: bool,
}

impl<R> Ancestry<R> {
    pub(crate) fn new() -> Self {
        Ancestry {
            versions: Vec::new(),
            vacant_versions: Vec::new(),
            makers: Vec::new(),
            vacant_makers: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            epoch: 1,
            ran: 0,
            custody: Vec::new(),
            holds_near: false,
        }
    }

    /// Forgets everything. Nothing may be dropped.
    pub(crate) fn clear(&mut self) {
        debug_assert!(self.versions.iter().flatten().all(|version| !version.is_dropped));
        self.versions.clear();
        self.vacant_versions.clear();
        self.makers.clear();
        self.vacant_makers.clear();
        self.inputs.clear();
        self.outputs.clear();
        self.custody.clear();
        (self.epoch, self.ran) = (1, 0);
    }

    pub(crate) fn version(&self, version: VersionId) -> &Version {
        self.versions[version.0 as usize].as_ref().expect("versions that something refers to are kept")
    }

    pub(crate) fn version_mut(&mut self, version: VersionId) -> &mut Version {
        self.versions[version.0 as usize].as_mut().expect("versions that something refers to are kept")
    }

    pub(crate) fn maker(&self, maker: MakerId) -> &Maker<R> {
        self.makers[maker.0 as usize].as_ref().expect("makers that something refers to are kept")
    }

    /// For each access of a maker's operator the version it read, or none where it read nothing.
    pub(crate) fn inputs(&self, maker: MakerId) -> &[Option<VersionId>] {
        &self.inputs[self.maker(maker).inputs.range()]
    }

    /// The versions that a maker's operator wrote, then those it created.
    pub(crate) fn outputs(&self, maker: MakerId) -> &[VersionId] {
        &self.outputs[self.maker(maker).outputs.range()]
    }

    /// How many makers are kept.
    pub(crate) fn makers(&self) -> usize {
        self.makers.len() - self.vacant_makers.len()
    }

    /// A version that `entry` holds from now on, made by nothing that is known.
    pub(crate) fn add_version(&mut self, entry: Entry, is_gradient: bool) -> VersionId {
        let version = Version {
            entry,
            is_gradient,
            maker: None,
            is_current: true,
            is_dropped: false,
            beside: None,
            wanted: 0,
            expected: 0,
            dropped_children_ns: 0,
            expected_ns: 0,
            anchors: 0,
            hold: Hold::No,
            readers: 0,
            rebuildable: (0, false),
        };
        VersionId(add(&mut self.versions, &mut self.vacant_versions, version))
    }

    /// Says that `outputs` were made by an operator from `inputs`.
    pub(crate) fn add_maker(
        &mut self,
        recipe: R,
        inputs: &[Option<VersionId>],
        outputs: &[VersionId],
        cost_ns: u64,
    ) -> MakerId {
        for &input in inputs.iter().flatten() {
            self.version_mut(input).readers += 1;
        }
        let read = Span::of(&mut self.inputs, inputs.iter().copied());
        let made = Span::of(&mut self.outputs, outputs.iter().copied());
        let maker = Maker { recipe, cost_ns, order: self.ran, inputs: read, outputs: made, anchors: 0 };
        self.ran += 1;
        let id = MakerId(add(&mut self.makers, &mut self.vacant_makers, maker));
        for &output in outputs {
            self.version_mut(output).maker = Some(id);
        }
        id
    }

    /// Whether the version must be made again before something can read it.
    pub(crate) fn is_missing(&self, version: VersionId) -> bool {
        let seen = self.version(version);
        seen.beside.is_none() && (!seen.is_current || seen.is_dropped)
    }

    /// Whether nothing that a maker reads is missing.
    pub(crate) fn is_ready(&self, maker: MakerId) -> bool {
        !self.inputs(maker).iter().flatten().any(|&input| self.is_missing(input))
    }

    /// What must be made again before `maker` can run, and what makes it, the last first that the program made.
    pub(crate) fn missing(&self, maker: MakerId) -> Vec<(VersionId, MakerId)> {
        let (mut missing, mut seen, mut stack) = (Vec::new(), HashSet::new(), vec![maker]);
        while let Some(reader) = stack.pop() {
            for &input in self.inputs(reader).iter().flatten() {
                if self.is_missing(input)
                    && let Some(maker) = self.version(input).maker
                    && seen.insert(input)
                {
                    missing.push((input, maker));
                    stack.push(maker);
                }
            }
        }
        missing.sort_by_key(|&(_, maker)| std::cmp::Reverse(self.maker(maker).order));
        missing
    }

    /// A rerun of `maker` is to come, or is not any more.
    pub(crate) fn expect(&mut self, maker: MakerId, to_come: bool) {
        for position in self.maker(maker).inputs.range() {
            if let Some(input) = self.inputs[position] {
                let expected = &mut self.version_mut(input).expected;
                *expected = if to_come { *expected + 1 } else { *expected - 1 };
            }
        }
    }

    /// Whether the version can be made again from what is, or can be, held.
    pub(crate) fn is_rebuildable(&mut self, version: VersionId) -> bool {
        if let Some(known) = self.known(version) {
            return known;
        }
        let mut stack = vec![version];
        while let Some(&top) = stack.last() {
            if self.known(top).is_some() {
                stack.pop();
                continue;
            }
            let maker = self.version(top).maker.expect("known to be a root otherwise");
            let (mut verdict, depth) = (true, stack.len());
            for &input in self.inputs(maker).iter().flatten() {
                match self.known(input) {
                    _ if self.version(input).is_current => {}
                    Some(rebuildable) => verdict &= rebuildable,
                    None => stack.push(input),
                }
            }
            if stack.len() == depth {
                let epoch = self.epoch;
                self.version_mut(top).rebuildable = (epoch, verdict);
                stack.pop();
            }
        }
        self.known(version).expect("settled above")
    }

    fn known(&self, version: VersionId) -> Option<bool> {
        let version = self.version(version);
        match version.rebuildable {
            _ if version.maker.is_none() => Some(false),
            (epoch, verdict) if epoch == self.epoch => Some(verdict),
            _ => None,
        }
    }

    /// Whether the storage of `version` may drop its bytes: they can be made again, and are not held in the stead of a root that
    /// is about to go.
    pub(crate) fn can_drop(&mut self, version: VersionId) -> bool {
        self.version(version).hold != Hold::Root && self.is_rebuildable(version)
    }

    /// The storage of `version` drops its bytes, which it may, and which is not held.
    pub(crate) fn drop_bytes(&mut self, version: VersionId) {
        debug_assert!(self.is_rebuildable(version));
        let seen = self.version(version);
        debug_assert!(seen.is_current && !seen.is_dropped && seen.hold == Hold::No);
        self.version_mut(version).is_dropped = true;
        self.tell_parents(version, true);
        self.anchor(vec![version]);
    }

    /// The storage of `version` has its bytes again, or has died.
    fn restore_bytes(&mut self, version: VersionId) {
        self.version_mut(version).is_dropped = false;
        self.tell_parents(version, false);
        self.release(version);
    }

    /// The storage of `version` has its bytes again.
    pub(crate) fn restored(&mut self, version: VersionId) {
        debug_assert!(self.version(version).is_dropped);
        self.restore_bytes(version);
    }

    /// The storage of `version` was written or has died.
    pub(crate) fn lose(&mut self, version: VersionId) {
        if self.version(version).is_dropped {
            self.restore_bytes(version);
        }
        let bereft = self.version(version).readers > 0 && !self.is_rebuildable(version);
        self.version_mut(version).is_current = false;
        if bereft {
            self.epoch += 1;
        }
    }

    /// The version cannot be made again after all: the program changed its bytes past the dispatcher.
    pub(crate) fn becomes_root(&mut self, version: VersionId) {
        debug_assert_eq!(self.version(version).anchors, 0, "nothing is rebuilt from what may be filled in");
        self.version_mut(version).maker = None;
        self.epoch += 1;
    }

    /// Whether dropped storages would be lost with the bytes that the storage of `version` holds.
    pub(crate) fn is_held(&self, version: VersionId) -> bool {
        self.version(version).hold != Hold::No
    }

    /// Whether some dropped storage will be rebuilt from `version`, or is it itself.
    pub(crate) fn is_anchored(&self, version: VersionId) -> bool {
        self.version(version).anchors > 0
    }

    /// The first of `dropped` that will be rebuilt from `root`.
    pub(crate) fn dependent(&self, root: VersionId, mut dropped: impl Iterator<Item = VersionId>) -> Option<VersionId> {
        let mut depends = vec![None; self.versions.len()];
        depends[root.0 as usize] = Some(true);
        dropped.find(|&version| self.reaches(version, &mut depends))
    }

    fn reaches(&self, version: VersionId, depends: &mut [Option<bool>]) -> bool {
        let mut stack = vec![version];
        while let Some(&top) = stack.last() {
            let seen = self.version(top);
            let maker = match seen.maker {
                Some(maker) if depends[top.0 as usize].is_none() && seen.hold == Hold::No => maker,
                _ => {
                    depends[top.0 as usize].get_or_insert(false);
                    stack.pop();
                    continue;
                }
            };
            let (mut verdict, depth) = (false, stack.len());
            for &input in self.inputs(maker).iter().flatten() {
                match depends[input.0 as usize] {
                    Some(reaches) => verdict |= reaches,
                    None => stack.push(input),
                }
            }
            if verdict || stack.len() == depth {
                stack.truncate(depth - 1);
                depends[top.0 as usize] = Some(verdict);
            }
        }
        depends[version.0 as usize] == Some(true)
    }

    fn tell_parents(&mut self, version: VersionId, dropped: bool) {
        let Some(maker) = self.version(version).maker else { return };
        let cost_ns = self.maker(maker).cost_ns;
        for position in 0..self.inputs(maker).len() {
            let Some(input) = self.inputs(maker)[position] else { continue };
            let parent = self.version_mut(input);
            if dropped {
                parent.dropped_children_ns += cost_ns;
            } else {
                parent.dropped_children_ns -= cost_ns;
            }
        }
    }

    /// Forgets what no live storage can be rebuilt from. No rerun may be under way.
    pub(crate) fn prune(&mut self) {
        let ids = |slots: usize| (0..slots as u32).map(VersionId);
        let kept: Vec<VersionId> = ids(self.versions.len())
            .filter(|id| {
                let version = self.versions[id.0 as usize].as_ref();
                version.is_some_and(|version| {
                    version.is_current || version.beside.is_some() || version.anchors > 0 || version.wanted > 0
                })
            })
            .collect();
        let (mut keep_version, mut keep_maker) = (vec![false; self.versions.len()], vec![false; self.makers.len()]);
        let mut stack = kept;
        while let Some(top) = stack.pop() {
            if std::mem::replace(&mut keep_version[top.0 as usize], true) {
                continue;
            }
            let Some(maker) = self.version(top).maker else { continue };
            if !self.is_rebuildable(top) {
                continue;
            }
            if !std::mem::replace(&mut keep_maker[maker.0 as usize], true) {
                stack.extend(self.inputs(maker).iter().flatten().chain(self.outputs(maker)));
            }
        }
        for (index, _) in keep_maker.iter().enumerate().filter(|(_, keep)| !**keep) {
            if let Some(maker) = self.makers[index].take() {
                self.vacant_makers.push(index as u32);
                for position in maker.inputs.range() {
                    if let Some(input) = self.inputs[position] {
                        self.version_mut(input).readers -= 1;
                    }
                }
                for position in maker.outputs.range() {
                    let output = self.outputs[position];
                    self.version_mut(output).maker = None;
                }
            }
        }
        for (index, _) in keep_version.iter().enumerate().filter(|(_, keep)| !**keep) {
            if self.versions[index].take().is_some() {
                self.vacant_versions.push(index as u32);
            }
        }
        self.close_gaps();
    }

    /// Gives back what forgotten makers left in the lists.
    fn close_gaps(&mut self) {
        let (inputs, outputs) = (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs));
        for maker in self.makers.iter_mut().flatten() {
            maker.inputs = Span::of(&mut self.inputs, inputs[maker.inputs.range()].iter().copied());
            maker.outputs = Span::of(&mut self.outputs, outputs[maker.outputs.range()].iter().copied());
        }
    }
}

fn add<T>(slots: &mut Vec<Option<T>>, vacant: &mut Vec<u32>, item: T) -> u32 {
    match vacant.pop() {
        Some(slot) => {
            slots[slot as usize] = Some(item);
            slot
        }
        None => {
            slots.push(Some(item));
            slots.len() as u32 - 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// x ─► y ─► z, with a recipe for each but x.
    fn chain() -> (Ancestry<()>, [VersionId; 3]) {
        let mut ancestry = Ancestry::new();
        let [x, y, z] = [1, 2, 3].map(|number| ancestry.add_version(Entry::numbered(number), false));
        ancestry.add_maker((), &[Some(x)], &[y], 10);
        ancestry.add_maker((), &[Some(y)], &[z], 20);
        (ancestry, [x, y, z])
    }

    /// Whether a root is let go of.
    fn relinquish<R>(ancestry: &mut Ancestry<R>, root: VersionId) -> bool {
        let heirs = ancestry.heirs(root);
        let is_let_go = heirs.is_some();
        heirs.into_iter().for_each(|heirs| ancestry.relinquish(heirs));
        is_let_go
    }

    #[test]
    fn what_a_dropped_storage_is_rebuilt_from_is_held_until_it_is_restored() {
        let (mut ancestry, [x, _, z]) = chain();
        assert!(!ancestry.is_rebuildable(x));
        assert!(ancestry.is_rebuildable(z));
        ancestry.drop_bytes(z);
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(1))]);
        ancestry.restored(z);
        assert_eq!(ancestry.take_custody(), [Custody::Unhold(Entry::numbered(1))]);
    }

    #[test]
    fn what_stands_is_held_in_place_of_its_root_until_it_is_about_to_go() {
        let (mut ancestry, [x, y, z]) = chain();
        let (hold, unhold) = (Custody::Hold, Custody::Unhold);
        let [at_x, at_y] = [1, 2].map(Entry::numbered);
        assert_eq!(ancestry.hold_near(true), []);
        ancestry.drop_bytes(z);
        assert_eq!(ancestry.take_custody(), [hold(at_y)]);
        assert!(ancestry.can_drop(y), "it can be made again");
        assert!(!ancestry.anchor_above(x), "it is not held");

        assert!(ancestry.anchor_above(y));
        assert_eq!(ancestry.take_custody(), [hold(at_x)]);
        ancestry.let_go(y, false);
        assert_eq!(ancestry.take_custody(), [unhold(at_x)], "it is not there");
        assert!(ancestry.anchor_above(y));
        ancestry.let_go(y, true);
        assert_eq!(ancestry.take_custody(), [hold(at_x), unhold(at_y)]);
        ancestry.drop_bytes(y);
        ancestry.restored(z);
        ancestry.restored(y);
        assert_eq!(ancestry.take_custody(), [unhold(at_x)]);
    }

    #[test]
    fn a_gradient_is_not_held_where_it_could_be_made_again() {
        let mut ancestry = Ancestry::new();
        let [x, y, z] = [(1, false), (2, true), (3, true)]
            .map(|(number, is_gradient)| ancestry.add_version(Entry::numbered(number), is_gradient));
        ancestry.add_maker((), &[Some(x)], &[y], 10);
        ancestry.add_maker((), &[Some(y)], &[z], 20);
        ancestry.hold_near(true);
        ancestry.drop_bytes(z);
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(1))]);
    }

    #[test]
    fn what_stands_is_all_there_is_to_hold_once_its_root_is_lost() {
        let (mut ancestry, [x, y, z]) = chain();
        ancestry.hold_near(true);
        ancestry.drop_bytes(z);
        ancestry.lose(x);
        assert!(!ancestry.can_drop(y) && !ancestry.anchor_above(y) && !relinquish(&mut ancestry, y));
        assert_eq!(ancestry.hold_near(false), [y]);
        ancestry.restored(z);
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(2)), Custody::Unhold(Entry::numbered(2))]);
    }

    #[test]
    fn an_intermediate_may_die_and_the_root_stays_held_for_all_that_need_it() {
        let (mut ancestry, [x, y, z]) = chain();
        ancestry.drop_bytes(z);
        ancestry.drop_bytes(y);
        ancestry.take_custody();
        ancestry.lose(y);
        assert!(ancestry.is_rebuildable(z));
        assert_eq!(ancestry.take_custody(), [], "z still needs the root");
        assert_eq!(ancestry.dependent(x, [z].into_iter()), Some(z));
        ancestry.lose(z);
        assert_eq!(ancestry.take_custody(), [Custody::Unhold(Entry::numbered(1))]);
    }

    #[test]
    fn what_is_missing_is_made_again_in_the_order_of_the_program_and_once() {
        let (mut ancestry, [x, y, z]) = chain();
        // Written over z, beside what was read from it before.
        let [read, over, goal] = [4, 5, 6].map(|number| ancestry.add_version(Entry::numbered(number), false));
        let reads = ancestry.add_maker((), &[Some(z), Some(y)], &[read], 1);
        let writes = ancestry.add_maker((), &[Some(z)], &[over], 1);
        let last = ancestry.add_maker((), &[Some(over), Some(read), Some(x)], &[goal], 1);
        [y, z, read, over].into_iter().for_each(|version| ancestry.lose(version));
        let made_by = |version: VersionId, ancestry: &Ancestry<()>| (version, ancestry.version(version).maker.unwrap());
        let expected = [over, read, z, y].map(|version| made_by(version, &ancestry));
        assert_eq!(ancestry.missing(last), expected, "the next one last");
        assert_eq!((expected[0].1, expected[1].1), (writes, reads));
        assert!(ancestry.is_missing(y) && !ancestry.is_missing(x) && !ancestry.is_ready(last));
        assert!(ancestry.missing(expected[3].1).is_empty() && ancestry.is_ready(expected[3].1), "x stands");

        ancestry.expect(last, true);
        assert_eq!([over, read, x, y].map(|version| ancestry.version(version).expected), [1, 1, 1, 0]);
        ancestry.expect(last, false);
        assert_eq!(ancestry.version(over).expected, 0);
    }

    #[test]
    fn what_stands_is_held_in_the_stead_of_a_root_that_the_program_let_go_of() {
        let (mut ancestry, [x, y, z]) = chain();
        ancestry.drop_bytes(z);
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(1))]);
        assert!(relinquish(&mut ancestry, x));
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(2)), Custody::Unhold(Entry::numbered(1))]);
        assert!(ancestry.is_rebuildable(y) && !ancestry.can_drop(y), "x still stands, and is about to go");
        ancestry.lose(x);
        assert!(ancestry.is_held(y) && !ancestry.is_rebuildable(y) && ancestry.is_rebuildable(z));
        assert_eq!(ancestry.dependent(y, [z].into_iter()), Some(z));
        ancestry.restored(z);
        assert_eq!(ancestry.take_custody(), [Custody::Unhold(Entry::numbered(2))]);
    }

    #[test]
    fn what_stands_at_some_remove_is_held_where_nothing_nearer_does() {
        let (mut ancestry, [x, y, z]) = chain();
        let w = ancestry.add_version(Entry::numbered(4), false);
        ancestry.add_maker((), &[Some(z)], &[w], 30);
        ancestry.drop_bytes(w);
        ancestry.lose(y);
        ancestry.take_custody();
        assert!(relinquish(&mut ancestry, x));
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(3)), Custody::Unhold(Entry::numbered(1))]);
        ancestry.lose(x);
        assert!(ancestry.is_rebuildable(w));
        assert_eq!(ancestry.dependent(z, [w].into_iter()), Some(w));
    }

    #[test]
    fn what_was_only_wanted_for_another_that_stands_is_not_held_in_the_roots_stead() {
        let mut ancestry = Ancestry::new();
        let [x, y, z, w, gone] = [1, 2, 3, 4, 5].map(|number| ancestry.add_version(Entry::numbered(number), false));
        let forgotten = ancestry.add_maker((), &[Some(x)], &[gone], 1);
        ancestry.add_maker((), &[Some(x)], &[y], 1);
        ancestry.lose(gone);
        ancestry.prune();
        // z is made from both, by the maker that comes first in the table.
        assert_eq!(ancestry.add_maker((), &[Some(x), Some(y)], &[z], 1), forgotten);
        ancestry.add_maker((), &[Some(z)], &[w], 1);
        ancestry.drop_bytes(w);
        ancestry.take_custody();
        assert!(relinquish(&mut ancestry, x));
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(3)), Custody::Unhold(Entry::numbered(1))]);
        ancestry.lose(x);
        assert!(ancestry.is_held(z) && !ancestry.is_anchored(y), "y may go");
        ancestry.restored(w);
        assert_eq!(ancestry.take_custody(), [Custody::Unhold(Entry::numbered(3))]);
    }

    #[test]
    fn a_root_is_kept_while_what_was_made_from_it_stands_nowhere_else() {
        let (mut ancestry, [x, y, z]) = chain();
        ancestry.drop_bytes(z);
        ancestry.drop_bytes(y);
        ancestry.take_custody();
        assert!(!relinquish(&mut ancestry, x), "y is dropped");
        ancestry.lose(y);
        assert!(!relinquish(&mut ancestry, x), "y is gone, and on the way to z");
        assert_eq!(ancestry.take_custody(), []);
        ancestry.restored(z);
        assert_eq!(ancestry.take_custody(), [Custody::Unhold(Entry::numbered(1))]);
        assert!(!relinquish(&mut ancestry, x), "nothing holds it");
    }

    #[test]
    fn nothing_can_be_rebuilt_from_a_root_that_was_written() {
        let (mut ancestry, [x, y, z]) = chain();
        assert!(ancestry.is_rebuildable(y));
        ancestry.lose(x);
        assert!(!ancestry.is_rebuildable(y));
        // While y stands in its storage it can serve as a root itself.
        assert!(ancestry.is_rebuildable(z));
        ancestry.drop_bytes(z);
        assert_eq!(ancestry.take_custody(), [Custody::Hold(Entry::numbered(2))]);
        assert!(ancestry.is_held(y));
        ancestry.restored(z);
        ancestry.lose(y);
        assert!(!ancestry.is_rebuildable(z));
    }

    #[test]
    fn pruning_keeps_what_live_storages_need_and_nothing_else() {
        let (mut ancestry, [x, y, z]) = chain();
        ancestry.lose(y);
        ancestry.prune();
        assert_eq!(ancestry.makers(), 2, "z is rebuilt through y");
        ancestry.lose(x);
        ancestry.prune();
        assert_eq!(ancestry.makers(), 0, "nothing leads back to a live root");
        assert!(ancestry.version(z).maker.is_none());
    }

    #[test]
    fn makers_keep_what_they_read_and_made_when_others_are_forgotten() {
        let (mut ancestry, [x, y, z]) = chain();
        let [a, b] = [8, 9].map(|number| ancestry.add_version(Entry::numbered(number), false));
        let lost = ancestry.add_version(Entry::numbered(7), false);
        ancestry.add_maker((), &[Some(lost)], &[a], 1);
        let kept = ancestry.add_maker((), &[Some(x), None, Some(z)], &[b], 1);
        ancestry.lose(lost);
        ancestry.prune();
        assert_eq!(ancestry.makers(), 3, "what was made from a lost root goes");
        assert_eq!((ancestry.inputs(kept), ancestry.outputs(kept)), (&[Some(x), None, Some(z)][..], &[b][..]));
        let maker = ancestry.version(z).maker.unwrap();
        assert_eq!((ancestry.inputs(maker), ancestry.outputs(maker)), (&[Some(y)][..], &[z][..]));
    }

    #[test]
    fn a_chain_of_any_length_is_walked_without_recursion() {
        let mut ancestry = Ancestry::new();
        let root = ancestry.add_version(Entry::numbered(1), false);
        let mut last = root;
        for number in 2..100_000 {
            let next = ancestry.add_version(Entry::numbered(number), false);
            ancestry.add_maker((), &[Some(last)], &[next], 1);
            last = next;
        }
        assert!(ancestry.is_rebuildable(last));
        ancestry.drop_bytes(last);
        assert_eq!(ancestry.dependent(root, [last].into_iter()), Some(last));
        ancestry.restored(last);
    }
}
