//! V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): half the memory of 1F1B.
//!
//! Stage group r holds the stages r and 2p − 1 − r, as in ZB-V. Its block sends a micro-batch down
//! the V at two turns a group and up at one, so that each group keeps at most ⌊(p + 2)/2⌋ micro-batches'
//! worth of memory, where the first group of 1F1B keeps p. If tF = tB = tW and m ≥ p, a step takes
//! 3m + 1.5p − 1.5 parts of a share (0.5 less for odd p); 1F1B takes 3m + 3(p − 1).

use super::vee_block::from_block;
use crate::error::Result;
use crate::schedule::Schedule;

/// V-Half of `m` micro-batches over `p` stage groups with two chunks each.
pub fn v_half(p: usize, m: usize) -> Result<Schedule> {
    // Two groups must not want the same turn.
    let late = if p.is_multiple_of(2) { 3 } else { 0 };
    let kept = (p + 2) / 2;
    from_block("v-half", p, m, 2 * kept, |r| {
        [2 * r, 3 * p - 2 - r, 3 * p + late + 2 * r - 1, 6 * p + late - 2 - r]
    })
}
