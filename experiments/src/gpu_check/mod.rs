//! Proves on a device, in one command, what has not been measured there: bits, budgets, time, memory that runs out.
//!
//! A check is a list of parts by importance. Each part of each loop runs in a process of its own, because a device's
//! errors are final for the process that meets them; it writes what it has found after every step, so what was cut short
//! still counts. Which parts there are and how long each may take is `schedule.rs`; what they measure is a file each, but for
//! jobs in Python, which share `jobs.rs`.

mod batch;
mod bench;
mod compare;
mod identity;
mod interceptor;
mod jobs;
mod lengths;
mod members;
mod memory;
mod overlap;
mod probe;
mod pytorch;
mod schedule;
mod script;
mod test_jobs;

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use clap::ValueEnum;
use plimsoll_env::recording::record;
use plimsoll_env::workload::{Manner, Workload, WorkloadConfig};
use plimsoll_runtime::torch::device::DeviceName;
use plimsoll_runtime::torch::settings::Determinism;
use plimsoll_runtime::torch::{Budget, Runtime};
use plimsoll_runtime::{Link, Trace};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use tch::Device;

use jobs::Kind;
pub use members::{Member, member};
pub use schedule::{Step, at_once, schedule};

use crate::chosen::Chosen;
use crate::loops::OpenDevice;
use crate::outputs::write_json;

/// What is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Losses and parameters are those of the untouched loop, bit for bit, and budgets are held
    Identity,
    /// A loop that runs out of memory finishes under a budget
    Memory,
    /// Batches of any length within a budget: bits, peak and time, beside the loop left alone
    Lengths,
    /// The hardware profile: the link by copy size, alone and beside compute, and the roofline
    Probe,
    /// Makespan and peak of every policy at every budget
    Compare,
    /// What plain PyTorch takes, with recompute and with offloading of its own, and a plan within the peak of the former
    Pytorch,
    /// A PyTorch job in Python within a budget: bits, peak and time, beside itself left alone
    Python,
    /// Bits and peak of one whose blocks `torch.compile` has compiled
    Compiled,
    /// Bits and peak of one that works in two streams beside each other
    Streams,
    /// Bits and peak of one whose parameters, gradients and optimizer's state exceed the budget
    Throughout,
    /// The same where its optimizer is several operators on lists, as is PyTorch's default
    Foreach,
    /// Small PyTorch jobs that do what is out of the ordinary: bits and peak within a budget, beside themselves left alone
    TestJobs,
    /// The largest batch that trains within the same memory, left alone and under a budget
    Batch,
    /// What the interceptor costs
    Interceptor,
}

impl Part {
    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_owned()
    }

    /// Whether what it takes is measured, so that nothing may run beside it. What the others say of time says little.
    pub fn is_timed(self) -> bool {
        match self {
            Part::Lengths | Part::Probe | Part::Compare | Part::Pytorch | Part::Python => true,
            Part::Batch | Part::Interceptor => true,
            Part::Identity | Part::Memory | Part::Compiled | Part::Streams => false,
            Part::Throughout | Part::Foreach | Part::TestJobs => false,
        }
    }

    /// Runs this part of the check on a member and writes to `findings`.
    pub fn run(self, request: &Request, member: &Member, findings: &mut Findings) -> anyhow::Result<()> {
        let on =
            |determinism, findings: &mut Findings, part: &dyn Fn(&Bed<'_>, &mut Findings) -> anyhow::Result<()>| {
                let bed = Bed::open(request, member, determinism)?;
                part(&bed, findings)?;
                // Before the device goes: to give page-locked memory back may take longer than there is left.
                findings.set(COMPLETE, true)
            };
        let fast = Determinism::NotAsked;
        match self {
            Part::Identity => on(member.config.determinism(), findings, &identity::run),
            Part::Memory => on(member.config.determinism(), findings, &memory::run),
            Part::Lengths => {
                on(member.config.determinism(), findings, &|bed, findings| lengths::run(bed, request, findings))
            }
            Part::Probe => probe::run(request, findings),
            Part::Compare => on(fast, findings, &|bed, findings| compare::run(bed, request, findings)),
            Part::Pytorch => match pytorch::run(request, member, findings)? {
                Some(checkpoint) => on(fast, findings, &|bed, findings| checkpoint.beside(bed, request, findings)),
                None => Ok(()),
            },
            Part::Python => jobs::run(request, member, Kind::Plain, findings),
            Part::Compiled => jobs::run(request, member, Kind::Compiled, findings),
            Part::Streams => jobs::run(request, member, Kind::Streams, findings),
            Part::Throughout => jobs::run(request, member, Kind::Throughout, findings),
            Part::Foreach => jobs::run(request, member, Kind::Foreach, findings),
            Part::TestJobs => test_jobs::run(request, findings),
            Part::Batch => on(fast, findings, &|bed, findings| batch::run(bed, request, findings)),
            Part::Interceptor => on(fast, findings, &interceptor::run),
        }
    }
}

