//! What pipelines without a flush do: 1F1B over the micro-batches of many steps.
//!
//! The forwards before the first backward are the prologue. From there on each step looks the same on every stage group:
//! its backwards, and between them the forwards that are as many ahead as stages follow. The end runs no forwards
//! ahead, so nothing but weights goes from one row of steps to the next; the
//! scripts of a row are cut out of these turns.

use crate::turn::{Turns, bwd, fwd, weave};

/// The turns of stage `i` of `p` for all micro-batches of a row.
pub(super) fn rolling(p: usize, i: usize, microbatches: usize) -> Turns {
    let ahead = (p - 1 - i).min(microbatches);
    fwd(0..ahead).then(weave([fwd(ahead..microbatches), bwd(0..microbatches)]))
}
