//! Which loop of a matrix product the workers divide.

use phalanx_ir::ops::Matmul;
use phalanx_ir::{ProductLoops, StridedLoop};

use crate::tasks::{Share, Var};

/// The loops of a product, and how workers divide them.
#[derive(Clone, Debug)]
pub(super) struct Dims(ProductLoops);

impl std::ops::Deref for Dims {
    type Target = ProductLoops;

    fn deref(&self) -> &ProductLoops {
        &self.0
    }
}

impl Dims {
    pub(super) fn new(matmul: &Matmul, a: &Var, b: &Var, out: &Var) -> Self {
        Self(ProductLoops::new(&matmul.spec, [&a.shape, &b.shape, &out.shape], &a.valid))
    }

    /// The axis whose shares are contiguous in the result, or the one with the most to share.
    pub(super) fn shared(&self, workers: usize) -> Shared {
        let candidates = (self.outer.iter().enumerate())
            .map(|(i, axis)| (Shared::Outer(i), *axis))
            .chain([(Shared::Rows, self.rows), (Shared::Cols, self.cols)]);
        let even = |axis: &StridedLoop| axis.size.is_multiple_of(workers);
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

    pub(super) fn axis(&self, shared: Shared) -> StridedLoop {
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
    pub(super) rows: StridedLoop,
    pub(super) cols: StridedLoop,
    pub(super) inner: StridedLoop,
    pub(super) outer: Option<(usize, StridedLoop)>,
}

impl Own {
    fn axis_mut(&mut self, shared: Shared, dims: &Dims) -> &mut StridedLoop {
        match shared {
            Shared::Rows => &mut self.rows,
            Shared::Cols => &mut self.cols,
            Shared::Outer(i) => &mut self.outer.insert((i, dims.outer[i])).1,
        }
    }
}
