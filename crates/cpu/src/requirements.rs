//! The scratch memory that kernels need in a program's workspace: a pure function of the types.

use phalanx_call::Requirements;
use phalanx_comm::PlannedCollective;
use phalanx_ir::ops::LinearCrossEntropy;
use phalanx_ir::{Instr, Mesh, Op, ProductLoops, Program, TensorType};

use crate::products::ProductUnits;

/// What the CPU engine needs, on any number of threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuRequirements {
    /// What own products are computed with.
    pub products: ProductUnits,
}

impl Requirements for CpuRequirements {
    fn own(&self, program: &Program, instr: &Instr) -> usize {
        match &instr.op {
            Op::Matmul(_) | Op::PackedMatmul(_) => panels(&self.products, program, instr),
            _ => own(program, instr),
        }
    }
}

/// Bytes of the panels of a product's right operands, if it is an own one.
pub(crate) fn panels(products: &ProductUnits, program: &Program, instr: &Instr) -> usize {
    let (mesh, ty) = (program.mesh(), |value| program.ty(value));
    let (spec, addends) = match &instr.op {
        Op::Matmul(matmul) => (&matmul.spec, usize::from(matmul.add)),
        Op::PackedMatmul(packed) => (&packed.spec, 0),
        _ => return 0,
    };
    let a = ty(instr.inputs[0]);
    let others = instr.inputs[1..instr.inputs.len() - addends].iter().zip(&instr.outputs);
    let bytes = others.map(|(&b, &out)| {
        let shapes = [a, ty(b), ty(out)].map(|ty| ty.local_shape(mesh));
        let loops = ProductLoops::new(spec, [&shapes[0], &shapes[1], &shapes[2]], &shapes[0]);
        products.panels(&loops, [a.dtype, ty(out).dtype])
    });
    bytes.sum()
}

/// The number of parts in which sums over rows are computed, for any number of threads: so the
/// gradient of a gain has the same bits with any number of threads.
pub(crate) const NORM_PARTS: usize = 8;

/// Bytes of the logits of one chunk, which come first in the scratch memory of the fused loss. They
/// have the wider type, so what follows is aligned without a gap.
pub(crate) fn chunk_bytes(
    loss: &LinearCrossEntropy,
    mesh: &Mesh,
    x: &TensorType,
    w: &TensorType,
) -> usize {
    let shape = x.local_shape(mesh);
    let rows: usize = shape[..shape.len().saturating_sub(1)].iter().product();
    // The vocabulary is not sharded, so all of it except padding is on this rank.
    let logits = loss.chunk.min(rows) * loss.vocab(&w.shape);
    logits * x.dtype.accumulator().size()
}

/// What a kernel needs besides operands, results and exchanged numbers.
fn own(program: &Program, instr: &Instr) -> usize {
    let (mesh, ty) = (program.mesh(), |i: usize| program.ty(instr.inputs[i]));
    match &instr.op {
        Op::RmsNormGrad(_) => norm_parts(mesh, ty(0), 1),
        Op::LayerNormGrad(_) => norm_parts(mesh, ty(0), 2),
        // The transposed weight follows the logits: otherwise one of the two products that read the
        // weight in every chunk would read it across rows each time.
        Op::LinearCrossEntropy(loss) => {
            chunk_bytes(loss, mesh, ty(0), ty(1)) + ty(1).local_bytes(mesh)
        }
        Op::Collective(collective) => PlannedCollective::picked_bytes(program, instr, collective),
        _ => 0,
    }
}

/// Bytes of the parts' sums, for `vectors` gradients of the local width of `x`.
fn norm_parts(mesh: &Mesh, x: &TensorType, vectors: usize) -> usize {
    let width = x.local_shape(mesh).last().copied().unwrap_or(0);
    NORM_PARTS * vectors * width * x.dtype.accumulator().size()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use phalanx_ir::text;

    #[test]
    fn own_scratch_comes_before_what_is_exchanged() {
        let program = text::parse(
            "mesh dp=2 tp=4
program t {
  x: data bf16[6,4,16]{0:dp 2:tp}
  gain: param bf16[16]{0:tp}
  bias: param bf16[16]{0:tp}
  whole: param bf16[16]
  w: param bf16[16,10]
  y: data bf16[6,4,16]{0:dp}
  targets: data i32[6,4]{0:dp}
  dnll: scalar f32[]
  %1, %2 = rms_norm(x, gain, eps=0.1) : bf16[6,4,16]{0:dp 2:tp}, f32[6,4]{0:dp}
  %3, %4 = rms_norm_grad(x, gain, %2, x, out=bf16) : bf16[6,4,16]{0:dp 2:tp}, bf16[16]{0:tp P:dp}
  %5, %6, %7 = layer_norm(y, whole, whole, eps=0.1) : bf16[6,4,16]{0:dp}, f32[6,4]{0:dp}, f32[6,4]{0:dp}
  %8, %9, %10 = layer_norm_grad(y, whole, %6, %7, y, out=bf16) : bf16[6,4,16]{0:dp}, bf16[16]{P:dp}, bf16[16]{P:dp}
  %11, %12, %13 = linear_cross_entropy(y, w, targets, dnll, transposed=false, chunk=5, out=f32) : f32[6,4]{0:dp}, bf16[6,4,16]{0:dp}, f32[16,10]{P:dp}
}
",
        )
        .unwrap();
        phalanx_ir::verify(&program).unwrap();
        let found: Vec<usize> = (program.instrs().iter())
            .map(|instr| CpuRequirements::default().scratch(&program, instr))
            .collect();
        // One f32 for each of 12 rows on each of 4 ranks; parts of a gain are 4 columns wide where
        // it is sharded; a chunk of logits, and the weight once more.
        let exchanged = 4 * 12 * 4;
        let expected = [
            exchanged,
            NORM_PARTS * 4 * 4 + exchanged,
            0,
            NORM_PARTS * 2 * 16 * 4,
            5 * 10 * 4 + 16 * 10 * 2,
        ];
        assert_eq!(found, expected);
    }
}
