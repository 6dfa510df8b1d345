//! Records iterations of a training loop and makes a trace of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use tch::Tensor;

use super::deaths::Deaths;
use super::recording::{RecordedIteration, Recording, trace_of};
use super::session::{Observer, Session, SessionError, Wish};
use super::shim::{self, DeviceTiming, Entry, RawOperator};
use crate::locks::lock;
use crate::trace::{Class, Trace};

/// Why iterations did not make a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Another loop is being observed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Too few iterations were recorded.
    #[error("a trace needs at least 2 recorded iterations, found {0}")]
    TooFew(usize),
    /// The iterations are not alike.
    #[error("iterations differ: {0}")]
    NotRepeating(String),
    /// Nothing ran.
    #[error("the recorded iteration holds no operator")]
    Empty,
}

/// Records whole iterations; at the end makes one trace of them.
pub struct Recorder {
    session: Session,
    listener: Arc<Listener>,
    done: Vec<RecordedIteration>,
    marks: HashMap<Entry, Class>,
}

/// Listens to one iteration after another.
struct Listener {
    recording: Mutex<Recording>,
    deaths: Deaths,
}

impl Listener {
    fn lock(&self) -> MutexGuard<'_, Recording> {
        lock(&self.recording)
    }

    fn absorb_freed(&self, recording: &mut Recording) {
        self.deaths.tell(&mut Vec::new(), |entry| recording.freed(entry));
    }
}

impl Recorder {
    /// A recorder with nothing recorded.
    pub fn new(session: Session) -> Self {
        let listener = Arc::new(Listener { recording: Mutex::default(), deaths: Deaths::new() });
        Recorder { session, listener, done: Vec::new(), marks: HashMap::new() }
    }

    /// Runs one iteration under observation. The first ones may still warm up; [`Recorder::finish`] says how many
    /// to leave out. On a GPU every other one is asked only for what it takes as a whole: that is less than with marks for
    /// every operator.
    pub fn iteration<R>(&mut self, body: impl FnOnce() -> R) -> Result<R, RecordError> {
        let known = self.done.last().map(RecordedIteration::survivors).unwrap_or_default();
        let mut recording = Recording::begin(known, Instant::now());
        self.listener.absorb_freed(&mut recording);
        *self.listener.lock() = recording;
        self.session.reset_peak();
        let is_timed = self.session.times_in_passing() || self.done.len().is_multiple_of(2);
        shim::time_on_device(if is_timed { DeviceTiming::Operators } else { DeviceTiming::Makespan });
        let listening = self.session.listen(Arc::clone(&self.listener) as Arc<dyn Observer>)?;
        let result = body();
        drop(listening);
        shim::time_on_device(DeviceTiming::Nothing);
        let ended = Instant::now();
        let mut recording = std::mem::take(&mut *self.listener.lock());
        self.listener.absorb_freed(&mut recording);
        let on_device = shim::take_device_times(recording.operators()).map_err(SessionError::from)?;
        self.done.push(recording.end(ended, self.session.peak_bytes(), on_device));
        Ok(result)
    }

    /// Says what a tensor is for. Call it after the last iteration, once intercepted operators have seen the tensor.
    pub fn mark(&mut self, tensor: &Tensor, class: Class) {
        if let Some(entry) = shim::entry_of(tensor) {
            self.marks.insert(entry, class);
        }
    }

    /// Makes a trace of all iterations but the first `warm_up`.
    pub fn finish(mut self, warm_up: usize, workload: &str, family: &str, device: &str) -> Result<Trace, RecordError> {
        let iterations = self.done.split_off(warm_up.min(self.done.len()));
        let iterations: Vec<&RecordedIteration> = iterations.iter().collect();
        if iterations.len() < 2 {
            return Err(RecordError::TooFew(iterations.len()));
        }
        trace_of(&iterations, &self.marks, [workload, family, device])
    }
}

impl Observer for Listener {
    fn before(&self, _operator: &RawOperator) -> Result<Wish, String> {
        let arrived = Instant::now();
        let mut recording = self.lock();
        self.absorb_freed(&mut recording);
        recording.arrive(arrived, shim::live_bytes());
        Ok(Wish { recipe: false, watch: true, times: true })
    }

    fn after(&self, operator: &RawOperator) {
        self.lock().ran(operator, 0);
    }

    fn failed(&self, _operator: &RawOperator) {
        self.lock().failed();
    }
}
