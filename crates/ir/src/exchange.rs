//! What an op communicates inside, when a factor that it reduces is sharded.
//!
//! Norms, softmax and cross-entropy first reduce each row to a few numbers. If the row is sharded,
//! every rank computes the numbers of its own part, all ranks of the row gather them, and each
//! merges them in the order of the group: so all have the same bits. That one all-gather is known
//! from the types alone, before any engine exists.

use crate::dtype::DType;
use crate::mesh::{Axis, Mesh};
use crate::ops::OpDef;
use crate::program::{Instr, Program, ValueId};
use crate::rule::FactorKind;
use crate::text;
use crate::types::TensorType;

/// The all-gather inside an instruction: each rank sends `rows · numbers` elements and receives
/// those of every rank along the axes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exchange {
    /// The axes that shard the reduced factor, major to minor.
    pub axes: Vec<Axis>,
    /// How many rows a rank holds.
    pub rows: usize,
    /// How many numbers it sends for each row.
    pub numbers: usize,
    /// Their element type, the accumulator of the operand's.
    pub dtype: DType,
}

impl Exchange {
    /// The exchange that an instruction makes, if its types need one.
    ///
    /// # Panics
    /// If the types of the instruction do not fit its rule: such a program is not verified.
    pub fn of(program: &Program, instr: &Instr) -> Option<Self> {
        let numbers = instr.op.exchanges();
        if numbers == 0 {
            return None;
        }
        let types =
            |ids: &[ValueId]| -> Vec<&TensorType> { ids.iter().map(|&v| program.ty(v)).collect() };
        let (ins, outs) = (types(&instr.inputs), types(&instr.outputs));
        let (rule, mesh) = (program.rule(instr), program.mesh());
        let assignment = rule.check(mesh, &ins, &outs).unwrap_or_else(|error| {
            panic!("the types of `{}` do not fit: {error:?}", text::instr(program, instr))
        });
        let (_, sharding) = (rule.factors.iter().zip(assignment))
            .find(|(f, s)| f.kind == FactorKind::Lowered && mesh.count(&s.axes) > 1)?;
        let shape = ins[0].local_shape(mesh);
        let rows = shape[..shape.len().saturating_sub(1)].iter().product();
        Some(Self { axes: sharding.axes, rows, numbers, dtype: ins[0].dtype.accumulator() })
    }

    /// Elements that each rank sends.
    pub fn elements(&self) -> usize {
        self.rows * self.numbers
    }

    /// Bytes of the numbers of all ranks, in their order.
    pub fn bytes(&self, mesh: &Mesh) -> usize {
        mesh.count(&self.axes) * self.elements() * self.dtype.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sharded_row_is_reduced_by_one_gather() {
        let program = text::parse(
            "mesh dp=2 tp=4
program t {
  x: data bf16[6,4,16]{0:dp 2:tp}
  y: data bf16[6,4,16]{0:dp}
  gain: param bf16[16]{0:tp}
  targets: data i32[6,4]{0:dp}
  %1, %2 = rms_norm(x, gain, eps=0.1) : bf16[6,4,16]{0:dp 2:tp}, f32[6,4]{0:dp}
  %3, %4 = rms_norm_grad(x, gain, %2, x, out=bf16) : bf16[6,4,16]{0:dp 2:tp}, bf16[16]{0:tp P:dp}
  %5, %6 = cross_entropy(x, targets) : f32[6,4]{0:dp}, f32[6,4]{0:dp}
  %7 = softmax(y) : bf16[6,4,16]{0:dp}
}
",
        )
        .unwrap();
        crate::verify(&program).unwrap();
        let found: Vec<Option<(usize, usize)>> = (program.instrs().iter())
            .map(|i| Exchange::of(&program, i).map(|e| (e.elements(), e.bytes(program.mesh()))))
            .collect();
        let bytes = |numbers: usize| Some((12 * numbers, 4 * 12 * numbers * 4));
        assert_eq!(found, [bytes(1), bytes(1), bytes(3), None]);
    }
}
