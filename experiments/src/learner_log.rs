//! What TensorBoard is told of a learner.

use plimsoll_agent::{Learner, UpdateReport};
use plimsoll_env::config::FamilyConfig;
use serde_json::Value;

use crate::provenance::command_line;
use crate::tensorboard::{Hyperparameter, RunLog};

/// What the run is about: its hyperparameters and its configuration.
pub fn describe<L: Learner + ?Sized>(log: &mut RunLog, config: &FamilyConfig, learner: &L) -> anyhow::Result<()> {
    let table = learner.hyperparameters();
    let hparams = table.as_object().into_iter().flatten().map(|(key, value)| {
        let value = match value {
            Value::Bool(flag) => Hyperparameter::Flag(*flag),
            Value::Number(number) => Hyperparameter::Number(number.as_f64().unwrap_or(f64::NAN)),
            other => Hyperparameter::Text(other.to_string()),
        };
        (key.as_str(), value)
    });
    log.hparams(hparams)?;
    log.text("configuration", 0, &format!("```toml\n{}\n```", config.text))?;
    log.text("command", 0, &command_line())?;
    Ok(())
}

/// What is logged of every update, by name.
pub fn scalars(report: &UpdateReport) -> impl Iterator<Item = (&'static str, f64)> + '_ {
    let common = [
        ("return_mean", report.return_mean),
        ("return_max", report.return_max),
        ("episode_length", report.episode_length_mean()),
        ("transitions_per_second", report.transitions_per_second()),
    ];
    common.into_iter().chain(report.details.iter().copied())
}
