//! The learned policy: the network's scores, made a choice.

use crate::network::Network;
use crate::observation::{FEATURES, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};
use crate::random::SplitMix64;

/// How scores become a choice.
#[derive(Clone, Debug)]
enum Decode {
    /// The highest logit of all legal evictions; the first of equals.
    Greedy,
    /// A draw from the softmax over the logits of all legal evictions, at temperature 1.
    Sampled(SplitMix64),
}

impl Decode {
    /// The highest score wins.
    fn score(&mut self, logit: f32) -> f32 {
        match self {
            Decode::Greedy => logit,
            Decode::Sampled(random) => logit + random.gumbel(),
        }
    }
}

/// A policy that was trained on a model family.
///
/// Every candidate is scored by itself, so the order and number of candidates do not matter to a score.
#[derive(Clone, Debug)]
pub struct LearnedPolicy {
    network: Network,
    decode: Decode,
}

impl LearnedPolicy {
    /// The policy that always takes what it scores highest.
    pub fn greedy(network: Network) -> Self {
        LearnedPolicy { network, decode: Decode::Greedy }
    }

    /// The policy that draws from its distribution: for several decodes of one problem, of which a
    /// verification keeps the best. The same seed makes the same draws.
    pub fn sampled(network: Network, seed: u64) -> Self {
        LearnedPolicy { network, decode: Decode::Sampled(SplitMix64::new(seed)) }
    }

    /// The same policy, sampling.
    pub(crate) fn with_seed(&self, seed: u64) -> Self {
        LearnedPolicy::sampled(self.network.clone(), seed)
    }
}

impl Policy for LearnedPolicy {
    fn reads_features(&self) -> bool {
        true
    }

    fn weighs_waiting(&self) -> bool {
        true
    }

