//! Recording a workload: one trace from several iterations of its real loop.

use plimsoll_runtime::Trace;
use plimsoll_runtime::torch::{RecordError, Recorder, Session};
use plimsoll_runtime::trace::Class;
use tch::TchError;

use crate::workload::Workload;

/// Iterations before the loop has found its rhythm: the first makes the optimizer's state, the second is the first to
/// find gradients of the one before.
pub const WARM_UP: usize = 2;

/// Why a workload could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The training loop failed.
    #[error("the training loop failed: {0}")]
    Loop(#[from] TchError),
    /// The iterations made no trace.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Records `iterations` iterations of `workload` after a warm-up. Returns the trace, and the losses of all iterations,
/// those of the warm-up included.
pub fn record(
    session: Session,
    workload: &mut dyn Workload,
    iterations: usize,
    device: &str,
) -> Result<(Trace, Vec<f64>), RecordingError> {
    let mut recorder = Recorder::new(session);
    let mut losses = Vec::new();
    for _ in 0..iterations.saturating_add(WARM_UP) {
        losses.push(recorder.iteration(|| workload.iteration())??);
    }
    for (_, variable) in workload.variables() {
        recorder.mark(&variable, Class::Parameter);
    }
    for parameter in workload.trainable() {
        recorder.mark(&parameter.grad(), Class::Gradient);
    }
    let trace = recorder.finish(WARM_UP, workload.name(), workload.family(), device)?;
    Ok((trace, losses))
}
