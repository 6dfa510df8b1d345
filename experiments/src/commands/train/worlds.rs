//! What there is to learn on: traces, and the machines and ranges that episodes are drawn with.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use plimsoll_env::Domain;
use plimsoll_env::config::{FamilyConfig, MachineRange, Split};
use plimsoll_env::predicted::STEPS_MAX;
use plimsoll_runtime::file::sha256_hex;
use plimsoll_runtime::units::Bandwidth;
use plimsoll_runtime::{ActionSet, Lineage, Link, Problem, Trace};

use super::{Arguments, beside};
use crate::loops::RECORDED_ITERATIONS;
use crate::machine::Machine;
use crate::members::{self, Recorded};

/// Of so many given traces, one is for validation.
const TRACES_PER_VALIDATION: usize = 4;
/// The machines with links from so much slower to so much faster than a profile's own.
const LINK_SPREAD: f64 = 2.0;

/// The traces to train on, and those to choose the best update by.
pub struct Material {
    recorded: Recorded,
    /// How many of the traces are to train on. Those after them are for validation.
    trained: usize,
}

impl Material {
    /// Records them now, or loads those that the interrupted call recorded, or those that the flags name.
    pub fn gather(config: &mut FamilyConfig, arguments: &Arguments) -> anyhow::Result<Self> {
        let gathered = match &arguments.traces {
            Some(folder) => Self::given(folder, &arguments.leave_out)?,
            None => Self::drawn(config, arguments)?,
        };
        gathered.without_hopeless(config)
    }

    /// Leaves out what no budget that is drawn suffices for: there is nothing to learn there, and nothing to validate by.
    fn without_hopeless(mut self, config: &FamilyConfig) -> anyhow::Result<Self> {
        let traces = &mut self.recorded.traces;
        let (found, most) = (traces.len(), config.randomisation.budget_share[1]);
        // Where every draw recomputes alone, so must what is drawn from.
        let swap = config.evaluation.actions.swap && config.randomisation.recompute_only < 1.0;
        let actions = ActionSet { swap, ..config.evaluation.actions };
        let validation = found - self.trained;
        traces.retain(|trace| {
            let lineage = Lineage::of(trace);
            let budget_bytes = (most * lineage.keep_all_peak_bytes() as f64) as u64;
            // Any link will do: bytes do not depend on it.
            let tiers = Link::symmetric(1e9, 0).into();
            budget_bytes > 0 && !Problem { trace, lineage: &lineage, tiers, budget_bytes, actions }.is_hopeless()
        });
        if traces.is_empty() {
            bail!(
                "no trace of which more than {:.0} % of the peak can be evicted: nothing to train on",
                100.0 - 100.0 * most
            );
        }
        let left_out = found - traces.len();
        if left_out > 0 {
            eprintln!("plimsoll: {left_out} of {found} members are left out: no budget in the range can hold them");
        }
        self.trained = traces.len() - validation.min(traces.len() - 1);
        Ok(self)
    }

    fn drawn(config: &mut FamilyConfig, arguments: &Arguments) -> anyhow::Result<Self> {
        let drawn = &config.randomisation;
        let (members, validation_members) = (drawn.members, drawn.validation_members);
        let mut names = drawn.workloads.clone();
        names.extend(members::draw(config, Split::Train, members + validation_members, arguments.flags.seed)?);
        if names.len() == validation_members {
            bail!("{}: [randomisation] names no members to train on; --traces names a folder", config.path.display());
        }
        let folder = beside(&arguments.out, "traces");
        let recorded = if arguments.resume {
            members::load_named(&folder, &names)?
        } else {
            members::record(config, &names, &folder, &arguments.flags, RECORDED_ITERATIONS)?
        };
        Ok(Material { recorded, trained: names.len() - validation_members })
    }

    fn given(folder: &Path, left_out: &[String]) -> anyhow::Result<Self> {
        let mut recorded = members::load_all(folder)?;
        for name in left_out {
            let before = recorded.traces.len();
            recorded.traces.retain(|trace| trace.workload != *name);
            if recorded.traces.len() == before {
                bail!("--leave-out {name}: {} holds no trace of a workload of that name", folder.display());
            }
        }
        let found = recorded.traces.len();
        if found == 0 {
            bail!("{}: no trace is left to train on", folder.display());
        }
        Ok(Material { trained: found - found / TRACES_PER_VALIDATION, recorded })
    }

    /// What recorded them.
    pub fn devices(&self) -> Vec<String> {
        let devices: BTreeSet<&String> = self.recorded.traces.iter().map(|trace| &trace.device).collect();
        devices.into_iter().cloned().collect()
    }

