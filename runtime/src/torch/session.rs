//! The process's one connection to libtorch's dispatcher, and who listens to it.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use tch::{Cuda, Device, Kind, TchError, Tensor};

use super::shim::{self, Audit, Callbacks, DeviceCounts, RawOperator, ShimError};
use crate::locks::lock;

/// Why a training loop could not be observed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// libtorch refused the allocator or the interceptor.
    #[error("libtorch refused the interceptor: {0}")]
    Install(#[from] ShimError),
    /// A process counts the bytes of one device.
    #[error("this process counts the bytes of {counted:?} already, and cannot count those of {wanted:?}")]
    OtherDevice {
        /// The device that was named first.
        counted: Device,
        /// The device that was named now.
        wanted: Device,
    },
    /// A device that is neither the CPU nor a CUDA device that libtorch can use.
    #[error("libtorch cannot use {0:?} here")]
    NoDevice(Device),
    /// What copies storages stayed in the process that this one was forked from.
    #[error("this process was forked from the one whose loop is kept within a budget; make a runtime of its own here")]
    Forked,
    /// Two loops of one process cannot be observed at once.
    #[error("another training loop of this process is being observed")]
    Busy,
    /// Storages are without their bytes; the loop must not go on.
    #[error("storages could not be restored: {0}")]
    NotRestored(String),
}

/// What an observer wants of an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wish {
    /// Its recipe.
    pub(crate) recipe: bool,
    /// Where it makes storages from nothing: whether they are filled in past the dispatcher before they are used.
    pub(crate) watch: bool,
    /// When it starts and ends.
    pub(crate) times: bool,
}

impl Wish {
    /// In one number: see shim.h.
    fn sum(self) -> i32 {
        i32::from(self.recipe) + 2 * i32::from(self.watch) + 4 * i32::from(self.times)
    }
}

/// Sees the operators of one iteration. It is called from every thread that runs one; of locks it may need none is held meanwhile.
pub(crate) trait Observer: Send + Sync {
    /// An operator is about to run. Returns what is wanted of it, or why it must not run.
    fn before(&self, operator: &RawOperator) -> Result<Wish, String>;
    /// The operator has run.
    fn after(&self, operator: &RawOperator);
    /// The operator has failed.
    fn failed(&self, operator: &RawOperator);
    /// An allocation of so many bytes would exceed the line: makes room, or says why there is none.
    fn pressed(&self, bytes: u64) -> Result<(), String> {
        Err(format!("{bytes} bytes more exceed the budget"))
    }
    /// An allocation fits under the line, and the device has no memory for it: gives so many bytes back, or all there are.
    /// Whether there were any.
    fn refused(&self, _bytes: u64) -> Result<bool, String> {
        Ok(false)
    }
    /// An operator that is no part of the iteration is about to run, in a thread that [stands by](stand_by): it is to find what it
    /// uses, until it has run or failed.
    fn before_bystander(&self, _operator: &RawOperator) -> Result<(), String> {
        Ok(())
    }
    /// It has run, or failed.
    fn after_bystander(&self, _operator: &RawOperator) {}
}

/// Looks at operators before it passes all that it is told on to another.
pub(crate) trait Relay: Send + Sync {
    /// The other.
    fn next(&self) -> &dyn Observer;
    /// An operator is about to run.
    fn arrives(&self, operator: &RawOperator) -> Result<(), SessionError>;
    /// The operator has run, of which the other is not told yet.
    fn ran(&self, _operator: &RawOperator) {}
}

impl<T: Relay> Observer for T {
    fn before(&self, operator: &RawOperator) -> Result<Wish, String> {
        self.arrives(operator).map_err(|error| error.to_string())?;
        self.next().before(operator)
    }

    fn after(&self, operator: &RawOperator) {
        self.ran(operator);
        self.next().after(operator);
    }

    fn failed(&self, operator: &RawOperator) {
        self.next().failed(operator);
    }

    fn pressed(&self, bytes: u64) -> Result<(), String> {
        self.next().pressed(bytes)
    }

    fn refused(&self, bytes: u64) -> Result<bool, String> {
        self.next().refused(bytes)
    }

    fn before_bystander(&self, operator: &RawOperator) -> Result<(), String> {
        self.next().before_bystander(operator)
    }

    fn after_bystander(&self, operator: &RawOperator) {
        self.next().after_bystander(operator);
    }
}

/// Who is told of operators, if anybody is.
type ActiveObserver = Option<Arc<dyn Observer>>;

