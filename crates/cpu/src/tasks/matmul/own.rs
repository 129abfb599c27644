//! Products by own micro-kernels: all workers pack the right operand, then each multiplies its part.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_ir::StridedLoop;

use super::loops::Dims;
use crate::element::CpuElement;
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{
    Addition, Grid, MicroKernel, OwnSides, PANEL_COLUMNS, PanelElement, ProductTarget, multiply,
    multiply_scratch, pack_right, panel_bytes, panel_words,
};
use crate::tasks::padding::Spare;
use crate::tasks::{Access, Context, Operation, Share, Task, Tasks, Var, task};

/// One product of two matrices.
#[derive(Clone)]
pub(super) struct OwnProduct {
    sides: OwnSides,
    inner: StridedLoop,
    left: Var,
    right: Var,
    out: Var,
    addend: Option<Var>,
    /// Where its panels lie in the workspace.
    panels: usize,
}

/// The tasks of products that share operand 0, if they are own ones; then also their panels' memory is
/// planned. `products` are operand 1, result and addend of each.
pub(super) fn compile(
    op: &Operation<'_>,
    dims: &[Dims],
    a: &Var,
    products: Vec<[Option<Var>; 3]>,
) -> Option<Tasks> {
    let out = products.first()?[1].as_ref()?;
    let types = [a.dtype, out.dtype];
    let kernel = op.products.kernel(types[0], types[1])?;
    let panels = op.scratch?;
    if !dims.iter().all(|dims| dims.is_plain()) {
        return None;
    }
    let mut end = panels;
    let mut tasks = Tasks::new();
    let mut own = Vec::new();
    for (dims, [b, out, addend]) in dims.iter().zip(products) {
        let sides = OwnSides::of(dims);
        let operands = [a.clone(), b?];
        let [left, right] = sides.operands.map(|i| operands[i].clone());
        let words = dims.inner.size.div_ceil(size_of::<u32>() / types[0].size());
        let (used, planned) =
            (panel_bytes(words, sides.columns.size), op.products.panels(dims, types));
        // Padding of the inner dimension is not packed.
        tasks.extend(Spare::after(end, used, planned));
        own.push(OwnProduct {
            sides,
            inner: dims.inner,
            left,
            right,
            out: out?,
            addend,
            panels: end,
        });
        end += planned;
    }
    let shared = own.iter().all(|p| p.sides.operands == [0, 1]);
    macro_rules! both {
        ($E:ty, $C:ty) => {{
            tasks.push(task(PackPanels::<$E> {
                kernel,
                products: own.clone(),
                types: PhantomData,
            }));
            let multiply =
                |products| task(Multiply::<$E, $C> { kernel, products, types: PhantomData });
            match shared {
                true => tasks.push(multiply(own)),
                false => tasks.extend(own.into_iter().map(|product| multiply(vec![product]))),
            }
        }};
    }
    use phalanx_ir::DType;
    match types {
        [DType::Bf16, DType::Bf16] => both!(half::bf16, half::bf16),
        [DType::Bf16, _] => both!(half::bf16, f32),
        _ => both!(f32, f32),
    }
    Some(tasks)
}

impl OwnProduct {
    fn operand<'a, E>(&self, cx: &'a Context<'_>, which: usize) -> Mat<'a, E> {
        let (var, outer) = match which {
            0 => (&self.left, self.sides.rows),
            _ => (&self.right, self.sides.columns),
        };
        let tensor = self.sides.operands[which];
        let [outer, inner] = [outer, self.inner].map(|l| (l.size, l.strides[tensor] as isize));
        // SAFETY: the loops describe the tensor, whose place the planner gave; the task declared that
        // it reads it.
        let mat = unsafe {
            Mat::from_raw(cx.ptr::<E>(var).cast_const(), [outer.0, inner.0], [outer.1, inner.1])
        };
        if which == 0 { mat } else { mat.t() }
    }

    /// A value with the strides of the result.
    fn like_result(&self) -> ([usize; 2], [isize; 2]) {
        let OwnSides { rows, columns, .. } = self.sides;
        ([rows.size, columns.size], [rows.strides[2] as isize, columns.strides[2] as isize])
    }

    fn used_panels(&self, kernel: &MicroKernel) -> usize {
        self.sides.columns.size.div_ceil(kernel.columns)
    }

    fn bytes<E: PanelElement>(&self) -> usize {
        panel_bytes(self.inner.size.div_ceil(E::PER_WORD), self.sides.columns.size)
    }

    /// Elements of a value of which a range of rows is used, if these are one piece; otherwise all.
    fn piece(
        &self,
        var: &Var,
        tensor: usize,
        rows: &Range<usize>,
        whole_rows: bool,
    ) -> Range<usize> {
        let stride = self.sides.rows.strides[tensor];
        match stride * self.sides.rows.size == var.elements() && whole_rows {
            true => rows.start * stride..rows.end * stride,
            false if rows.is_empty() => 0..0,
            false => 0..var.elements(),
        }
    }
}

/// Packs the right operands; workers divide the panels of each.
struct PackPanels<E> {
    kernel: MicroKernel,
    products: Vec<OwnProduct>,
    types: PhantomData<E>,
}

impl<E: PanelElement> PackPanels<E> {
    fn own(&self, product: &OwnProduct, share: Share) -> Range<usize> {
        let columns = product.sides.columns.size.next_multiple_of(PANEL_COLUMNS);
        share.of(columns / self.kernel.columns)
    }
}

