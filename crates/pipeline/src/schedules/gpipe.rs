//! GPipe (Huang et al., 2019): all forwards, then all backwards, then one update.
//!
//! It takes (m + p − 1)(tF + tB + tW): the pipeline fills and drains once, for any m. Every stage
//! group keeps all m micro-batches; for that reason GPipe keeps only the inputs of a stage and runs
//! its forward again before the backward: the backward then takes tF longer. That is
//! `Schedule::rematerialised`, which works with any schedule; the order of its turns stays the
//! same.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{bwd, fwd};

/// GPipe of `m` micro-batches over `p` stage groups.
pub fn gpipe(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("gpipe", m, Placement::looped(p, 1)?, |_| fwd(0..m).then(bwd(0..m)))
}
