//! Rows as the tasks of one op see them: which of them are valid, which part of them this rank
//! holds, and the numbers to which they are reduced.

use std::ops::Range;

use phalanx_call::Requirements;
use phalanx_engine::EngineError;
use phalanx_ir::{Exchange, LocalPart};

use super::super::{Access, Context, Operation, Var};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::lowered::{self as kernel, Merge, Numbers};
use crate::requirements::CpuRequirements;

/// The ops.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    RmsNorm { eps: f64 },
    RmsNormGrad,
    LayerNorm { eps: f64 },
    LayerNormGrad,
    Softmax,
    SoftmaxGrad,
    CrossEntropy,
    CrossEntropyGrad,
}

impl Kind {
    /// Whether rows of padding must be excluded: rows are summed, or hold targets to look up.
    pub(super) fn bounds_rows(self) -> bool {
        self.vectors() > 0 || self.has_targets()
    }

    pub(super) fn has_targets(self) -> bool {
        matches!(self, Kind::CrossEntropy | Kind::CrossEntropyGrad)
    }

    /// How many results are sums over all rows.
    pub(super) fn vectors(self) -> usize {
        match self {
            Kind::RmsNormGrad => 1,
            Kind::LayerNormGrad => 2,
            _ => 0,
        }
    }

    /// Whether an operand is as wide as a row and shared by all of them.
    pub(super) fn is_vector(self, input: usize) -> bool {
        match self {
            Kind::RmsNorm { .. } | Kind::RmsNormGrad | Kind::LayerNormGrad => input == 1,
            Kind::LayerNorm { .. } => input > 0,
            _ => false,
        }
    }

    pub(super) fn merge(self) -> Merge {
        match self {
            Kind::LayerNorm { .. } => Merge::Moments,
            Kind::Softmax | Kind::CrossEntropy => Merge::Exponentials,
            _ => Merge::Add,
        }
    }
}

/// Where the numbers of all parts lie once they are gathered.
pub(super) struct Gathered {
    /// Offset in the workspace of all parts' numbers: `[parts, rows, numbers]`.
    pub(super) offset: usize,
    /// How many numbers a row has.
    pub(super) numbers: usize,
    /// This rank's part.
    pub(super) own: usize,
    /// How many valid elements of a row each part has.
    pub(super) counts: Vec<usize>,
}

impl Gathered {
    pub(super) fn new(op: &Operation<'_>, exchange: &Exchange) -> Result<Self, EngineError> {
        let missing = || op.unsupported("its scratch memory was not planned");
        let (mesh, ty) = (op.program.mesh(), op.program.ty(op.instr.inputs[0]));
        let last = |rank: usize| ty.local_valid(mesh, rank).last().copied().unwrap_or(1);
        let group = mesh.group(op.rank, &exchange.axes);
        Ok(Self {
            offset: op.scratch.ok_or_else(missing)?
                + CpuRequirements { products: *op.products }.exchange_offset(op.program, op.instr),
            numbers: exchange.numbers,
            own: mesh.shard(op.rank, &exchange.axes),
            counts: group.into_iter().map(last).collect(),
        })
    }
}

/// What the tasks of one op share.
pub(super) struct Shared {
    pub(super) kind: Kind,
    pub(super) inputs: Vec<Var>,
    pub(super) outputs: Vec<Var>,
    /// The valid rows.
    pub(super) runs: Vec<Range<usize>>,
    /// Valid elements of a row here, and on all ranks together.
    pub(super) width: usize,
    pub(super) total: usize,
    /// Which part of the row is here.
    pub(super) part: LocalPart,
    /// Offset of the parts' sums of gradients in the workspace.
    pub(super) sums: Option<usize>,
    pub(super) gathered: Option<Gathered>,
}

impl Shared {
    pub(super) fn rows(&self) -> usize {
        self.inputs[0].rows()
    }

