//! What the device does at best, and how fast copies are: the hardware profile, beside the findings.

use anyhow::Context;
use plimsoll_runtime::file::write_whole;

use super::{Findings, Request};
use crate::probed::Probed;

/// The name of the profile, until somebody gives it another.
const NAME: &str = "measured";

/// Runs the part.
pub fn run(request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let probed = Probed::of(request.device, NAME)?;
    findings.set("machine", &probed.machine)?;
    findings.set("copies", &probed.copies)?;
    findings.set("profile", &probed.profile)?;
    let path = request.out.join(format!("{NAME}.toml"));
    write_whole(&path, probed.to_toml().as_bytes()).context("the profile")
}
