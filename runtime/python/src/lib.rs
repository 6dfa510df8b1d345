//! The runtime as a Python class: what a PyTorch job needs, and no more. What it does for whom is told to Python users in
//! `plimsoll/__init__.pyi`.

use std::path::{Path, PathBuf};

use plimsoll_runtime::baselines::BASELINES;
use plimsoll_runtime::torch::device::DeviceName;
use plimsoll_runtime::torch::{self, Budget, Detecting, Running};
use plimsoll_runtime::units::Bytes;
use plimsoll_runtime::{ActionSet, PolicyFile};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use send_wrapper::SendWrapper;

/// A file's name has more than a family's in it, and no more than 255 bytes.
const FAMILY_BYTES_MAX: usize = 128;

/// Bytes, or a text such as `512MiB`.
fn bytes_of(amount: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = amount.extract::<String>() {
        return text.parse().map(|Bytes(bytes)| bytes).map_err(value_error);
    }
    let none = |_| value_error(format!("{amount} is no number of bytes, nor a text such as 512MiB"));
    amount.extract().map_err(none)
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn runtime_error(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn os_error(error: impl std::fmt::Display) -> PyErr {
    PyOSError::new_err(error.to_string())
}

fn load(path: &Path) -> PyResult<PolicyFile> {
    PolicyFile::load(path).map_err(|error| {
        let known = if path.exists() {
            String::new()
        } else {
            format!("; nor is there a baseline of that name, only {}", BASELINES.join(", "))
        };
        os_error(format!("{error}{known}"))
    })
}

/// Does what may take long while Python's other threads go on.
fn detached<R>(work: impl FnOnce() -> R) -> R {
    // It stays on this thread.
    let work = SendWrapper::new(work);
    Python::attach(|py| py.detach(|| SendWrapper::new(work.take()()))).take()
}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime"))]
///
#[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.__init__"))]
#[pyclass(frozen, module = "plimsoll")]
struct Runtime {
    runtime: torch::Runtime,
    device: DeviceName,
}

#[pymethods]
impl Runtime {
    #[new]
    #[pyo3(signature = (budget, policy = None, *, device = None, swap = None, recompute = None, host_limit = None,
                        log_events = false))]
    fn new(
        budget: &Bound<'_, PyAny>,
        policy: Option<PathBuf>,
        device: Option<&Bound<'_, PyAny>>,
        swap: Option<bool>,
        recompute: Option<bool>,
        host_limit: Option<&Bound<'_, PyAny>>,
        log_events: bool,
    ) -> PyResult<Self> {
        let device = match device {
            Some(device) => device.str()?.to_cow()?.parse().map_err(value_error)?,
            None => DeviceName::Cpu,
        };
        let mut builder = torch::Runtime::builder().budget(Budget::bytes(bytes_of(budget)?));
        let mut actions = ActionSet::ALL;
        if let Some(path) = policy {
            builder = match BASELINES.into_iter().find(|name| path.as_os_str() == *name) {
                Some(name) => builder.baseline(name),
                None => {
                    let policy = load(&path)?;
                    actions = policy.actions;
                    builder.policy(policy)
                }
            };
        }
        let [swap, recompute] = [swap.unwrap_or(actions.swap), recompute.unwrap_or(actions.recompute)];
        builder = builder.actions(ActionSet { swap, recompute });
        let limit_bytes = host_limit.map(bytes_of).transpose()?;
        builder = detached(|| builder.on(device, limit_bytes)).map_err(runtime_error)?;
        if log_events {
            builder = builder.log_events();
        }
        let runtime = detached(|| builder.build()).map_err(runtime_error)?;
        Ok(Runtime { runtime, device })
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.iteration"))]
    fn iteration(slf: Py<Self>) -> Guard {
        Guard { runtime: slf, is_loop: false, held: None }
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.detect"))]
    fn detect(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Loop>> {
        let guard = Guard { runtime: slf, is_loop: true, held: None };
        Py::new(py, PyClassInitializer::from(guard).add_subclass(Loop))
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.budget"))]
    #[getter]
    fn budget(&self) -> u64 {
        detached(|| self.runtime.budget().as_bytes())
    }

    #[setter]
    fn set_budget(&self, budget: &Bound<'_, PyAny>) -> PyResult<()> {
        let budget = Budget::bytes(bytes_of(budget)?);
        detached(|| self.runtime.set_budget(budget));
        Ok(())
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.report"))]
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = detached(|| self.runtime.report().to_json());
        let report = py.import("json")?.call_method1("loads", (report,))?;
        Ok(report.cast_into()?)
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.write_chrome_trace"))]
    fn write_chrome_trace(&self, path: PathBuf) -> PyResult<()> {
        detached(|| self.runtime.write_chrome_trace(path)).map_err(os_error)
    }

    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Runtime.save_traces"))]
    fn save_traces(&self, folder: PathBuf, family: &str) -> PyResult<Vec<PathBuf>> {
        if family.is_empty() || family.contains(['/', '\0']) || family.len() > FAMILY_BYTES_MAX {
            return Err(value_error(format!("{family:?} is no family: files are named after it")));
        }
        detached(|| {
            std::fs::create_dir_all(&folder).map_err(|error| os_error(format!("{}: {error}", folder.display())))?;
            let traces = self.runtime.traces(family, &self.device.product());
            traces.iter().map(|trace| trace.save_in(&folder).map_err(os_error)).collect()
        })
    }

    fn __str__(&self) -> String {
        detached(|| self.runtime.report().to_string())
    }
}

/// What keeps the operators of a thread under the budget while it lives.
enum Held {
    Iteration(Running),
    Loop(Detecting),
}

// One iteration, or a whole loop, for `with`.
#[doc = include_str!(concat!(env!("OUT_DIR"), "/Guard"))]
#[pyclass(subclass, module = "plimsoll")]
struct Guard {
    runtime: Py<Runtime>,
    is_loop: bool,
    held: Option<SendWrapper<Held>>,
}

/// A loop whose iterations are found, unless they are marked.
#[pyclass(extends = Guard, module = "plimsoll")]
struct Loop;

#[pymethods]
impl Loop {
    #[doc = include_str!(concat!(env!("OUT_DIR"), "/Loop.mark"))]
    fn mark(slf: PyRef<'_, Self>) -> PyResult<()> {
        let guard = slf.as_super();
        if guard.is_elsewhere() {
            return Err(runtime_error("iterations begin in the thread of their loop"));
        }
        match guard.held.as_deref() {
            Some(Held::Loop(detecting)) => detached(|| detecting.mark()).map_err(runtime_error),
            _ => Err(runtime_error("the loop has not begun, or has ended")),
        }
    }
}

impl Guard {
    /// Whether another thread has entered it.
    fn is_elsewhere(&self) -> bool {
        self.held.as_ref().is_some_and(|held| !held.valid())
    }
}

#[pymethods]
impl Guard {
    fn __enter__(mut slf: PyRefMut<'_, Self>) -> PyResult<PyRefMut<'_, Self>> {
        if slf.is_elsewhere() {
            return Err(runtime_error("another thread is within this already"));
        }
        let (runtime, is_loop) = (&slf.runtime.get().runtime, slf.is_loop);
        let started = detached(|| match is_loop {
            true => runtime.start_detecting().map(Held::Loop),
            false => runtime.start().map(Held::Iteration),
        });
        slf.held = Some(SendWrapper::new(started.map_err(runtime_error)?));
        Ok(slf)
    }

    fn __exit__(&mut self, _kind: Py<PyAny>, raised: Option<Py<PyAny>>, _trace: Py<PyAny>) -> PyResult<bool> {
        if self.is_elsewhere() {
            return Err(runtime_error("it ends in the thread that began it"));
        }
        let ended = detached(|| match self.held.take().map(SendWrapper::take) {
            Some(Held::Iteration(running)) => running.end(),
            Some(Held::Loop(detecting)) => detecting.end(),
            None => Ok(()),
        });
        match ended {
            // What the program has raised comes first.
            Err(error) if raised.is_some() => eprintln!("plimsoll: {error}"),
            ended => ended.map_err(runtime_error)?,
        }
        Ok(false)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.is_elsewhere() {
            // Its thread never left it: operators there go on as they were.
            std::mem::forget(self.held.take());
        }
    }
}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/stand_by"))]
#[pyfunction]
fn stand_by() {
    torch::stand_by();
}

/// The current stream of this thread is used outside of iterations, too: see `plimsoll/_streams.py`.
#[pyfunction]
fn note_stream() -> PyResult<()> {
    torch::note_stream().map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// What this thread runs next is no part of the operator that it is within: see `plimsoll/_interruptions.py`.
#[pyfunction]
fn step_aside() {
    torch::step_aside();
}

/// How often this thread has, and has not stepped back.
#[pyfunction]
fn times_aside() -> usize {
    torch::times_aside()
}

/// This thread is how it was when it had stepped aside so many times.
#[pyfunction]
fn step_back(times: usize) {
    torch::step_back(times);
}

/// Whether the handler of that signal comes later.
#[pyfunction]
fn postpone(signal: i32) -> bool {
    torch::postpone(signal)
}

/// One of `gc.callbacks`. It is none of Python's own functions: at the beginning of such a one handlers of signals run, and what they
/// raise there is lost.
#[pyfunction]
fn collect_aside(phase: &str, _found: &Bound<'_, PyDict>) {
    match phase {
        "start" => torch::step_aside(),
        _ => torch::step_back(torch::times_aside().saturating_sub(1)),
    }
}

/// What `plimsoll/__init__.py` gives to Python.
#[pymodule]
mod _plimsoll {
    #[pymodule_export]
    use super::{
        Guard, Loop, Runtime, collect_aside, note_stream, postpone, stand_by, step_aside, step_back, times_aside,
    };
}
