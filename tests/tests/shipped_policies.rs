//! The promise: the policies that are shipped load here and now, say how they were made, and plan what they were made for
//! better than chance does.

use std::path::Path;

use plimsoll_env::Instance;
use plimsoll_runtime::baselines::Random;
use plimsoll_runtime::{ActionSet, PolicyFile, plan};
use plimsoll_tests::{Recorded, one_at_a_time, shipped, shipped_workload};

#[test]
fn every_shipped_policy_is_of_its_family_and_better_than_chance_on_a_member_of_it() {
    let _running = one_at_a_time();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/policies");
    let mut families = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file = PolicyFile::load(&path).unwrap();
        let family = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert_eq!(file.family, family);
        let command = format!("plimsoll train --config configs/{family}.toml");
        assert!(file.provenance.command.starts_with(&command), "{}", file.provenance.command);
        assert!(file.provenance.quality.contains_key("held_out.all.planned.over_reference"), "{family} was not judged");

        let workload = &shipped(&family).randomisation.workloads[0];
        let recorded = Recorded::of(&shipped_workload(workload), 1);
        // The link of these tests is too fast for a choice to matter.
        let instance = Instance { actions: ActionSet { swap: false, recompute: true }, ..recorded.instance(0.7) };
        let learned = plan(instance.problem(), &mut file.into_policy());
        let by_chance = plan(instance.problem(), &mut Random::new(1));
        assert!(learned.fits(), "{family}: the budget is not held");
        assert!(learned.is_better_than(&by_chance), "{family}: {learned:?}, by chance {by_chance:?}");
        families.push(family);
    }
    assert!(families.contains(&"gpt".to_owned()) && families.contains(&"resnet".to_owned()), "{families:?}");
}
