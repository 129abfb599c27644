//! V-Min (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): a third of the memory of
//! 1F1B.
//!
//! Stage group r holds the stages r and 2p − 1 − r, as in ZB-V. Its block sends a micro-batch down
//! and up the V without a wait, so that each group keeps at most ⌊(p + 4)/3⌋ micro-batches' worth of
//! memory, where the first group of 1F1B keeps p. If tF = tB = tW and m ≥ p, a step takes
//! 3m + 2p − 2.5 parts of a share (one more if 3 divides p). Where the three times differ, every
//! micro-batch waits: then V-Half is faster.

use super::vee_block::from_block;
use crate::error::Result;
use crate::schedule::Schedule;

/// V-Min of `m` micro-batches over `p` stage groups with two chunks each.
pub fn v_min(p: usize, m: usize) -> Result<Schedule> {
    // Two parts of a group must not want the same turn.
    let late = if p.is_multiple_of(3) { 2 } else { 0 };
    let kept = (p + 4) / 3;
    from_block("v-min", p, m, 2 * kept, |r| {
        [r, 2 * p - 1 - r, 2 * p + late + r, 4 * p + late - 1 - r]
    })
}
