//! What a configuration may hold, and what is said about one that may not.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::*;
use crate::workload::GptConfig;

const GPT: &str = include_str!("../../../configs/gpt.toml");

fn parse(text: &str) -> Result<FamilyConfig, ConfigError> {
    FamilyConfig::parse(Path::new("a.toml"), text)
}

/// The shipped configurations of families that have loops.
fn shipped() -> Vec<FamilyConfig> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs")).unwrap();
    let paths = folder.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let configs = paths.map(|path| FamilyConfig::load(path).unwrap_or_else(|error| panic!("{error}")));
    configs.filter(|config| config.family.has_loops()).collect()
}

/// What is said when `good` in the shipped gpt configuration becomes `bad`.
fn refusal(good: &str, bad: &str) -> String {
    assert!(GPT.contains(good), "{good}");
    parse(&GPT.replacen(good, bad, 1)).unwrap_err().to_string()
}

/// The line, from one, on which `needle` first stands.
fn line(needle: &str) -> usize {
    GPT.lines().position(|line| line.contains(needle)).unwrap() + 1
}

#[test]
fn shipped_configurations_are_valid() {
    let configs = shipped();
    for &family in Family::ALL {
        let of_family = |config: &&FamilyConfig| config.name() == family.name();
        assert_eq!(configs.iter().find(of_family).unwrap().family, FamilyName::Loops(family));
    }
    for config in configs {
        assert_eq!(config.evaluation.actions, ActionSet::ALL);
        for (name, workload) in &config.workloads {
            assert_eq!(workload.family().name(), config.family.name(), "{name}");
        }
    }
}

#[test]
fn the_shortest_passage_is_no_longer_than_the_longest() {
    let refused = refusal("shortest = 32", "shortest = 129");
    assert!(refused.contains("shortest: must be between 1 and `sequence`, which is 128, is 129"), "{refused}");
    assert!(refusal("shortest = 32", "shortest = 0").contains("shortest: must be"));
}

#[test]
fn loops_run_in_the_manner_of_their_configuration() {
    assert_eq!(parse(GPT).unwrap().manner, Manner::default());
    let mixed = parse(&format!("{GPT}\n[manner]\nbf16 = true\npasses = 4\n")).unwrap();
    assert_eq!(mixed.manner, Manner { bf16: true, one_batch: false, passes: NonZeroU32::new(4).unwrap() });
    assert!(parse(&format!("{GPT}\n[manner]\npasses = 0\n")).is_err());
    let unknown = parse(&format!("{GPT}\n[manner]\nbf61 = true\n")).unwrap_err().to_string();
    assert!(unknown.contains("manner.bf61: unknown key `bf61`, did you mean `bf16`?"), "{unknown}");
}

#[test]
fn traces_that_are_given_have_no_loops() {
    let text = include_str!("../../../configs/traces.toml");
    let config = parse(text).unwrap();
    assert_eq!((config.family, config.workloads.len()), (FamilyName::Traces, 0));
    assert!(config.members(Split::Train, 1, 0).is_err());
    let looped = parse(&format!("{text}\n[workloads.a]\nlayers = 1\n")).unwrap_err().to_string();
    assert!(looped.contains("workloads.a"), "{looped}");
}

#[test]
fn drawn_members_are_valid_small_and_different() {
    for config in shipped() {
        let flops_max = config.members.as_ref().unwrap().flops_max;
        let [trained, held_out] = [Split::Train, Split::HeldOut].map(|split| config.members(split, 8, 1).unwrap());
        let mut names = BTreeSet::new();
        for (name, member) in trained.iter().chain(&held_out) {
            assert_eq!(member.family().name(), config.family.name(), "{name}");
            assert_eq!(member.validate(), Ok(()), "{name}");
            assert!((1e6..=flops_max).contains(&member.flops()), "{name} takes {} flops", member.flops());
            assert!(names.insert(name), "{name} was drawn twice");
        }
        assert_eq!(config.members(Split::Train, 8, 1).unwrap(), trained, "the same seed gives the same members");
        assert_ne!(config.members(Split::Train, 8, 2).unwrap(), trained, "another seed gives others");
    }
}

#[test]
fn drawn_members_say_their_structure_and_are_split_by_it() {
    let config = parse(GPT).unwrap();
    for split in [Split::Train, Split::HeldOut] {
        for (name, member) in config.members(split, 20, 3).unwrap() {
            let WorkloadConfig::Gpt(GptConfig { layers, width, heads, sequence, batch, .. }) = member else {
                panic!("{name} is no gpt")
            };
            assert_eq!(name, format!("gpt-d{layers}-w{width}-h{heads}-s{sequence}-b{batch}"));
            let trained = split == Split::Train;
            assert_eq!((2..=6).contains(&layers), trained, "{name}");
            assert_eq!([64, 128, 192].contains(&width), trained, "{name}");
            assert_eq!([64, 96, 128].contains(&sequence), trained, "{name}");
            assert_eq!((4..=12).contains(&batch), trained, "{name}");
        }
    }
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    let meets = refusal("layers = { uniform = [7, 10] }", "layers = { uniform = [6, 10] }");
    assert!(meets.contains("members.held_out.layers: must hold no value that members.train holds"), "{meets}");
    let line = GPT.lines().position(|line| line.starts_with("layers = { uniform = [7")).unwrap() + 1;
    assert!(meets.starts_with(&format!("a.toml:{line}: ")), "{meets}");
    let unknown = refusal("layers = { uniform = [2, 6] }", "layers = 4\nlayres = 4");
    assert!(unknown.contains("members.train.layres: unknown key `layres`, did you mean `layers`?"), "{unknown}");
    let invalid = refusal("heads = { choice = [2, 4] }", "heads = 5");
    assert!(
        invalid.contains("members.train: must hold 1 members, holds 0; others were refused, for heads"),
        "{invalid}"
    );
    let costly = refusal("flops_max = 2e10", "flops_max = 1e3");
    assert!(costly.contains("holds 0; others were refused, for gpt-d"), "{costly}");
    let range = refusal("layers = { uniform = [2, 6] }", "layers = { unifrom = [2, 6] }");
    assert!(range.contains("members.train.layers: expected a value, ") && range.contains("found `unifrom`"), "{range}");
}

