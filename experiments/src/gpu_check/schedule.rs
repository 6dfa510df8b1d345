//! Which parts are checked on which loops, in which order, and how much of the time each may take.

use plimsoll_runtime::torch::device::DeviceName;

use super::Part;
use super::members::{names, of_any_length, smallest};

/// One part on one loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The part.
    pub part: Part,
    /// The loop.
    pub member: &'static str,
    /// Most of the whole time that it may take.
    pub share_max: f64,
}

/// Of a device's memory, a step takes about so much at most.
const STEP_BYTES: u64 = 12 << 30;
/// So many threads of a step are busy, its device's driver's among them.
const STEP_THREADS: usize = 2;

/// How many steps that nobody times may run beside each other, where there is so much memory for them and so many cores.
pub fn at_once(memory_bytes: u64, cores: usize) -> usize {
    ((memory_bytes / STEP_BYTES) as usize).min(cores / STEP_THREADS).max(1)
}

/// The steps of a check on `device`, most important first; only `parts`, where any are named, which then have the time of the others
/// as well.
///
/// Shares add up to more than one: a step that is done early leaves its time to those after it.
pub fn schedule(device: DeviceName, parts: &[Part]) -> Vec<Step> {
    let step = |part, member, share_max| Step { part, member, share_max };
    let (members, [first, second]) = (names(device), smallest(device));
    let mut steps = vec![
        step(Part::Identity, first, 0.15),
        step(Part::Identity, second, 0.15),
        step(Part::Memory, first, 0.12),
        step(Part::TestJobs, first, 0.4),
        step(Part::Lengths, of_any_length(device), 0.08),
        step(Part::Probe, first, 0.08),
        step(Part::Compare, members[0], 0.2),
        step(Part::Pytorch, members[0], 0.1),
        step(Part::Python, first, 0.15),
        step(Part::Compiled, first, 0.2),
        step(Part::Streams, first, 0.12),
        step(Part::Throughout, first, 0.12),
        step(Part::Foreach, first, 0.12),
        step(Part::Batch, members[0], 0.12),
        step(Part::Compare, members[1], 0.15),
        step(Part::Pytorch, members[1], 0.1),
        step(Part::Python, second, 0.15),
        step(Part::Interceptor, first, 0.08),
    ];
    for member in &members[2..] {
        steps.extend([step(Part::Compare, member, 0.15), step(Part::Pytorch, member, 0.1)]);
    }
    let total = |steps: &[Step]| steps.iter().map(|step| step.share_max).sum::<f64>();
    let whole = total(&steps);
    steps.retain(|step| parts.is_empty() || parts.contains(&step.part));
    let larger = whole / total(&steps);
    steps.iter_mut().for_each(|step| step.share_max = (step.share_max * larger).min(1.0));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_steps_run_beside_each_other_as_there_is_room_for() {
        assert_eq!(at_once(139 << 30, 16), 8);
        assert_eq!(at_once(78 << 30, 16), 6);
        assert_eq!(at_once(24 << 30, 64), 2);
        assert_eq!((at_once(8 << 30, 16), at_once(0, 2), at_once(139 << 30, 1)), (1, 1, 1));
    }

    #[test]
    fn bits_come_first_and_every_loop_is_compared() {
        for device in [DeviceName::Cpu, DeviceName::Cuda(0)] {
            let steps = schedule(device, &[]);
            assert_eq!(steps[0].part, Part::Identity);
            for member in names(device) {
                assert!(steps.iter().any(|step| step.part == Part::Compare && step.member == *member), "{member}");
            }
            let [only] = schedule(device, &[Part::Memory])[..] else { panic!("one loop runs out of memory") };
            assert_eq!((only.part, only.share_max), (Part::Memory, 1.0), "it has all the time");
            assert!(steps.iter().all(|step| step.share_max < 0.5), "each leaves time to others");
        }
    }
}
