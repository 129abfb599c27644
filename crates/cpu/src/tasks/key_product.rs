//! Products of stored scores with the keys that are here: workers divide the pairs of a sequence and
//! a key head, as in attention. Keys that are neighbours in the whole sequence are one product.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;
use phalanx_engine::EngineError;
use phalanx_ir::ops::{KeyForm, KeyProduct};
use phalanx_ir::{DType, LocalPart};

use super::attention::pair_accesses;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::gemm::{Packing, matmul, matmul_scratch};
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{
    MicroKernel, PanelElement, multiply_packed, multiply_scratch_up_to, pack_whole, packed_words,
};

pub(super) fn compile(op: &Operation<'_>, product: &KeyProduct) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let out = op.output(0);
    let (a, b) = (op.instr.inputs[0], op.instr.inputs[1]);
    // By what they are: queries, keys, scores.
    let (x, y, p) = match product.form {
        KeyForm::Scores => ((a, &inputs[0]), (b, &inputs[1]), &out),
        KeyForm::Weighted => ((op.instr.outputs[0], &out), (b, &inputs[1]), &inputs[0]),
        KeyForm::Sums => ((b, &inputs[1]), (op.instr.outputs[0], &out), &inputs[0]),
    };
    let group = x.1.shape[2] / y.1.shape[2].max(1);
    let sizes = Sizes {
        batch: x.1.shape[0],
        queries: x.1.shape[1],
        keys_here: y.1.shape[1],
        key_heads: y.1.shape[2],
        group,
        dim: x.1.shape[3],
        valid_dim: x.1.valid[3],
        keys: p.shape[3],
        valid_batch: x.1.valid[0],
        valid_queries: x.1.valid[1],
        valid_keys: y.1.valid[1],
        valid_heads: y.1.valid[2],
        // Padding of the major factor of the heads is padding of the key heads; with one key head,
        // those of its group may be padded.
        valid_group: if y.1.shape[2] == 1 { x.1.valid[2] } else { group },
        here: op.part(y.0, 1),
        places: op.part(x.0, 1),
        totals: [op.program.ty(x.0).shape[1], op.program.ty(y.0).shape[1]],
    };
    let product = *product;
    let dtype = inputs[0].dtype;
    if let Some(unit) = op.products.kernel(dtype, out.dtype) {
        let by = Own(unit);
        return match dtype {
            DType::Bf16 => Ok(vec![task(Step::<bf16, _> {
                product,
                sizes,
                inputs,
                out,
                by,
                types: PhantomData,
            })]),
            DType::F32 => Ok(vec![task(Step::<f32, _> {
                product,
                sizes,
                inputs,
                out,
                by,
                types: PhantomData,
            })]),
            other => Err(op.unsupported(format!("it has no own products of {other}"))),
        };
    }
    let made = for_float!(op, dtype, T => {
        let by = Library;
        task(Step::<T, _> { product, sizes, inputs, out, by, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// Local sizes, with padding and without, and where queries and keys lie in the whole.
struct Sizes {
    batch: usize,
    queries: usize,
    keys_here: usize,
    key_heads: usize,
    group: usize,
    dim: usize,
    valid_dim: usize,
    keys: usize,
    valid_batch: usize,
    valid_queries: usize,
    valid_keys: usize,
    valid_heads: usize,
    valid_group: usize,
    here: LocalPart,
    places: LocalPart,
    /// Queries and keys of whole sequences.
    totals: [usize; 2],
}

impl Sizes {
    fn pairs(&self) -> usize {
        self.batch * self.key_heads
    }

    /// Keys that are here and neighbours in the whole: their rows here, and their columns.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            (next < self.valid_keys).then(|| {
                let start = next;
                let first = self.here.global(start);
                next = (start + self.here.run(start)).min(self.valid_keys);
                (start..next, first..first + next - start)
            })
        })
    }

    /// Where the rows of a head of queries begin, and their strides.
    fn queries_at(&self, pair: usize, head: usize) -> (usize, [isize; 2]) {
        let heads = self.key_heads * self.group;
        let (sequence, key_head) = (pair / self.key_heads, pair % self.key_heads);
        let start = sequence * self.queries * heads + key_head * self.group + head;
        (start * self.dim, [(heads * self.dim) as isize, 1])
    }

    /// The same for the keys of a pair.
    fn keys_at(&self, pair: usize) -> (usize, [isize; 2]) {
        let (sequence, key_head) = (pair / self.key_heads, pair % self.key_heads);
        let start = sequence * self.keys_here * self.key_heads + key_head;
        (start * self.dim, [(self.key_heads * self.dim) as isize, 1])
    }

    /// The same for the scores of a head.
    fn scores_at(&self, pair: usize, head: usize) -> (usize, [isize; 2]) {
        ((pair * self.group + head) * self.queries * self.keys, [self.keys as isize, 1])
    }
}