impl<E: PanelElement> Task for PackPanels<E> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let of = |product: &OwnProduct| {
            let (own, all) = (self.own(product, share), product.bytes::<E>());
            let columns = product.sides.columns.size.next_multiple_of(PANEL_COLUMNS);
            let panel = all / columns * self.kernel.columns;
            let bytes = own.start * panel..own.end * panel;
            [product.right.reads_all(), Access::scratch(product.panels, bytes, true)]
        };
        self.products.iter().flat_map(of).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        for product in &self.products {
            let (b, to) = (product.operand::<E>(cx, 1), cx.workspace::<u32>(product.panels));
            // SAFETY: the task declared that it writes its own panels, for which there is room.
            unsafe { pack_right(&self.kernel, b, to, self.own(product, cx.share)) };
        }
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

/// Multiplies products that share their left operand.
struct Multiply<E, C> {
    kernel: MicroKernel,
    products: Vec<OwnProduct>,
    types: PhantomData<(E, C)>,
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Multiply<E, C> {
    fn rows(&self) -> usize {
        self.products[0].sides.rows.size
    }

    fn grid(&self, workers: usize) -> Grid {
        let panels = self.products.iter().map(|p| p.used_panels(&self.kernel)).max().unwrap_or(1);
        Grid::new([self.rows(), panels], self.kernel.rows, workers)
    }

    /// Adds the addend to a result that is itself added to, before the product is.
    fn bring(
        &self,
        cx: &Context<'_>,
        product: &OwnProduct,
        rows: &Range<usize>,
        own: &Range<usize>,
    ) {
        let Some(addend) = &product.addend else { return };
        if addend.slot == product.out.slot || !cx.adds(&product.out) {
            return;
        }
        let (shape, strides) = product.like_result();
        let width = self.kernel.columns;
        let columns = own.start * width..shape[1].min(own.end * width);
        // SAFETY: the task declared both accesses; this worker's part of the result is its own.
        let (from, mut to) = unsafe {
            let from = cx.ptr::<C>(addend).cast_const();
            let to = cx.ptr::<C>(&product.out);
            (Mat::from_raw(from, shape, strides), MatMut::from_raw(to, shape, strides))
        };
        for (i, j) in rows.clone().flat_map(|i| columns.clone().map(move |j| (i, j))) {
            let to = to.at_mut(i, j);
            *to = C::store(to.load() + from.at(i, j).load());
        }
    }

    fn target<'a>(&self, cx: &'a Context<'_>, i: usize, grid: Grid) -> ProductTarget<'a, C> {
        let product = &self.products[i];
        let (shape, strides) = product.like_result();
        let [_, own] = grid.part(cx.share.worker, [shape[0], product.used_panels(&self.kernel)]);
        let adds = cx.adds(&product.out);
        let add = match &product.addend {
            Some(addend) if addend.slot != product.out.slot && !adds => {
                let from = cx.ptr::<C>(addend).cast_const();
                // SAFETY: it has the result's shape and lies elsewhere; the task declared that it
                // reads it.
                Addition::Other(unsafe { Mat::from_raw(from, shape, strides) })
            }
            None if !adds => Addition::Nothing,
            _ => Addition::Result,
        };
        // SAFETY: the task declared that it writes its part of the result; the kernel is done with one
        // target before it asks for another.
        let result = unsafe { MatMut::from_raw(cx.ptr::<C>(&product.out), shape, strides) };
        let words = panel_words(product.inner.size.div_ceil(E::PER_WORD));
        ProductTarget { panels: cx.workspace::<u32>(product.panels), words, own, result, add }
    }
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Task for Multiply<E, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let grid = self.grid(share.workers);
        let [rows, _] = grid.part(share.worker, [self.rows(), 1]);
        let first = &self.products[0];
        let left = first.piece(&first.left, first.sides.operands[0], &rows, true);
        let mut accesses = vec![first.left.reads(left)];
        for product in &self.products {
            let part = product.piece(&product.out, 2, &rows, grid.columns == 1);
            accesses.push(Access::scratch(product.panels, 0..product.bytes::<E>(), false));
            accesses.push(product.out.writes(part.clone()));
            accesses.extend(product.addend.as_ref().map(|addend| addend.reads(part)));
        }
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let grid = self.grid(cx.share.workers);
        let [rows, _] = grid.part(cx.share.worker, [self.rows(), 1]);
        for product in &self.products {
            let size = [self.rows(), product.used_panels(&self.kernel)];
            let [_, own] = grid.part(cx.share.worker, size);
            self.bring(cx, product, &rows, &own);
        }
        let first = &self.products[0];
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(self.scratch(cx.share.workers) / size_of::<u32>()) };
        let target = |i| self.target(cx, i, grid);
        let (a, count) = (first.operand::<E>(cx, 0), self.products.len());
        // SAFETY: the panels were packed by an earlier task, behind a barrier; parts are disjoint.
        unsafe { multiply(&self.kernel, a, rows, count, target, scratch) };
    }

    fn scratch(&self, workers: usize) -> usize {
        let rows = self.rows().div_ceil(self.grid(workers).rows);
        let (inner, first) = (self.products[0].inner, &self.products[0].sides);
        let inner = [inner.size, inner.strides[first.operands[0]]];
        multiply_scratch::<E>(&self.kernel, rows, inner) * size_of::<u32>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
