//! How fast a unit multiplies if nothing has to be fetched.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::micro::{MicroKernel, PanelWord, TileCall};

impl MicroKernel {
    /// Multiplications and additions per second of one core, the best of some rounds of a few milliseconds:
    /// one tile over a block of the inner dimension, again and again, all of it in the first cache.
    pub fn peak(&self) -> f64 {
        // Half of a block of a panel fits beside the left operand.
        let words = self.block / 2;
        let (left, right) = (vec![0_u32; self.rows * words], vec![0_u32; self.columns * words]);
        let mut tile = vec![0_f32; self.rows * self.columns];
        let call = TileCall {
            rows: self.rows,
            words,
            left: left.as_ptr().cast(),
            left_bytes: words * size_of::<u32>(),
            right: right.as_ptr(),
            tile: tile.as_mut_ptr(),
            tile_stride: self.columns,
            add: false,
        };
        let per_word = if self.word == PanelWord::Pair { 2 } else { 1 };
        let work = 2 * self.rows * self.columns * words * per_word;
        let mut best = 0_f64;
        // SAFETY: the operands have as many rows, columns and words as the call says; the caller, who made
        // the kernel, has seen that the processor has its unit.
        unsafe {
            self.enter();
            for _ in 0..8 {
                let (start, mut calls) = (Instant::now(), 0_usize);
                while start.elapsed() < Duration::from_millis(3) {
                    for _ in 0..64 {
                        (self.run)(black_box(&call));
                    }
                    calls += 64;
                }
                best = best.max((calls * work) as f64 / start.elapsed().as_secs_f64());
            }
            self.leave();
        }
        best
    }
}