#[test]
fn more_members_than_ranges_hold_are_refused() {
    let config = parse(&GPT.replacen("layers = { uniform = [7, 10] }", "layers = 7", 1)).unwrap();
    let error = config.members(Split::HeldOut, 50, 0).unwrap_err().to_string();
    assert!(error.contains("members.held_out: must hold 50 members, holds "), "{error}");
}

#[test]
fn no_member_is_drawn_that_has_the_structure_of_one_that_is_trained_on_by_its_name() {
    let ranges = "layers = { uniform = [2, 6] }
width = { choice = [64, 128, 192] }
heads = { choice = [2, 4] }
sequence = { choice = [64, 96, 128] }
batch = { uniform = [4, 12] }";
    assert!(GPT.contains(ranges));
    // gpt-small has eight.
    let few =
        GPT.replacen(ranges, "layers = 4\nwidth = 128\nheads = 4\nsequence = 128\nbatch = { choice = [8, 9] }", 1);
    let config = parse(&few).unwrap();
    for seed in 0..10 {
        let drawn = config.members(Split::Train, 1, seed).unwrap();
        assert_eq!(drawn[0].0, "gpt-d4-w128-h4-s128-b9");
    }
    assert!(config.members(Split::Train, 2, 0).is_err());
    let others =
        parse(&few.replacen(r#"workloads = ["gpt-tiny", "gpt-small", "gpt-wide"]"#, "workloads = []", 1)).unwrap();
    assert_eq!(others.members(Split::Train, 2, 0).unwrap().len(), 2);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_valid_one() {
    let at = line("[workloads.gpt-tiny]") + 1;
    assert_eq!(
        refusal("layers = ", "layres = "),
        format!("a.toml:{at}: workloads.gpt-tiny.layres: unknown key `layres`, did you mean `layers`?")
    );
    let at = line("[evaluation]");
    assert_eq!(
        refusal("[evaluation]", "[evalution]"),
        format!("a.toml:{at}: evalution: unknown key `evalution`, did you mean `evaluation`?")
    );
}

#[test]
fn a_wrong_unit_is_refused_with_its_key() {
    let budgets = refusal("budgets = [\"60%\"", "budgets = [\"80 parsecs\"");
    assert!(budgets.starts_with(&format!("a.toml:{}: evaluation.budgets: expected a budget", line("budgets ="))));
    assert!(budgets.contains("found `80 parsecs`"), "{budgets}");
    let link = refusal("link = \"500MB/s\"", "link = \"8GB\"");
    assert!(link.contains("evaluation.link: expected a link speed") && link.contains("found `8GB`"), "{link}");
    let noise = refusal("cost_noise = 0.1", "cost_noise = \"10%\"");
    assert!(noise.contains("randomisation.cost_noise: invalid type"), "{noise}");
}

#[test]
fn a_missing_key_is_named_with_its_table() {
    let at = line("[workloads.gpt-tiny]");
    assert_eq!(refusal("layers = ", "# layers = "), format!("a.toml:{at}: workloads.gpt-tiny: missing key `layers`"));
}

#[test]
fn an_unknown_workload_is_named_with_the_nearest() {
    let at = GPT.lines().position(|line| line.starts_with("workloads = ")).unwrap() + 1;
    assert_eq!(
        refusal("workloads = [\"gpt-tiny\"", "workloads = [\"gpt-tyni\""),
        format!("a.toml:{at}: randomisation.workloads: no workload `gpt-tyni`, did you mean `gpt-tiny`?")
    );
    let error = parse(GPT).unwrap().workload("gpt-smal").unwrap_err();
    assert_eq!(error.to_string(), "a.toml: no workload `gpt-smal`, did you mean `gpt-small`?");
}

#[test]
fn values_that_make_no_sense_are_refused() {
    assert!(refusal("heads = 2", "heads = 5").contains("workloads.gpt-tiny.heads: must divide the width"));
    assert!(
        refusal("cost_noise = 0.1", "cost_noise = -0.1").contains("randomisation.cost_noise: must be between 0 and 2")
    );
    assert!(
        refusal("\"100MB/s\", \"4GB/s\"", "\"32GB/s\", \"2GB/s\"")
            .contains("randomisation.machines.as-recorded.link: must be two links")
    );
    let each = "contention_ns_per_byte = [0.0, 0.4]\ncontention_each_ns = [20, 10]";
    assert!(
        refusal("contention_ns_per_byte = [0.0, 0.4]", each)
            .contains("randomisation.machines.as-recorded.contention_each_ns: must be two times")
    );
    assert!(refusal("family = \"gpt\"", "family = \"gtp\"").contains("a.toml:"));
}

#[test]
fn a_missing_file_is_named() {
    let error = FamilyConfig::load("no-such-folder/gpt.toml").unwrap_err().to_string();
    assert!(error.starts_with("no-such-folder/gpt.toml: "), "{error}");
}
