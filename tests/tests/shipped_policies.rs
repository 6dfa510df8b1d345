//! The promise: the policies that are shipped load here and now, say how they were made, and plan what they were made for
//! better than chance does.

use std::path::Path;
use std::sync::Arc;

use plimsoll_env::Instance;
use plimsoll_env::hardware::{HardwareProfile, Roofline};
use plimsoll_runtime::baselines::Random;
use plimsoll_runtime::{ActionSet, Lineage, Link, PolicyFile, Trace, plan};
use plimsoll_tests::{Recorded, one_at_a_time, shipped, shipped_workload};

/// `trace` with the times of a Titan V on which every operator takes as long as its bytes: the same wherever, and beside
/// whatever, it was recorded.
fn timed(trace: &Trace) -> Trace {
    let endless = Roofline { flops_per_s: 0.0, memory_bytes_per_s: 1e18, launch_overhead_ns: 0.0, runs_ahead: false };
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/hardware/titan-v.toml");
    HardwareProfile::load(profile).unwrap().project(trace, &endless)
}

#[test]
fn every_shipped_policy_is_of_its_family_and_better_than_chance_on_a_member_of_it() {
    let _running = one_at_a_time();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/policies");
    let (mut names, mut all_better, mut all_worse) = (Vec::new(), 0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file = PolicyFile::load(&path).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert_eq!(file.family, shipped(&name).family.name());
        let command = format!("plimsoll train --config configs/{name}.toml");
        assert!(file.provenance.command.starts_with(&command), "{}", file.provenance.command);
        assert!(file.provenance.quality.contains_key("held_out.all.planned.over_reference"), "{name} was not judged");

        // Of those that learned on models for a GPU, too, a small member is asked for.
        let workload = &shipped(&file.family).randomisation.workloads[0];
        let recorded = Recorded::of(&shipped_workload(workload), 1);
        let trace = Arc::new(timed(&recorded.trace));
        let lineage = Arc::new(Lineage::of(&trace));
        let (mut better, mut worse) = (0, 0);
        for (swap, ratio) in [true, false].into_iter().flat_map(|swap| [0.9, 0.8, 0.7, 0.6].map(|ratio| (swap, ratio)))
        {
            let instance = Instance {
                trace: trace.clone(),
                lineage: lineage.clone(),
                tiers: Link::symmetric(12e9, 10_000).into(),
                budget_bytes: (ratio * trace.peak_bytes as f64) as u64,
                actions: ActionSet { swap, recompute: true },
            };
            let learned = plan(instance.problem(), &mut file.clone().into_policy());
            for seed in 0..4 {
                let by_chance = plan(instance.problem(), &mut Random::new(seed));
                better += usize::from(learned.is_better_than(&by_chance));
                worse += usize::from(by_chance.is_better_than(&learned));
            }
        }
        println!("{name}: better than chance {better} times, worse {worse} times");
        // How close a few points of one small member come depends on what its operators take on the machine at hand.
        assert!(better > 2 * worse, "{name}: better than chance {better} times, worse {worse} times");
        (all_better, all_worse) = (all_better + better, all_worse + worse);
        names.push(name);
    }
    assert!(all_better > 10 * all_worse, "better than chance {all_better} times, worse {all_worse} times");
    names.sort_unstable();
    assert_eq!(
        names.join(" "),
        "autoencoder bert densenet gpt gpt2 inception lstm mobilenet resnet resnet224 unet vgg vit"
    );
}
