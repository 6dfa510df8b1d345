//! What follows from a trace alone: versions of storages, what a rerun reads, and the windows in which a
//! storage could be evicted.
//!
//! A storage that is written holds another *version* afterwards. The unit of recompute is the version: a
//! recipe that reads the old version of its own storage would otherwise be a cycle. A version without a
//! replayable producer is a *root*; it can be swapped, never rebuilt. Nothing here depends on a budget.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::profile::Profile;
use crate::trace::{AccessMode, OperatorId, StorageId, Trace};

/// Storages below this size are never evicted: they are cheap to keep, and some hold sizes and scalars that
/// libtorch reads without asking the dispatcher.
pub const EVICTION_FLOOR_BYTES: u64 = 4096;

/// A window's index in [`Lineage::windows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub u32);

impl WindowId {
    /// As an index into per-window arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A version's index in [`Lineage::versions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VersionId(pub u32);

impl VersionId {
    /// As an index into per-version arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a storage holds between two writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The storage.
    pub storage: StorageId,
    /// The operator that rebuilds it, or none for a root.
    pub producer: Option<OperatorId>,
    /// The first operator index before which the storage holds this version.
    pub since: u32,
    /// The last operator index before which the storage still holds this version: the index of the operator
    /// that overwrites it, or after which the program frees it; the number of operators if it survives.
    pub until: u32,
    /// The last operator index before which it can be rebuilt, from roots and from versions that can no longer be
    /// rebuilt themselves but that their storages still hold; `None` for a root.
    pub rebuildable_until: Option<u32>,
}

/// The idle time between two successive accesses of a storage: the unit of decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The storage.
    pub storage: StorageId,
    /// What it holds meanwhile.
    pub version: VersionId,
    /// First operator index at which it is idle.
    pub start: u32,
    /// The operator that accesses it next, or the number of operators where the trace ends first, or one past the operator
    /// after which it is freed.
    pub end: u32,
    /// Whether it must be resident again at `end`, as opposed to being freed there, or left to what comes next.
    pub used_again: bool,
    /// Whether it may be dropped and rebuilt.
    pub recomputable: bool,
}

impl Window {
    /// Whether its storage is idle while that operator runs.
    pub const fn spans(&self, operator: usize) -> bool {
        self.start as usize <= operator && operator < self.end as usize
    }

    /// The operator index that ends it: of the access, or of the operator after which its storage is freed.
    pub(crate) const fn last_operator(&self) -> usize {
        if self.used_again { self.end as usize } else { self.end as usize - 1 }
    }
}

/// How an iteration, or a part of one, stands to those before and after it: what they leave to each other in a slow tier. That is
/// decided for all of them together; no plan of one changes it. Where code that nobody listens to comes before and after an
/// iteration, it begins and ends with everything resident.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Edges {
    /// Initial storages that are away when it begins, in order.
    pub away: Vec<StorageId>,
    /// Initial storages that are on their way there when it begins, as they go: what came before it had no time to finish their copies.
    pub leaving: Vec<StorageId>,
    /// Initial storages that are away when it ends, in order, as far as they live on.
    pub stays: Vec<StorageId>,
}

impl Edges {
    /// The same edges, with those of `storages` that are away marked as still being offloaded when it begins, in that order.
    pub(crate) fn with_leaving(&self, storages: &[StorageId]) -> Edges {
        let mut away = self.not_there();
        let leaving: Vec<_> = storages.iter().copied().filter(|storage| away.binary_search(storage).is_ok()).collect();
        let left: HashSet<StorageId> = leaving.iter().copied().collect();
        away.retain(|storage| !left.contains(storage));
        Edges { away, leaving, stays: self.stays.clone() }
    }

    /// Whether the same is left, of which more or less may be leaving.
    pub(crate) fn leaves_the_same(&self, other: &Edges) -> bool {
        self.stays == other.stays && self.not_there() == other.not_there()
    }

    /// What is away when it begins, or leaving, in order.
    fn not_there(&self) -> Vec<StorageId> {
        let mut all = [&self.away[..], &self.leaving].concat();
        all.sort_unstable();
        all
    }

    /// Those of `windows` that begin with what is still leaving, in its order.
    fn leaving_windows(&self, windows: &[Window]) -> Vec<WindowId> {
        let first = (0..).map(WindowId).zip(windows).filter(|(_, window)| window.start == 0);
        let first: HashMap<StorageId, WindowId> = first.map(|(id, window)| (window.storage, id)).collect();
        self.leaving.iter().filter_map(|storage| first.get(storage).copied()).collect()
    }