/// What a part is asked to do.
pub struct Request {
    /// Where.
    pub device: DeviceName,
    /// Where its files go.
    pub out: PathBuf,
    /// When it is to stop.
    pub deadline: Deadline,
    /// The Python that has PyTorch.
    pub python: String,
    /// The folder that holds the Python package, if any.
    pub package: Option<PathBuf>,
    /// Learned policies; those of a loop's family are compared with baselines on it.
    pub policies: Vec<PathBuf>,
}

impl Request {
    /// The learned policies of a family.
    fn learned(&self, family: &str) -> anyhow::Result<Vec<Chosen>> {
        let learned = self.policies.iter().map(|path| Chosen::parse(&path.to_string_lossy()));
        let mut policies = learned.collect::<anyhow::Result<Vec<_>>>()?;
        policies.retain(|policy| matches!(policy, Chosen::Learned { file, .. } if file.family == family));
        Ok(policies)
    }
}

/// When to begin nothing more.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(pub SystemTime);

impl Deadline {
    /// So far away.
    pub fn after(time: Duration) -> Self {
        Deadline(SystemTime::now() + time)
    }

    /// At so many seconds of Unix time.
    pub fn at_unix_s(seconds: u64) -> Self {
        Deadline(UNIX_EPOCH + Duration::from_secs(seconds))
    }

    /// In seconds of Unix time.
    pub fn unix_s(self) -> u64 {
        self.0.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// What is left.
    pub fn left(self) -> Duration {
        self.0.duration_since(SystemTime::now()).unwrap_or_default()
    }

    /// Whether nothing is left.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }
}

/// What a part has found so far: a JSON object that is on disk after every addition.
pub struct Findings {
    path: PathBuf,
    found: Map<String, Value>,
}

impl Findings {
    /// Nothing yet.
    pub fn at(path: PathBuf) -> Self {
        Findings { path, found: Map::new() }
    }

    /// Adds or replaces one finding.
    pub fn set(&mut self, key: &str, value: impl Serialize) -> anyhow::Result<()> {
        self.found.insert(key.to_owned(), serde_json::to_value(value)?);
        self.write()
    }

    /// Adds what is not as it should be, of which the first line tells enough: the step has failed.
    pub fn fail(&mut self, what: String) -> anyhow::Result<()> {
        self.push(FAILURES, what.lines().next())
    }

    /// Says why the part says nothing here.
    pub fn not_run(&mut self, why: impl Into<String>) -> anyhow::Result<()> {
        self.set(NOT_RUN, why.into())
    }

    /// Says that time was over before all was done.
    pub fn cut_short(&mut self) -> anyhow::Result<()> {
        self.set(CUT_SHORT, true)
    }

    /// Whether there is a finding of that name.
    fn has(&self, key: &str) -> bool {
        self.found.contains_key(key)
    }

    /// Adds to a list of findings.
    pub fn push(&mut self, key: &str, value: impl Serialize) -> anyhow::Result<()> {
        let list = self.found.entry(key).or_insert_with(|| Value::Array(Vec::new()));
        list.as_array_mut().context("a list of findings")?.push(serde_json::to_value(value)?);
        self.write()
    }

    fn write(&self) -> anyhow::Result<()> {
        write_json(&self.path, &self.found)
    }

    /// What is on disk at `path`; an empty object where nothing is.
    pub fn read(path: &Path) -> Value {
        let text = std::fs::read(path).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_else(|_| Value::Object(Map::new()))
    }
}

/// What a step came to.
pub enum Outcome {
    /// All is as it should be.
    Done,
    /// What was done is as it should be; what was not.
    InPart(String),
    /// Why it says nothing here.
    NotRun(String),
    /// What is not as it should be, or why it was not done.
    Failed(String),
}

impl Outcome {
    /// Of a step that did not end well, by what it found or else by how it ended: the device may fail while it is given back, or take
    /// longer for that than there is time.
    pub fn of_broken(found: &Value, how: String) -> Self {
        if found[COMPLETE] == true { Outcome::of(found) } else { Outcome::Failed(how) }
    }

    fn without_failures(found: &Value) -> Self {
        let is_over = (found[CUT_SHORT] == true).then(|| "its time was over".to_owned());
        let left_out = found[LEFT_OUT].as_array();
        let left_out = left_out.map(|all| format!("{} do not run here when they are left alone", all.len()));
        let missing: Vec<String> = is_over.into_iter().chain(left_out).collect();
        if missing.is_empty() { Outcome::Done } else { Outcome::InPart(missing.join(", and ")) }
    }

