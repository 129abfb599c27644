//! Matrix products: by the library where its matrices can describe the operands, otherwise by a kernel
//! of our own.

mod choice;
mod plan;
mod shape;

use std::fmt;
use std::sync::Arc;

use phalanx_call::Slot;
use phalanx_engine::EngineError;
use phalanx_ir::{DType, ProductLoops, StridedLoop};

use crate::error::CudaError;
use crate::kernels::{KernelSpec, Source};
use crate::tasks::{Arg, KernelTask, Operation, Place, Run};

pub(crate) use choice::IssuedOn;
pub(crate) use plan::{Extra, ProductLibrary, ProductPlan, WORKSPACE};
pub(crate) use shape::ProductShape;

/// When a product is added to what its result holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Adding {
    Always,
    /// If the output in this slot is added to.
    If(Slot),
}

/// Where the operands of a product lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) a: Place,
    pub(crate) b: Place,
    /// Added to the product; it has the shape of the result.
    pub(crate) addend: Option<Place>,
    pub(crate) out: Place,
    pub(crate) adding: Adding,
}

/// A product that is ready to run.
pub(crate) struct Product {
    operands: Operands,
    loops: ProductLoops,
    /// Bytes of an element of the operands, and of the result.
    sizes: [usize; 2],
    how: How,
    /// The bias, and the library's way to add it, if it has one.
    bias: Option<(Biased, Option<Arc<ProductPlan>>)>,
}

enum How {
    /// The library, with the number of the outer loop that is its batch.
    Library(Arc<ProductPlan>, Option<usize>),
    Own(KernelTask),
}

/// One number for each column, which is added to a product.
pub(crate) struct Biased {
    pub(crate) at: Place,
    /// Where the GELU of the sum goes.
    pub(crate) gelu: Option<Place>,
    /// The addition and the GELU alone, after the product.
    pub(crate) separately: KernelTask,
}

/// Its sides: rows × columns × what is summed over.
impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProductLoops { rows, cols, inner, .. } = &self.loops;
        let own = if matches!(self.how, How::Own(_)) { " by a kernel of ours" } else { "" };
        write!(f, "product {}×{}×{}{own}", rows.size, cols.size, inner.size)
    }
}

impl Product {
    /// A product of operands and a result of these types. A bias comes with the kernel that adds it
    /// where the library cannot.
    pub(crate) fn new(
        op: &mut Operation<'_>,
        loops: ProductLoops,
        [of, out]: [DType; 2],
        operands: Operands,
        bias: Option<Biased>,
    ) -> Result<Self, EngineError> {
        let sizes = [of.size(), out.size()];
        let batch = (0..loops.outer.len()).max_by_key(|&i| loops.outer[i].size);
        let shape = ProductShape::of(&loops, batch.map(|i| loops.outer[i]), [of, out]);
        let plan = match shape {
            None => None,
            Some(shape) => op.engine.product(&shape)?,
        };
        let how = match plan {
            Some(plan) => How::Library(plan, batch),
            None => How::Own(own(op, &loops, [of, out], &operands)?),
        };
        // Columns of the result must be those of the library's matrix, in one product.
        let biased = shape.filter(|_| loops.outer.is_empty() && loops.sums.is_empty());
        let bias = match bias {
            None => None,
            Some(bias) => {
                let shape = biased.and_then(|shape| shape.with_bias(bias.gelu.is_some()));
                let plan = shape.map(|shape| op.engine.product(&shape)).transpose()?.flatten();
                Some((bias, plan))
            }
        };
        Ok(Self { operands, loops, sizes, how, bias })
    }

    /// The kernels that have to be compiled for it.
    pub(crate) fn own_kernels(&mut self) -> impl Iterator<Item = &mut KernelTask> {
        let own = match &mut self.how {
            How::Own(kernel) => Some(kernel),
            How::Library(..) => None,
        };
        own.into_iter().chain(self.bias.as_mut().map(|(bias, _)| &mut bias.separately))
    }

