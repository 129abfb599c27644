//! Patches: what the taps of each output read, side by side, so that a convolution is a product.

use std::ops::Range;

use phalanx_ir::ops::WindowSpan;

use crate::element::{CpuElement, CpuFloat};

/// Patches of images of `line` places with `channels` each.
#[derive(Clone, Copy, Debug)]
pub struct Patches {
    /// How height and width are read.
    pub spans: [WindowSpan; 2],
    /// Taps of a patch along height and width: more than the window has, where weights are padded.
    pub taps: [usize; 2],
    /// Whether outputs are gathered for inputs, which is the gradient, and not inputs for outputs.
    pub backwards: bool,
    /// Places of a line of what is gathered.
    pub line: usize,
    /// Elements of a place.
    pub channels: usize,
    /// How many of them are valid; the others count as zeros.
    pub valid: usize,
}

impl Patches {
    /// Elements of a whole patch.
    pub fn width(&self) -> usize {
        self.taps[0] * self.taps[1] * self.channels
    }

    /// Writes these columns of the patches of some lines, `across` places of each.
    pub fn gather<T: CpuElement>(
        &self,
        image: &[T],
        lines: Range<usize>,
        across: usize,
        columns: Range<usize>,
        out: &mut [T::Acc],
    ) {
        let (n, taps) = (columns.len(), self.taps[1]);
        if n == 0 {
            return;
        }
        let first = lines.start;
        for line in lines {
            let block = &mut out[(line - first) * across * n..(line + 1 - first) * across * n];
            for tap in columns.start / self.channels..columns.end.div_ceil(self.channels) {
                let start = (tap * self.channels).max(columns.start);
                let end = ((tap + 1) * self.channels).min(columns.end);
                let from = start - tap * self.channels;
                let (to, len) = (start - columns.start, end - start);
                let kept = len.min(self.valid.saturating_sub(from));
                let row = self.read(0, line, tap / taps);
                for place in 0..across {
                    let patch = &mut block[place * n + to..place * n + to + len];
                    match row.zip(self.read(1, place, tap % taps)) {
                        None => patch.fill(T::Acc::ZERO),
                        Some((row, column)) => {
                            let at = (row * self.line + column) * self.channels + from;
                            for (to, from) in patch.iter_mut().zip(&image[at..at + kept]) {
                                *to = from.load();
                            }
                            patch[kept..].fill(T::Acc::ZERO);
                        }
                    }
                }
            }
        }
    }

    /// The line, or the place in a line, that a tap reads.
    #[inline]
    pub fn read(&self, dim: usize, at: usize, tap: usize) -> Option<usize> {
        match self.backwards {
            _ if tap >= self.spans[dim].size => None,
            false => self.spans[dim].input(at, tap),
            true => self.spans[dim].output(at, tap),
        }
    }
}
