//! One step of an attention whose keys come in parts: workers divide the pairs of a sequence and a
//! key head, as in an attention over all keys.

use std::marker::PhantomData;

use half::bf16;
use phalanx_engine::EngineError;
use phalanx_ir::{DType, Op, ops};

use super::attention::{accesses, mask, shape};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::attention::{
    AttentionKernel, AttentionShape, BackwardTensors, ForwardTensors, OwnAttention,
};
use crate::kernels::gemm::Packing;
use crate::products::{MicroKernel, PanelElement};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (attention, goes_on, backward) = match op.instr.op {
        Op::Attend(a) => (a.of, a.goes_on, false),
        Op::AttendGrad(g) => (g.of, g.goes_on, true),
        _ => return Err(op.unsupported("it is not a step of an attention")),
    };
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let shape = shape(op, &attention, &inputs)?;
    let dtype = inputs[0].dtype;
    let of = Operands { attention, goes_on, backward, shape, inputs, outputs };
    if let Some(unit) = op.products.kernel(dtype, DType::F32) {
        return match dtype {
            DType::Bf16 => Ok(vec![task(OwnStep::<bf16> { unit, of, types: PhantomData })]),
            DType::F32 => Ok(vec![task(OwnStep::<f32> { unit, of, types: PhantomData })]),
            other => Err(op.unsupported(format!("it has no own products of {other}"))),
        };
    }
    let made = for_float!(op, dtype, T => task(Step::<T> { of, types: PhantomData }))?;
    Ok(vec![made])
}

struct Operands {
    attention: ops::Attention,
    goes_on: bool,
    backward: bool,
    shape: AttentionShape,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
}

impl Operands {
    fn forward<T: CpuElement>(&self, cx: &Context<'_>) -> ForwardTensors<T, T::Acc> {
        let input = |i: usize| &self.inputs[i];
        ForwardTensors {
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
        }
    }

    fn backward<T: CpuElement>(&self, cx: &Context<'_>) -> BackwardTensors<T, T::Acc> {
        let input = |i: usize| &self.inputs[i];
        let so_far = |i: usize| -> *const T::Acc {
            let gradient: *mut T::Acc = cx.ptr(input(i));
            gradient.cast_const()
        };
        BackwardTensors {
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
        }
    }

    fn kernel(&self, cx: Option<&Context<'_>>) -> AttentionKernel<'static, Packing> {
        let dropout = cx.and_then(|cx| mask(&self.attention, &self.inputs, cx));
        AttentionKernel { shape: self.shape, dropout, gemm: &Packing }
    }

    fn accesses(&self, share: Share) -> Vec<Access> {
        accesses((&self.attention, &self.shape), &self.inputs, &self.outputs, share)
    }
}

/// A step whose products are the library's.
struct Step<T> {
    of: Operands,
    types: PhantomData<T>,
}

impl<T: CpuElement> Step<T> {
    fn elements(&self) -> usize {
        match self.of.backward {
            false => self.of.shape.forward_scratch(),
            true => self.of.shape.backward_scratch(),
        }
    }
}

impl<T: CpuElement> Task for Step<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.of.accesses(share)
    }

    fn run(&self, cx: &Context<'_>) {
        let pairs = cx.share.of(self.of.shape.pairs());
        if pairs.is_empty() {
            return;
        }
        let kernel = self.of.kernel(Some(cx));
        // SAFETY: no other slice of it is in use; the tensors have the shape's sizes, and pairs of different
        // workers are disjoint.
        unsafe {
            let scratch = cx.scratch::<T::Acc>(self.elements());
            match self.of.backward {
                false => kernel.forward(&self.of.forward::<T>(cx), pairs, scratch),
                true => kernel.backward(&self.of.backward::<T>(cx), pairs, scratch),
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.elements() * size_of::<T::Acc>()
    }
}

/// A step whose products are own ones.
struct OwnStep<E> {
    unit: MicroKernel,
    of: Operands,
    types: PhantomData<E>,
}

impl<E: PanelElement> OwnStep<E> {
    fn kernel(&self, cx: Option<&Context<'_>>) -> OwnAttention<'static> {
        OwnAttention { attention: self.of.kernel(cx), unit: self.unit }
    }

    fn words(&self) -> usize {
        match self.of.backward {
            false => self.kernel(None).forward_scratch::<E>(),
            true => self.kernel(None).backward_scratch::<E>(),
        }
    }
}

impl<E: PanelElement> Task for OwnStep<E> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.of.accesses(share)
    }

    fn run(&self, cx: &Context<'_>) {
        let pairs = cx.share.of(self.of.shape.pairs());
        if pairs.is_empty() {
            return;
        }
        let kernel = self.kernel(Some(cx));
        // SAFETY: as for the library's.
        unsafe {
            let scratch = cx.scratch::<u32>(self.words());
            match self.of.backward {
                false => kernel.forward(&self.of.forward::<E>(cx), pairs, scratch),
                true => kernel.backward(&self.of.backward::<E>(cx), pairs, scratch),
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.words() * size_of::<u32>()
    }
}
