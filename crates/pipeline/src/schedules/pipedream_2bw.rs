//! PipeDream-2BW (Narayanan et al., 2021): 1F1B that never drains, with one update per batch and two versions of the
//! weights.
//!
//! Gradients of the m ≥ p micro-batches of a batch are summed, and each batch reads the weights from before the last
//! update on all stages: `W(t+1) = W(t) − r ∇f(W(t−1))`. While a stage still runs the backwards of one batch, it already
//! runs the forwards of the next, with the newer weights: two versions, whatever the number of stages. A new version is
//! needed only a batch after it was made, so no stage waits for another's update. With fewer micro-batches than stages
//! it would be needed before it exists.

use phalanx_script::Updates;

use super::rolling::rolling;
use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;

/// PipeDream-2BW over `p` stage groups, for batches of `m` micro-batches each.
pub fn pipedream_2bw(p: usize, m: usize, batches: usize) -> Result<Schedule> {
    let updates = Updates::new(m, m, vec![1; p]);
    let all = m * batches;
    let place = Placement::looped(p, 1)?;
    let schedule = Schedule::new("pipedream-2bw", all, place, |i| rolling(p - 1 - i, all))?;
    Ok(schedule.updating(updates))
}
