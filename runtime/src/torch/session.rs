//! The process's one connection to libtorch's dispatcher, and who listens to it.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::shim::{self, Callbacks, RawOperator, ShimError};

/// Why a training loop could not be observed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// libtorch refused the allocator or the interceptor.
    #[error("libtorch refused the interceptor: {0}")]
    Install(#[from] ShimError),
    /// Two loops of one process cannot be observed at once.
    #[error("another training loop of this process is being observed")]
    Busy,
}

/// What an observer wants of an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wish {
    /// Its recipe.
    pub(crate) recipe: bool,
    /// Where it makes storages from nothing: whether they are filled in past the dispatcher before they are used.
    pub(crate) watch: bool,
}

/// Sees the operators of one iteration.
pub(crate) trait Observer {
    /// An operator is about to run. Returns what is wanted of it, or why it must not run.
    fn before(&mut self, operator: &RawOperator) -> Result<Wish, String>;
    /// The operator has run.
    fn after(&mut self, operator: &RawOperator);
    /// The operator has failed.
    fn failed(&mut self);
}

/// The observer of the iteration under way. It outlives its place here: see [`Session::observe`].
struct Active(*mut dyn Observer);

// SAFETY: operators run one at a time, if not all on one thread; the mutex around it gives each its turn.
unsafe impl Send for Active {}

static ACTIVE: Mutex<Option<Active>> = Mutex::new(None);
static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CALLBACKS: Callbacks = Callbacks { name: on_name, before: on_before, after: on_after, failed: on_failed };

/// A process's connection to libtorch's dispatcher and CPU allocator.
///
/// Make it before the model: bytes allocated earlier are not counted and cannot be evicted.
#[derive(Clone, Copy, Debug)]
pub struct Session(());

impl Session {
    /// Registers the counting allocator and the interceptor, once per process.
    pub fn install() -> Result<Self, SessionError> {
        static INSTALLED: OnceLock<Result<(), ShimError>> = OnceLock::new();
        // tch registers its own threads and keys first.
        INSTALLED.get_or_init(|| shim::install(&CALLBACKS)).clone()?;
        Ok(Session(()))
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

    /// Runs `body` with `observer` told of every operator.
    pub(crate) fn observe<R>(
        &self,
        observer: &mut (dyn Observer + '_),
        body: impl FnOnce() -> R,
    ) -> Result<R, SessionError> {
        struct Listening;
        impl Drop for Listening {
            fn drop(&mut self) {
                shim::intercept(false);
                *lock(&ACTIVE) = None;
            }
        }
        {
            let mut active = lock(&ACTIVE);
            if active.is_some() {
                return Err(SessionError::Busy);
            }
            let observer: *mut (dyn Observer + '_) = observer;
            // SAFETY: only the lifetime changes; `Listening` takes the pointer away before the borrow ends.
            *active =
                Some(Active(unsafe { std::mem::transmute::<*mut (dyn Observer + '_), *mut dyn Observer>(observer) }));
        }
        let listening = Listening;
        shim::intercept(true);
        let result = body();
        drop(listening);
        Ok(result)
    }
}

/// An operator's name, by the shim's number.
pub(crate) fn operator_name(name: u32) -> String {
    lock(&NAMES)[name as usize].clone()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls the active observer, if any. A panic in it must not unwind into C++.
fn with_observer<R>(call: impl FnOnce(&mut dyn Observer) -> R) -> Option<R> {
    let active = lock(&ACTIVE);
    // SAFETY: the pointer is valid while it stands in ACTIVE, and the lock makes this the only use.
    let observer = unsafe { &mut *active.as_ref()?.0 };
    match catch_unwind(AssertUnwindSafe(|| call(observer))) {
        Ok(result) => Some(result),
        Err(_) => {
            eprintln!("plimsoll: an invariant broke inside an operator; no training loop can go on from here");
            std::process::abort();
        }
    }
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
    match with_observer(|observer| observer.before(operator)) {
        None => 0,
        Some(Ok(Wish { recipe, watch })) => i32::from(recipe) + 2 * i32::from(watch),
        Some(Err(message)) => {
            shim::refuse(&message);
            -1
        }
    }
}

extern "C" fn on_after(operator: *const RawOperator) {
    // SAFETY: the shim gives an event that lives until this returns.
    let operator = unsafe { &*operator };
    with_observer(|observer| observer.after(operator));
}

extern "C" fn on_failed() {
    with_observer(|observer| observer.failed());
}
