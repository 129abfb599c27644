//! A group of elementwise ops: its steps one after the other, each rounded to its own type.

use phalanx_ir::ops::{Fused, FusedArg};

use super::{Call, apply};
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn fused(op: &Fused, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let mut made: Vec<RefTensor> = Vec::new();
    for step in &op.steps {
        let operands: Vec<&RefTensor> = (step.args.iter())
            .map(|arg| match *arg {
                FusedArg::Input(i) => call.ins[i],
                FusedArg::Step(i) => &made[i],
            })
            .collect();
        let result = apply(&step.op, &operands)?.swap_remove(0);
        made.push(result);
    }
    Ok(op.results.iter().map(|&i| made[i].clone()).collect())
}
