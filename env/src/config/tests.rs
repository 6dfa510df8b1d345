//! What a configuration may hold, and what is said about one that may not.

use super::*;

const GPT: &str = include_str!("../../../configs/gpt.toml");
const RESNET: &str = include_str!("../../../configs/resnet.toml");

fn parse(text: &str) -> Result<FamilyConfig, ConfigError> {
    FamilyConfig::parse(Path::new("a.toml"), text)
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
    for (text, family) in [(GPT, Family::Gpt), (RESNET, Family::Resnet)] {
        let config = parse(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.family, family);
        assert_eq!(config.evaluation.actions, ActionSet::ALL);
    }
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
    assert!(refusal("cost_noise = 0.1", "cost_noise = -0.1").contains("randomisation.cost_noise: must be at least 0"));
    assert!(
        refusal("\"100MB/s\", \"4GB/s\"", "\"32GB/s\", \"2GB/s\"").contains("randomisation.link: must be two links")
    );
    assert!(refusal("family = \"gpt\"", "family = \"gtp\"").contains("a.toml:"));
}

#[test]
fn a_missing_file_is_named() {
    let error = FamilyConfig::load("no-such-folder/gpt.toml").unwrap_err().to_string();
    assert!(error.starts_with("no-such-folder/gpt.toml: "), "{error}");
}
