//! One step of an attention whose keys come in parts: workers divide the pairs of a sequence and a
//! key head, as in an attention over all keys.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::{Op, ops};

use super::attention::{accesses, mask, shape};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::attention::{AttentionKernel, AttentionShape, BackwardTensors, ForwardTensors};
use crate::kernels::gemm::Packing;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (attention, goes_on, backward) = match op.instr.op {
        Op::Attend(a) => (a.of, a.goes_on, false),
        Op::AttendGrad(g) => (g.of, g.goes_on, true),
        _ => return Err(op.unsupported("it is not a step of an attention")),
    };
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let shape = shape(op, &attention, &inputs)?;
    let made = for_float!(op, inputs[0].dtype, T => {
        task(Step::<T> {
            attention, goes_on, backward, shape, inputs, outputs, types: PhantomData,
        })
    })?;
    Ok(vec![made])
}

struct Step<T> {
    attention: ops::Attention,
    goes_on: bool,
    backward: bool,
    shape: AttentionShape,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Step<T> {
    fn forward(&self, cx: &Context<'_>, pairs: Range<usize>) {
        let input = |i: usize| &self.inputs[i];
        let tensors = ForwardTensors::<T, T::Acc> {
            q: cx.ptr(input(0)),
            k: cx.ptr(input(1)),
            v: cx.ptr(input(2)),
            o: cx.ptr(&self.outputs[0]),
            lse: cx.ptr(&self.outputs[1]),
            before: self.goes_on.then(|| {
                let o: *mut T::Acc = cx.ptr(input(3));
                let lse: *mut T::Acc = cx.ptr(input(4));
                (o.cast_const(), lse.cast_const())
            }),
        };
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(self.shape.forward_scratch()) };
        // SAFETY: the tensors have the shape's sizes, and pairs of different workers are disjoint.
        unsafe { self.kernel(cx).forward(&tensors, pairs, scratch) };
    }

    fn gradient(&self, cx: &Context<'_>, pairs: Range<usize>) {
        let input = |i: usize| &self.inputs[i];
        let so_far = |i: usize| -> *const T::Acc {
            let gradient: *mut T::Acc = cx.ptr(input(i));
            gradient.cast_const()
        };
        let tensors = BackwardTensors::<T, T::Acc> {
            q: cx.ptr(input(0)),
            k: cx.ptr(input(1)),
            v: cx.ptr(input(2)),
            o: cx.ptr(input(3)),
            lse: cx.ptr(input(4)),
            d_o: cx.ptr(input(5)),
            dq: cx.ptr(&self.outputs[0]),
            dk: cx.ptr(&self.outputs[1]),
            dv: cx.ptr(&self.outputs[2]),
            before: self.goes_on.then(|| [6, 7, 8].map(so_far)),
        };
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(self.shape.backward_scratch()) };
        // SAFETY: the tensors have the shape's sizes, and pairs of different workers are disjoint.
        unsafe { self.kernel(cx).backward(&tensors, pairs, scratch) };
    }

    fn kernel(&self, cx: &Context<'_>) -> AttentionKernel<'static, Packing> {
        let dropout = mask(&self.attention, &self.inputs, cx);
        AttentionKernel { shape: self.shape, dropout, gemm: &Packing }
    }
}

impl<T: CpuElement> Task for Step<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        accesses((&self.attention, &self.shape), &self.inputs, &self.outputs, share)
    }

    fn run(&self, cx: &Context<'_>) {
        let pairs = cx.share.of(self.shape.pairs());
        match (pairs.is_empty(), self.backward) {
            (true, _) => {}
            (false, true) => self.gradient(cx, pairs),
            (false, false) => self.forward(cx, pairs),
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.shape.forward_scratch().max(self.shape.backward_scratch()) * size_of::<T::Acc>()
    }
}
