//! Keeps a training loop under a budget: records its iterations, plans those that repeat, carries the plans out, and
//! watches whether they do what was predicted.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let train_step = || {};
//! use plimsoll_runtime::PolicyFile;
//! use plimsoll_runtime::torch::{Budget, Runtime};
//!
//! let mut plimsoll = Runtime::builder()
//!     .policy(PolicyFile::load("gpt.policy")?)
//!     .budget(Budget::mebibytes(512))
//!     .build()?; // before the model is made
//! for _ in 0..100 {
//!     let _iteration = plimsoll.iteration();
//!     train_step();
//! }
//! println!("{}", plimsoll.report());
//! # Ok(())
//! # }
//! ```

use std::marker::PhantomData;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use tch::Device;

use super::copy::{CopyEngine, HostEngine};
use super::detector::Detector;
use super::device::{CopyProbeError, CopyTable, DeviceName, EngineError, Engines, PAGE_LOCKED_LIMIT_BYTES};
use super::driver::{Driver, Open, Record, Shared, Wanted};
use super::library::{Decider, Library, Next};
use super::lock::Lock;
use super::parts::Divider;
use super::reactive::Reactive;
use super::report::Report;
use super::residency::Residency;
use super::session::{Listening, Observer, Session, SessionError};
use crate::baselines::BASELINES;
use crate::file::{FileError, write_whole};
use crate::hardware::{Link, SlowTiers};
use crate::plan::ActionSet;
use crate::planner::Planner;
use crate::policy_file::PolicyFile;
use crate::trace::Trace;
use crate::units::{Bytes, UnitError};

/// Device bytes that a training loop may never exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Budget(pub(super) u64);

impl Budget {
    /// So many bytes.
    pub const fn bytes(bytes: u64) -> Self {
        Budget(bytes)
    }

    /// So many times 1,048,576 bytes.
    pub const fn mebibytes(mebibytes: u64) -> Self {
        Budget(mebibytes << 20)
    }

    /// In bytes.
    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Budget {
    type Err = UnitError;

    /// Reads `20GiB`, `1.5GB`, or a plain number of bytes.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        text.parse().map(|Bytes(bytes)| Budget(bytes))
    }
}

