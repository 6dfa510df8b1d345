//! The C interface of the shim, made safe: the only file that calls it.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{self, NonNull};

use serde::Serialize;

use crate::trace::{AccessMode, Phase};

// How an operator uses a storage, and how its bytes were found: see shim.h.
const PLIMSOLL_READ: u32 = 0;
const PLIMSOLL_WRITE: u32 = 1;
const PLIMSOLL_OVERWRITE: u32 = 2;
const PLIMSOLL_FILLED: u32 = 1;
const PLIMSOLL_WAS_AWAY: u32 = 2;

/// Why a storage is not evicted that an operator makes larger or smaller: in the words of the shim.
pub(crate) const RESIZED: &str = "changes its size";

/// What the shim could not do, in libtorch's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShimError(pub String);

/// The shim's number for a storage.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Entry(u32);

/// One distinct storage among an operator's inputs, as the shim lays it out.
#[repr(C)]
pub(crate) struct RawAccess {
    pub(crate) entry: Entry,
    mode: u32,
    pub(crate) bytes: u64,
    locked: *const c_char,
    filled: u32,
}

/// One storage that an operator made, as the shim lays it out.
#[repr(C)]
pub(crate) struct RawCreated {
    pub(crate) entry: Entry,
    pub(crate) bytes: u64,
    locked: *const c_char,
}

/// An operator about to run or run, as the shim lays it out.
#[repr(C)]
pub(crate) struct RawOperator {
    pub(crate) name: u32,
    not_replayable: *const c_char,
    accesses: *const RawAccess,
    access_count: usize,
    created: *const RawCreated,
    created_count: usize,
    recipe: Cell<*mut c_void>,
    pub(crate) peak_bytes: u64,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
}

impl RawAccess {
    /// Whether its bytes were filled in past the dispatcher after an operator made it, as far as that was to be seen.
    pub(crate) fn is_filled(&self) -> bool {
        self.filled == PLIMSOLL_FILLED
    }

    pub(crate) fn mode(&self) -> AccessMode {
        match self.mode {
            PLIMSOLL_READ => AccessMode::Read,
            PLIMSOLL_WRITE => AccessMode::Write,
            PLIMSOLL_OVERWRITE => AccessMode::Overwrite,
            _ => AccessMode::SideEffect,
        }
    }

    /// Whether a rerun of the operator would write it.
    pub(crate) fn is_written(&self) -> bool {
        matches!(self.mode(), AccessMode::Write | AccessMode::Overwrite)
    }

    /// Whether that was not to be seen, the storage having no bytes when the operator arrived.
    pub(crate) fn was_away(&self) -> bool {
        self.filled == PLIMSOLL_WAS_AWAY
    }

    pub(crate) fn is_locked(&self) -> bool {
        !self.locked.is_null()
    }

    pub(crate) fn locked(&self) -> Option<&'static str> {
        // SAFETY: the shim gives null or a string literal.
        unsafe { literal(self.locked) }
    }
}

/// What a device is timed at.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceTiming {
    /// Nothing.
    Nothing,
    /// The whole.
    Makespan,
    /// Every operator as well, which makes the whole longer.
    Operators,
}

/// An iteration by the clock of a device that came to it after it was issued.
pub(crate) struct OnDevice {
    /// Empty where they were not timed.
    pub(crate) operators: Vec<DeviceTimes>,
    /// From where it started to where it ended.
    pub(crate) makespan_ns: u64,
}

/// What a device took for an operator that it came to after it was issued.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceTimes {
    /// The pause before it.
    pub(crate) gap_ns: u64,
    /// What the runtime did before it, or meanwhile.
    pub(crate) interrupted_ns: u64,
    /// Its own.
    pub(crate) cost_ns: u64,
}

impl RawCreated {
    pub(crate) fn locked(&self) -> Option<&'static str> {
        // SAFETY: the shim gives null or a string literal.
        unsafe { literal(self.locked) }
    }
}

