//! Matrix products of any arrangement.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Matmul, Spec};
use phalanx_ir::{Op, ProductLoops};

use super::{Operation, Task, Tasks, Var};
use crate::products::{Adding, Operands, Product};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::Matmul(Matmul { spec, add, .. }) => {
            let addend = add.then(|| op.input(2));
            let (b, out) = (op.input(1), op.output(0));
            Ok(vec![product(op, &spec, &b, addend.as_ref(), &out)?])
        }
        // Each alone: the library is fast on both forms, and the bits are the same.
        Op::PackedMatmul(packed) => (0..op.instr.outputs.len())
            .map(|i| {
                let (b, out) = (op.input(i + 1), op.output(i));
                product(op, &packed.spec, &b, None, &out)
            })
            .collect(),
        _ => Err(op.unsupported("it is not a product")),
    }
}

fn product(
    op: &mut Operation<'_>,
    spec: &Spec,
    b: &Var,
    addend: Option<&Var>,
    out: &Var,
) -> Result<Task, EngineError> {
    let a = op.input(0);
    op.float(a.dtype)?;
    op.float(out.dtype)?;
    let loops = ProductLoops::new(spec, [&a.shape, &b.shape, &out.shape], &a.valid);
    let operands = Operands {
        a: a.place(),
        b: b.place(),
        addend: addend.map(Var::place),
        out: out.place(),
        adding: Adding::If(out.slot),
    };
    Ok(Task::Product(Box::new(Product::new(op, loops, [a.dtype, out.dtype], operands)?)))
}
