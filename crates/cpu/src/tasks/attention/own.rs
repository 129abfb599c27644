//! Attention by own micro-kernels, where products are own ones.

use std::marker::PhantomData;

use half::bf16;
use phalanx_engine::EngineError;
use phalanx_ir::{DType, ops};

use super::{accesses, mask};
use crate::kernels::attention::{
    AttentionKernel, AttentionShape, BackwardTensors, ForwardTensors, OwnAttention,
};
use crate::kernels::gemm::Packing;
use crate::products::{MicroKernel, PanelElement};
use crate::tasks::{Access, Context, Operation, Share, Task, Tasks, Var, task};

/// An attention or its gradient, with its operands and results.
pub(super) struct Sizes {
    pub(super) attention: ops::Attention,
    pub(super) backward: bool,
    pub(super) shape: AttentionShape,
    pub(super) inputs: Vec<Var>,
    pub(super) outputs: Vec<Var>,
}

pub(super) fn compile(
    op: &Operation<'_>,
    unit: MicroKernel,
    of: Sizes,
) -> Result<Tasks, EngineError> {
    match of.inputs[0].dtype {
        DType::Bf16 => Ok(vec![task(Pairs::<bf16> { unit, of, types: PhantomData })]),
        DType::F32 => Ok(vec![task(Pairs::<f32> { unit, of, types: PhantomData })]),
        other => Err(op.unsupported(format!("it has no own products of {other}"))),
    }
}

struct Pairs<E> {
    unit: MicroKernel,
    of: Sizes,
    types: PhantomData<E>,
}

impl<E: PanelElement> Pairs<E> {
    fn kernel(&self, cx: Option<&Context<'_>>) -> OwnAttention<'static> {
        let of = &self.of;
        let dropout = cx.and_then(|cx| mask(&of.attention, &of.inputs, cx));
        let attention = AttentionKernel { shape: of.shape, dropout, gemm: &Packing };
        OwnAttention { attention, unit: self.unit }
    }

    fn words(&self) -> usize {
        match self.of.backward {
            false => self.kernel(None).forward_scratch::<E>(),
            true => self.kernel(None).backward_scratch::<E>(),
        }
    }
}

impl<E: PanelElement> Task for Pairs<E> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let of = &self.of;
        accesses((&of.attention, &of.shape), &of.inputs, &of.outputs, share)
    }

    fn run(&self, cx: &Context<'_>) {
        let Sizes { attention, backward, shape, inputs, outputs } = &self.of;
        let pairs = cx.share.of(shape.pairs());
        if pairs.is_empty() {
            return;
        }
        let kernel = self.kernel(Some(cx));
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(self.words()) };
        let [q, k, v] = [0, 1, 2].map(|i| cx.ptr::<E>(&inputs[i]).cast_const());
        if !backward {
            let (o, lse) = (cx.ptr(&outputs[0]), cx.ptr(&outputs[1]));
            let tensors = ForwardTensors::<E> { q, k, v, o, lse, before: None };
            // SAFETY: the tensors have the shape's sizes, and pairs of different workers are disjoint.
            return unsafe { kernel.forward(&tensors, pairs, scratch) };
        }
        let [dq, dk, dv] = [0, 1, 2].map(|i| cx.ptr::<E>(&outputs[i]));
        let tensors = BackwardTensors::<E> {
            q,
            k,
            v,
            o: cx.ptr(&inputs[3]),
            lse: cx.ptr(&inputs[4]),
            d_o: cx.ptr(&inputs[inputs.len() - 1 - usize::from(attention.drops())]),
            dq,
            dk,
            dv,
            before: None,
        };
        // SAFETY: as above.
        unsafe { kernel.backward(&tensors, pairs, scratch) };
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.words() * size_of::<u32>()
    }
}
