//! PipeDream (Harlap et al., 2018; Narayanan et al., 2019): 1F1B that never drains, with an update after every backward.
//!
//! Each stage runs just enough forwards to fill the pipeline after it, then alternates without end, and updates its
//! weights after each backward. So a micro-batch is a batch of its own. Its forward and its backward on a stage must read
//! the same weights, so a stage keeps a version for each micro-batch in flight (weight stashing): stage i of p
//! has p − i of them, and its gradients belong to weights that are p − 1 − i updates old:
//! `w(t+1) = w(t) − r ∇f(w₁(t−p+1), …, w_p(t))`. With vertical sync a micro-batch reads the version that it met on the
//! first stage everywhere: all stages are p − 1 updates late and keep p versions. Stages that several holders take in turn are
//! in `round_robin.rs`.

use phalanx_script::Updates;

use super::rolling::rolling;
use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;

/// PipeDream over `p` stage groups, for steps of `m` micro-batches each.
pub fn pipedream(p: usize, m: usize, steps: usize, vertical_sync: bool) -> Result<Schedule> {
    let delay = |stage: usize| if vertical_sync { p - 1 } else { p - 1 - stage };
    let updates = Updates::new(m, 1, (0..p).map(delay).collect());
    let all = m * steps;
    let schedule =
        Schedule::new("pipedream", all, Placement::looped(p, 1)?, |i| rolling(p - 1 - i, all))?;
    Ok(schedule.updating(updates))
}
