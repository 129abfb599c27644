//! GPipe (Huang et al., 2019): all forwards, then all backwards, then one update.
//!
//! It takes (m + p − 1)(tF + tB + tW): the pipeline fills and drains once, whatever m is. Every
//! device keeps all m micro-batches, and for that reason GPipe keeps only the inputs of a stage and
//! runs its forward again before the backward: the backward then takes tF longer. That is
//! `Schedule::rematerialised`, which any schedule can have; the order of its turns is the same.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{bwd, fwd};

/// GPipe of `m` micro-batches over `p` devices.
pub fn gpipe(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("gpipe", m, Placement::looped(p, 1)?, |_| fwd(0..m).then(bwd(0..m)))
}
