//! A value as a task sees it.

use phalanx_call::Slot;
use phalanx_ir::{DType, Program, ValueId};

use super::{Arg, Place};

/// What this rank holds of a value, and where.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) slot: Slot,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// How many elements of each dim are valid; the rest is padding.
    pub(crate) valid: Vec<usize>,
}

impl Var {
    pub(crate) fn of(program: &Program, value: ValueId, slot: Slot, rank: usize) -> Self {
        let (ty, mesh) = (program.ty(value), program.mesh());
        let (shape, valid) = (ty.local_shape(mesh), ty.local_valid(mesh, rank));
        Self { slot, dtype: ty.dtype, shape, valid }
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The last dim.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The valid elements of a valid row.
    pub(crate) fn valid_width(&self) -> usize {
        self.valid.last().copied().unwrap_or(1)
    }

    /// All dims but the last, multiplied.
    pub(crate) fn rows(&self) -> usize {
        let dims = self.shape.len().saturating_sub(1);
        self.shape[..dims].iter().product()
    }

    pub(crate) fn place(&self) -> Place {
        Place { slot: self.slot, offset: 0 }
    }

    /// Its address, as an argument of a kernel.
    pub(crate) fn arg(&self) -> Arg {
        Arg::Pointer(self.place())
    }

    /// Whether it is added to what its output holds, as an argument of a kernel.
    pub(crate) fn adds(&self) -> Arg {
        Arg::Adds(self.slot)
    }

    /// The distance between neighbours along each dim.
    pub(crate) fn strides(&self) -> Vec<usize> {
        (0..self.shape.len()).map(|dim| self.shape[dim + 1..].iter().product()).collect()
    }

    /// The valid rows (all dims but the last), as ranges of neighbours.
    pub(crate) fn row_runs(&self) -> Vec<std::ops::Range<usize>> {
        let dims = self.shape.len().saturating_sub(1);
        let (shape, valid) = (&self.shape[..dims], &self.valid[..dims]);
        if valid.contains(&0) {
            return Vec::new();
        }
        let full = shape.iter().zip(valid).rev().take_while(|(size, valid)| size == valid).count();
        let inner: usize = shape[dims - full..].iter().product();
        let Some(cut) = (dims - full).checked_sub(1) else {
            return std::iter::once(0..inner).collect();
        };
        let mut starts = vec![0];
        for (size, valid) in shape[..cut].iter().zip(valid) {
            starts = starts.iter().flat_map(|s| (0..*valid).map(move |i| s * size + i)).collect();
        }
        let run = |start: usize| start * shape[cut] * inner;
        starts.into_iter().map(|s| run(s)..run(s) + valid[cut] * inner).collect()
    }
}

/// Extents and valid extents of dims as kernels take them (`Extents`).
pub(super) fn extents(shape: &[usize], valid: &[usize]) -> Vec<i64> {
    let mut words = vec![shape.len() as i64];
    words.extend(padded(shape));
    words.extend(padded(valid));
    words
}

/// Numbers of up to eight dims, with ones behind them.
pub(super) fn padded(numbers: &[usize]) -> [i64; MOST_DIMS] {
    std::array::from_fn(|i| numbers.get(i).map_or(1, |&n| n as i64))
}

/// The most dims that kernels take.
pub(super) const MOST_DIMS: usize = 8;
