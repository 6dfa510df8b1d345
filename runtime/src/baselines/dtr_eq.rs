use super::dtr::{own_ns, per_byte_and_time};
use super::lowest;
use crate::lineage::{Lineage, VersionId, WindowId};
use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// DTR's score with ẽ* for a neighbourhood: classes of evicted storages that touch, whichever way they depend on each
/// other (Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR 2021, h_DTR-eq).
///
/// Deviations: those of `dtr`, but for the generations; and classes are those of the storages that are evicted at the
/// pressure point, where the paper never splits one and subtracts what was rebuilt, and has what died in them, too.
#[derive(Default)]
pub struct DtrEq {
    known: Option<Known>,
}

impl Policy for DtrEq {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        self.known = Some(Known::of(problem));
        Plan::keep_all(problem.lineage.windows().len())
    }

    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let known = self.known.as_mut().expect("a policy is opened before it chooses");
        known.classify(pressure.operator as u32);
        let choice = lowest(pressure, Action::Recompute, |candidate| {
            per_byte_and_time(own_ns(candidate) + known.touching_ns(candidate.window), candidate)
        })
        .or_else(|| lowest(pressure, Action::Swap, |candidate| per_byte_and_time(candidate.transfer_ns, candidate)))?;
        if choice.action == Action::Recompute {
            known.dropped.push(pressure.candidates[choice.candidate].window);
        }
        Some(choice)
    }
}

const NO_CLASS: u32 = u32::MAX;

/// What the rule has to know of the iteration, and of its own choices.
struct Known {
    lineage: Lineage,
    /// Windows that were chosen to be dropped.
    dropped: Vec<WindowId>,
    /// Per version: a version of the same class, or itself; none while it is not evicted.
    class: Vec<u32>,
    /// Per version that stands for its class.
    class_ns: Vec<u64>,
    /// Classes counted already for the candidate at hand.
    counted: Vec<u32>,
}

impl Known {
    fn of(problem: &Problem<'_>) -> Self {
        let versions = problem.lineage.versions().len();
        Known {
            lineage: problem.lineage.clone(),
            dropped: Vec::with_capacity(problem.lineage.windows().len()),
            class: vec![NO_CLASS; versions],
            class_ns: vec![0; versions],
            counted: Vec::with_capacity(versions),
        }
    }

    /// Finds the classes of what is dropped at operator index `now`.
    fn classify(&mut self, now: u32) {
        self.class.fill(NO_CLASS);
        for position in 0..self.dropped.len() {
            let window = *self.lineage.window(self.dropped[position]);
            if window.start <= now && now < window.end {
                let version = window.version;
                self.class[version.index()] = version.0;
                let producer = self.lineage.version(version).producer.expect("what is dropped can be rebuilt");
                self.class_ns[version.index()] = self.lineage.cost_ns(producer);
                self.join_neighbours(version);
            }
        }
    }

    fn join_neighbours(&mut self, version: VersionId) {
        let Known { lineage, class, class_ns, .. } = self;
        for_neighbours(lineage, version, |neighbour| {
            if class[neighbour.index()] != NO_CLASS {
                let (own, other) = (find(class, version), find(class, neighbour));
                if own != other {
                    class[other as usize] = own;
                    class_ns[own as usize] += class_ns[other as usize];
                }
            }
        });
    }

    /// Cost of all classes that the version in `window` touches.
    fn touching_ns(&mut self, window: WindowId) -> u64 {
        let Known { lineage, class, class_ns, counted, .. } = self;
        counted.clear();
        let mut sum_ns = 0;
        for_neighbours(lineage, lineage.window(window).version, |neighbour| {
            if class[neighbour.index()] != NO_CLASS {
                let found = find(class, neighbour);
                if !counted.contains(&found) {
                    counted.push(found);
                    sum_ns += class_ns[found as usize];
                }
            }
        });
        sum_ns
    }
}

fn find(class: &mut [u32], version: VersionId) -> u32 {
    let mut found = version.0;
    while class[found as usize] != found {
        let above = class[found as usize];
        class[found as usize] = class[above as usize];
        found = above;
    }
    found
}

/// The versions that a rerun would make `version` from, and those that one would make from it.
fn for_neighbours(lineage: &Lineage, version: VersionId, mut visit: impl FnMut(VersionId)) {
    if let Some(producer) = lineage.version(version).producer {
        lineage.replay_inputs(producer).iter().for_each(|&input| visit(input));
    }
    for &consumer in lineage.consumers(version) {
        lineage.replay_outputs(consumer).iter().for_each(|&output| visit(output));
    }
}
