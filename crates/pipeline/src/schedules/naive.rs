//! Layer-wise model parallelism without a pipeline: one device works, the others wait.
//!
//! Each micro-batch goes through all stages and back before the next starts. It takes
//! m·p·(tF + tB + tW), so a device is busy 1/p of the time; it keeps one micro-batch. An honest
//! baseline, and what remains of every schedule when there is only one micro-batch.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{bwd, fwd, weave};

/// Layer-wise model parallelism of `m` micro-batches over `p` devices.
pub fn naive(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("naive", m, Placement::looped(p, 1)?, |_| weave([fwd(0..m), bwd(0..m)]))
}
