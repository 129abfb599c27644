//! Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): smaller stages, several in each stage
//! group.
//!
//! Stage group d holds the stages d, p + d, 2p + d… A pipeline of v·p small stages fills in 1/v of
//! the time: (m·v + p − 1)(tF + tB + tW)/v. Micro-batches go in groups of p, each group through
//! chunk 0, then chunk 1… ("depth first"), so m must be a multiple of p. The price is v times the
//! messages, and a little more memory than 1F1B: min(2(p − 1 − d) + (v − 1)p + 1, m·v) chunks in
//! stage group d.

use crate::error::{PipelineError, Result};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::schedules::{Warmup, one_f_one_b};
use crate::turn::{Turns, bwd, fwd, weave};
use crate::words::counted;

/// Interleaved 1F1B of `m` micro-batches over `p` stage groups with `v` chunks each; with one chunk
/// there is nothing to interleave, and it is 1F1B.
pub fn interleaved(p: usize, m: usize, v: usize) -> Result<Schedule> {
    if v == 1 {
        return one_f_one_b(p, m, Warmup::Pa);
    }
    if p > 0 && !m.is_multiple_of(p) {
        return Err(not_in_groups(p, m));
    }
    Schedule::new("interleaved", m, Placement::looped(p, v)?, |d| {
        let warm = 2 * (p - 1 - d) + (v - 1) * p;
        let groups = || (0..m).step_by(p).map(|first| first..first + p);
        let forwards: Turns =
            groups().flat_map(|g| (0..v).map(move |c| fwd(g.clone()).on(c))).collect();
        let backwards: Turns =
            groups().flat_map(|g| (0..v).rev().map(move |c| bwd(g.clone()).on(c))).collect();
        let (first, rest) = forwards.split(warm);
        first.then(weave([rest, backwards]))
    })
}

fn not_in_groups(p: usize, m: usize) -> PipelineError {
    let (below, above) = (m / p * p, m.div_ceil(p) * p);
    let nearest = match below {
        0 => counted(above, "micro-batch"),
        _ => format!("{below} or {above} micro-batches"),
    };
    PipelineError::Shape {
        what: format!(
            "interleaved cannot run {} on {}",
            counted(m, "micro-batch"),
            counted(p, "stage")
        ),
        why: format!("micro-batches go in groups of {p}, one for each stage"),
        nearest: format!("{nearest}; or breadth-first, which takes any number"),
    }
}