/// Why a runtime could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// libtorch refused the interceptor.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// There is no such baseline.
    #[error("no baseline is called {found}; there are {}", BASELINES.join(", "))]
    UnknownBaseline {
        /// The name that was given.
        found: String,
    },
    /// The device cannot be used, or nothing copies from there.
    #[error(transparent)]
    Device(#[from] EngineError),
    /// The link to the host's memory could not be measured.
    #[error("measuring copies to the host's memory: {0}")]
    Link(#[from] CopyProbeError),
    /// The copies of the CPU do not reach other devices.
    #[error("a runtime for {0:?} needs an engine and a link of that device")]
    NoEngine(Device),
    /// A budget is what a runtime is for.
    #[error("a runtime needs a budget")]
    NoBudget,
}

/// How a [`Runtime`] is to be.
pub struct Builder {
    decider: Result<Decider, BuildError>,
    budget: Option<Budget>,
    device: Device,
    engine: Option<Box<dyn CopyEngine>>,
    tiers: Option<SlowTiers>,
    actions: ActionSet,
    planner: Planner<'static>,
    plans_max: usize,
    events: bool,
}

impl Builder {
    /// The learned policy that the [`Planner`] decodes. Where neither it nor a baseline is named, the planner searches for plans by
    /// itself. DTR's rule for drops and swaps (`dtr-swap`) decides when bytes run out, with a policy or without.
    ///
    /// The file has been read: what becomes of it later does not matter.
    pub fn policy(mut self, policy: PolicyFile) -> Self {
        self.actions = policy.actions;
        self.decider = Ok(Decider::Learned(Box::new(policy.into_policy())));
        self
    }

    /// A baseline that decides alone, by its name. Where it has to see a whole iteration first, `dtr-swap` decides when bytes
    /// run out.
    pub fn baseline(mut self, name: &str) -> Self {
        let known = BASELINES.into_iter().find(|known| *known == name);
        self.decider =
            known.map(Decider::Baseline).ok_or_else(|| BuildError::UnknownBaseline { found: name.to_owned() });
        self
    }

    /// The line. There is no default.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// The device that the loop runs on, with copies to at most so much of the host's memory, which a CUDA device has page-locked
    /// ([`PAGE_LOCKED_LIMIT_BYTES`] unless told), over its link as it is measured now. Opens the device: call it before any other use of
    /// libtorch.
    pub fn on(self, name: DeviceName, host_limit_bytes: Option<u64>) -> Result<Self, BuildError> {
        if name == DeviceName::Cpu {
            return Ok(match host_limit_bytes {
                Some(bytes) => self.device(Device::Cpu).engine(Box::new(HostEngine::with_limit(bytes, None))),
                None => self.device(Device::Cpu),
            });
        }
        let device = name.open().map_err(EngineError::from)?;
        Session::install_on(device)?;
        let engines = Engines::open(name, host_limit_bytes.unwrap_or(PAGE_LOCKED_LIMIT_BYTES))?;
        let link = CopyTable::reckoned_link(&engines, device)?;
        Ok(self.device(device).engine(engines.engine(None)?).link(link))
    }

    /// The device whose bytes the budget is about; the CPU unless told otherwise. Another one needs an
    /// [`engine`](Builder::engine) and a [`link`](Builder::link) of its own, which [`on`](Builder::on) finds by itself, and
    /// [`Session::install_on`] says what else.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// What makes the copies; this machine's memory unless told otherwise.
    pub fn engine(mut self, engine: Box<dyn CopyEngine>) -> Self {
        self.engine = Some(engine);
        self
    }

    /// How fast the engine's copies are; measured on this machine's memory unless told. How much it takes, plans ask the engine.
    pub fn link(mut self, link: Link) -> Self {
        self.tiers = Some(link.into());
        self
    }

    /// How fast the copies of an engine of several tiers are, and how much plans may put into each at most: instead of
    /// [`Builder::link`].
    pub fn tiers(mut self, tiers: SlowTiers) -> Self {
        self.tiers = Some(tiers);
        self
    }

    /// Evictions that may be used.
    pub fn actions(mut self, actions: ActionSet) -> Self {
        self.actions = actions;
        self
    }

    /// How much is tried for every plan that is not a baseline's own: eight decodes beside the greedy one, baselines and
    /// search, for as long as [`Planner`] takes where nobody limits it, unless told.
    pub fn planner(mut self, planner: Planner<'static>) -> Self {
        self.planner = planner;
        self
    }

    /// Plans that are remembered, of all programs and all of their sizes; the one that was not carried out for longest makes way, but
    /// that for the largest of several sizes stays. 64 unless told.
    pub fn plans_max(mut self, plans_max: usize) -> Self {
        self.plans_max = plans_max.max(1);
        self
    }

    /// Logs operators, copies and bytes for [`Runtime::write_chrome_trace`].
    pub fn log_events(mut self) -> Self {
        self.events = true;
        self
    }

    /// The runtime. Make it before the model: bytes allocated earlier are not counted and cannot be evicted.
    pub fn build(self) -> Result<Runtime, BuildError> {
        let decider = self.decider?;
        let budget = self.budget.ok_or(BuildError::NoBudget)?;
        if self.device != Device::Cpu && (self.engine.is_none() || self.tiers.is_none()) {
            return Err(BuildError::NoEngine(self.device));
        }
        let session = Session::install_on(self.device)?;
        let tiers = match self.tiers {
            Some(tiers) => tiers,
            None => HostEngine::probe().map_err(CopyProbeError::from)?.into(),
        };
        let engine = self.engine.unwrap_or_else(|| Box::new(HostEngine::new(None)));
        let tiers = tiers.within(|tier| engine.limit_bytes(tier));
        let mut driver =
            Driver::new(Residency::new(engine, Reactive::new(decider.reactive(), self.actions, tiers.host)));
        driver.may_recompute = self.actions.recompute;
        if self.events {
            driver.residency.events.switch_on();
        }
        let library = Library::new(
            budget,
            decider,
            tiers,
            self.actions,
            self.planner,
            self.plans_max,
            !session.times_in_passing(),
        );
        Ok(Runtime { session, shared: Arc::new(Shared::new(driver)), library: Arc::new(Lock::new(library)) })
    }
}

/// Keeps one training loop under a budget.
pub struct Runtime {
    session: Session,
    shared: Arc<Shared>,
    library: Arc<Lock<Library>>,
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.session.is_inherited() {
            // The threads that its engine waits for are in the process that this one was forked from.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

impl Runtime {
    /// A runtime to be configured.
    pub fn builder() -> Builder {
        Builder {
            decider: Ok(Decider::Planner),
            budget: None,
            device: Device::Cpu,
            engine: None,
            tiers: None,
            actions: ActionSet::ALL,
            planner: Planner::default(),
            plans_max: 64,
            events: false,
        }
    }

    /// Starts an iteration: operators of this thread are under the budget until the guard is dropped. Then every storage
    /// is resident again.
    ///
    /// # Panics
    ///
    /// If another loop of the process is under way; see [`Runtime::try_iteration`].
    pub fn iteration(&mut self) -> Iteration<'_> {
        self.try_iteration().unwrap_or_else(|error| panic!("plimsoll: {error}"))
    }

    /// Starts an iteration, unless another loop of the process is under way, or storages of an earlier iteration are
    /// still without their bytes.
    pub fn try_iteration(&mut self) -> Result<Iteration<'_>, SessionError> {
        Ok(Iteration { _running: self.start()?, _runtime: PhantomData })
    }

    /// The same for a caller that cannot borrow the runtime meanwhile.
    pub fn start(&self) -> Result<Running, SessionError> {
        let divides = self.library.lock().cuts().any();
        let divider = || Arc::new(Divider::new(Arc::clone(&self.shared), Arc::clone(&self.library)));
        let divider = divides.then(divider);
        let observer = divider.clone().map_or(Arc::clone(&self.shared) as _, |divider| divider as Arc<dyn Observer>);
        let listening = self.session.listen(observer)?;
        let next = self.next(false);
        divider.iter().for_each(|divider| divider.begin(&next));
        let open = Open::begin(listening, &self.shared, next.leader, next.wanted, next.line_bytes)?;
        Ok(Running { shared: Arc::clone(&self.shared), library: Arc::clone(&self.library), open: Some(open) })
    }

    /// Prepares an iteration by itself, or the first one of a loop.
    fn next(&self, is_loop: bool) -> Next {
        let (mut library, mut driver) = (self.library.lock(), self.shared.lock());
        let was_loop = std::mem::replace(&mut library.is_loop, is_loop);
        driver.come_from_elsewhere(is_loop, was_loop);
        library.next(&mut driver)
    }

    /// Puts operators of this thread under the budget until the guard is dropped, and finds out where iterations begin, unless
    /// [`Detection::mark`] says so: for a loop that cannot be marked, and for one that has to do with less than what is there all
    /// the time. What happens between iterations belongs to them, so no tensor may be read by its address meanwhile; tensors that
    /// operators read are brought back as always. So parameters and the optimizer's state may be away there, too, where the budget
    /// asks for that; once the guard is dropped, everything is resident, whatever that takes. What no operator has used under a
    /// guard cannot be evicted: where a model alone exceeds the budget, it has to be made here.
    ///
    /// While no iteration has been found, or where there is none, evictions are made when bytes run out.
    pub fn detect(&mut self) -> Result<Detection<'_>, SessionError> {
        Ok(Detection { detecting: self.start_detecting()?, runtime: self })
    }

    /// The same for a caller that cannot borrow the runtime meanwhile.
    pub fn start_detecting(&self) -> Result<Detecting, SessionError> {
        let detector = Arc::new(Detector::new(Arc::clone(&self.shared), Arc::clone(&self.library)));
        let listening = self.session.listen(Arc::clone(&detector) as Arc<dyn Observer>)?;
        let Next { leader, wanted, line_bytes, .. } = self.next(true);
        // It starts anywhere in an iteration.
        self.shared.begin(leader, Wanted { record: Record::Nothing, ..wanted }, line_bytes)?;
        self.shared.lock().has_no_end();
        Ok(Detecting { detector, listening: Some(listening) })
    }

    /// The line.
    pub fn budget(&self) -> Budget {
        self.library.lock().budget()
    }

    /// Draws the line elsewhere, from the next iteration on. Plans are made anew when that begins; where operators on lists are run in
    /// other pieces then, once the program has been seen again.
    pub fn set_budget(&self, budget: Budget) {
        self.library.lock().set_budget(budget);
    }

    /// What the loop has done so far.
    pub fn report(&self) -> Report {
        let library = self.library.lock();
        let mut report = library.report.clone();
        let driver = self.shared.lock();
        report.budget_bytes = library.budget().0;
        report.slow_tier_high_water_bytes = driver.residency.engine.high_water_bytes();
        report.least_feasible_budget_bytes =
            report.least_feasible_budget_bytes.max(driver.residency.reactive.least_bytes);
        report
    }

    /// The programs that are known so far, for a policy to learn on: each at those sizes that it was planned for and timed at, the
    /// parts of an iteration that is divided by themselves. On a GPU a program is timed within a plan, some iterations after its first.
    ///
    /// `family` is to be that of the model. `device` is where it trains: `cpu`, whose times can be projected to another machine, or
    /// the name of a product. Workloads are named after the family and what they do, so those of several jobs may be
    /// [saved in](Trace::save_in) one folder; the same one is the same file there, wherever it ran.
    pub fn traces(&self, family: &str, device: &str) -> Vec<Trace> {
        let library = self.library.lock();
        let driver = self.shared.lock();
        let named = |trace: &Trace| {
            let workload = format!("{family}-{}", &trace.fingerprint()[..8]);
            Trace { workload, family: family.to_owned(), device: device.to_owned(), ..trace.clone() }
        };
        library.traces(&driver).map(named).collect()
    }

    /// Writes what happened when, for Perfetto or `chrome://tracing`: operators, both copy channels, and bytes over
    /// time. Empty unless [`Builder::log_events`] was asked for. A copy's end is when it was noticed.
    pub fn write_chrome_trace(&self, path: impl AsRef<Path>) -> Result<(), FileError> {
        write_whole(path.as_ref(), self.shared.lock().residency.events.to_chrome_json().as_bytes())
    }
}

