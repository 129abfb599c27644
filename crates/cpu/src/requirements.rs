//! The scratch memory that kernels need in a program's workspace: a pure function of the types.

use phalanx_call::Requirements;
use phalanx_comm::PlannedCollective;
use phalanx_ir::ops::LinearCrossEntropy;
use phalanx_ir::{Instr, Mesh, Op, ProductLoops, Program, TensorType};

use crate::products::{ProductUnits, panel_bytes};

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
            _ => own(&self.products, program, instr),
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

/// The parts of the fused loss's scratch memory, in bytes, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LossRoom {
    /// Logits of a chunk, in the wider type, so that what follows is aligned without a gap.
    pub(crate) logits: usize,
    /// With the library, the transposed weight: otherwise one of the two products that read the weight in
    /// every chunk would read it across rows each time. With own products, the panels of the weight for the
    /// logits, those for the gradient of x, and those of a chunk for the gradient of the weight.
    pub(crate) operands: [usize; 3],
}

impl LossRoom {
    pub(crate) fn new(
        loss: &LinearCrossEntropy,
        products: &ProductUnits,
        mesh: &Mesh,
        [x, w]: [&TensorType; 2],
    ) -> Self {
        let shape = x.local_shape(mesh);
        let width = shape.last().copied().unwrap_or(1);
        let rows = shape[..shape.len().saturating_sub(1)].iter().product::<usize>().min(loss.chunk);
        // The vocabulary is not sharded, so all of it except padding is on this rank.
        let classes = loss.vocab(&w.shape);
        let accumulator = x.dtype.accumulator().size();
        if products.kernel(x.dtype, loss.out).is_none() {
            let turned = w.local_bytes(mesh);
            return Self { logits: rows * classes * accumulator, operands: [turned, 0, 0] };
        }
        let words = |elements: usize| elements.div_ceil(size_of::<u32>() / x.dtype.size());
        let gradient = if loss.transposed { width } else { classes };
        Self {
            logits: rows * logit_stride(classes) * accumulator,
            operands: [
                panel_bytes(words(width), classes),
                panel_bytes(words(classes), width),
                panel_bytes(words(rows), gradient),
            ],
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.logits + self.operands.iter().sum::<usize>()
    }
}

/// Elements from one row of logits to the next where own products read them: room for zeros that fill the
/// last words up, and not a power of two, which would put a column into a few sets of a cache.
pub(crate) fn logit_stride(classes: usize) -> usize {
    classes.next_multiple_of(16) + 16
}

/// What a kernel needs besides operands, results and exchanged numbers.
fn own(products: &ProductUnits, program: &Program, instr: &Instr) -> usize {
    let (mesh, ty) = (program.mesh(), |i: usize| program.ty(instr.inputs[i]));
    match &instr.op {
        Op::RmsNormGrad(_) => norm_parts(mesh, ty(0), 1),
        Op::LayerNormGrad(_) => norm_parts(mesh, ty(0), 2),
        Op::LinearCrossEntropy(loss) => LossRoom::new(loss, products, mesh, [ty(0), ty(1)]).bytes(),
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
