//! Matrix products of any arrangement: own ones, or strided products of the `gemm` library.

mod loops;
mod own;

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::StridedLoop;
use phalanx_ir::ops::{Matmul, PackedMatmul};

use super::padding::Spare;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::CpuElement;
use crate::kernels::gemm::{Packing, ProductPart, matmul, matmul_scratch, matmul_turns};
use crate::kernels::matrix::{Mat, MatMut};
use crate::requirements::panels;
use loops::{Dims, Own, Shared};

pub(super) fn compile(op: &Operation<'_>, spec: &Matmul) -> Result<Tasks, EngineError> {
    let [a, b] = [op.input(0), op.input(1)];
    let out = op.output(0);
    let addend = spec.add.then(|| op.input(2));
    let dims = [Dims::new(spec, &a, &b, &out)];
    let product = [Some(b.clone()), Some(out.clone()), addend.clone()];
    if let Some(tasks) = own::compile(op, &dims, &a, vec![product]) {
        return Ok(tasks);
    }
    let made = for_floats!(op, a.dtype, out.dtype, T, C => {
        task(Product::<T, C> { addend, ..Product::new(spec, a, b, out) })
    })?;
    Ok(with_spare(op, made))
}

/// Products that share their first operand: one task, whose products are interleaved.
pub(super) fn compile_packed(
    op: &Operation<'_>,
    spec: &PackedMatmul,
) -> Result<Tasks, EngineError> {
    let (a, single) = (op.input(0), spec.single());
    let count = op.instr.outputs.len();
    let dims = |i| Dims::new(&single, &a, &op.input(i + 1), &op.output(i));
    let dims: Vec<Dims> = (0..count).map(dims).collect();
    let products = (0..count).map(|i| [Some(op.input(i + 1)), Some(op.output(i)), None]);
    if let Some(tasks) = own::compile(op, &dims, &a, products.collect()) {
        return Ok(tasks);
    }
    let made = for_floats!(op, a.dtype, spec.out, T, C => {
        let product = |i| Product::new(&single, a.clone(), op.input(i + 1), op.output(i));
        task(Pack::<T, C> { products: (0..count).map(product).collect() })
    })?;
    Ok(with_spare(op, made))
}

/// A product of the library on a rank where padding keeps it from being an own one: memory for panels
/// was planned all the same.
fn with_spare(op: &Operation<'_>, made: Box<dyn Task>) -> Tasks {
    let planned = panels(op.products, op.program, op.instr);
    let spare = op.scratch.and_then(|scratch| Spare::after(scratch, 0, planned));
    spare.into_iter().chain([made]).collect()
}