impl RawOperator {
    pub(crate) fn not_replayable(&self) -> Option<&'static str> {
        // SAFETY: the shim gives null or a string literal.
        unsafe { literal(self.not_replayable) }
    }

    pub(crate) fn is_replayable(&self) -> bool {
        self.not_replayable.is_null()
    }

    /// Whether its start and its end were timed.
    pub(crate) fn is_timed(&self) -> bool {
        self.end_ns > 0
    }

    pub(crate) fn accesses(&self) -> &[RawAccess] {
        // SAFETY: the shim gives `access_count` accesses that live as long as the event.
        unsafe { slice(self.accesses, self.access_count) }
    }

    /// The storages that it uses.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.accesses().iter().map(|access| access.entry)
    }

    pub(crate) fn created(&self) -> &[RawCreated] {
        // SAFETY: the shim gives `created_count` storages that live as long as the event.
        unsafe { slice(self.created, self.created_count) }
    }

    /// The recipe that came with an operator that has run; none once it has been taken.
    pub(crate) fn take_recipe(&self) -> Option<Recipe> {
        NonNull::new(self.recipe.replace(ptr::null_mut())).map(Recipe)
    }
}

/// # Safety
///
/// `text` is null or a nul-terminated UTF-8 string that is never freed.
unsafe fn literal(text: *const c_char) -> Option<&'static str> {
    // SAFETY: as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("a reason that is not UTF-8"))
}

/// # Safety
///
/// `items` is null, or points to `count` items that outlive the result.
unsafe fn slice<'a, T>(items: *const T, count: usize) -> &'a [T] {
    // SAFETY: as the caller promises.
    if items.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(items, count) } }
}

/// All that a rerun of one operator needs beside the bytes it reads.
pub(crate) struct Recipe(NonNull<c_void>);

// SAFETY: a recipe is plain data; libtorch's reference counts in it are atomic.
unsafe impl Send for Recipe {}

// SAFETY: a rerun reads the recipe and never changes it.
unsafe impl Sync for Recipe {}
impl Recipe {
    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> usize {
        // SAFETY: the recipe is alive.
        unsafe { plimsoll_recipe_bytes(self.0.as_ptr()) }
    }
}

impl Clone for Recipe {
    fn clone(&self) -> Self {
        // SAFETY: the recipe is alive, and stays so for every owner.
        unsafe { plimsoll_recipe_share(self.0.as_ptr()) };
        Recipe(self.0)
    }
}

impl Drop for Recipe {
    fn drop(&mut self) {
        // SAFETY: the pointer came from the shim and is freed once by every owner.
        unsafe { plimsoll_recipe_free(self.0.as_ptr()) }
    }
}

/// What the shim calls. See shim.h.
#[repr(C)]
pub(crate) struct Callbacks {
    pub(crate) name: extern "C" fn(u32, *const c_char),
    pub(crate) before: extern "C" fn(*const RawOperator) -> i32,
    pub(crate) after: extern "C" fn(*const RawOperator),
    pub(crate) failed: extern "C" fn(*const RawOperator),
    pub(crate) pressure: extern "C" fn(u64) -> i32,
    pub(crate) refused: extern "C" fn(u64) -> i32,
    pub(crate) before_bystander: extern "C" fn(*const RawOperator) -> i32,
    pub(crate) after_bystander: extern "C" fn(*const RawOperator),
}

