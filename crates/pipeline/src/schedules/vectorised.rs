//! The vectorised pipeline (Xu et al., GSPMD, 2021): all stage groups do the same in every tick.
//!
//! GSPMD writes a pipeline as tensor code. The stages lie along one dim of a value that is sharded over the stage
//! groups; a tick shifts the value by one stage, puts the next micro-batch at its start, and applies all stages at once.
//! There are v·m + p − 1 ticks for m micro-batches and v rounds (circular: each stage group holds v stages, and
//! what leaves the last group enters the first again), and as many for the backward, in reverse order. As one program
//! cannot skip a tick, a stage group that has no micro-batch computes on zeros: the time is GPipe's, (v·m + p − 1)(tF +
//! tB + tW)/v, and so are all numbers but the FLOPs, which are (v·m + p − 1)/(v·m) times GPipe's, on every group,
//! and what is kept: all v·m + p − 1 ticks.
//!
//! A micro-batch of a tick is its number minus the stage group's, so the empty ones go from stage to stage as others do.

use phalanx_script::Part;

use crate::check::Numbers;
use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::Turn;
use crate::written::Written;

/// The vectorised pipeline of `m` micro-batches over `p` stage groups, `v` times around.
pub fn vectorised(p: usize, m: usize, v: usize) -> Result<Schedule> {
    let placement = Placement::looped(p, v)?;
    let list = |group: usize| {
        let turn = |part| move |tick: usize| tick_turn([p, m, v], part, tick, group);
        let ticks = 0..v * m + p - 1;
        let backwards = ticks.clone().rev().map(turn(Part::BW));
        ticks.map(turn(Part::F)).chain(backwards).collect()
    };
    let turns = (0..p).map(list).collect();
    let numbers = Numbers { real: m, empty: 2 * (p - 1) };
    Schedule::numbered("vectorised", numbers, placement, turns, Written::Lists)
}

/// What a stage group does in a tick. Empty micro-batches have the numbers from m on: first those that enter the first
/// stage after all others, then those that are ahead of the first one.
fn tick_turn([p, m, v]: [usize; 3], part: Part, tick: usize, group: usize) -> Turn {
    let (microbatch, chunk) = match tick.checked_sub(group) {
        Some(number) if number < v * m => (number % m, number / m),
        Some(number) => (m + number - v * m, v - 1),
        None => (m + p - 1 + group - tick - 1, 0),
    };
    Turn { part, microbatch, chunk, version: 0 }
}
