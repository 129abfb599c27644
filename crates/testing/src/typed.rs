//! The same op in another element type.

use phalanx_ir::ops::{AttentionKind, Narrow};
use phalanx_ir::{DType, Op};
use phalanx_reference::RefTensor;

/// An op on f64 operands as it is when programs compute in another float type: statistics, states and masters
/// keep the accumulator's.
///
/// # Panics
/// If operands do not have as many values as their shapes say.
pub fn in_type(op: &Op, given: &[RefTensor], dtype: DType) -> (Op, Vec<RefTensor>) {
    let op = with_type(op, dtype);
    let operands = given.iter().enumerate().map(|(i, t)| {
        let own = operand_type(&op, i, t, dtype);
        RefTensor::new(own, t.shape(), &t.values()).expect("a tensor has its values")
    });
    let operands = operands.collect();
    (op, operands)
}

/// The op with results of another float type.
fn with_type(op: &Op, dtype: DType) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::Matmul(m) => m.out = dtype,
        Op::PackedMatmul(m) => m.out = dtype,
        Op::Reduce(r) => r.out = dtype,
        Op::Fill(f) => f.dtype = dtype,
        Op::Fused(f) => f.steps.iter_mut().for_each(|step| step.dtype = dtype),
        Op::RmsNormGrad(n) => n.out = dtype,
        Op::LayerNormGrad(n) => n.out = dtype,
        Op::EmbeddingGrad(e) => e.out = dtype,
        Op::Conv2dWeightGrad(c) => c.out = dtype,
        Op::LinearCrossEntropy(l) => l.out = dtype,
        Op::Histogram(h) => h.out = dtype,
        Op::GroupedMatmulGrad(g) => g.out = dtype,
        Op::AdamW(a) if dtype.size() == 2 => narrow(&mut a.narrow, dtype),
        Op::Sgd(s) if dtype.size() == 2 => narrow(&mut s.narrow, dtype),
        Op::Lion(l) if dtype.size() == 2 => narrow(&mut l.narrow, dtype),
        _ => {}
    }
    op
}

/// Masters get copies, unless their upper halves are the weights.
fn narrow(own: &mut Narrow, dtype: DType) {
    if *own != Narrow::Split {
        *own = Narrow::Copy(dtype);
    }
}

/// The element type that an operand of this type has when the op computes in another one.
fn operand_type(op: &Op, index: usize, t: &RefTensor, dtype: DType) -> DType {
    let statistics = match op {
        Op::RmsNormGrad(_) => index == 2,
        Op::LayerNormGrad(_) => index == 2 || index == 3,
        Op::CrossEntropyGrad(_) => index >= 2,
        Op::LinearCrossEntropy(_) => index == 3,
        Op::Attend(_) => index >= 3,
        Op::AttendGrad(_) => index == 4 || index >= 6,
        Op::AttentionGrad(g) => index == 4 && g.of.kind == AttentionKind::Flash,
        Op::AdamW(_) | Op::Sgd(_) | Op::Lion(_) | Op::LambDirection(_) => index != 1,
        Op::MemberScale(_) => index == 1,
        Op::FactorDirection(_) => index >= 1,
        Op::KeyProduct(_) | Op::Dispatch(_) | Op::Combine(_) => index == 2,
        _ => false,
    };
    match t.dtype() {
        DType::F64 if statistics => dtype.accumulator(),
        DType::F64 => dtype,
        other => other,
    }
}