unsafe extern "C" {
    fn plimsoll_install(callbacks: *const Callbacks, cuda_index: i32) -> i32;
    fn plimsoll_device_bytes(out: *mut DeviceCounts);
    fn plimsoll_reset_device_peak();
    fn plimsoll_set_device_share(share: f64) -> i32;
    fn plimsoll_empty_device_cache() -> i32;
    fn plimsoll_note_stream() -> i32;
    fn plimsoll_is_capturing() -> i32;
    fn plimsoll_join_streams() -> i32;
    fn plimsoll_time_on_device(timing: i32);
    fn plimsoll_device_interrupted();
    fn plimsoll_take_device_times(
        out: *mut DeviceTimes,
        capacity: usize,
        count: *mut usize,
        makespan_ns: *mut u64,
    ) -> i32;
    fn plimsoll_set_deterministic(how: i32);
    fn plimsoll_autocast(on_cuda: i32, on: i32);
    fn plimsoll_intercept(on: i32);
    fn plimsoll_stand_by();
    fn plimsoll_step_aside();
    fn plimsoll_times_aside() -> usize;
    fn plimsoll_step_back(times: usize);
    fn plimsoll_postpone(signal: i32) -> i32;
    fn plimsoll_forget_bystanders();
    fn plimsoll_without_python() -> *mut c_void;
    fn plimsoll_with_python(state: *mut c_void);
    fn plimsoll_before_fork();
    fn plimsoll_after_fork();
    fn plimsoll_find_dead();
    fn plimsoll_forget_failed_backward();
    fn plimsoll_phase() -> u32;
    fn plimsoll_recorded() -> u64;
    fn plimsoll_audit(what: i32);
    fn plimsoll_take_audit_findings(out: *mut c_char, capacity: usize) -> usize;
    fn plimsoll_error() -> *const c_char;
    fn plimsoll_refuse(message: *const c_char);
    fn plimsoll_live_bytes() -> u64;
    fn plimsoll_peak_bytes() -> u64;
    fn plimsoll_reset_peak();
    fn plimsoll_set_line(bytes: u64);
    fn plimsoll_set_piece(bytes: u64);
    fn plimsoll_take_freed(out: *mut Entry, capacity: usize) -> usize;
    fn plimsoll_forget(entry: Entry);
    fn plimsoll_lent(entry: Entry) -> *const c_char;
    fn plimsoll_entry_of(tensor: *const c_void) -> u32;
    fn plimsoll_is_filled(entry: Entry, ends_watch: i32, filled: *mut i32) -> i32;
    fn plimsoll_park(entry: Entry, bytes: *mut *mut c_void) -> i32;
    fn plimsoll_unpark(entry: Entry) -> i32;
    fn plimsoll_release(entry: Entry) -> i32;
    fn plimsoll_allocate(entry: Entry, bytes: *mut *mut c_void) -> i32;
    fn plimsoll_hold(entry: Entry) -> i32;
    fn plimsoll_unhold(entry: Entry) -> i32;
    fn plimsoll_is_orphan(entry: Entry, orphan: *mut i32) -> i32;
    fn plimsoll_bytes_of(entry: Entry, bytes: *mut u64) -> i32;
    fn plimsoll_rerun(
        recipe: *mut c_void,
        inputs: *const Entry,
        input_count: usize,
        outputs: *mut Entry,
        output_count: usize,
    ) -> i32;
    fn plimsoll_recipe_share(recipe: *mut c_void);
    fn plimsoll_recipe_free(recipe: *mut c_void);
    fn plimsoll_recipe_bytes(recipe: *const c_void) -> usize;
    fn plimsoll_entry_bytes() -> usize;
    fn plimsoll_adopt(from: Entry, to: Entry) -> i32;
    fn plimsoll_discard(entry: Entry) -> i32;
}

fn checked(status: i32) -> Result<(), ShimError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the message stays until this thread's next call.
    let message = unsafe { CStr::from_ptr(plimsoll_error()) };
    // libtorch appends a stack trace to the first line.
    Err(ShimError(message.to_string_lossy().lines().next().unwrap_or_default().to_owned()))
}

/// Why what allocates could not be done.
#[derive(Debug)]
pub(crate) enum AllocateError {
    /// An allocation was refused.
    NoRoom(String),
    /// Anything else.
    Failed(ShimError),
}

/// What an allocation that was refused returns: see shim.h.
const NO_ROOM: i32 = -2;

fn allocated(status: i32) -> Result<(), AllocateError> {
    checked(status)
        .map_err(|error| if status == NO_ROOM { AllocateError::NoRoom(error.0) } else { AllocateError::Failed(error) })
}

/// Registers everything on the CPU, or on a CUDA device by its number.
pub(crate) fn install(callbacks: &'static Callbacks, cuda: Option<i32>) -> Result<(), ShimError> {
    // SAFETY: the callbacks live for ever and are called as their types say.
    checked(unsafe { plimsoll_install(callbacks, cuda.unwrap_or(-1)) })
}

/// What the caching allocator of a CUDA device counts itself, as the shim lays it out: bytes, the highest since
/// [`Session::reset_device_peak`](super::Session::reset_device_peak), and allocations that failed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// Bytes of blocks in use, each a little larger than what was asked for.
    pub allocated_bytes: u64,
    /// The most of them.
    pub allocated_peak_bytes: u64,
    /// Bytes that the allocator has of the device, in use or not.
    pub reserved_bytes: u64,
    /// The most of them.
    pub reserved_peak_bytes: u64,
    /// Allocations that the device refused for good.
    pub failed: u64,
    /// Allocations that it refused until the allocator gave back what it kept.
    pub retried: u64,
}

pub(crate) fn device_counts() -> DeviceCounts {
    let mut counts = DeviceCounts::default();
    // SAFETY: the shim writes all of it.
    unsafe { plimsoll_device_bytes(&mut counts) };
    counts
}

