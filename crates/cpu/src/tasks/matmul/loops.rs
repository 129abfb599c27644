//! The loops of a matrix product: which letters are merged into one index, which indices the
//! library gets, and which one the workers divide.

use phalanx_ir::ops::Matmul;

use crate::tasks::{Share, Var};

/// Consecutive letters that are merged into one index in every tensor that has them: its extent,
/// and its stride in a, b and the result (0 where absent).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loop {
    /// How many steps it takes: for inner letters, over valid elements alone.
    pub(super) size: usize,
    /// The extent of the letters, padding included.
    extent: usize,
    pub(super) strides: [usize; 3],
}

/// The loops of a product: one row, column and inner index for the library, the rest around it.
#[derive(Clone, Debug)]
pub(super) struct Dims {
    pub(super) rows: Loop,
    pub(super) cols: Loop,
    pub(super) inner: Loop,
    /// Loops over batches, and over rows and columns that could not be merged.
    pub(super) outer: Vec<Loop>,
    /// Loops over inner letters that could not be merged: products that add up.
    pub(super) sums: Vec<Loop>,
}

const NONE: Loop = Loop { size: 1, extent: 1, strides: [0, 0, 0] };

impl Dims {
    pub(super) fn new(matmul: &Matmul, a: &Var, b: &Var, out: &Var) -> Self {
        let letters = matmul.spec.letters();
        let shapes = [&a.shape, &b.shape, &out.shape];
        let extents = matmul.spec.extents();
        let axis = |letter: char| {
            let mut axis = NONE;
            for (tensor, (names, shape)) in letters.iter().zip(shapes).enumerate() {
                if let Some(dim) = names.find(letter) {
                    axis.extent = shape[dim];
                    axis.strides[tensor] = shape[dim + 1..].iter().product();
                }
            }
            // Sums use only valid elements; other results may be computed from padding.
            axis.size = match letters[0].find(letter) {
                Some(dim) if extents.inner.contains(&letter) => a.valid[dim],
                _ => axis.extent,
            };
            axis
        };
        let merged = |group: &[char]| merge(group.iter().map(|&c| axis(c)));
        let mut outer = merged(&extents.batch);
        let one = |group: &[char], rest: &mut Vec<Loop>| {
            let mut axes = merged(group);
            let largest = (0..axes.len()).max_by_key(|&i| axes[i].size);
            let chosen = largest.map_or(NONE, |i| axes.remove(i));
            rest.extend(axes);
            chosen
        };
        let rows = one(&extents.rows, &mut outer);
        let cols = one(&extents.cols, &mut outer);
        let mut sums = Vec::new();
        let inner = one(&extents.inner, &mut sums);
        Self { rows, cols, inner, outer, sums }
    }

    /// The axis whose shares are contiguous in the result, or the one with the most to share.
    pub(super) fn shared(&self, workers: usize) -> Shared {
        let candidates = (self.outer.iter().enumerate())
            .map(|(i, axis)| (Shared::Outer(i), *axis))
            .chain([(Shared::Rows, self.rows), (Shared::Cols, self.cols)]);
        let even = |axis: &Loop| axis.size.is_multiple_of(workers);
        candidates
            .max_by_key(|(_, axis)| {
                (axis.size >= workers, even(axis), axis.strides[2] * usize::from(axis.size > 1))
            })
            .map_or(Shared::Rows, |(shared, _)| shared)
    }

    /// A worker's loops and where they start in each tensor, if it has anything to do.
    pub(super) fn own(&self, share: Share) -> Option<(Own, [usize; 3])> {
        let shared = self.shared(share.workers);
        let mine = share.of(self.axis(shared).size);
        if mine.is_empty() {
            return None;
        }
        let mut own = Own { rows: self.rows, cols: self.cols, inner: self.inner, outer: None };
        let axis = own.axis_mut(shared, self);
        axis.size = mine.len();
        let start = axis.strides.map(|stride| mine.start * stride);
        Some((own, start))
    }

    /// Whether it is one product of two matrices, of which something is summed.
    pub(super) fn is_plain(&self) -> bool {
        self.outer.is_empty() && self.sums.is_empty() && self.inner.size > 0
    }

    pub(super) fn axis(&self, shared: Shared) -> Loop {
        match shared {
            Shared::Outer(i) => self.outer[i],
            Shared::Rows => self.rows,
            Shared::Cols => self.cols,
        }
    }
}

/// Which index the workers divide among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shared {
    Outer(usize),
    Rows,
    Cols,
}

/// The loops of one worker: the library's three, and the outer sizes by reference.
pub(super) struct Own {
    pub(super) rows: Loop,
    pub(super) cols: Loop,
    pub(super) inner: Loop,
    pub(super) outer: Option<(usize, Loop)>,
}

impl Own {
    fn axis_mut(&mut self, shared: Shared, dims: &Dims) -> &mut Loop {
        match shared {
            Shared::Rows => &mut self.rows,
            Shared::Cols => &mut self.cols,
            Shared::Outer(i) => &mut self.outer.insert((i, dims.outer[i])).1,
        }
    }
}

/// Merges neighbouring axes where one index can cover both in every tensor.
fn merge(axes: impl Iterator<Item = Loop>) -> Vec<Loop> {
    let mut out: Vec<Loop> = Vec::new();
    for axis in axes {
        match out.last_mut() {
            // The valid elements of the minor one would not be evenly spaced.
            Some(last)
                if axis.size == axis.extent
                    && ((0..3).all(|t| last.strides[t] == axis.strides[t] * axis.extent)
                        || axis.extent == 1) =>
            {
                if axis.extent > 1 {
                    *last = Loop {
                        size: last.size * axis.size,
                        extent: last.extent * axis.extent,
                        strides: axis.strides,
                    };
                }
            }
            Some(last) if last.extent == 1 && last.size == 1 => *last = axis,
            _ => out.push(axis),
        }
    }
    out
}
