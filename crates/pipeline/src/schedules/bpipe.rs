//! BPipe (Kim et al., 2023): 1F1B in which the first stages give micro-batches to the last ones, which have room.
//!
//! The order of work and the bits of 1F1B, and its time if moves take none; but no stage group keeps more than
//! ⌈(p + 2) / 2⌉ micro-batches, where the first one of 1F1B keeps p. Each eviction sends what is kept of a
//! micro-batch twice. From 4 stages on there is something to move.

use crate::error::Result;
use crate::evict;
use crate::schedule::Schedule;
use crate::schedules::{Warmup, one_f_one_b};

/// BPipe of `m` micro-batches over `p` stage groups.
pub fn bpipe(p: usize, m: usize) -> Result<Schedule> {
    let schedule = one_f_one_b(p, m, Warmup::Pa)?;
    let moves = evict::moves(&schedule)?;
    Ok(schedule.parking("bpipe", moves))
}