pub(crate) fn reset_device_peak() {
    // SAFETY: sets counters.
    unsafe { plimsoll_reset_device_peak() }
}

pub(crate) fn set_device_share(share: f64) -> Result<(), ShimError> {
    // SAFETY: sets a limit.
    checked(unsafe { plimsoll_set_device_share(share) })
}

pub(crate) fn empty_device_cache() -> Result<(), ShimError> {
    // SAFETY: the allocator gives back what nobody uses.
    checked(unsafe { plimsoll_empty_device_cache() })
}

/// The current stream of this thread is used, or about to be, by operators that nobody may listen to.
pub(crate) fn note_stream() -> Result<(), ShimError> {
    // SAFETY: at most has the stream wait for others.
    checked(unsafe { plimsoll_note_stream() })
}

/// Whether a CUDA graph is being captured: nothing may leave or come back.
pub(crate) fn is_capturing() -> bool {
    // SAFETY: asks.
    unsafe { plimsoll_is_capturing() != 0 }
}

/// What a program gives any of its streams from now on comes after all that it has given each of them so far. For a program of one
/// stream this does nothing. Fails while a CUDA graph is captured.
pub(crate) fn join_streams() -> Result<(), ShimError> {
    // SAFETY: the device's streams wait for each other; the host does not.
    checked(unsafe { plimsoll_join_streams() })
}

/// Says what a device is timed at that works through operators later, and starts or ends that.
pub(crate) fn time_on_device(timing: DeviceTiming) {
    // SAFETY: sets a flag, and at most makes a mark.
    unsafe { plimsoll_time_on_device(timing as i32) }
}

/// What the device is given from now on is the runtime's, until the next operator starts.
pub(crate) fn device_interrupted() {
    // SAFETY: at most makes a mark.
    unsafe { plimsoll_device_interrupted() }
}

/// What was timed last, in which so many operators ran. None where there is no such device.
pub(crate) fn take_device_times(operators: usize) -> Result<Option<OnDevice>, ShimError> {
    let (mut times, mut count, mut makespan_ns) = (vec![DeviceTimes::default(); operators], 0, 0);
    // SAFETY: the array holds so many.
    checked(unsafe { plimsoll_take_device_times(times.as_mut_ptr(), operators, &mut count, &mut makespan_ns) })?;
    times.truncate(if count == operators { count } else { 0 });
    Ok((makespan_ns > 0).then_some(OnDevice { operators: times, makespan_ns }))
}

pub(crate) fn set_deterministic(how: i32) {
    // SAFETY: sets flags.
    unsafe { plimsoll_set_deterministic(how) }
}

pub(crate) fn autocast(on_cuda: bool, on: bool) {
    // SAFETY: sets flags of this thread.
    unsafe { plimsoll_autocast(i32::from(on_cuda), i32::from(on)) }
}

/// Takes the shim's locks, for this thread to fork the process.
pub(crate) fn before_fork() {
    // SAFETY: what forks holds none of them.
    unsafe { plimsoll_before_fork() }
}

/// Gives them back, in the process that forked and in the one that came of it.
pub(crate) fn after_fork() {
    // SAFETY: `before_fork` took them on this thread.
    unsafe { plimsoll_after_fork() }
}

/// Switches interception of this thread on or off. Where it comes on, operators that bystanders have begun unheard are over.
pub(crate) fn intercept(on: bool) {
    // SAFETY: sets flags of this thread, and waits for others that wait for nobody.
    unsafe { plimsoll_intercept(i32::from(on)) }
}

/// This thread is a bystander from now on, while it is not intercepted.
pub(crate) fn stand_by() {
    // SAFETY: sets flags of this thread.
    unsafe { plimsoll_stand_by() }
}

/// This thread is a bystander until [`step_back`] is told how often it had been one so before.
pub(crate) fn step_aside() {
    // SAFETY: it looks at this thread alone.
    unsafe { plimsoll_step_aside() }
}

pub(crate) fn times_aside() -> usize {
    // SAFETY: as above.
    unsafe { plimsoll_times_aside() }
}

pub(crate) fn step_back(times: usize) {
    // SAFETY: as above.
    unsafe { plimsoll_step_back(times) }
}

/// Whether the handler of a signal comes later.
pub(crate) fn postpone(signal: i32) -> bool {
    // SAFETY: as above.
    unsafe { plimsoll_postpone(signal) != 0 }
}

