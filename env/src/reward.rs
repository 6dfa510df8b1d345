//! The reward of a complete plan.

/// Overhead that is added for going over the budget at all, and for going over by a whole budget.
const OVER_BUDGET_OVERHEAD: [f64; 2] = [0.5, 4.0];
/// Overheads below this hardly differ.
const OVERHEAD_SCALE: f64 = 0.01;

/// How many times better than the best hand-written policy a plan is: ln((reference + 0.01) / (overhead + 0.01)). A plan that is
/// over the budget counts as slower than the reference, however fast it is, and more so by each byte.
///
/// `overhead` and `reference_overhead` are makespan ÷ keep-all makespan − 1; below 0 they count as 0. The reward is 0 where the
/// plan equals the reference. A tenth less of overhead earns the same wherever a plan stands, so that one that is far behind
/// still learns what brings it closer.
pub fn plan_reward(overhead: f64, reference_overhead: f64, over_budget_bytes: u64, budget_bytes: u64) -> f32 {
    let mut overhead = overhead.max(0.0);
    if over_budget_bytes > 0 {
        let [at_all, by_a_budget] = OVER_BUDGET_OVERHEAD;
        overhead = overhead.max(reference_overhead)
            + at_all
            + by_a_budget * over_budget_bytes as f64 / budget_bytes.max(1) as f64;
    }
    ((reference_overhead.max(0.0) + OVERHEAD_SCALE) / (overhead + OVERHEAD_SCALE)).ln() as f32
}

#[cfg(test)]
mod tests {
    use super::plan_reward;

    #[test]
    fn the_reference_earns_nothing_and_less_overhead_earns_more() {
        assert_eq!(plan_reward(0.2, 0.2, 0, 100), 0.0);
        assert!(plan_reward(0.1, 0.2, 0, 100) > 0.0);
        assert!(plan_reward(0.3, 0.2, 0, 100) < 0.0);
        assert_eq!(plan_reward(-0.1, 0.2, 0, 100), plan_reward(0.0, 0.2, 0, 100));
    }

    #[test]
    fn the_budget_is_worth_more_than_time() {
        assert!(plan_reward(0.0, 0.2, 1, 100) < plan_reward(0.5, 0.2, 0, 100));
        assert!(plan_reward(0.0, 0.2, 2, 100) < plan_reward(0.0, 0.2, 1, 100));
        assert!(plan_reward(0.0, 3.0, 1, 100) < plan_reward(3.0, 3.0, 0, 100));
    }

    #[test]
    fn a_share_of_overhead_earns_the_same_near_the_reference_and_far_from_it() {
        let gain = |from, to| plan_reward(to, 0.1, 0, 100) - plan_reward(from, 0.1, 0, 100);
        assert!((gain(0.1, 0.09) - gain(4.0, 3.6)).abs() < 0.02, "{} {}", gain(0.1, 0.09), gain(4.0, 3.6));
    }
}
