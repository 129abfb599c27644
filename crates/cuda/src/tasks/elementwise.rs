//! Elementwise ops, alone or in groups: one generated kernel.

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::{FusedArg, FusedStep};

use super::{Arg, Operation, Tasks, Var};
use crate::generate::{Group, Repeat};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let (steps, results) = match &op.instr.op {
        Op::Fused(fused) => (fused.steps.clone(), fused.results.clone()),
        single => {
            let args = (0..inputs.len()).map(FusedArg::Input).collect();
            (vec![FusedStep { op: single.clone(), args, dtype: outputs[0].dtype }], vec![0])
        }
    };
    let full = outputs[0].elements();
    if full == 0 {
        return Ok(vec![]);
    }
    let repeat = |var: &Var| match var.elements() {
        n if n == full => Repeat::Full,
        1 => Repeat::Single,
        _ => Repeat::Periodic,
    };
    let given: Vec<_> = inputs.iter().map(|var| (var.dtype, repeat(var))).collect();
    let group = Group { inputs: &given, steps: &steps, results: &results };
    let kernel = group.kernel().map_err(|why| op.unsupported(why))?;
    let mut args = Vec::new();
    for (var, (_, repeat)) in inputs.iter().zip(&given) {
        args.push(var.arg());
        if *repeat == Repeat::Periodic {
            args.push(Arg::Int(var.elements() as i64));
        }
    }
    for var in &outputs {
        args.extend([var.arg(), var.adds()]);
    }
    args.push(Arg::Int(full as i64));
    if args.len() > 32 {
        return Err(op.unsupported(format!("a group of {} operands is too large", inputs.len())));
    }
    // A thread takes two elements at least.
    Ok(vec![op.over(full.div_ceil(2), kernel, args)])
}