/// Does what may wait for other threads while Python's go on.
pub(crate) fn without_python<R>(wait: impl FnOnce() -> R) -> R {
    // SAFETY: nothing of Python's is used meanwhile.
    let state = unsafe { plimsoll_without_python() };
    let result = wait();
    // SAFETY: on the same thread, once.
    unsafe { plimsoll_with_python(state) };
    result
}

/// After a fork, in the child, which has no other threads.
pub(crate) fn forget_bystanders() {
    // SAFETY: nobody else is there to count.
    unsafe { plimsoll_forget_bystanders() }
}

/// Notes the storages that died without a report: those whose bytes are not counted. To be called between iterations.
pub(crate) fn find_dead() {
    // SAFETY: locks what it needs.
    unsafe { plimsoll_find_dead() }
}

/// Lets go of what libtorch keeps of a backward pass that has failed in an operator, if one has. To be called by the thread that began
/// it, outside of any.
pub(crate) fn forget_failed_backward() {
    // SAFETY: it runs operators that nobody is told of.
    unsafe { plimsoll_forget_failed_backward() }
}

/// What the operator that this thread runs is for.
pub(crate) fn phase() -> Phase {
    // SAFETY: reads what this thread is about.
    [Phase::Forward, Phase::Backward, Phase::Update][unsafe { plimsoll_phase() } as usize]
}

/// How much autograd has recorded of this thread, the operator that is about to run included.
pub(crate) fn recorded() -> u64 {
    // SAFETY: reads a number of this thread.
    unsafe { plimsoll_recorded() }
}

/// What operators are held to while a loop runs, as the shim numbers it.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audit {
    /// Whether they do what their schema does not say: write an input, or draw random numbers. One that does must be taught to
    /// the shim before its storages may be recomputed.
    Effects = 1,
    /// Whether they make the same bits of the same inputs, in two runs of the same program, neither of them under a plan.
    FirstRun = 2,
    /// The second of these.
    SecondRun = 3,
}

pub(crate) fn audit(what: Option<Audit>) {
    // SAFETY: sets a mode, whose values are those of `PlimsollAudit`.
    unsafe { plimsoll_audit(what.map_or(0, |audit| audit as i32)) }
}

pub(crate) fn take_audit_findings() -> Vec<String> {
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the text holds as many bytes as it says, and the shim ends it with a nul where there is room.
    let found = unsafe { plimsoll_take_audit_findings(text.as_mut_ptr().cast(), text.len()) };
    let text = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy).unwrap_or_default();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if lines.len() < found {
        lines.push(format!("and {} more", found - lines.len()));
    }
    lines
}

/// Bytes that the shim's table of storages takes.
pub(crate) fn entry_bytes() -> usize {
    // SAFETY: reads counters.
    unsafe { plimsoll_entry_bytes() }
}

pub(crate) fn refuse(message: &str) {
    let message = CString::new(message.replace('\0', " ")).expect("no nul is left");
    // SAFETY: the shim copies the message.
    unsafe { plimsoll_refuse(message.as_ptr()) }
}

pub(crate) fn live_bytes() -> u64 {
    // SAFETY: reads a counter.
    unsafe { plimsoll_live_bytes() }
}

pub(crate) fn peak_bytes() -> u64 {
    // SAFETY: reads a counter.
    unsafe { plimsoll_peak_bytes() }
}

pub(crate) fn reset_peak() {
    // SAFETY: sets a counter.
    unsafe { plimsoll_reset_peak() }
}

/// Sets the device bytes that no allocation may exceed; `u64::MAX` for none.
pub(crate) fn set_line(bytes: u64) {
    // SAFETY: sets a number.
    unsafe { plimsoll_set_line(bytes) }
}

/// Sets what an operator on lists may use without being run in pieces; `u64::MAX` for anything.
pub(crate) fn set_piece(bytes: u64) {
    // SAFETY: sets a number.
    unsafe { plimsoll_set_piece(bytes) }
}

/// Appends the entries whose storages have died since the last call. Whether there are any now.
pub(crate) fn take_freed(into: &mut Vec<Entry>) -> bool {
    loop {
        into.reserve(64);
        let room = into.spare_capacity_mut();
        // SAFETY: the room is as long as it says.
        let count = unsafe { plimsoll_take_freed(room.as_mut_ptr().cast(), room.len()) };
        let is_all = count < room.len();
        // SAFETY: so many were written.
        unsafe { into.set_len(into.len() + count) };
        if is_all {
            return !into.is_empty();
        }
    }
}

