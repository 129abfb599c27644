//! Which worker touches which bytes: its share of a task, the values of a call, and the parts of
//! them that it reads or writes.

use std::ops::Range;

use phalanx_call::Slot;
use phalanx_ir::{DType, Program, ValueId};

/// Which part of a task a worker does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) worker: usize,
    pub(crate) workers: usize,
}

impl Share {
    /// This worker's part of `n` things.
    pub(crate) fn of(self, n: usize) -> Range<usize> {
        n * self.worker / self.workers..n * (self.worker + 1) / self.workers
    }

    /// All of the work for one worker, if it is too small to divide.
    pub(crate) fn alone(self, n: usize) -> Range<usize> {
        if self.worker == 0 { 0..n } else { 0..0 }
    }
}

/// A value as a task sees it.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) slot: Slot,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// How many elements of each dim are valid; the rest is padding.
    pub(crate) valid: Vec<usize>,
}

impl Var {
    /// What a rank holds of a value.
    pub(crate) fn of(program: &Program, value: ValueId, slot: Slot, rank: usize) -> Self {
        let (ty, mesh) = (program.ty(value), program.mesh());
        let (shape, valid) = (ty.local_shape(mesh), ty.local_valid(mesh, rank));
        Self { slot, dtype: ty.dtype, shape, valid }
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The last dim.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// All dims but the last, multiplied.
    pub(crate) fn rows(&self) -> usize {
        self.elements() / self.width().max(1)
    }

    /// A worker's rows: whole samples if they divide evenly, so that consecutive ops of different
    /// widths have the same borders and need no barrier between them.
    pub(crate) fn own_rows(&self, share: Share) -> Range<usize> {
        share.of(self.rows())
    }

    pub(crate) fn access(&self, elements: Range<usize>, write: bool) -> Access {
        let size = self.dtype.size();
        let bytes = elements.start * size..elements.end * size;
        Access { slot: self.slot, bytes, write }
    }

    pub(crate) fn reads(&self, elements: Range<usize>) -> Access {
        self.access(elements, false)
    }

    pub(crate) fn writes(&self, elements: Range<usize>) -> Access {
        self.access(elements, true)
    }

    pub(crate) fn reads_all(&self) -> Access {
        self.reads(0..self.elements())
    }

    /// Elements of these rows.
    pub(crate) fn of_rows(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width()..rows.end * self.width()
    }
}

/// Bytes of a value that one worker touches.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    slot: Slot,
    bytes: Range<usize>,
    write: bool,
}

impl Access {
    /// Bytes of an instruction's scratch memory in the workspace.
    pub(crate) fn scratch(offset: usize, bytes: Range<usize>, write: bool) -> Self {
        Self { slot: Slot::Workspace(offset), bytes, write }
    }

    /// Whether two workers must not make these accesses without a barrier between them.
    pub(crate) fn conflicts(&self, other: &Access) -> bool {
        if !(self.write || other.write) {
            return false;
        }
        let (a, b) = match (self.slot, other.slot) {
            (Slot::Workspace(a), Slot::Workspace(b)) => (a, b),
            (a, b) if a == b => (0, 0),
            _ => return false,
        };
        let (x, y) = (&self.bytes, &other.bytes);
        a + x.start < b + y.end && b + y.start < a + x.end
    }
}