thread_local! {
    /// The same observer on the thread that listens, where nearly all operators run: it needs no lock to be found.
    static HERE: RefCell<ActiveObserver> = const { RefCell::new(None) };
    /// Who was told of each operator that this thread runs for another, or as a bystander, the innermost last: an iteration may end, and
    /// another one begin, meanwhile.
    static BESIDE: RefCell<Vec<Arc<dyn Observer>>> = const { RefCell::new(Vec::new()) };
    /// [`ACTIVE`], while this thread forks the process.
    static ACTIVE_IN_FORK: RefCell<Option<MutexGuard<'static, ActiveObserver>>> = const { RefCell::new(None) };
}

/// The observer of the iteration under way.
static ACTIVE: Mutex<ActiveObserver> = Mutex::new(None);
static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CALLBACKS: Callbacks = Callbacks {
    name: on_name,
    before: on_before,
    after: on_after,
    failed: on_failed,
    pressure: on_pressure,
    refused: on_refused,
    before_bystander: on_before_bystander,
    after_bystander: on_after_bystander,
};

/// A process's connection to libtorch's dispatcher and to the allocator of one device.
///
/// Make it before the model: bytes allocated earlier are not counted and cannot be evicted.
#[derive(Clone, Copy, Debug)]
pub struct Session {
    device: Device,
    /// The process that it was made in.
    process: u32,
}

impl Session {
    /// Registers the counting allocator and the interceptor for loops on the CPU, once per process.
    pub fn install() -> Result<Self, SessionError> {
        Session::install_on(Device::Cpu)
    }

    /// Registers both for loops on `device`, once per process: the bytes of no other device are counted or moved.
    ///
    /// Of a CUDA device libtorch's CUDA half must have been loaded (`dlopen`) before anything asked libtorch for CUDA.
    pub fn install_on(device: Device) -> Result<Self, SessionError> {
        static INSTALLED: OnceLock<(Device, Result<(), SessionError>)> = OnceLock::new();
        let (counted, installed) = INSTALLED.get_or_init(|| (device, install(device)));
        installed.clone()?;
        if *counted != device {
            return Err(SessionError::OtherDevice { counted: *counted, wanted: device });
        }
        Ok(Session { device, process: process::id() })
    }

    /// What the device's own allocator counts, beside what is counted here; zeros on the CPU. The difference between
    /// reserved and allocated bytes is what fragmentation costs.
    pub fn device_counts(&self) -> DeviceCounts {
        shim::device_counts()
    }

    /// Whether a loop can be asked what its operators take and be no slower for it. A GPU, which works through them later,
    /// has to make two marks for each.
    pub fn times_in_passing(&self) -> bool {
        self.device == Device::Cpu
    }

    /// Starts other peaks of [`Session::device_counts`].
    pub fn reset_device_peak(&self) {
        shim::reset_device_peak();
    }

    /// Bounds the share of a CUDA device's memory that libtorch may take: beyond it allocations fail as they do where
    /// the device is full.
    pub fn set_device_share(&self, share: f64) -> Result<(), SessionError> {
        Ok(shim::set_device_share(share)?)
    }

    /// Has libtorch give back to a CUDA device what it keeps for later.
    pub fn empty_device_cache(&self) -> Result<(), SessionError> {
        Ok(shim::empty_device_cache()?)
    }

    /// Device bytes allocated now.
    pub fn live_bytes(&self) -> u64 {
        shim::live_bytes()
    }

    /// Most device bytes allocated since the last [`Session::reset_peak`].
    pub fn peak_bytes(&self) -> u64 {
        shim::peak_bytes()
    }

    /// Starts another peak from the bytes allocated now.
    pub fn reset_peak(&self) {
        shim::reset_peak();
    }

    /// Holds every operator that is observed, by a [`Recorder`](super::Recorder) for instance, to this from now on, or to nothing.
    /// Slow.
    pub fn audit(&self, what: Option<Audit>) {
        shim::audit(what);
    }

    /// What audits have found since they were last asked: one line for each operator and finding.
    pub fn audit_findings(&self) -> Vec<String> {
        shim::take_audit_findings()
    }

    /// Whether it was made in a process that this one was forked from.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process != process::id()
    }

    /// Tells `observer` of every operator that this thread runs, until the result is dropped.
    pub(crate) fn listen(&self, observer: Arc<dyn Observer>) -> Result<Listening, SessionError> {
        if self.is_inherited() {
            return Err(SessionError::Forked);
        }
        let mut active = lock(&ACTIVE);
        if active.is_some() {
            return Err(SessionError::Busy);
        }
        *active = Some(Arc::clone(&observer));
        // Bystanders may ask who listens while others are waited for.
        drop(active);
        HERE.set(Some(observer));
        shim::find_dead();
        shim::intercept(true);
        Ok(Listening { session: *self, _of_this_thread: PhantomData })
    }
}

