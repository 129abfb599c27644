//! Layer-wise model parallelism without a pipeline: one stage group works, the others wait.
//!
//! Each micro-batch runs forward and backward through all stages before the next starts. It takes
//! m·p·(tF + tB + tW), so a stage group is busy 1/p of the time; it keeps one micro-batch. It is
//! the simplest baseline; with only one micro-batch every schedule is the same as this one.

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{bwd, fwd, weave};

/// Layer-wise model parallelism of `m` micro-batches over `p` stage groups.
pub fn naive(p: usize, m: usize) -> Result<Schedule> {
    Schedule::new("naive", m, Placement::looped(p, 1)?, |_| weave([fwd(0..m), bwd(0..m)]))
}
