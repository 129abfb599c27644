//! Dropout on tiles of probabilities, as a pure function of the global index of a probability.

use std::ops::Range;

use super::AttentionKernel;
use crate::element::{CpuFloat, vectorized};
use crate::kernels::matrix::MatMut;

impl<G> AttentionKernel<'_, G> {
    /// Applies dropout to a tile of probabilities of a pair and one of its query heads, or to the
    /// gradients there.
    ///
    /// The probability that query `i` of query head `h` gives to key `j` is number
    /// `(h·queries + i)·keys + j` of its sequence, all counted over the whole.
    pub(super) fn drop<F: CpuFloat>(
        &self,
        (pair, head): (usize, usize),
        rows: &Range<usize>,
        keys: &Range<usize>,
        tile: &mut MatMut<F>,
    ) {
        let shape = &self.shape;
        let Some((mask, dropped)) =
            self.dropout.and_then(|mask| Some((mask, mask.last_dropped()?)))
        else {
            return;
        };
        let factor = mask.factor();
        vectorized(
            #[inline(always)]
            || {
                for (r, i) in rows.clone().enumerate() {
                    let (seen, _) = shape.split(i, keys, tile.row(r));
                    let (sequence, first) = shape.drawn((pair, head), i);
                    let mut done = 0;
                    while done < seen.len() {
                        let (run, place) = shape.key_run(keys.start + done);
                        let run = run.min(seen.len() - done);
                        let part = &mut seen[done..done + run];
                        mask.draw(
                            sequence,
                            first + place,
                            run,
                            #[inline(always)]
                            |range, words| keep_some(&mut part[range], words, dropped, factor),
                        );
                        done += run;
                    }
                }
            },
        );
    }
}

#[inline(always)]
fn keep_some<F: CpuFloat>(row: &mut [F], words: &[u32], dropped: u32, factor: F) {
    for (x, word) in row.iter_mut().zip(words) {
        *x = if *word > dropped { *x * factor } else { F::ZERO };
    }
}