/// What multiplies matrices of `T`: `c = a·b`, or `c += a·b` if it adds.
trait Multiplies<T: CpuElement>: Send + Sync {
    /// Elements of scratch for sizes up to these: rows, inner dimension, columns.
    fn scratch(&self, sizes: [usize; 3]) -> usize;

    fn multiply(
        &self,
        c: MatMut<'_, T::Acc>,
        a: Mat<'_, T>,
        b: Mat<'_, T>,
        adds: bool,
        scratch: &mut [T::Acc],
    );
}

/// The library.
struct Library;

impl<T: CpuElement> Multiplies<T> for Library {
    fn scratch(&self, [rows, inner, columns]: [usize; 3]) -> usize {
        matmul_scratch::<T, T, T::Acc>(rows, inner, columns)
    }

    fn multiply(
        &self,
        c: MatMut<'_, T::Acc>,
        a: Mat<'_, T>,
        b: Mat<'_, T>,
        adds: bool,
        scratch: &mut [T::Acc],
    ) {
        matmul(&Packing, c, a, b, adds, scratch);
    }
}

/// A unit of the processor.
struct Own(MicroKernel);

impl<E: PanelElement> Multiplies<E> for Own {
    fn scratch(&self, [rows, inner, columns]: [usize; 3]) -> usize {
        // The left operand may have any strides.
        let copied = multiply_scratch_up_to::<E>(&self.0, rows, [inner, 0]);
        packed_words::<E>(inner, columns) + copied
    }

    fn multiply(
        &self,
        c: MatMut<'_, f32>,
        a: Mat<'_, E>,
        b: Mat<'_, E>,
        adds: bool,
        scratch: &mut [f32],
    ) {
        let [inner, columns] = b.shape();
        let scratch: &mut [u32] = bytemuck::cast_slice_mut(scratch);
        let (panels, scratch) = scratch.split_at_mut(packed_words::<E>(inner, columns));
        let right = pack_whole(&self.0, b, panels).whole(&self.0);
        multiply_packed(&self.0, a, right, c, adds, scratch);
    }
}

struct Step<T, M> {
    product: KeyProduct,
    sizes: Sizes,
    inputs: Vec<Var>,
    out: Var,
    by: M,
    types: PhantomData<T>,
}

impl<T: CpuElement, M: Multiplies<T>> Step<T, M> {
    /// # Safety
    /// Pairs of different workers are disjoint, and the task declared their accesses.
    unsafe fn pair(&self, cx: &Context<'_>, pair: usize, scratch: &mut [T::Acc]) {
        let (sizes, form) = (&self.sizes, self.product.form);
        // SAFETY: passed on to the caller.
        unsafe { self.begin(cx, pair) };
        let valid = pair / sizes.key_heads < sizes.valid_batch
            && pair % sizes.key_heads < sizes.valid_heads;
        if !valid {
            return;
        }
        let (a, b): (*mut T, *mut T) = (cx.ptr(&self.inputs[0]), cx.ptr(&self.inputs[1]));
        let out: *mut T::Acc = cx.ptr(&self.out);
        let dim = sizes.valid_dim;
        let (rows, keys) = ([sizes.valid_queries, dim], [sizes.valid_keys, dim]);
        let scores = [sizes.valid_queries, sizes.keys];
        let (y, y_strides) = sizes.keys_at(pair);
        for head in 0..sizes.valid_group {
            let ((x, x_strides), (p, p_strides)) =
                (sizes.queries_at(pair, head), sizes.scores_at(pair, head));
            // SAFETY: the places lie within the tensors, whose sizes they are computed from; the
            // result of a pair is used here alone, and is no operand of the product.
            unsafe {
                match form {
                    KeyForm::Scores => {
                        let x = Mat::from_raw(a.add(x).cast_const(), rows, x_strides);
                        let y = Mat::from_raw(b.add(y).cast_const(), keys, y_strides);
                        let p = MatMut::from_raw(out.add(p), scores, p_strides);
                        self.scores(p, x, y, scratch);
                    }
                    KeyForm::Weighted => {
                        let p = Mat::from_raw(a.add(p).cast_const(), scores, p_strides);
                        let y = Mat::from_raw(b.add(y).cast_const(), keys, y_strides);
                        let mut x = MatMut::from_raw(out.add(x), rows, x_strides);
                        for (own, columns) in sizes.runs() {
                            let p = p.block(0..rows[0], columns);
                            let y = y.block(own, 0..dim);
                            self.by.multiply(x.reborrow(), p, y, true, scratch);
                        }
                    }
                    KeyForm::Sums => {
                        let p = Mat::from_raw(a.add(p).cast_const(), scores, p_strides);
                        let x = Mat::from_raw(b.add(x).cast_const(), rows, x_strides);
                        let mut y = MatMut::from_raw(out.add(y), keys, y_strides);
                        for (own, columns) in sizes.runs() {
                            let p = p.block(0..rows[0], columns).t();
                            let y = y.reborrow().block(own, 0..dim);
                            self.by.multiply(y, p, x, true, scratch);
                        }
                    }
                }
            }
        }
    }