    /// Whether the storage of a window is away when that begins.
    fn has_away(&self, window: &Window) -> bool {
        window.start == 0 && self.away.binary_search(&window.storage).is_ok()
    }
}

/// Lists of different lengths in one array.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lists<T> {
    offsets: Vec<u32>,
    items: Vec<T>,
}

impl<T: Copy> Lists<T> {
    /// `lists` lists from (list, item) pairs, each list in the order of the pairs.
    pub(crate) fn gather(lists: usize, pairs: &[(u32, T)]) -> Self {
        let mut offsets = vec![0u32; lists + 1];
        for &(list, _) in pairs {
            offsets[list as usize + 1] += 1;
        }
        for index in 0..lists {
            offsets[index + 1] += offsets[index];
        }
        let mut cursor = offsets.clone();
        let mut order = vec![0u32; pairs.len()];
        for (position, &(list, _)) in pairs.iter().enumerate() {
            order[cursor[list as usize] as usize] = position as u32;
            cursor[list as usize] += 1;
        }
        Lists { offsets, items: order.into_iter().map(|position| pairs[position as usize].1).collect() }
    }

    pub(crate) fn of(&self, list: usize) -> &[T] {
        &self.items[self.offsets[list] as usize..self.offsets[list + 1] as usize]
    }
}

/// Versions and windows of a trace, and its keep-all profile.
#[derive(Clone, Debug)]
pub struct Lineage {
    versions: Vec<Version>,
    windows: Vec<Window>,
    replay_inputs: Lists<VersionId>,
    replay_outputs: Lists<VersionId>,
    consumers: Lists<OperatorId>,
    windows_starting: Lists<WindowId>,
    windows_ending: Lists<WindowId>,
    writes: Lists<VersionId>,
    storage_bytes: Vec<u64>,
    demand_bytes: Vec<u64>,
    keep_all_bytes: Vec<u64>,
    keep_all_peak_bytes: u64,
    profile: Profile,
    start_ns: Vec<u64>,
    end_ns: Vec<u64>,
    edges: Edges,
    /// By window: whether its storage is away when the trace ends.
    stays: Vec<bool>,
    /// Windows whose storages are away when the trace begins or ends, or on their way there.
    decided: Vec<WindowId>,
    leaving: Vec<WindowId>,
    /// Per window: whether it is one of those.
    begins_leaving: Vec<bool>,
    /// Bytes of what is away when it begins.
    away_bytes: u64,
}

impl Lineage {
    /// Reads the lineage of `trace`. Linear in its length.
    pub fn of(trace: &Trace) -> Self {
        Self::between(trace, Edges::default())
    }

    /// Reads the lineage of a part of an iteration.
    pub fn between(trace: &Trace, edges: Edges) -> Self {
        Builder::new(trace).build(edges)
    }

    /// What it was read between.
    pub fn edges(&self) -> &Edges {
        &self.edges
    }

    /// Windows, in order, that are swapped whatever a plan says, because what comes before or after reckons with it.
    pub fn decided(&self) -> &[WindowId] {
        &self.decided
    }

    /// Whether a window is one of those.
    pub(crate) fn is_decided(&self, window: WindowId) -> bool {
        self.decided.binary_search(&window).is_ok()
    }

    /// Whether the storage of a window is away when that begins.
    pub fn begins_away(&self, window: WindowId) -> bool {
        self.edges.has_away(self.window(window))
    }

    /// The windows whose storages are on their way to a slow tier when they begin, as those go.
    pub fn leaving(&self) -> &[WindowId] {
        &self.leaving
    }

    /// Whether a window is one of those.
    pub(crate) fn begins_leaving(&self, window: WindowId) -> bool {
        self.begins_leaving[window.index()]
    }

    /// Whether the storage of a window is still away when what comes next begins.
    pub(crate) fn stays_away(&self, window: WindowId) -> bool {
        self.stays[window.index()]
    }

    /// Every version, in order of production.
    pub fn versions(&self) -> &[Version] {
        &self.versions
    }

    /// Every window, ordered by the access that ends it.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// A window.
    pub fn window(&self, window: WindowId) -> &Window {
        &self.windows[window.index()]
    }

    /// A version.
    pub fn version(&self, version: VersionId) -> &Version {
        &self.versions[version.index()]
    }

