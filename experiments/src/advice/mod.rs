//! Advice: which way of saving memory pays for a model, a batch size and a budget.
//!
//! After PAPAYA, a performance model of memory optimisation methods of which the abstract and its formulas were at hand:
//! latency(b) = max(a, k·b) + c, peak(b) = α·b + β, largest batch = (0.8·M - β) / α, throughput = b / latency(b), each
//! fitted per method. Deviations: the largest batch is (M - β) / α, because our peak is exact where theirs leaves a fifth
//! for what an allocator wastes, but no larger than what can never be evicted allows, nor than twice the largest that
//! was recorded; peak(b) is at least what parameters and optimizer state take alone, which hides what samples take; and
//! what is fitted of a method is its *full strength* (its plan at the least budget that it can hold, which is where the
//! largest batch stands), while plans at the budget itself come from the timeline.

pub mod fit;
pub mod method;
pub mod quantisation;
pub mod report;