struct Product<T, C> {
    dims: Dims,
    a: Var,
    b: Var,
    out: Var,
    addend: Option<Var>,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Product<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let shared = self.dims.shared(share.workers);
        let axis = self.dims.axis(shared);
        let own = share.of(axis.size);
        // If the divided index is the slowest of a tensor, a share is a contiguous piece of it.
        let piece = |tensor: usize, var: &Var| -> Range<usize> {
            let stride = axis.strides[tensor];
            if stride > 0 && stride * axis.size == var.elements() {
                own.start * stride..own.end * stride
            } else if own.is_empty() {
                0..0
            } else {
                0..var.elements()
            }
        };
        let mut accesses = vec![
            self.a.reads(piece(0, &self.a)),
            self.b.reads(piece(1, &self.b)),
            self.out.writes(piece(2, &self.out)),
        ];
        accesses.extend(self.addend.as_ref().map(|c| c.reads(piece(2, c))));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        if let Some((own, start)) = self.dims.own(cx.share) {
            self.loops(cx, &own, 0, start);
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let d = &self.dims;
        let cap = |shared, size: usize| {
            if d.shared(workers) == shared { size.div_ceil(workers) } else { size }
        };
        let (m, n) = (cap(Shared::Rows, d.rows.size), cap(Shared::Cols, d.cols.size));
        matmul_scratch::<T, T, C>(m, d.inner.size, n) * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Product<T, C> {
    fn new(spec: &Matmul, a: Var, b: Var, out: Var) -> Self {
        let dims = Dims::new(spec, &a, &b, &out);
        Self { dims, a, b, out, addend: None, types: PhantomData }
    }

    fn loops(&self, cx: &Context<'_>, own: &Own, depth: usize, at: [usize; 3]) {
        let Some(&axis) = self.dims.outer.get(depth) else {
            return self.sums(cx, own, at);
        };
        let axis = own.outer.filter(|(i, _)| *i == depth).map_or(axis, |(_, a)| a);
        for i in 0..axis.size {
            let moved = std::array::from_fn(|t| at[t] + i * axis.strides[t]);
            self.loops(cx, own, depth + 1, moved);
        }
    }

    fn sums(&self, cx: &Context<'_>, own: &Own, at: [usize; 3]) {
        let total: usize = self.dims.sums.iter().map(|a| a.size).product();
        if total * own.inner.size == 0 {
            return self.nothing(cx, own, at[2]);
        }
        for index in 0..total {
            let mut moved = at;
            let mut rest = index;
            for axis in self.dims.sums.iter().rev() {
                for (m, stride) in moved.iter_mut().zip(axis.strides) {
                    *m += rest % axis.size * stride;
                }
                rest /= axis.size;
            }
            self.product(cx, own, moved, index > 0);
        }
    }

    fn product(&self, cx: &Context<'_>, own: &Own, at: [usize; 3], later: bool) {
        let (m, n, k) = (own.rows, own.cols, own.inner);
        let adds = later || cx.adds(&self.out) || self.addend.is_some();
        // SAFETY: this is the only view of the worker's share of the result.
        let ProductPart { a, b, mut c, .. } = unsafe { self.part(cx, own, at) };
        if let (Some(addend), false) = (&self.addend, later) {
            self.bring(cx, addend, at[2], &mut c, [m, n]);
        }
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(matmul_scratch::<T, T, C>(m.size, k.size, n.size)) };
        matmul(&Packing, c, a, b, adds, scratch);
    }

    /// The matrices of a worker's share.
    ///
    /// # Safety
    /// No other view of this part of the result is in use.
    unsafe fn part<'a>(
        &self,
        cx: &'a Context<'_>,
        own: &Own,
        at: [usize; 3],
    ) -> ProductPart<'a, T, C> {
        let (m, n, k) = (own.rows, own.cols, own.inner);
        let strides = |r: StridedLoop, c: StridedLoop, t: usize| {
            [r.strides[t] as isize, c.strides[t] as isize]
        };
        // SAFETY: the axes describe these three tensors, whose places the planner gave; a worker's
        // share of the result is its own, and the operands are written by nobody meanwhile.
        unsafe {
            ProductPart {
                a: Mat::from_raw(
                    cx.ptr::<T>(&self.a).add(at[0]),
                    [m.size, k.size],
                    strides(m, k, 0),
                ),
                b: Mat::from_raw(
                    cx.ptr::<T>(&self.b).add(at[1]),
                    [k.size, n.size],
                    strides(k, n, 1),
                ),
                c: MatMut::from_raw(
                    cx.ptr::<C>(&self.out).add(at[2]),
                    [m.size, n.size],
                    strides(m, n, 2),
                ),
                accumulate: cx.adds(&self.out),
            }
        }
    }

    /// Zeros, if a rank holds only padding of the contracted dim.
    fn nothing(&self, cx: &Context<'_>, own: &Own, at: usize) {
        let (m, n) = (own.rows, own.cols);
        let strides = [m.strides[2] as isize, n.strides[2] as isize];
        // SAFETY: as in `product`.
        let mut c =
            unsafe { MatMut::from_raw(cx.ptr::<C>(&self.out).add(at), [m.size, n.size], strides) };
        if let Some(addend) = &self.addend {
            return self.bring(cx, addend, at, &mut c, [m, n]);
        }
        if cx.adds(&self.out) {
            return;
        }
        for i in 0..m.size {
            for j in 0..n.size {
                // SAFETY: the element lies in the matrix.
                unsafe {
                    *c.as_mut_ptr().add(i * m.strides[2] + j * n.strides[2]) = C::default();
                }
            }
        }
    }

    /// Copies the addend to the result, to which the product is added, unless it is already there.
    fn bring(
        &self,
        cx: &Context<'_>,
        addend: &Var,
        at: usize,
        c: &mut MatMut<'_, C>,
        [m, n]: [StridedLoop; 2],
    ) {
        if addend.slot == self.out.slot {
            return;
        }
        let add = cx.adds(&self.out);
        for i in 0..m.size {
            // SAFETY: the addend has the result's shape, and the row is part of this worker's share
            // of both; they do not overlap, because they lie in different places.
            unsafe {
                let from = cx.ptr::<C>(addend).add(at + i * m.strides[2]);
                let to = c.as_mut_ptr().add(i * m.strides[2]);
                if n.strides[2] == 1 && !add {
                    std::ptr::copy_nonoverlapping(from, to, n.size);
                    continue;
                }
                for j in (0..n.size).map(|j| j * n.strides[2]) {
                    let (from, to) = (*from.add(j), to.add(j));
                    *to = if add { C::store((*to).load() + from.load()) } else { from };
                }
            }
        }
    }
}

/// Products that share their first operand. If each is one product of two matrices, they are
/// interleaved over blocks of the contracted dim; otherwise they run one after the other. Workers
/// divide each product as if it were alone, so that shares match those of neighbouring ops.
struct Pack<T, C> {
    products: Vec<Product<T, C>>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Pack<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.products.iter().flat_map(|product| product.accesses(share)).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        if !self.products.iter().all(|product| product.dims.is_plain()) {
            return self.products.iter().for_each(|product| product.run(cx));
        }
        let part = |i: usize| {
            let product = &self.products[i];
            let (own, start) = product.dims.own(cx.share)?;
            // SAFETY: the kernel is done with one part before it asks for another.
            Some(unsafe { product.part(cx, &own, start) })
        };
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(self.scratch(cx.share.workers) / size_of::<T::Acc>()) };
        matmul_turns(&Packing, self.products.len(), part, scratch);
    }

    fn scratch(&self, workers: usize) -> usize {
        self.products.iter().map(|product| product.scratch(workers)).max().unwrap_or(0)
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