/// An iteration under way; it ends where this is dropped.
#[must_use = "the iteration ends where the guard is dropped"]
pub struct Iteration<'a> {
    _running: Running,
    _runtime: PhantomData<&'a mut Runtime>,
}

/// An iteration under way, by itself; it ends where this is dropped, on the thread that started it.
#[must_use = "the iteration ends where the guard is dropped"]
pub struct Running {
    shared: Arc<Shared>,
    library: Arc<Lock<Library>>,
    open: Option<Open>,
}

impl Running {
    /// Ends it, as dropping it does, which tells of errors on stderr. Where storages cannot be restored the next iteration tries again, and
    /// does not start before it succeeds.
    pub fn end(mut self) -> Result<(), SessionError> {
        self.close()
    }

    fn close(&mut self) -> Result<(), SessionError> {
        let Some(open) = self.open.take() else { return Ok(()) };
        match open.close() {
            Ok(ended) => self.library.lock().after(&mut self.shared.lock(), ended),
            // The iteration goes on where it began.
            Err(SessionError::Forked) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.close().unwrap_or_else(|error| eprintln!("plimsoll: {error}"));
    }
}

/// A loop whose iterations are found, not marked; it ends where this is dropped.
#[must_use = "the loop is left alone once the guard is dropped"]
pub struct Detection<'a> {
    runtime: &'a mut Runtime,
    detecting: Detecting,
}

