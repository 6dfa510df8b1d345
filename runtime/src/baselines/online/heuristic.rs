//! What rules share: how they learn of evictions, and the search for the lowest score.

use super::pool::Pool;
use super::program::SeatId;
use super::simulator::World;

/// Scores the storages that could be evicted. The lowest goes.
pub(super) trait Heuristic {
    /// `storage` is new to the program; it is not computed yet, and counts as evicted until it is.
    fn created(&mut self, _world: &World<'_>, _storage: SeatId) {}

    /// `storage` was evicted.
    fn evicted(&mut self, _world: &World<'_>, _storage: SeatId) {}

    /// `storage` was computed, for the first time or again.
    fn materialised(&mut self, _world: &World<'_>, _storage: SeatId) {}

    /// The score.
    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64;

    /// A bound that costs little: the score is not below it.
    fn score_at_least(&self, _world: &World<'_>, _storage: SeatId) -> f64 {
        f64::NEG_INFINITY
    }
}

/// The storage with the lowest score. Of equals the last wins; a score of zero ends the search.
///
/// The storage with the lowest bound is scored first; what is bound to score higher than that need not be looked at
/// (the idea of Minoux, *Accelerated greedy algorithms for maximizing submodular set functions*, 1978).
pub(super) fn lowest<H: Heuristic>(heuristic: &mut H, world: &World<'_>, pool: &Pool) -> Option<SeatId> {
    let bound = |&storage: &SeatId| heuristic.score_at_least(world, storage);
    let promising = pool.iter().min_by(|a, b| bound(a).total_cmp(&bound(b)))?;
    let mut ceiling = heuristic.score(world, promising);
    let (mut best, mut lowest) = (None, f64::INFINITY);
    for storage in pool.iter() {
        if heuristic.score_at_least(world, storage) > ceiling {
            continue;
        }
        let score = heuristic.score(world, storage);
        if score <= lowest {
            (best, lowest) = (Some(storage), score);
            ceiling = ceiling.min(score);
        }
        if score == 0.0 {
            break;
        }
    }
    best
}

/// Cost per `what`; infinite where there is nothing to gain.
pub(super) fn per(cost_ns: i64, what: f64) -> f64 {
    if what == 0.0 { f64::INFINITY } else { cost_ns as f64 / what }
}