    /// The versions that a rerun of `operator` reads.
    pub fn replay_inputs(&self, operator: OperatorId) -> &[VersionId] {
        self.replay_inputs.of(operator.index())
    }

    /// The versions that a rerun of `operator` makes.
    pub fn replay_outputs(&self, operator: OperatorId) -> &[VersionId] {
        self.replay_outputs.of(operator.index())
    }

    /// The operators whose rerun reads `version`.
    pub fn consumers(&self, version: VersionId) -> &[OperatorId] {
        self.consumers.of(version.index())
    }

    /// Windows that are idle from just before operator `index` on.
    pub fn windows_starting(&self, index: usize) -> &[WindowId] {
        self.windows_starting.of(index)
    }

    /// Windows whose storage is accessed by operator `index`, or freed just before it.
    pub fn windows_ending(&self, index: usize) -> &[WindowId] {
        self.windows_ending.of(index)
    }

    /// Versions that storages come to hold because of operator `index`, replayable or not.
    pub(crate) fn writes(&self, index: usize) -> &[VersionId] {
        self.writes.of(index)
    }

    /// Bytes that operator `index` allocates: outputs and workspace.
    pub fn demand_bytes(&self, index: usize) -> u64 {
        self.demand_bytes[index]
    }

    /// Device bytes at operator `index` if nothing is evicted; the last entry is the iteration's end.
    pub fn keep_all_bytes(&self) -> &[u64] {
        &self.keep_all_bytes
    }

    /// When operator `index` starts if nothing is evicted; the entry after the last operator is the makespan.
    pub fn start_ns(&self, index: usize) -> u64 {
        self.start_ns[index]
    }

    /// By storage: how long it is idle before its first use and after its last one, if nothing is evicted.
    pub(crate) fn idle_around_ns(&self) -> Vec<u64> {
        let mut idle_ns = vec![0; self.storage_bytes.len()];
        let last = self.windows_ending(self.end_ns.len()).iter().filter(|id| self.window(**id).start > 0);
        for window in self.windows_starting(0).iter().chain(last).map(|id| self.window(*id)) {
            idle_ns[window.storage.index()] +=
                self.start_ns(window.end as usize) - self.start_ns(window.start as usize);
        }
        idle_ns
    }

    /// Bytes of a storage.
    pub(crate) fn bytes(&self, storage: StorageId) -> u64 {
        self.storage_bytes[storage.index()]
    }

    /// Time of an operator itself.
    pub(crate) fn cost_ns(&self, operator: OperatorId) -> u64 {
        self.end_ns[operator.index()] - self.start_ns[operator.index()]
    }

    /// When operator `index` ends if nothing is evicted.
    pub(crate) fn end_ns(&self, index: usize) -> u64 {
        self.end_ns[index]
    }

    /// The first operator index of `range` that starts at `moment_ns` or later if nothing is evicted; its end where
    /// there is none.
    pub(crate) fn first_start_from(&self, range: Range<usize>, moment_ns: u64) -> usize {
        range.start + self.start_ns[range].partition_point(|&start_ns| start_ns < moment_ns)
    }

    /// The last operator index up to `end` that starts at `moment_ns` or earlier if nothing is evicted; 0 where there is
    /// none.
    pub(crate) fn last_start_until(&self, end: usize, moment_ns: u64) -> usize {
        self.start_ns[..=end].partition_point(|&start_ns| start_ns <= moment_ns).saturating_sub(1)
    }

    /// Device bytes while each operator runs if nothing is evicted, to be asked about.
    pub(crate) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Device bytes before operator `index` allocates any if nothing is evicted.
    pub(crate) fn resident_bytes(&self, index: usize) -> i64 {
        let demand_bytes = self.demand_bytes.get(index).map_or(0, |&bytes| bytes as i64);
        self.profile.at(index) - demand_bytes
    }

    /// Makespan if nothing is evicted.
    pub fn keep_all_makespan_ns(&self) -> u64 {
        *self.start_ns.last().expect("start_ns has an entry for the iteration's end")
    }

    /// Most bytes before operator `index` if nothing is evicted but what is away from the start on.
    pub(crate) fn most_bytes_until(&self, index: usize) -> u64 {
        let most_bytes = self.keep_all_bytes[..index].iter().copied().max().unwrap_or(0);
        most_bytes.saturating_sub(self.away_bytes)
    }

    /// Peak bytes if nothing is evicted.
    pub fn keep_all_peak_bytes(&self) -> u64 {
        self.keep_all_peak_bytes
    }
}

