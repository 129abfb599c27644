//! Matrix products of any arrangement, with what is added to them.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Binary, BinaryKind, FusedArg, FusedStep, Matmul, Spec, Unary, UnaryKind};
use phalanx_ir::{Op, ProductLoops, ValueId};

use super::elementwise::group;
use super::{Arg, Operation, Task, Tasks, Var};
use crate::products::{Adding, Biased, Operands, Product};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::Matmul(Matmul { spec, add, .. }) => {
            let addend = add.then(|| op.instr.inputs[2]);
            Ok(vec![product(op, &spec, op.instr.inputs[1], addend, op.instr.outputs[0])?])
        }
        // Each alone: the library is fast on both forms, and the bits are the same.
        Op::PackedMatmul(packed) => (0..op.instr.outputs.len())
            .map(|i| {
                let (b, out) = (op.instr.inputs[i + 1], op.instr.outputs[i]);
                product(op, &packed.spec, b, None, out)
            })
            .collect(),
        _ => Err(op.unsupported("it is not a product")),
    }
}

fn product(
    op: &mut Operation<'_>,
    spec: &Spec,
    b: ValueId,
    addend: Option<ValueId>,
    out: ValueId,
) -> Result<Task, EngineError> {
    let fold = op.folds.to(out);
    let bias = fold.and_then(|fold| fold.bias).map(|value| op.var(value));
    let addend = addend.or(fold.and_then(|fold| fold.addend)).map(|value| op.var(value));
    let (a, b, out) = (op.input(0), op.var(b), op.var(out));
    op.float(a.dtype)?;
    op.float(out.dtype)?;
    let loops = ProductLoops::new(spec, [&a.shape, &b.shape, &out.shape], &a.valid);
    let operands = Operands {
        a: a.place(),
        b: b.place(),
        addend: addend.as_ref().map(Var::place),
        out: out.place(),
        adding: Adding::If(out.slot),
    };
    let gelu = fold.and_then(|fold| fold.gelu).map(|(_, value)| op.var(value));
    let bias = match &bias {
        None => None,
        Some(bias) => Some(Biased {
            at: bias.place(),
            gelu: gelu.as_ref().map(Var::place),
            separately: with_bias(op, &out, bias, gelu.as_ref())?,
        }),
    };
    Ok(Task::Product(Box::new(Product::new(op, loops, [a.dtype, out.dtype], operands, bias)?)))
}

/// The addition of a bias, and the GELU of the sum, to a product that was computed without them.
fn with_bias(
    op: &Operation<'_>,
    out: &Var,
    bias: &Var,
    gelu: Option<&Var>,
) -> Result<super::KernelTask, EngineError> {
    let dtype = out.dtype;
    let args = vec![FusedArg::Input(0), FusedArg::Input(1)];
    let mut steps = vec![FusedStep { op: Binary { kind: BinaryKind::Add }.into(), args, dtype }];
    let args = vec![FusedArg::Step(0)];
    steps.extend(gelu.map(|_| FusedStep {
        op: Unary { kind: UnaryKind::Gelu }.into(),
        args,
        dtype,
    }));
    let outputs: Vec<&Var> = [out].into_iter().chain(gelu).collect();
    let (results, adds) = ((0..steps.len()).collect::<Vec<_>>(), vec![Arg::Int(0); steps.len()]);
    match group(op, &[out, bias], &steps, &results, (&outputs, adds))? {
        Task::Kernel(kernel) => Ok(kernel),
        _ => Err(op.unsupported("an addition is no kernel")),
    }
}