/// Why a storage may not be evicted any more, if somebody has asked for its address.
pub(crate) fn lent(entry: Entry) -> Option<&'static str> {
    // SAFETY: the shim looks at what it has under any number that it gave, and gives null or a string literal.
    unsafe { literal(plimsoll_lent(entry)) }
}

pub(crate) fn forget(entry: Entry) {
    // SAFETY: an unknown entry is an error inside the shim, not undefined behaviour.
    unsafe { plimsoll_forget(entry) }
}

/// The entry of a tensor's storage, where an intercepted operator has seen it.
pub(crate) fn entry_of(tensor: &tch::Tensor) -> Option<Entry> {
    // SAFETY: tch's pointer is an at::Tensor*.
    let entry = unsafe { plimsoll_entry_of(tensor.as_ptr().cast()) };
    (entry != 0).then_some(Entry(entry))
}

/// Whether the bytes of a storage that is being watched were filled in past the dispatcher. It must be resident.
pub(crate) fn is_filled(entry: Entry, ends_watch: bool) -> Result<bool, ShimError> {
    let mut filled = 0;
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_is_filled(entry, ends_watch.into(), &mut filled) })?;
    Ok(filled != 0)
}

/// Takes the bytes out of the storage; the entry keeps them.
pub(crate) fn park(entry: Entry) -> Result<*mut u8, ShimError> {
    let mut bytes = std::ptr::null_mut();
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_park(entry, &mut bytes) })?;
    Ok(bytes.cast())
}

/// Puts the bytes that the entry keeps into the storage.
pub(crate) fn unpark(entry: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_unpark(entry) })
}

/// Frees the bytes that the entry keeps.
pub(crate) fn release(entry: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_release(entry) })
}

/// Allocates bytes for the entry to keep.
pub(crate) fn allocate(entry: Entry) -> Result<*mut u8, AllocateError> {
    let mut bytes = std::ptr::null_mut();
    // SAFETY: an unknown entry is an error inside the shim.
    allocated(unsafe { plimsoll_allocate(entry, &mut bytes) })?;
    Ok(bytes.cast())
}

/// Keeps the storage alive until [`unhold`].
pub(crate) fn hold(entry: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_hold(entry) })
}

pub(crate) fn unhold(entry: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_unhold(entry) })
}

/// Whether only [`hold`] keeps the storage alive: the program has let go of it.
pub(crate) fn is_orphan(entry: Entry) -> Result<bool, ShimError> {
    let mut orphan = 0;
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_is_orphan(entry, &mut orphan) })?;
    Ok(orphan != 0)
}

/// The size of the storage now.
pub(crate) fn bytes_of(entry: Entry) -> Result<u64, ShimError> {
    let mut bytes = 0;
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_bytes_of(entry, &mut bytes) })?;
    Ok(bytes)
}

/// Whether nothing holds the storage any more, though nobody may have said so yet.
pub(crate) fn has_died(entry: Entry) -> bool {
    bytes_of(entry).is_err()
}

/// Reruns an operator; see shim.h for the order of inputs and outputs.
pub(crate) fn rerun(recipe: &Recipe, inputs: &[Entry], outputs: &mut [Entry]) -> Result<(), AllocateError> {
    // SAFETY: the recipe is alive, and the slices are as long as they say.
    let status = unsafe {
        plimsoll_rerun(recipe.0.as_ptr(), inputs.as_ptr(), inputs.len(), outputs.as_mut_ptr(), outputs.len())
    };
    allocated(status)
}

/// Moves the bytes of `from`, which stands beside the program, into the empty storage of `to`.
pub(crate) fn adopt(from: Entry, to: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_adopt(from, to) })
}

/// Frees an entry that stands beside the program.
pub(crate) fn discard(entry: Entry) -> Result<(), ShimError> {
    // SAFETY: an unknown entry is an error inside the shim.
    checked(unsafe { plimsoll_discard(entry) })
}

impl Entry {
    /// No storage: where the shim ignores an input.
    pub(crate) const NONE: Entry = Entry(0);

    /// As an index into per-storage arrays.
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The entry at an index of a per-storage array.
    pub(crate) const fn at(index: usize) -> Entry {
        Entry(index as u32)
    }

    #[cfg(test)]
    pub(crate) const fn numbered(number: u32) -> Entry {
        Entry(number)
    }
}