/// State of the single pass over the trace.
struct Builder<'a> {
    trace: &'a Trace,
    versions: Vec<Version>,
    windows: Vec<Window>,
    /// Version that each storage holds now.
    current: Vec<VersionId>,
    /// One past the last operator that accessed each storage.
    idle_since: Vec<u32>,
    alive: Vec<bool>,
}

/// What each operator reads and makes, by its number, in order.
#[derive(Default)]
struct Flow {
    inputs: Vec<(u32, VersionId)>,
    /// Those versions that a rerun makes again.
    outputs: Vec<(u32, VersionId)>,
    writes: Vec<(u32, VersionId)>,
}

const NOWHERE: VersionId = VersionId(u32::MAX);

impl<'a> Builder<'a> {
    fn new(trace: &'a Trace) -> Self {
        let storages = trace.storages.len();
        Builder {
            trace,
            versions: Vec::new(),
            windows: Vec::new(),
            current: vec![NOWHERE; storages],
            idle_since: vec![0; storages],
            alive: vec![false; storages],
        }
    }

    fn make_version(&mut self, storage: StorageId, since: u32, producer: Option<OperatorId>) -> VersionId {
        let version = VersionId(self.versions.len() as u32);
        let until = self.trace.operators.len() as u32;
        let rebuildable_until = producer.map(|_| until);
        self.versions.push(Version { storage, producer, since, until, rebuildable_until });
        self.current[storage.index()] = version;
        version
    }

    fn close_window(&mut self, storage: StorageId, end: u32, used_again: bool) {
        let (start, facts) = (self.idle_since[storage.index()], &self.trace.storages[storage.index()]);
        if start < end && facts.locked.is_none() && facts.bytes >= EVICTION_FLOOR_BYTES {
            let version = self.current[storage.index()];
            self.windows.push(Window { storage, version, start, end, used_again, recomputable: false });
        }
    }

    /// Makes every version and every window.
    fn walk(&mut self) -> Flow {
        let trace = self.trace;
        let mut flow = Flow::default();
        for index in 0..trace.initial_storages {
            self.alive[index as usize] = true;
            self.make_version(StorageId(index), 0, None);
        }
        for (index, operator) in trace.operators.iter().enumerate() {
            let now = index as u32;
            for access in &operator.accesses {
                self.close_window(access.storage, now, true);
                self.idle_since[access.storage.index()] = now + 1;
                if matches!(access.mode, AccessMode::Read | AccessMode::Write) {
                    flow.inputs.push((now, self.current[access.storage.index()]));
                }
            }
            let written = || operator.accesses.iter().filter(|access| access.mode.writes());
            // A version superseded by this very operator is intact until it, like any other root it reads.
            for access in written() {
                self.versions[self.current[access.storage.index()].index()].until = now;
            }
            for &storage in &operator.creates {
                self.alive[storage.index()] = true;
                self.idle_since[storage.index()] = now + 1;
            }
            let replayable = operator.not_replayable.is_none();
            let written = written().map(|access| (access.storage, access.mode != AccessMode::SideEffect));
            for (storage, told) in written.chain(operator.creates.iter().map(|&storage| (storage, true))) {
                let rebuilt = replayable && told;
                let version = self.make_version(storage, now + 1, rebuilt.then_some(OperatorId(now)));
                flow.writes.push((now, version));
                if rebuilt {
                    flow.outputs.push((now, version));
                }
            }
            for &storage in &operator.frees {
                self.close_window(storage, now + 1, false);
                self.alive[storage.index()] = false;
                self.versions[self.current[storage.index()].index()].until = now;
            }
        }
        flow
    }

    /// Closes the windows that reach the iteration's end. Returns which of all windows stay beyond it.
    fn close_at_end(&mut self, edges: &Edges) -> Vec<bool> {
        let mut stays = vec![false; self.windows.len()];
        for index in 0..self.trace.storages.len() {
            if self.alive[index] {
                let storage = StorageId(index as u32);
                let does_stay = storage.0 < self.trace.initial_storages && edges.stays.binary_search(&storage).is_ok();
                self.close_window(storage, self.trace.operators.len() as u32, !does_stay);
                stays.resize(self.windows.len(), does_stay);
            }
        }
        stays
    }