    /// The family of all traces.
    pub fn family(&self) -> anyhow::Result<String> {
        let traces = &self.recorded.traces;
        let family = &traces[0].family;
        match traces.iter().find(|trace| trace.family != *family) {
            Some(other) => bail!("{} is of the family {}, not {family} like others", other.workload, other.family),
            None => Ok(family.clone()),
        }
    }
}

/// The machines to train for, each with its range of links: those of the configuration, or the one that the flags name.
pub fn machines(config: &FamilyConfig, arguments: &Arguments) -> anyhow::Result<Vec<(Machine, MachineRange)>> {
    let find = |name: &str| Machine::find(name, Some(&arguments.config));
    let known = &config.randomisation.machines;
    let mut machines = match &arguments.hardware {
        None => {
            known.iter().map(|(name, range)| Ok((find(name)?, range.clone()))).collect::<anyhow::Result<Vec<_>>>()?
        }
        Some(name) => {
            let machine = find(name)?;
            let range = match (known.get(name), &machine) {
                (Some(range), _) => range.clone(),
                (None, Machine::Profiled(profile)) => around(&profile.link, &profile.name)?,
                (None, Machine::AsRecorded) => bail!("--hardware {name}: the configuration has no links for it"),
            };
            vec![(machine, range)]
        }
    };
    if let Some(link) = arguments.link {
        machines.iter_mut().for_each(|(_, range)| range.link = [link; 2]);
    }
    Ok(machines)
}

/// Links around that of a profile, whose copies cost compute nothing to so much more than that profile says.
fn around(link: &Link, name: &str) -> anyhow::Result<MachineRange> {
    let rate = |factor: f64| {
        let rate = Bandwidth::from_bytes_per_second(link.offload_bytes_per_s * factor);
        rate.with_context(|| format!("the link of {name} is out of range"))
    };
    Ok(MachineRange {
        link: [rate(1.0 / LINK_SPREAD)?, rate(LINK_SPREAD)?],
        contention_ns_per_byte: [0.0, LINK_SPREAD * link.contention_ns_per_byte],
        contention_each_ns: [0, (LINK_SPREAD * link.contention_each_ns as f64) as u64],
    })
}

/// What episodes are drawn from: one domain per machine.
pub struct Worlds {
    pub training: Arc<[Domain]>,
    pub validation: Arc<[Domain]>,
}

impl Worlds {
    pub fn of(
        config: &FamilyConfig,
        machines: &[(Machine, MachineRange)],
        material: &Material,
    ) -> anyhow::Result<Self> {
        let Recorded { traces, recorded_on } = &material.recorded;
        let (mut training, mut validation) = (Vec::new(), Vec::new());
        for (machine, range) in machines {
            let projected = traces.iter().map(|trace| Ok(Arc::new(machine.project(trace, recorded_on)?)));
            let mut trained = projected.collect::<anyhow::Result<Vec<_>>>()?;
            if let Some(untimed) = trained.iter().find(|trace| Lineage::of(trace).keep_all_makespan_ns() == 0) {
                bail!(
                    "{}: it takes no time, so no plan for it is better than another: --hardware gives it some",
                    untimed.workload
                );
            }
            let validated = trained.split_off(material.trained);
            // Without traces to validate by, other episodes of the same traces have to do.
            let validated = if validated.is_empty() { trained.clone() } else { validated };
            training.push(domain(config, machine, range, trained));
            validation.push(domain(config, machine, range, validated));
        }
        Ok(Worlds { training: training.into(), validation: validation.into() })
    }

    /// What tells them from others.
    pub fn digest(&self) -> String {
        let of_domain = |domain: &Domain| {
            let traces =
                domain.traces.iter().map(|trace| sha256_hex(&serde_json::to_vec(&**trace).expect("plain data")));
            let traces = traces.collect::<String>();
            format!("{traces}{:?}", Domain { traces: Vec::new(), ..domain.clone() })
        };
        sha256_hex(self.training.iter().chain(&*self.validation).map(of_domain).collect::<String>().as_bytes())
    }
}

fn domain(config: &FamilyConfig, machine: &Machine, range: &MachineRange, traces: Vec<Arc<Trace>>) -> Domain {
    let randomisation = &config.randomisation;
    Domain {
        traces,
        budget_share: randomisation.budget_share,
        link_bytes_per_s: range.link.map(Bandwidth::bytes_per_second),
        cost_noise: randomisation.cost_noise,
        link: machine.link_of(range.link[0].bytes_per_second()),
        contention_ns_per_byte: range.contention_ns_per_byte,
        contention_each_ns: range.contention_each_ns,
        actions: config.evaluation.actions,
        recompute_only: randomisation.recompute_only,
        steps_max: STEPS_MAX,
    }
}
