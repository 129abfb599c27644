//! 1F1B with a flush: PipeDream-Flush (Narayanan et al., 2021), the schedule of DAPPLE (Fan et al.,
//! 2021), which calls it early backward.
//!
//! Each stage runs just enough forwards to fill the pipeline after it, then alternates. It takes as
//! long as GPipe, (m + p − 1)(tF + tB + tW), but stage i never holds more than min(p − i, m)
//! micro-batches.
//!
//! If messages take as long as the work, a stage needs more micro-batches in flight to stay busy.
//! DAPPLE's second policy counts the links as stages: min(2(p − i) − 1, m).

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{bwd, fwd, weave};

/// How many forwards a stage starts with.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Warmup {
    /// One for each stage from here to the last.
    #[default]
    Pa,
    /// One for each stage and each link from here to the last, for slow links.
    Pb,
}

impl Warmup {
    /// Every warm-up.
    pub const ALL: [Warmup; 2] = [Warmup::Pa, Warmup::Pb];

    /// The word in configurations and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Warmup::Pa => "pa",
            Warmup::Pb => "pb",
        }
    }
}

/// 1F1B of `m` micro-batches over `p` stage groups.
pub fn one_f_one_b(p: usize, m: usize, warmup: Warmup) -> Result<Schedule> {
    Schedule::new("1f1b", m, Placement::looped(p, 1)?, |i| {
        let behind = p - 1 - i;
        let warm = m.min(match warmup {
            Warmup::Pa => behind,
            Warmup::Pb => 2 * behind,
        });
        fwd(0..warm).then(weave([fwd(warm..m), bwd(0..m)]))
    })
}