fn install(device: Device) -> Result<(), SessionError> {
    let shim_error = |error: TchError| ShimError(error.to_string());
    call_vector_functions().map_err(shim_error)?;
    let cuda = match device {
        Device::Cpu => None,
        Device::Cuda(index) if Cuda::is_available() && index < Cuda::device_count() as usize => {
            // The first tensor makes libtorch take the device into use.
            drop(Tensor::f_zeros([1], (Kind::Float, device)).map_err(shim_error)?);
            Some(index as i32)
        }
        _ => return Err(SessionError::NoDevice(device)),
    };
    // tch registers its own threads and keys first.
    shim::install(&CALLBACKS, cuda)?;
    // SAFETY: the three are called one after the other by a thread that forks, which is in no call of the shim.
    let failed = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(begin_child)) };
    if failed == 0 { Ok(()) } else { Err(ShimError("no memory is left to watch for forks".to_owned()).into()) }
}

/// At their first call MKL's vector functions find out by which kernels they go. Where several threads make it at once, one of them
/// may go by those of the least precision (pytorch#188792): so that a loop has the same bits every time, this thread makes it alone.
fn call_vector_functions() -> Result<(), TchError> {
    Tensor::f_ones([1], (Kind::Float, Device::Cpu))?.f_exp().map(drop)
}

/// From now on operators of this thread find what an iteration has evicted, though the iteration is another thread's.
///
/// Only the thread that an iteration is of, and the autograd threads that work for it, are intercepted by themselves. A thread
/// that reads or writes the same tensors meanwhile, to save a checkpoint say, calls this once before. It may run iterations of its own.
/// In Python those do that `threading` starts after the package was imported.
pub fn stand_by() {
    shim::stand_by();
}

/// What this thread does next is no part of the operator that it is within, if it is within one, as what a handler of a signal of Python's
/// does: it is a bystander's until [`step_back`] is told what [`times_aside`] was before.
pub fn step_aside() {
    shim::step_aside();
}

/// How often this thread has stepped aside and not yet back.
pub fn times_aside() -> usize {
    shim::times_aside()
}

/// This thread is how it was when it had stepped aside so many times.
pub fn step_back(times: usize) {
    shim::step_back(times);
}

/// Whether the handler of that signal of Python's comes later: this thread runs an operator again, of which the program knows nothing.
pub fn postpone(signal: i32) -> bool {
    shim::postpone(signal)
}

/// The stream of a GPU that this thread uses now is one that bytes must not leave or come back beside, though what it is given is
/// outside of iterations, where nobody listens.
///
/// The streams of an iteration's operators are found by themselves. In Python so is any that becomes the current one.
pub fn note_stream() -> Result<(), SessionError> {
    Ok(shim::note_stream()?)
}

/// The child has none of the other threads, which may hold a lock now.
extern "C" fn before_fork() {
    ACTIVE_IN_FORK.set(Some(lock(&ACTIVE)));
    shim::before_fork();
}

extern "C" fn after_fork() {
    shim::after_fork();
    ACTIVE_IN_FORK.set(None);
}

/// A child is left alone, though it was forked within an iteration: nothing of what copies storages is in it, and it serves
/// the program in other ways, as a loader of data does.
extern "C" fn begin_child() {
    shim::intercept(false);
    shim::forget_bystanders();
    shim::set_line(u64::MAX);
    // Not dropped, for that waits for threads. Where what an operator does has forked, its listener is in use for good.
    HERE.with(|here| here.try_borrow_mut().map(|mut here| std::mem::forget(here.take())).ok());
    std::mem::forget(ACTIVE_IN_FORK.with_borrow_mut(|active| active.as_mut().and_then(|listener| listener.take())));
    after_fork();
}

/// Operators of this thread are told to an observer while this lives.
pub(crate) struct Listening {
    session: Session,
    _of_this_thread: PhantomData<*const ()>,
}

impl Listening {
    /// Whether they were, in the process that this one was forked from.
    pub(crate) fn is_inherited(&self) -> bool {
        self.session.is_inherited()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if self.is_inherited() {
            return;
        }
        shim::intercept(false);
        let here = HERE.take();
        *lock(&ACTIVE) = None;
        // Dropped with nothing locked: it may free tensors.
        drop(here);
    }
}