    /// Elements of a value that belong to some rows.
    pub(super) fn of_rows(&self, var: &Var, rows: &Range<usize>) -> Range<usize> {
        let width = var.elements() / self.rows().max(1);
        rows.start * width..rows.end * width
    }

    pub(super) fn reads(&self, rows: &Range<usize>) -> Vec<Access> {
        let read = |(i, var): (usize, &Var)| match self.kind.is_vector(i) {
            _ if rows.is_empty() => var.reads(0..0),
            true => var.reads_all(),
            false => var.reads(self.of_rows(var, rows)),
        };
        self.inputs.iter().enumerate().map(read).collect()
    }

    /// Bytes of the numbers of some rows of a part, counted from the first part's start.
    pub(super) fn number_bytes(
        &self,
        part: usize,
        rows: &Range<usize>,
        size: usize,
    ) -> Range<usize> {
        let numbers = self.gathered.as_ref().map_or(0, |g| g.numbers) * size;
        let first = part * self.rows();
        (first + rows.start) * numbers..(first + rows.end) * numbers
    }

    /// The valid elements of a row of an operand.
    ///
    /// # Safety
    /// The task declared that it reads the row, and `T` is its element type.
    pub(super) unsafe fn row<'a, T>(
        &self,
        cx: &'a Context<'_>,
        input: usize,
        row: usize,
    ) -> &'a [T] {
        let var = &self.inputs[input];
        let start = if self.kind.is_vector(input) { 0 } else { row * var.width() };
        // SAFETY: the caller's.
        unsafe { cx.get(var, start..start + self.width) }
    }

    /// A row's number in an operand that has one for each.
    ///
    /// # Safety
    /// As for [`Self::row`].
    pub(super) unsafe fn number<T: Copy>(&self, cx: &Context<'_>, input: usize, row: usize) -> T {
        // SAFETY: the caller's.
        unsafe { cx.get::<T>(&self.inputs[input], row..row + 1)[0] }
    }

    /// The place of a row's target in this part, if it lies here.
    pub(super) fn held(&self, target: i32) -> Option<usize> {
        let local = usize::try_from(target).ok()?.checked_sub(self.part.start()?)?;
        (local < self.width).then_some(local)
    }

    /// The numbers of this rank's part of a row.
    ///
    /// # Safety
    /// The task declared that it reads the row, and `T` is the operand's element type.
    pub(super) unsafe fn measure<T: CpuElement>(
        &self,
        cx: &Context<'_>,
        row: usize,
    ) -> Numbers<T::Acc> {
        // SAFETY: the caller's; statistics have the accumulator type.
        unsafe {
            let x = self.row::<T>(cx, 0, row);
            match self.kind {
                Kind::RmsNorm { .. } => kernel::squares(x),
                Kind::LayerNorm { .. } => kernel::moments(x),
                Kind::Softmax => kernel::exponentials(x, None),
                Kind::CrossEntropy => kernel::exponentials(x, self.held(self.number(cx, 1, row))),
                Kind::SoftmaxGrad => kernel::product(x, self.row(cx, 1, row)),
                Kind::RmsNormGrad => {
                    kernel::rms_gradient([x, self.row(cx, 1, row), self.row(cx, 3, row)])
                }
                Kind::LayerNormGrad => kernel::layer_gradient(
                    [x, self.row(cx, 1, row), self.row(cx, 4, row)],
                    [self.number(cx, 2, row), self.number(cx, 3, row)],
                ),
                Kind::CrossEntropyGrad => [T::Acc::ZERO; kernel::MOST],
            }
        }
    }

    /// Reports a target that names no class; negative ones are ignored.
    pub(super) fn refuses(&self, cx: &Context<'_>, target: i32) -> bool {
        let bad = usize::try_from(target).is_ok_and(|t| t >= self.total);
        if bad {
            let classes = self.total;
            let message = format!("target {target} is not below the vocabulary size {classes}");
            cx.failure.report(message);
        }
        bad
    }
}
