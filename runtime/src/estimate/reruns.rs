//! What reruns would cost, given what is dropped already, kept from one pressure point to the next.
//!
//! A storage that is dropped, or restored, changes what was found out by looking at it, and nothing else. So every answer
//! leaves word with the versions that it looked at.

use crate::lineage::{Lineage, VersionId, WindowId};

/// Reruns looked at when a candidate's recompute time is estimated. In a running program, what takes more is dropped where little else is
/// left: where a loop's iterations have not been found, what an update wrote goes back to all updates before it.
pub(crate) const ANCESTORS_MAX: usize = 256;

/// Words left per version, at most, before all are forgotten together with the answers.
const WORDS_PER_VERSION: usize = 16;

const NONE: u32 = u32::MAX;
const UNKNOWN: u64 = u64::MAX;

/// Bytes and rebuild time of dropped storages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Children {
    pub(super) bytes: u64,
    pub(super) ns: u64,
}

/// Answers about reruns, and on what each stands.
#[derive(Debug)]
pub(super) struct Reruns {
    /// What is dropped, and the same per version.
    dropped: Vec<VersionId>,
    is_dropped: Vec<bool>,
    /// Per version: the last look at which it was dropped.
    dropped_at: Vec<u32>,
    look: u32,
    /// Per window: time to rebuild it, or `UNKNOWN`.
    rebuild_ns: Vec<u64>,
    /// Per version: dropped storages that it would help to rebuild, if that is known.
    children: Vec<Option<Children>>,
    /// Per version: the first word left with it.
    first: Vec<u32>,
    /// Windows whose answer looked at a version, and the next word left with that.
    words: Vec<(WindowId, u32)>,
    visited: Vec<u32>,
    visit: u32,
    stack: Vec<VersionId>,
}

impl Reruns {
    pub(super) fn new(lineage: &Lineage) -> Self {
        let (versions, windows) = (lineage.versions().len(), lineage.windows().len());
        Reruns {
            dropped: Vec::new(),
            is_dropped: vec![false; versions],
            dropped_at: vec![0; versions],
            look: 0,
            rebuild_ns: vec![UNKNOWN; windows],
            children: vec![None; versions],
            first: vec![NONE; versions],
            words: Vec::new(),
            visited: vec![0; versions],
            visit: 0,
            stack: Vec::new(),
        }
    }

    /// Takes note of what is dropped now.
    pub(super) fn look(&mut self, lineage: &Lineage, dropped: impl Iterator<Item = VersionId>) {
        self.look += 1;
        let before = self.dropped.len();
        for version in dropped {
            self.dropped_at[version.index()] = self.look;
            if !self.is_dropped[version.index()] {
                self.dropped.push(version);
                self.turn(lineage, version);
            }
        }
        for position in (0..before).rev() {
            let version = self.dropped[position];
            if self.dropped_at[version.index()] != self.look {
                self.dropped.swap_remove(position);
                self.turn(lineage, version);
            }
        }
        if self.words.len() > WORDS_PER_VERSION * self.first.len() {
            self.words.clear();
            self.first.fill(NONE);
            self.rebuild_ns.fill(UNKNOWN);
        }
    }

    /// A version is dropped, or is no more: forgets what looked at it.
    fn turn(&mut self, lineage: &Lineage, version: VersionId) {
        self.is_dropped[version.index()] ^= true;
        let mut word = std::mem::replace(&mut self.first[version.index()], NONE);
        while let Some(&(window, next)) = self.words.get(word as usize) {
            self.rebuild_ns[window.index()] = UNKNOWN;
            word = next;
        }
        if let Some(producer) = lineage.version(version).producer {
            for &input in lineage.replay_inputs(producer) {
                self.children[input.index()] = None;
            }
        }
    }

    /// Time to rebuild a window's storage before the window ends: its producer and every ancestor that will be dropped or
    /// dead by then.
    pub(super) fn rebuild_ns(&mut self, lineage: &Lineage, window: WindowId) -> u64 {
        if self.rebuild_ns[window.index()] == UNKNOWN {
            self.rebuild_ns[window.index()] = self.find_rebuild_ns(lineage, window);
        }
        self.rebuild_ns[window.index()]
    }

    fn find_rebuild_ns(&mut self, lineage: &Lineage, id: WindowId) -> u64 {
        let window = lineage.window(id);
        self.visit += 1;
        self.stack.clear();
        self.stack.push(window.version);
        self.visited[window.version.index()] = self.visit;
        let (mut total_ns, mut reruns) = (0, 0);
        while let Some(version) = self.stack.pop() {
            let Some(producer) = lineage.version(version).producer else { continue };
            total_ns += lineage.cost_ns(producer);
            reruns += 1;
            if reruns == ANCESTORS_MAX {
                break;
            }
            for &output in lineage.replay_outputs(producer) {
                self.visited[output.index()] = self.visit;
            }
            for &input in lineage.replay_inputs(producer) {
                if std::mem::replace(&mut self.visited[input.index()], self.visit) == self.visit {
                    continue;
                }
                let lives = lineage.version(input).until >= window.end;
                if lives {
                    let next = std::mem::replace(&mut self.first[input.index()], self.words.len() as u32);
                    self.words.push((id, next));
                }
                if !lives || self.is_dropped[input.index()] {
                    self.stack.push(input);
                }
            }
        }
        total_ns
    }

    /// Dropped storages that `version` would help to rebuild.
    pub(super) fn children(&mut self, lineage: &Lineage, version: VersionId) -> Children {
        if self.dropped.is_empty() {
            return Children::default();
        }
        *self.children[version.index()].get_or_insert_with(|| {
            let mut children = Children::default();
            for &consumer in lineage.consumers(version) {
                let outputs = lineage.replay_outputs(consumer).iter();
                let mut dropped = outputs.filter(|output| self.is_dropped[output.index()]).peekable();
                if dropped.peek().is_some() {
                    children.ns += lineage.cost_ns(consumer);
                }
                children.bytes += dropped.map(|output| lineage.bytes(lineage.version(*output).storage)).sum::<u64>();
            }
            children
        })
    }
}