/// An operator's name, by the shim's number.
pub(crate) fn operator_name(name: u32) -> String {
    lock(&NAMES)[name as usize].clone()
}

/// A panic must not unwind into C++.
fn caught<R>(call: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        eprintln!("plimsoll: an invariant broke inside an operator; no training loop can go on from here");
        std::process::abort();
    })
}

/// Calls the active observer, if any. It may be that of another thread, and is then given to keep.
fn with_observer<R>(call: impl FnOnce(&dyn Observer, Option<&Arc<dyn Observer>>) -> R) -> Option<R> {
    caught(|| {
        HERE.with(|here| match &*here.borrow() {
            Some(observer) => Some(call(&**observer, None)),
            None => {
                // Not locked meanwhile: what a rerun allocates on this thread comes back here.
                let active = lock(&ACTIVE).clone();
                active.map(|observer| call(&*observer, Some(&observer)))
            }
        })
    })
}

/// Calls who was told of the operator that this thread runs, and has run now.
fn with_who_was_told(call: impl FnOnce(&dyn Observer)) {
    caught(|| {
        HERE.with(|here| match &*here.borrow() {
            Some(observer) => call(&**observer),
            None => told_beside().map_or((), |observer| call(&*observer)),
        })
    })
}

/// Who was told of the innermost operator that this thread runs for another, or as a bystander; it ends.
fn told_beside() -> ActiveObserver {
    BESIDE.with_borrow_mut(Vec::pop)
}

/// What the shim is told: the observer's answer, or -1 and why it refuses.
fn answer(observed: Result<i32, String>) -> i32 {
    observed.unwrap_or_else(|message| {
        shim::refuse(&message);
        -1
    })
}

extern "C" fn on_name(name: u32, text: *const c_char) {
    // SAFETY: the shim gives a nul-terminated string.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    let mut names = lock(&NAMES);
    assert_eq!(names.len(), name as usize, "operator names are announced in order");
    names.push(text);
}

extern "C" fn on_before(operator: *const RawOperator) -> i32 {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    let asked = with_observer(|observer, others| {
        let wish = observer.before(operator);
        if let Some(observer) = others.filter(|_| wish.is_ok()) {
            BESIDE.with_borrow_mut(|beside| beside.push(Arc::clone(observer)));
        }
        answer(wish.map(Wish::sum))
    });
    asked.unwrap_or(0)
}

extern "C" fn on_after(operator: *const RawOperator) {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    with_who_was_told(|observer| observer.after(operator));
}

extern "C" fn on_failed(operator: *const RawOperator) {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    with_who_was_told(|observer| observer.failed(operator));
}

extern "C" fn on_pressure(bytes: u64) -> i32 {
    // Where nobody observes, the iteration has just ended, and its line with it: the allocation fits now.
    with_observer(|observer, _| answer(observer.pressed(bytes).map(|()| 0))).unwrap_or(0)
}

extern "C" fn on_refused(bytes: u64) -> i32 {
    with_observer(|observer, _| answer(observer.refused(bytes).map(i32::from))).unwrap_or(0)
}

extern "C" fn on_before_bystander(operator: *const RawOperator) -> i32 {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    let active = lock(&ACTIVE).clone();
    caught(|| {
        let Some(observer) = active else { return 0 };
        let ready = observer.before_bystander(operator);
        if ready.is_ok() {
            BESIDE.with_borrow_mut(|beside| beside.push(observer));
        }
        answer(ready.map(|()| 1))
    })
}

extern "C" fn on_after_bystander(operator: *const RawOperator) {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    caught(|| told_beside().into_iter().for_each(|observer| observer.after_bystander(operator)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_one_device_and_no_device_that_is_not_there() {
        assert_eq!(install(Device::Mps).unwrap_err(), SessionError::NoDevice(Device::Mps));
        assert_eq!(install(Device::Cuda(1_000)).unwrap_err(), SessionError::NoDevice(Device::Cuda(1_000)));
        let session = Session::install_on(Device::Cpu).unwrap();
        assert_eq!(session.device_counts(), DeviceCounts::default(), "the CPU has no caching allocator");
        assert!(session.set_device_share(0.5).is_err());
        let other = Session::install_on(Device::Cuda(0)).unwrap_err();
        assert_eq!(other, SessionError::OtherDevice { counted: Device::Cpu, wanted: Device::Cuda(0) });
    }
}
