//! The reward of a complete plan.

/// The worst reward.
const WORST: f64 = -3.0;
/// Overhead that is added for going over the budget at all, and for going over by a whole budget.
const OVER_BUDGET_OVERHEAD: [f64; 2] = [0.5, 4.0];
/// Overheads below this hardly differ.
const OVERHEAD_SCALE: f64 = 0.01;

/// How much better than the best hand-written policy a plan is: −(overhead − reference) / (reference + 0.01), at
/// least −3. Bytes over the budget are priced into the overhead.
///
/// `overhead` and `reference_overhead` are makespan ÷ keep-all makespan − 1. The reward is 0 where the plan equals the
/// reference, and below 1.
pub fn plan_reward(overhead: f64, reference_overhead: f64, over_budget_bytes: u64, budget_bytes: u64) -> f32 {
    let mut overhead = overhead;
    if over_budget_bytes > 0 {
        let [at_all, by_a_budget] = OVER_BUDGET_OVERHEAD;
        overhead += at_all + by_a_budget * over_budget_bytes as f64 / budget_bytes.max(1) as f64;
    }
    let reference = reference_overhead.max(0.0);
    (-(overhead - reference) / (reference + OVERHEAD_SCALE)).max(WORST) as f32
}

#[cfg(test)]
mod tests {
    use super::plan_reward;

    #[test]
    fn the_reference_earns_nothing_and_less_overhead_earns_more() {
        assert_eq!(plan_reward(0.2, 0.2, 0, 100), 0.0);
        assert!(plan_reward(0.1, 0.2, 0, 100) > 0.0);
        assert!(plan_reward(0.3, 0.2, 0, 100) < 0.0);
        assert!(plan_reward(0.0, 0.2, 0, 100) < 1.0);
    }

    #[test]
    fn the_budget_is_worth_more_than_time() {
        assert!(plan_reward(0.0, 0.2, 1, 100) < plan_reward(0.5, 0.2, 0, 100));
        assert_eq!(plan_reward(0.0, 0.0, 1000, 100), -3.0);
    }
}