    fn scores(
        &self,
        mut p: MatMut<'_, T::Acc>,
        x: Mat<'_, T>,
        y: Mat<'_, T>,
        scratch: &mut [T::Acc],
    ) {
        let (sizes, [rows, _]) = (&self.sizes, x.shape());
        let [queries, keys] = sizes.totals;
        for (own, columns) in sizes.runs() {
            let y = y.block(own, 0..sizes.valid_dim).t();
            let part = p.reborrow().block(0..rows, columns.clone());
            self.by.multiply(part, x, y, false, scratch);
            if !self.product.causal {
                continue;
            }
            for row in 0..rows {
                // How many of all keys it sees; the last query sees the last key.
                let seen = (sizes.places.global(row) + 1 + keys).saturating_sub(queries);
                let hidden = seen.clamp(columns.start, columns.end)..columns.end;
                p.row(row)[hidden].fill(T::Acc::NEG_INFINITY);
            }
        }
    }

    /// What the result of a pair is before its products are added or placed: that of earlier steps, or
    /// zeros.
    ///
    /// # Safety
    /// As [`Self::pair`].
    unsafe fn begin(&self, cx: &Context<'_>, pair: usize) {
        let out: *mut T::Acc = cx.ptr(&self.out);
        let before = self.product.goes_on.then(|| cx.ptr::<T::Acc>(&self.inputs[2]).cast_const());
        if before == Some(out.cast_const()) {
            return;
        }
        let sizes = &self.sizes;
        let ((start, [stride, _]), rows, width) = match self.product.form {
            KeyForm::Scores => (sizes.scores_at(pair, 0), sizes.group * sizes.queries, sizes.keys),
            KeyForm::Weighted => {
                (sizes.queries_at(pair, 0), sizes.queries, sizes.group * sizes.dim)
            }
            KeyForm::Sums => (sizes.keys_at(pair), sizes.keys_here, sizes.dim),
        };
        for row in 0..rows {
            let at = start + row * stride as usize;
            // SAFETY: the rows lie within the result, and earlier results have its size.
            unsafe {
                match before {
                    Some(before) => out.add(at).copy_from(before.add(at), width),
                    None => out.add(at).write_bytes(0, width),
                }
            }
        }
    }

    fn scratch_elements(&self) -> usize {
        let Sizes { valid_queries, valid_keys, dim, .. } = self.sizes;
        let of = |m, k, n| self.by.scratch([m, k, n]);
        match self.product.form {
            KeyForm::Scores => of(valid_queries, dim, valid_keys),
            KeyForm::Weighted => of(valid_queries, valid_keys, dim),
            KeyForm::Sums => of(valid_keys, valid_queries, dim),
        }
    }
}

impl<T: CpuElement, M: Multiplies<T>> Task for Step<T, M> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let outputs = std::slice::from_ref(&self.out);
        let sizes = (self.sizes.batch, self.sizes.key_heads);
        pair_accesses(sizes, &self.inputs, outputs, share, false)
    }

    fn run(&self, cx: &Context<'_>) {
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(self.scratch_elements()) };
        for pair in cx.share.of(self.sizes.pairs()) {
            // SAFETY: shares are disjoint ranges of pairs.
            unsafe { self.pair(cx, pair, scratch) };
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.scratch_elements() * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
