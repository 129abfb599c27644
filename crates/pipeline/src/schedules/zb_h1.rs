//! ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): 1F1B with the backward split in two.
//!
//! The stage before waits only for the gradient of the inputs (B). The gradient of the weights (W)
//! can wait, and fills what would be a bubble. Stage group i runs W i micro-batches late, so that
//! every group keeps p micro-batches until W, as many as 1F1B keeps at most. For tW ≤ min(tF, tB)
//! the bubble is (p − 1)(tF + tB − tW), a third of 1F1B's where all are equal.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{b, fwd, w, weave};

/// ZB-H1 of `m` micro-batches over `p` stage groups.
pub fn zb_h1(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("zb-h1", m, Placement::looped(p, 1)?, |i| {
        let warm = m.min(p - i);
        fwd(0..warm).then(weave([b(0..m), w(0..m).late(i), fwd(warm..m)]))
    })
}