    /// Issues it.
    ///
    /// # Safety
    /// The operands are this run's to use.
    pub(crate) unsafe fn run(
        &self,
        run: &Run<'_>,
        library: &ProductLibrary,
    ) -> Result<(), CudaError> {
        let within = self.bias.as_ref().and_then(|(bias, plan)| Some((plan.as_ref()?, bias)));
        let within = within.map(|(plan, bias)| {
            (plan, Extra { bias: run.address(bias.at), gelu: bias.gelu.map(|at| run.address(at)) })
        });
        // The library reads a bias of this alignment.
        let within = within.filter(|(_, extra)| extra.bias.is_multiple_of(16));
        let (plan, batch) = match (&self.how, within) {
            (_, Some((plan, _))) => (plan, None),
            (How::Own(kernel), None) => {
                // SAFETY: the caller's; the arguments are made for the kernel.
                unsafe { kernel.run(run)? };
                return self.add_bias(run);
            }
            (How::Library(plan, batch), None) => (plan, *batch),
        };
        let extra = within.map(|(_, extra)| extra);
        let adds = match self.operands.adding {
            Adding::Always => true,
            Adding::If(slot) => run.adds(slot),
        };
        let around: Vec<StridedLoop> = (self.loops.outer.iter().enumerate())
            .filter(|(i, _)| Some(*i) != batch)
            .map(|(_, axis)| *axis)
            .collect();
        let place = IssuedOn { stream: run.stream, workspace: run.workspace };
        for outer in offsets(&around) {
            for (term, inner) in offsets(&self.loops.sums).enumerate() {
                let at: [usize; 3] = std::array::from_fn(|t| outer[t] + inner[t]);
                let Operands { a, b, addend, out, .. } = self.operands;
                let [size, out_size] = self.sizes;
                let out = run.address(out.add(at[2] * out_size));
                let old = match addend {
                    Some(addend) if term == 0 => Some(run.address(addend.add(at[2] * out_size))),
                    _ => (adds || term > 0).then_some(out),
                };
                let (a, b) = (run.address(a.add(at[0] * size)), run.address(b.add(at[1] * size)));
                // SAFETY: the plan was made for matrices of these strides, which lie in operands
                // that the caller gives.
                unsafe { plan.run(library, &place, [a, b], old, out, extra)? };
            }
        }
        match within {
            Some(_) => Ok(()),
            None => self.add_bias(run),
        }
    }

    /// Adds the bias to the finished product.
    fn add_bias(&self, run: &Run<'_>) -> Result<(), CudaError> {
        match &self.bias {
            // SAFETY: the kernel was made for the result and the bias, which this run may use.
            Some((bias, _)) => unsafe { bias.separately.run(run) },
            None => Ok(()),
        }
    }
}

/// Where the steps of nested loops begin in a, b and the result.
fn offsets(loops: &[StridedLoop]) -> impl Iterator<Item = [usize; 3]> {
    let total: usize = loops.iter().map(|axis| axis.size).product();
    let loops = loops.to_vec();
    (0..total).map(move |index| {
        let (mut rest, mut at) = (index, [0; 3]);
        for axis in loops.iter().rev() {
            for (at, stride) in at.iter_mut().zip(axis.strides) {
                *at += rest % axis.size * stride;
            }
            rest /= axis.size;
        }
        at
    })
}

/// The most loops around a product, and of sums, that the own kernel takes.
const MOST_LOOPS: usize = 6;

fn own(
    op: &Operation<'_>,
    loops: &ProductLoops,
    [of, out]: [DType; 2],
    operands: &Operands,
) -> Result<KernelTask, EngineError> {
    let ProductLoops { rows, cols, inner, outer, sums } = loops;
    if outer.len().max(sums.len()) > MOST_LOOPS {
        return Err(op.unsupported("it has too many dims that cannot be merged"));
    }
    let sizes = [rows.size, cols.size, inner.size];
    let strides = [
        rows.strides[0],
        inner.strides[0],
        inner.strides[1],
        cols.strides[1],
        rows.strides[2],
        cols.strides[2],
    ];
    let mut words: Vec<i64> = sizes.iter().chain(&strides).map(|&n| n as i64).collect();
    let of_loops = |loops: &[StridedLoop], tensors: usize, words: &mut Vec<i64>| {
        let steps: usize = loops.iter().map(|axis| axis.size).product();
        words.extend([loops.len() as i64, steps as i64]);
        let mut push = |of: &dyn Fn(&StridedLoop) -> usize| {
            words.extend((0..MOST_LOOPS).map(|i| loops.get(i).map_or(1, |axis| of(axis) as i64)));
        };
        push(&|axis| axis.size);
        (0..tensors).for_each(|t| push(&|axis| axis.strides[t]));
        steps
    };
    let batch = of_loops(outer, 3, &mut words);
    of_loops(sums, 2, &mut words);
    let Operands { a, b, addend, out: target, adding } = *operands;
    let kernel = KernelSpec::of(Source::Product, "einsum", &[op.float(of)?, op.float(out)?]);
    let args = vec![
        Arg::Pointer(a),
        Arg::Pointer(b),
        addend.map_or(Arg::Null, Arg::Pointer),
        Arg::Pointer(target),
        Arg::Words(words),
        match adding {
            Adding::Always => Arg::Int(1),
            Adding::If(slot) => Arg::Adds(slot),
        },
    ];
    let tiles = rows.size.div_ceil(TILE).max(1) * cols.size.div_ceil(TILE).max(1);
    let blocks = [tiles as u32, batch.clamp(1, 65_535) as u32, 1];
    Ok(KernelTask::new(kernel, blocks, (TILE * TILE) as u32, args))
}

/// The side of a tile of the own kernel.
const TILE: usize = 16;
