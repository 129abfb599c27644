//! ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2024): no bubble with the memory of 1F1B.
//!
//! Device r holds the stages r and 2p − 1 − r: the model goes there and comes back in the shape of a
//! V, so the device that starts a micro-batch also ends it and can turn around at once. Where tF =
//! tB = tW and m ≥ 2p − 1 no device waits, and each keeps 2p chunks, that is p whole shares, as the
//! first device of 1F1B does. For tF = tB ≥ tW the bubble is (p − 1)(tF + tB − 2tW) chunk times.
//!
//! The rule is made for at least 2p − 1 micro-batches; fewer run the same order with the surplus
//! left out.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{b, fwd, w, weave};

/// ZB-V of `microbatches` over `p` devices with two chunks each.
pub fn zb_v(p: usize, microbatches: usize) -> Result<Schedule> {
    let m = microbatches.max((2 * p).saturating_sub(1));
    let (there, back) = (0, 1);
    Schedule::new("zb-v", microbatches, Placement::vee(p)?, |r| {
        let full = 2 * (p - r) - 1;
        // Fill the V: until the first micro-batch is back, then on both sides of it.
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
            // Drain it: what others wait for first, then the weights.
            .then(weave([b(m - p..m - p + r).on(there), b(m - r..m).on(back)]))
            .then(weave([b(m - p + r..m).on(there), w(m - p..m - r).on(there)]))
            .then(w(m - r..m).on(back))
            .then(w(m - r..m).on(there))
            .below(microbatches)
    })
}