    /// Of a step that ended well, by what it found.
    pub fn of(found: &Value) -> Self {
        if let Some(why) = found[NOT_RUN].as_str() {
            return Outcome::NotRun(why.to_owned());
        }
        let failures: Vec<&str> = found[FAILURES].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        match failures[..] {
            [] => Outcome::without_failures(found),
            [only] => Outcome::Failed(only.to_owned()),
            [first, ref others @ ..] => Outcome::Failed(format!("{first}, and {} more", others.len())),
        }
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::InPart(but) => write!(f, "done in part: {but}"),
            Outcome::NotRun(why) => write!(f, "not run: {why}"),
            Outcome::Failed(what) => write!(f, "failed: {what}"),
        }
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The last line that tells most, or else the last that says anything.
pub fn telling_line(text: &str, tells_most: impl Fn(&str) -> bool) -> Option<&str> {
    let mut said = text.lines().rev().filter(|line| !line.trim().is_empty());
    said.clone().find(|line| tells_most(line)).or_else(|| said.next())
}

/// Where a step's findings say that all has been found.
const COMPLETE: &str = "complete";
/// Where they say what is not as it should be.
const FAILURES: &str = "failures";
/// Where they say that time was over before all was done.
const CUT_SHORT: &str = "cut_short";
/// Where they say what does not run here at all, and why.
const LEFT_OUT: &str = "left_out";
/// Where they say why it says nothing.
const NOT_RUN: &str = "not_run";

/// What loops are run on.
struct Bed<'a> {
    member: &'a Member,
    name: DeviceName,
    on: OpenDevice,
}

impl<'a> Bed<'a> {
    fn open(request: &Request, member: &'a Member, determinism: Determinism) -> anyhow::Result<Self> {
        let on = OpenDevice::open(request.device)?;
        on.ask_for(determinism);
        Ok(Bed { member, name: request.device, on })
    }

    fn is_cpu(&self) -> bool {
        self.on.device == Device::Cpu
    }

    /// A fresh loop: always the same one.
    fn workload(&self) -> anyhow::Result<Box<dyn Workload>> {
        self.workload_as(&self.member.config, self.member.manner)
    }

    /// The same with that configuration, in that manner.
    fn workload_as(&self, config: &WorkloadConfig, manner: Manner) -> anyhow::Result<Box<dyn Workload>> {
        let name = &self.member.name;
        // tch's layers panic where the device has no room for their parameters.
        let built = std::panic::catch_unwind(|| config.build_as(name, self.on.device, SEED, manner));
        built.map_err(|_| anyhow!("{name}: its parameters could not be made"))?.with_context(|| name.to_string())
    }

    /// So many iterations as a trace, and their losses.
    fn record(&self, workload: &mut dyn Workload, iterations: usize) -> anyhow::Result<(Trace, Vec<f64>)> {
        Ok(record(self.on.session, workload, iterations, &self.name.product())?)
    }

    /// What an iteration comes to, and what it takes until the device has done all of it.
    fn timed<R>(&self, iteration: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<(R, Duration)> {
        let (result, time) = self.on.timed(iteration);
        Ok((result?, time))
    }

    /// What keeps a loop within a budget from its first iteration on.
    fn runtime(&self, budget_bytes: u64, link: Link) -> anyhow::Result<Runtime> {
        let OpenDevice { device, engines, .. } = &self.on;
        let builder = Runtime::builder().budget(Budget::bytes(budget_bytes));
        Ok(builder.device(*device).engine(engines.engine(None)?).link(link).build()?)
    }

    /// Leaves the caching allocator so many bytes of a device's memory.
    fn limit_memory(&self, bytes: u64) -> anyhow::Result<()> {
        let device = self.name.cuda_device().with_context(|| format!("{} has no memory of its own", self.name))?;
        let total_bytes = device.total_memory_bytes;
        Ok(self.on.session.set_device_share(bytes as f64 / total_bytes as f64)?)
    }
}

/// Of the memory that a loop is left, its budget takes so much: blocks are a little larger than what was asked for, and lie
/// in pieces.
const BUDGET_SHARE: f64 = 0.9;
/// Seed of every loop.
const SEED: u64 = 1;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_step_is_done_only_where_all_is_as_it_should_be() {
        let told = |found: Value| Outcome::of(&found).to_string();
        assert_eq!(told(json!({ "verdicts": [] })), "done");
        assert_eq!(told(json!({ "cut_short": true })), "done in part: its time was over");
        let left_out = "done in part: its time was over, and 2 do not run here when they are left alone";
        assert_eq!(told(json!({ "cut_short": true, "left_out": ["a", "b"] })), left_out);
        assert_eq!(told(json!({ "cut_short": true, "failures": ["a"] })), "failed: a");
        assert_eq!(told(json!({ "not_run": "no torch" })), "not run: no torch");
        assert_eq!(told(json!({ "failures": ["swap: other bits"] })), "failed: swap: other bits");
        assert_eq!(told(json!({ "failures": ["a", "b", "c"] })), "failed: a, and 2 more");
        let broken = |found: Value| Outcome::of_broken(&found, "signal: 6".to_owned()).to_string();
        assert_eq!(broken(json!({ "verdicts": [] })), "failed: signal: 6");
        assert_eq!(broken(json!({ "complete": true })), "done");
        assert_eq!(broken(json!({ "complete": true, "failures": ["a"] })), "failed: a");
    }
}
