//! ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2024): no bubble with the memory of 1F1B.
//!
//! Stage group r holds the stages r and 2p − 1 − r: the model goes through the groups and back, in
//! the shape of a V, so the group that starts a micro-batch also ends it and can start its backward
//! at once. If tF = tB = tW and m ≥ 2p − 1, no group waits, and each keeps 2p chunks, as much
//! memory as p micro-batches in the first group of 1F1B. For tF = tB ≥ tW the bubble is (p − 1)(tF +
//! tB − 2tW) chunk times.
//!
//! The rule is made for at least 2p − 1 micro-batches; with fewer, the turns of the missing ones
//! are left out.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{b, fwd, w, weave};

/// ZB-V of `microbatches` over `p` stage groups with two chunks each.
pub fn zb_v(p: usize, microbatches: usize) -> Result<Schedule> {
    let m = microbatches.max((2 * p).saturating_sub(1));
    let (there, back) = (0, 1);
    Schedule::new("zb-v", microbatches, Placement::vee(p)?, |r| {
        let full = 2 * (p - r) - 1;
        // Fill the V: until the first micro-batch comes back, then on both sides.
        fwd(0..full)
            .on(there)
            .then(weave([fwd(0..r).on(back), fwd(full..full + r).on(there)]))
            .then(weave([fwd(r..p).on(back), b(0..p - r).on(back), w(0..p - r).on(back)]))
            // The steady state: one of each part on each side.
            .then(weave([
                fwd(full + r..m).on(there),
                b(0..m - p).on(there),
                w(0..m - p).on(there),
                fwd(p..m).on(back),
                b(p - r..m - r).on(back),
                w(p - r..m - r).on(back),
            ]))
            // Drain it: first what others wait for, then the weight gradients.
            .then(weave([b(m - p..m - p + r).on(there), b(m - r..m).on(back)]))
            .then(weave([b(m - p + r..m).on(there), w(m - p..m - r).on(there)]))
            .then(w(m - r..m).on(back))
            .then(w(m - r..m).on(there))
            .below(microbatches)
    })
}
