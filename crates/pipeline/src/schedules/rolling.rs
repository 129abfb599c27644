//! What pipelines without a flush do: 1F1B over the micro-batches of many steps.
//!
//! The forwards before the first backward are the prologue. From there on each step looks the same on every stage group:
//! its backwards, and between them the forwards that are as many ahead as stages follow. The end runs no forwards
//! ahead, so nothing but weights goes from one row of steps to the next; the
//! scripts of a row are cut out of these turns.

use crate::turn::{Turns, bwd, fwd, weave};

/// The turns of a stage group for all its micro-batches of a row, with so many forwards ahead.
pub(super) fn rolling(ahead: usize, microbatches: usize) -> Turns {
    let ahead = ahead.min(microbatches);
    fwd(0..ahead).then(weave([fwd(ahead..microbatches), bwd(0..microbatches)]))
}