    fn build(mut self, edges: Edges) -> Lineage {
        let trace = self.trace;
        let count = trace.operators.len();
        let Flow { inputs, outputs, writes } = self.walk();
        let stays = self.close_at_end(&edges);
        let replay_inputs = Lists::gather(count, &inputs);
        settle_horizons(&mut self.versions, &replay_inputs);
        for window in &mut self.windows {
            let version = &self.versions[window.version.index()];
            window.recomputable =
                version.rebuildable_until.is_some_and(|until| until as usize >= window.last_operator())
                    && !may_yet_be_filled_in(trace, version, window.start);
        }
        let consumers: Vec<_> = inputs.iter().map(|&(operator, version)| (version.0, OperatorId(operator))).collect();
        let by = |key: fn(&Window) -> u32| -> Vec<(u32, WindowId)> {
            self.windows.iter().enumerate().map(|(id, window)| (key(window), WindowId(id as u32))).collect()
        };
        let leaving = edges.leaving_windows(&self.windows);
        let mut begins_leaving = vec![false; self.windows.len()];
        leaving.iter().for_each(|id| begins_leaving[id.index()] = true);
        let decided = (0..self.windows.len())
            .filter(|&id| stays[id] || begins_leaving[id] || edges.has_away(&self.windows[id]))
            .map(|id| WindowId(id as u32))
            .collect();
        let away = self.windows.iter().filter(|window| edges.has_away(window));
        let away_bytes = away.map(|window| trace.storages[window.storage.index()].bytes).sum();
        let (demand_bytes, keep_all_bytes, start_ns) = keep_all_profile(trace);
        Lineage {
            windows_starting: Lists::gather(count + 1, &by(|window| window.start)),
            windows_ending: Lists::gather(count + 1, &by(|window| window.end)),
            consumers: Lists::gather(self.versions.len(), &consumers),
            replay_inputs,
            replay_outputs: Lists::gather(count, &outputs),
            writes: Lists::gather(count, &writes),
            versions: self.versions,
            windows: self.windows,
            storage_bytes: trace.storages.iter().map(|storage| storage.bytes).collect(),
            demand_bytes,
            profile: Profile::new(keep_all_bytes.iter().map(|&bytes| bytes as i64).collect()),
            keep_all_peak_bytes: keep_all_bytes.iter().copied().max().unwrap_or(0),
            keep_all_bytes,
            end_ns: trace
                .operators
                .iter()
                .zip(&start_ns)
                .map(|(operator, start_ns)| start_ns + operator.cost_ns)
                .collect(),
            start_ns,
            decided,
            leaving,
            begins_leaving,
            away_bytes,
            edges,
            stays,
        }
    }
}

/// Whether a storage that is idle from `start` on was made from nothing and not used since: a program may fill it in
/// past the dispatcher, and only its first use tells.
fn may_yet_be_filled_in(trace: &Trace, version: &Version, start: u32) -> bool {
    version.producer.is_some_and(|maker| trace.operators[maker.index()].accesses.is_empty() && start == maker.0 + 1)
}

/// Fills in until when each version can be rebuilt, now that it is known when each root ends.
///
/// Producers come before what they produce, so one pass in order of production suffices.
fn settle_horizons(versions: &mut [Version], replay_inputs: &Lists<VersionId>) {
    for index in 0..versions.len() {
        let Some(producer) = versions[index].producer else { continue };
        let horizon = replay_inputs.of(producer.index()).iter().map(|&input| {
            // Past the time until which it can be rebuilt, no window of it is recomputable: its storage has it, on the
            // device or in a slow tier, for as long as it holds it.
            let input = &versions[input.index()];
            input.rebuildable_until.map_or(input.until, |until| until.max(input.until))
        });
        versions[index].rebuildable_until = horizon.chain(versions[index].rebuildable_until).min();
    }
}

/// Demand of each operator, bytes at each operator and start of each operator, with nothing evicted.
fn keep_all_profile(trace: &Trace) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    let bytes_of = |storage: &StorageId| trace.storages[storage.index()].bytes;
    let (mut resident, mut now) = (trace.start_bytes(), 0);
    let (mut demand, mut bytes, mut start) = (Vec::new(), Vec::new(), Vec::new());
    for operator in &trace.operators {
        let created: u64 = operator.creates.iter().map(bytes_of).sum();
        demand.push(created + operator.workspace_bytes);
        bytes.push(resident + created + operator.workspace_bytes);
        resident += created;
        resident -= operator.frees.iter().map(bytes_of).sum::<u64>();
        start.push(now + operator.gap_ns);
        now += operator.gap_ns + operator.cost_ns;
    }
    bytes.push(resident);
    start.push(now + trace.tail_ns);
    (demand, bytes, start)
}
