//! Cross-entropy, alone and fused with its projection.

mod linear;
mod own;

use std::marker::PhantomData;

use phalanx_engine::EngineError;
use phalanx_ir::Op;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::cross_entropy as kernel;
use crate::kernels::matrix::{Mat, MatMut};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let gradient = match &op.instr.op {
        Op::LinearCrossEntropy(fused) => return linear::compile(op, *fused, inputs, outputs),
        Op::CrossEntropyGrad(_) => true,
        _ => false,
    };
    let made = for_float!(op, inputs[0].dtype, T => {
        task(Loss::<T> { gradient, inputs, outputs, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// The loss of rows of logits, or their gradient.
struct Loss<T> {
    gradient: bool,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Loss<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let logits = &self.inputs[0];
        let rows = logits.own_rows(share);
        let part = |var: &Var| {
            if var.shape == logits.shape { logits.of_rows(&rows) } else { rows.clone() }
        };
        let written = self.outputs.iter();
        let reads = self.inputs.iter().map(|v| v.reads(part(v)));
        reads.chain(written.map(|v| v.writes(part(v)))).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let logits = &self.inputs[0];
        let rows = logits.own_rows(cx.share);
        if rows.is_empty() {
            return;
        }
        let (count, width) = (rows.len(), logits.width());
        let elements = logits.of_rows(&rows);
        // SAFETY: the task declared these accesses; in place, only the mutable slice exists.
        unsafe {
            let targets = cx.get::<i32>(&self.inputs[1], rows.clone());
            if !self.valid(cx, targets) {
                return;
            }
            if !self.gradient {
                let x = Mat::rows_of(cx.get::<T>(logits, elements), count, width);
                let nll = cx.get_mut::<T::Acc>(&self.outputs[0], rows.clone());
                let lse = cx.get_mut::<T::Acc>(&self.outputs[1], rows);
                kernel::loss(x, targets, nll, lse);
                return;
            }
            let lse = cx.get::<T::Acc>(&self.inputs[2], rows.clone());
            let d_nll = cx.get::<T::Acc>(&self.inputs[3], rows.clone());
            let out = cx.get_mut::<T>(&self.outputs[0], elements.clone());
            let out = MatMut::rows_of(out, count, width);
            if cx.ptr::<T>(logits) == cx.ptr::<T>(&self.outputs[0]) {
                kernel::gradient_in_place(out, targets, lse, d_nll);
            } else {
                let x = Mat::rows_of(cx.get::<T>(logits, elements), count, width);
                kernel::gradient(x, targets, lse, d_nll, out);
            }
        }
    }
}

impl<T: CpuElement> Loss<T> {
    fn valid(&self, cx: &Context<'_>, targets: &[i32]) -> bool {
        valid(cx, targets, self.inputs[0].width())
    }
}

/// Whether every target names a class; reports the first that does not.
fn valid(cx: &Context<'_>, targets: &[i32], classes: usize) -> bool {
    match targets.iter().find(|&&t| usize::try_from(t).is_ok_and(|t| t >= classes)) {
        None => true,
        Some(t) => {
            cx.failure.report(format!("target {t} is not below the vocabulary size {classes}"));
            false
        }
    }
}
