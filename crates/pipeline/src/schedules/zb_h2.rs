//! ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): no bubble, for twice the memory.
//!
//! Like ZB-H1, but each stage group starts with enough forwards to be busy until its first B can
//! run, and leaves its W for the end, when no B is left. Every group keeps 2p − 1 micro-batches
//! until W. For m ≥ 2p − 1 and tW ≤ min(tF, tB) the bubble is (p − 1)(tF + tB − 2tW): none where
//! all are equal. That counts each stage group from its own start to its own end; a step that must
//! wait for all groups, for example to clip by the global norm, still takes the makespan.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{b, fwd, w, weave};

/// ZB-H2 of `m` micro-batches over `p` stage groups.
pub fn zb_h2(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("zb-h2", m, Placement::looped(p, 1)?, |i| {
        let warm = m.min(2 * (p - i) - 1);
        fwd(0..warm).then(weave([b(0..m), w(0..m).late(2 * i), fwd(warm..m)]))
    })
}
