//! Breadth-first pipelines (Lamy-Poirier, 2023): chunk by chunk, each over all micro-batches.
//!
//! It has the placement and the length of interleaved 1F1B, (m·v + p − 1)(tF + tB + tW)/v for m ≥
//! p, but a stage group finishes with a chunk's weights before it needs the next chunk: with ZeRO-3
//! they are gathered twice and their gradient is reduced once per step, not once per group of p
//! micro-batches. But it keeps all m·v chunks, so it is used with recomputation. With one chunk it
//! is GPipe.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{Turns, bwd, fwd};

/// The breadth-first schedule of `m` micro-batches over `p` stage groups with `v` chunks each.
pub fn breadth_first(p: usize, m: usize, v: usize) -> Result<Schedule> {
    Schedule::new("breadth-first", m, Placement::looped(p, v)?, |_| {
        let forwards: Turns = (0..v).map(|c| fwd(0..m).on(c)).collect();
        let backwards: Turns = (0..v).rev().map(|c| bwd(0..m).on(c)).collect();
        forwards.then(backwards)
    })
}