impl Detection<'_> {
    /// Says that an iteration begins here, on the thread of the loop. From then on none is looked for.
    pub fn mark(&self) -> Result<(), SessionError> {
        self.detecting.mark()
    }

    /// What the loop has done so far, up to the last iteration that was found.
    pub fn report(&self) -> Report {
        self.runtime.report()
    }

    /// Stretches between two updates that an iteration takes, once that is known.
    pub fn period(&self) -> Option<usize> {
        self.detecting.detector.period()
    }
}

/// What [`Runtime::start_detecting`] returns: a [`Detection`] that borrows nothing.
#[must_use = "the loop is left alone once the guard is dropped"]
pub struct Detecting {
    detector: Arc<Detector>,
    listening: Option<Listening>,
}

impl Detecting {
    /// As [`Detection::mark`].
    pub fn mark(&self) -> Result<(), SessionError> {
        if self.is_inherited() {
            return Err(SessionError::Forked);
        }
        self.detector.mark()
    }

    /// Ends it, as dropping it does, which tells of errors on stderr.
    pub fn end(mut self) -> Result<(), SessionError> {
        self.close()
    }

    fn close(&mut self) -> Result<(), SessionError> {
        if self.listening.is_none() || self.is_inherited() {
            return Ok(());
        }
        let ended = self.detector.end();
        self.listening = None;
        ended
    }

    /// Whether it is that of the process that this one was forked from.
    fn is_inherited(&self) -> bool {
        self.listening.as_ref().is_some_and(Listening::is_inherited)
    }
}

impl Drop for Detecting {
    fn drop(&mut self) {
        self.close().unwrap_or_else(|error| eprintln!("plimsoll: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_needs_an_engine_and_a_link_of_its_own() {
        let runtime = || Runtime::builder().budget(Budget::mebibytes(1)).device(Device::Cuda(0));
        let link = Link::symmetric(1e9, 0);
        for incomplete in [runtime(), runtime().link(link), runtime().engine(Box::new(HostEngine::new(None)))] {
            assert!(matches!(incomplete.build(), Err(BuildError::NoEngine(Device::Cuda(0)))));
        }
    }
}