    /// It has learned on iterations that are known to their end.
    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let mut best: Option<(f32, Choice)> = None;
        let LearnedPolicy { network, decode } = self;
        let features = &pressure.features[..pressure.candidates.len() * FEATURES];
        network.for_each_logits(features, |candidate, logits| {
            let facts = &pressure.candidates[candidate];
            for (action, logit) in Action::EVICTIONS.into_iter().zip(logits) {
                if !facts.allows(action) {
                    continue;
                }
                let score = decode.score(logit);
                if best.is_none_or(|(highest, _)| score > highest) {
                    best = Some((score, Choice { candidate, action }));
                }
            }
        });
        if let Some(waiting) = pressure.waiting() {
            let [logit, _] = network.logits(pressure.row(waiting.candidate));
            let score = decode.score(logit);
            if best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, waiting));
            }
        }
        best.map(|(_, choice)| choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::WindowId;
    use crate::network::tests::drawn;
    use crate::observation::{Candidate, Wait};

    fn candidate(can_swap: bool, can_recompute: bool) -> Candidate {
        Candidate {
            window: WindowId(0),
            bytes: 1,
            staleness_ns: 1,
            gap_ns: 1,
            to_use_ns: 1,
            transfer_ns: 1,
            swap_exposed_ns: 0,
            contention_ns: 0,
            own_recompute_ns: 1,
            recompute_ns: 1,
            dropped_children_bytes: 0,
            dropped_children_ns: 0,
            used_again: true,
            can_swap,
            can_recompute,
        }
    }

    fn pressure<'a>(candidates: &'a [Candidate], features: &'a [f32]) -> Pressure<'a> {
        Pressure { operator: 0, deficit_bytes: 1, wait: None, candidates, features }
    }

    fn drawn_features(candidates: usize) -> Vec<f32> {
        drawn_features_of(11, candidates)
    }

    fn drawn_features_of(seed: u64, candidates: usize) -> Vec<f32> {
        let mut random = SplitMix64::new(seed);
        (0..candidates * FEATURES).map(|_| random.unit() * 4.0 - 2.0).collect()
    }

    #[test]
    fn greedy_takes_the_highest_legal_logit() {
        let weights = drawn(4, 16, 16);
        let candidates: Vec<_> = (0..40).map(|i| candidate(i % 3 != 0, i % 2 == 0)).collect();
        let features = drawn_features(40);
        let pressure = pressure(&candidates, &features);
        let choice = LearnedPolicy::greedy(Network::new(&weights)).choose(&pressure).unwrap();
        let mut network = Network::new(&weights);
        let mut score = |choice: Choice| {
            network.logits(pressure.row(choice.candidate))[(choice.action == Action::Recompute) as usize]
        };
        let chosen = score(choice);
        assert!(candidates[choice.candidate].allows(choice.action));
        assert!(pressure.choices().all(|other| score(other) <= chosen));
    }

    #[test]
    fn waiting_is_chosen_where_it_scores_highest_and_may_be_chosen() {
        let candidates = [candidate(true, false); 3];
        let (mut waited, mut evicted) = (0, 0);
        for seed in 0..40 {
            let features = drawn_features_of(seed, 4);
            let mut policy = LearnedPolicy::greedy(Network::new(&drawn(seed, 16, 16)));
            let scores: Vec<f32> =
                features.as_chunks::<FEATURES>().0.iter().map(|row| policy.network.logits(row)[0]).collect();
            let highest = |rows: &[f32]| (0..rows.len()).max_by(|&a, &b| rows[a].total_cmp(&rows[b])).unwrap();
            let wait = Some(Wait { stall_ns: 1, slack_ns: 0 });
            let soft = Pressure { wait, ..pressure(&candidates, &features) };
            let choice = policy.choose(&soft).unwrap();
            assert_eq!(choice.candidate, highest(&scores));
            assert_eq!(Some(choice) == soft.waiting(), choice.candidate == 3);
            *(if choice.candidate == 3 { &mut waited } else { &mut evicted }) += 1;
            let hard = pressure(&candidates, &features[..3 * FEATURES]);
            assert_eq!(policy.choose(&hard).unwrap().candidate, highest(&scores[..3]));
        }
        assert!(waited > 0 && evicted > 0, "it waited {waited} times and evicted {evicted} times");
    }

    #[test]
    fn the_first_of_equals_wins_and_no_legal_eviction_is_no_choice() {
        let mut policy = LearnedPolicy::greedy(Network::new(&drawn(4, 16, 16)));
        let features = drawn_features(1).repeat(3);
        let candidates = [candidate(false, false), candidate(true, false), candidate(true, false)];
        let expected = Choice { candidate: 1, action: Action::Swap };
        assert_eq!(policy.choose(&pressure(&candidates, &features)), Some(expected));
        assert_eq!(policy.choose(&pressure(&candidates[..1], &features)), None);
    }

    #[test]
    fn samples_follow_the_softmax() {
        let weights = drawn(9, 8, 8);
        let candidates = [candidate(true, true), candidate(false, true), candidate(true, false)];
        let features: Vec<f32> = drawn_features(3).iter().map(|value| value * 0.2).collect();
        let pressure = pressure(&candidates, &features);
        let mut network = Network::new(&weights);
        let weight: Vec<(Choice, f32)> = pressure
            .choices()
            .map(|choice| {
                let logits = network.logits(pressure.row(choice.candidate));
                (choice, logits[(choice.action == Action::Recompute) as usize].exp())
            })
            .collect();
        let total: f32 = weight.iter().map(|(_, weight)| weight).sum();
        let mut policy = LearnedPolicy::sampled(Network::new(&weights), 5);
        let draws: Vec<_> = (0..20_000).map(|_| policy.choose(&pressure).unwrap()).collect();
        for (choice, weight) in weight {
            let share = draws.iter().filter(|&&drawn| drawn == choice).count() as f32 / 20_000.0;
            assert!((share - weight / total).abs() < 0.02, "{choice:?}: {share}, not {}", weight / total);
        }
    }
}
