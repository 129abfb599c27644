//! Attention: workers divide the pairs of a sequence and a key head.

mod own;

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::{self, AttentionKind};

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::attention::{
    AttentionKernel, AttentionPart, AttentionShape, BackwardTensors, ForwardTensors,
};
use crate::kernels::dropout::{Mask, dropout, dropout_of_sample};
use crate::kernels::gemm::Packing;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (attention, backward) = match op.instr.op {
        Op::Attention(a) => (a, false),
        Op::AttentionGrad(g) => (g.of, true),
        _ => return Err(op.unsupported("it is not an attention")),
    };
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let shape = shape(op, &attention, &inputs)?;
    let types = [inputs[0].dtype, outputs[0].dtype];
    if let (Some(unit), AttentionKind::Flash) =
        (op.products.kernel(types[0], types[1]), attention.kind)
    {
        return own::compile(op, unit, own::Sizes { attention, backward, shape, inputs, outputs });
    }
    let made = for_float!(op, inputs[0].dtype, T => {
        task(Pairs::<T> { attention, backward, shape, inputs, outputs, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// The sizes of an attention with these operands, of which queries and keys come first.
pub(super) fn shape(
    op: &Operation<'_>,
    attention: &ops::Attention,
    inputs: &[Var],
) -> Result<AttentionShape, EngineError> {
    let (q, k) = (&inputs[0].shape, &inputs[1].shape);
    if inputs[0].valid[3] < q[3] {
        return Err(
            op.unsupported("the elements of a head cannot be padded; pad the number of heads")
        );
    }
    Ok(AttentionShape {
        batch: q[0],
        queries: q[1],
        keys: k[1],
        kv_heads: k[2],
        group: q[2] / k[2].max(1),
        dim: q[3],
        causal: attention.causal,
        scale: 1.0 / (q[3] as f64).sqrt(),
        held: held(op, &inputs[0], &inputs[1]),
    })
}

/// Which part of the attention this rank holds, unless it is all of it.
fn held(op: &Operation<'_>, q: &Var, k: &Var) -> Option<AttentionPart> {
    let (value, key) = (op.instr.inputs[0], op.instr.inputs[1]);
    let [batch, positions, heads] = [0, 1, 2].map(|dim| op.part(value, dim));
    let key_positions = op.part(key, 1);
    let parts = [batch, positions, heads, key_positions];
    let sharded = parts.iter().any(|part| part.shards > 1);
    // Padding of the major factor of the query heads is also padding of the key heads, and handled
    // there; with one key head, the heads of its group may be padded.
    let group = if k.shape[2] == 1 { q.valid[2] } else { q.shape[2] / k.shape[2].max(1) };
    let padded = q.valid[1] < q.shape[1] || k.valid[1] < k.shape[1] || q.valid[2] < q.shape[2];
    (sharded || padded).then(|| AttentionPart {
        batch,
        positions,
        heads,
        queries: op.program.ty(value).shape[1],
        key_positions,
        keys_here: k.valid[1],
        keys: op.program.ty(key).shape[1],
        group,
    })
}

struct Pairs<T> {
    attention: ops::Attention,
    backward: bool,
    shape: AttentionShape,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Pairs<T> {
    fn flash(&self) -> bool {
        self.attention.kind == AttentionKind::Flash
    }

    fn mask(&self, cx: &Context<'_>) -> Option<Mask> {
        mask(&self.attention, &self.inputs, cx)
    }

    fn forward(&self, cx: &Context<'_>, pairs: Range<usize>) {
        let attention =
            AttentionKernel { shape: self.shape, dropout: self.mask(cx), gemm: &Packing };
        // The materialised form also computes the log-sum-exp, which is not kept.
        let rows = if self.flash() { 0 } else { self.rows() };
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(rows + self.forward_scratch()) };
        let (spare, scratch) = scratch.split_at_mut(rows);
        let tensors = ForwardTensors::<T> {
            q: cx.ptr(&self.inputs[0]),
            k: cx.ptr(&self.inputs[1]),
            v: cx.ptr(&self.inputs[2]),
            o: cx.ptr(&self.outputs[0]),
            lse: match self.attention.kind {
                AttentionKind::Flash => cx.ptr(&self.outputs[1]),
                AttentionKind::Materialised => spare.as_mut_ptr(),
            },
            before: None,
        };
        // SAFETY: the tensors have the shape's sizes, and pairs of different workers are disjoint.
        unsafe {
            if self.flash() {
                attention.forward(&tensors, pairs.clone(), scratch);
            } else {
                let probabilities = cx.ptr::<T>(&self.outputs[1]);
                attention.forward_materialised(&tensors, probabilities, pairs.clone(), scratch);
            }
        }
        if let (false, Some(mask)) = (self.flash(), self.mask(cx)) {
            self.drop_probabilities(cx, mask, pairs);
        }
    }

    /// The dropped probabilities of a range of pairs, which are whole rows of the stored ones.
    fn drop_probabilities(&self, cx: &Context<'_>, mask: Mask, pairs: Range<usize>) {
        if self.shape.held.is_some() {
            return self.drop_rows(cx, mask, pairs);
        }
        let size = self.shape.group * self.shape.queries * self.shape.keys;
        let sample = size * self.shape.kv_heads;
        let own = pairs.start * size..pairs.end * size;
        // SAFETY: the task declared these accesses, and the two results are distinct.
        unsafe {
            let from = cx.get::<T>(&self.outputs[1], own.clone());
            dropout(from, mask, sample, own.start, cx.get_mut::<T>(&self.outputs[2], own));
        }
    }

    /// As above, row by row of what a rank holds of them.
    fn drop_rows(&self, cx: &Context<'_>, mask: Mask, pairs: Range<usize>) {
        let (shape, keys) = (&self.shape, self.inputs[1].valid[1]);
        for row in
            pairs.start * shape.group * shape.queries..pairs.end * shape.group * shape.queries
        {
            let (pair, rest) =
                (row / (shape.group * shape.queries), row % (shape.group * shape.queries));
            let (head, query) = (rest / shape.queries, rest % shape.queries);
            let (sample, first) = shape.drawn((pair, head), query);
            let own = row * shape.keys..(row + 1) * shape.keys;
            // SAFETY: the task declared these accesses, and the two results are distinct.
            unsafe {
                let from = &cx.get::<T>(&self.outputs[1], own.clone())[..keys];
                let (to, padding) = cx.get_mut::<T>(&self.outputs[2], own).split_at_mut(keys);
                dropout_of_sample(from, mask, sample, first, to);
                padding.fill(T::default());
            }
        }
    }

    /// Rows of scores.
    fn rows(&self) -> usize {
        self.shape.batch * self.shape.heads() * self.shape.queries
    }

    fn forward_scratch(&self) -> usize {
        match self.attention.kind {
            AttentionKind::Flash => self.shape.forward_scratch(),
            AttentionKind::Materialised => self.shape.forward_materialised_scratch(),
        }
    }
}

/// The mask of dropout, if there is one; its key is the last operand.
pub(super) fn mask(attention: &ops::Attention, inputs: &[Var], cx: &Context<'_>) -> Option<Mask> {
    let key = inputs.last().filter(|_| attention.drops())?;
    // SAFETY: the task declared that it reads the key, which has five words.
    let words = unsafe { cx.get::<i32>(key, 0..5) };
    let key = std::array::from_fn(|i| words[i]);
    Some(Mask { key, site: attention.site, p: attention.dropout })
}

/// What a worker reads and writes of tensors whose first dim is the batch, and of a random key.
pub(super) fn accesses(
    (attention, shape): (&ops::Attention, &AttentionShape),
    inputs: &[Var],
    outputs: &[Var],
    share: Share,
) -> Vec<Access> {
    let sizes = (shape.batch, shape.kv_heads);
    pair_accesses(sizes, inputs, outputs, share, attention.drops())
}

/// The same for any op whose workers divide pairs of `batch` sequences and so many heads; a random
/// key, if it is keyed, is the last operand.
pub(super) fn pair_accesses(
    (batch, heads): (usize, usize),
    inputs: &[Var],
    outputs: &[Var],
    share: Share,
    keyed: bool,
) -> Vec<Access> {
    let pairs = share.of(batch * heads);
    // Pairs of whole sequences are contiguous pieces of every tensor; others are strided.
    let whole = pairs.start.is_multiple_of(heads) && pairs.end.is_multiple_of(heads);
    let part = |var: &Var| {
        if pairs.is_empty() {
            0..0
        } else if whole {
            let sample = var.elements() / batch;
            pairs.start / heads * sample..pairs.end / heads * sample
        } else {
            0..var.elements()
        }
    };
    let is_key = |i: usize| keyed && i + 1 == inputs.len();
    let read = inputs
        .iter()
        .enumerate()
        .map(|(i, var)| if is_key(i) { var.reads_all() } else { var.reads(part(var)) });
    read.chain(outputs.iter().map(|v| v.writes(part(v)))).collect()
}

impl<T: CpuElement> Task for Pairs<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        accesses((&self.attention, &self.shape), &self.inputs, &self.outputs, share)
    }

    fn run(&self, cx: &Context<'_>) {
        let pairs = cx.share.of(self.shape.pairs());
        if pairs.is_empty() {
            return;
        }
        if !self.backward {
            return self.forward(cx, pairs);
        }
        let attention =
            AttentionKernel { shape: self.shape, dropout: self.mask(cx), gemm: &Packing };
        let dy = self.inputs.len() - 1 - usize::from(self.attention.drops());
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(self.shape.backward_scratch()) };
        let tensors = BackwardTensors::<T> {
            q: cx.ptr(&self.inputs[0]),
            k: cx.ptr(&self.inputs[1]),
            v: cx.ptr(&self.inputs[2]),
            o: cx.ptr(&self.inputs[3]),
            lse: cx.ptr(&self.inputs[4]),
            d_o: cx.ptr(&self.inputs[dy]),
            dq: cx.ptr(&self.outputs[0]),
            dk: cx.ptr(&self.outputs[1]),
            dv: cx.ptr(&self.outputs[2]),
            before: None,
        };
        // SAFETY: the tensors have the shape's sizes, and pairs of different workers are disjoint.
        unsafe {
            if self.flash() {
                attention.backward(&tensors, pairs, scratch);
            } else {
                let probabilities = cx.ptr::<T>(&self.inputs[4]);
                attention.backward_materialised(&tensors, probabilities, pairs, scratch);
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        let forward = self.forward_scratch() + self.rows();
        forward.max(self.shape.backward_scratch()) * size_of::<T::Acc>()
    }
}
