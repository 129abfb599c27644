//! The scratch memory that kernels need in a program's workspace: a pure function of the types.

use phalanx_call::Requirements;
use phalanx_comm::PlannedCollective;
use phalanx_ir::ops::LinearCrossEntropy;
use phalanx_ir::{DType, Instr, Mesh, Op, Program, TensorType, ValueId};

use crate::engine::{WINDOW, second_queue_is_asked_for};
use crate::folds::Folds;
use crate::fused_attention::FusedShape;
use crate::products::WORKSPACE;

/// What the CUDA engine needs, on any GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CudaRequirements {
    /// Whether attention runs by cuDNN, which has a workspace, where it can.
    pub attention_library: bool,
    /// Whether gradients of weights have a queue of their own, which has a workspace too.
    pub second_queue: bool,
}

impl CudaRequirements {
    /// With the libraries of this machine.
    pub fn here() -> Self {
        Self {
            attention_library: crate::without_attention_library().is_none(),
            second_queue: second_queue_is_asked_for(),
        }
    }
}

impl Requirements for CudaRequirements {
    fn own(&self, program: &Program, instr: &Instr) -> usize {
        let fused = FusedShape::of(program, instr).filter(|_| self.attention_library);
        match fused {
            Some(shape) => shape.scratch(),
            None => own(program, instr),
        }
    }

    fn merged(&self, program: &Program) -> Vec<(ValueId, ValueId)> {
        Folds::of(program).merged()
    }

    fn early(&self, program: &Program) -> Vec<(ValueId, usize)> {
        Folds::of(program).early()
    }

    /// The workspaces of products, which must be there before the arena is, because algorithms are chosen on it,
    /// and the window for batches that come ahead. The engine allocates them once for each rank.
    fn beside(&self, _program: &Program) -> usize {
        (1 + usize::from(self.second_queue)) * WORKSPACE + WINDOW
    }
}

/// Rows that a block takes at once in the gradient of a norm of narrow rows: a warp for each.
pub(crate) const NORM_WARPS: usize = 4;

/// The packs of 16 bytes that each lane of a warp has of a row, if the row is whole packs of all lanes.
pub(crate) fn lane_packs(width: usize, dtype: DType) -> Option<usize> {
    let lanes = 32 * 16 / dtype.size();
    width.is_multiple_of(lanes).then_some(width / lanes).filter(|packs| *packs > 0)
}

/// Whether a warp keeps a row of a norm's gradient in its registers.
pub(crate) fn fits_a_warp(packs: usize) -> bool {
    packs <= 3
}

/// In how many parts rows of so many elements are summed for a norm's gradient: a block of threads takes
/// each. So many fit on a large GPU at once.
pub(crate) fn norm_parts(rows: usize, width: usize, dtype: DType) -> usize {
    const PROCESSORS: usize = 132;
    match lane_packs(width, dtype) {
        Some(packs) if fits_a_warp(packs) => rows.div_ceil(NORM_WARPS).clamp(1, 4 * PROCESSORS),
        Some(packs) => rows.clamp(1, PROCESSORS * (32 / packs).max(1)),
        None => rows.clamp(1, PROCESSORS * (8192 / width.max(1)).clamp(1, 6)),
    }
}

/// In how many parts the elements behind each of some results are summed. As many threads as a large GPU
/// runs at once, and each with several elements; of a single result, a block of threads takes each part.
pub(crate) fn reduce_parts(results: usize, elements: usize) -> usize {
    if results == 1 {
        return elements.div_ceil(1 << 13).clamp(1, 1056);
    }
    let wanted = (1usize << 17).div_ceil(results.max(1));
    wanted.min(elements.div_ceil(8)).clamp(1, 65_535)
}

/// Bytes of logits that a chunk of the fused loss may have.
const LOGITS: usize = 2 << 30;

/// The rows of a chunk of the fused loss: more than the op asks for, because every chunk reads and
/// writes the weight's gradient once, and a large product is a fast one.
pub(crate) fn chunk_rows(
    loss: &LinearCrossEntropy,
    mesh: &Mesh,
    x: &TensorType,
    w: &TensorType,
) -> usize {
    let (row, rows) = (loss.vocab(&w.shape) * x.dtype.size(), rows(mesh, x));
    let most = loss.chunk.max(LOGITS / row.max(1)).min(rows).max(1);
    // Chunks of one size, and of whole tiles of products.
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(128).min(most)
}

/// Bytes of the logits of one chunk, in the element type of x.
pub(crate) fn chunk_bytes(
    loss: &LinearCrossEntropy,
    mesh: &Mesh,
    x: &TensorType,
    w: &TensorType,
) -> usize {
    let rows = chunk_rows(loss, mesh, x, w).min(rows(mesh, x));
    rows * loss.vocab(&w.shape) * x.dtype.size()
}

/// What a kernel needs besides operands, results and exchanged numbers.
fn own(program: &Program, instr: &Instr) -> usize {
    let (mesh, ty) = (program.mesh(), |i: usize| program.ty(instr.inputs[i]));
    let elements = |ty: &TensorType| ty.local_shape(mesh).iter().product::<usize>();
    match &instr.op {
        Op::RmsNormGrad(_) => norm_bytes(mesh, ty(0), 1),
        Op::LayerNormGrad(_) => norm_bytes(mesh, ty(0), 2),
        Op::LinearCrossEntropy(loss) => chunk_bytes(loss, mesh, ty(0), ty(1)),
        // It is computed with what it sums.
        Op::Reduce(_) if Folds::of(program).is_summed(instr.outputs[0]) => 0,
        Op::UnaryGrad(_) => match Folds::of(program).sum_of(instr) {
            None => 0,
            Some((_, sum)) => {
                let results = elements(program.ty(sum));
                let rows = elements(program.ty(instr.outputs[0])) / results.max(1);
                reduce_parts(results, rows) * results * size_of::<f64>()
            }
        },
        Op::Reduce(_) | Op::SumSquares(_) => {
            let results = elements(program.ty(instr.outputs[0]));
            let parts = reduce_parts(results, elements(ty(0)) / results.max(1));
            parts * results * size_of::<f64>()
        }
        // One number for each query.
        Op::AttentionGrad(_) | Op::AttendGrad(_) => {
            let q = ty(0).local_shape(mesh);
            q[0] * q[1] * q[2] * ty(0).dtype.accumulator().size()
        }
        Op::Collective(collective) => PlannedCollective::picked_bytes(program, instr, collective),
        _ => 0,
    }
}

/// Bytes of the parts' sums, for `vectors` gradients of the local width of `x`.
fn norm_bytes(mesh: &Mesh, x: &TensorType, vectors: usize) -> usize {
    let width = x.local_shape(mesh).last().copied().unwrap_or(0);
    norm_parts(rows(mesh, x), width, x.dtype) * vectors * width * x.dtype.accumulator().size()
}

fn rows(mesh: &Mesh, x: &TensorType) -> usize {
    let shape = x.local_shape(mesh);
    shape[..shape.len().saturating_sub(1)].iter().product()
}
