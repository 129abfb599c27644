//! The fused loss by own micro-kernels: the weight is packed once for all chunks, and the gradient of the
//! logits is rounded to the type of the operands before it is multiplied, as it would be if it left the op.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;
use phalanx_engine::EngineError;
use phalanx_ir::DType;

use super::linear::Chunk;
use super::valid;
use crate::element::CpuElement;
use crate::kernels::cross_entropy::loss_and_rounded_gradient;
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{
    Addition, MicroKernel, PANEL_COLUMNS, PanelElement, ProductTarget, multiply, multiply_scratch,
    pack_right, panel_bytes, panel_words,
};
use crate::requirements::{LossRoom, logit_stride};
use crate::tasks::padding::Spare;
use crate::tasks::{Access, Context, Operation, Share, Task, Tasks, task};

pub(super) fn compile(
    op: &Operation<'_>,
    kernel: MicroKernel,
    room: LossRoom,
    chunks: Vec<Chunk>,
) -> Result<Tasks, EngineError> {
    let Some(first) = chunks.first() else { return Ok(Tasks::new()) };
    let [for_logits, for_dx, _] = room.operands;
    let panels = [first.other, first.other + for_logits, first.other + for_logits + for_dx];
    macro_rules! all {
        ($E:ty, $C:ty) => {{
            let of = |chunk: Chunk| Head::<$E, $C> { kernel, chunk, panels, types: PhantomData };
            let heads: Vec<Head<$E, $C>> = chunks.into_iter().map(of).collect();
            tasks_of(heads, room)
        }};
    }
    match (first.inputs[0].dtype, first.outputs[2].dtype) {
        (DType::Bf16, DType::Bf16) => Ok(all!(bf16, bf16)),
        (DType::Bf16, DType::F32) => Ok(all!(bf16, f32)),
        (DType::F32, DType::F32) => Ok(all!(f32, f32)),
        (x, dw) => Err(op.unsupported(format!("it has no own product of {x} for {dw}"))),
    }
}

fn tasks_of<E: PanelElement, C: CpuElement<Acc = f32>>(
    heads: Vec<Head<E, C>>,
    room: LossRoom,
) -> Tasks {
    let mut tasks = Tasks::new();
    for which in 0..3 {
        let used = heads.iter().map(|head| head.panel_bytes(which)).max().unwrap_or(0);
        tasks.extend(Spare::after(heads[0].panels[which], used, room.operands[which]));
    }
    tasks.push(task(PackWeight(heads[0].clone())));
    for head in heads {
        tasks.extend([task(Rows(head.clone())), task(Weight(head))]);
    }
    tasks
}

/// One chunk of rows, with the places of panels.
#[derive(Clone)]
struct Head<E, C> {
    kernel: MicroKernel,
    chunk: Chunk,
    /// Offsets of the panels of the weight for the logits, for the gradient of x, and of those for the
    /// gradient of the weight.
    panels: [usize; 3],
    types: PhantomData<(E, C)>,
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Head<E, C> {
    /// Inner dimension and columns of the products with these panels.
    fn right(&self, which: usize) -> [usize; 2] {
        let (width, classes, rows) =
            (self.chunk.width(), self.chunk.classes(), self.chunk.rows.len());
        match which {
            0 => [width, classes],
            1 => [classes, width],
            // The gradient is computed in the order in which it lies, which its store follows.
            _ if self.chunk.transposed => [rows, width],
            _ => [rows, classes],
        }
    }

    fn panel_bytes(&self, which: usize) -> usize {
        let [inner, columns] = self.right(which);
        panel_bytes(inner.div_ceil(E::PER_WORD), columns)
    }

    /// Panels with which something is multiplied.
    fn used(&self, which: usize) -> usize {
        self.right(which)[1].div_ceil(self.kernel.columns)
    }

    /// A worker's panels, those that only fill memory up included.
    fn own_panels(&self, which: usize, share: Share) -> Range<usize> {
        share.of(self.right(which)[1].next_multiple_of(PANEL_COLUMNS) / self.kernel.columns)
    }

    /// The bytes of a worker's panels.
    fn panel_access(&self, which: usize, share: Share) -> Access {
        let [_, columns] = self.right(which);
        let all = columns.next_multiple_of(PANEL_COLUMNS) / self.kernel.columns;
        let (own, each) = (self.own_panels(which, share), self.panel_bytes(which) / all.max(1));
        Access::scratch(self.panels[which], own.start * each..own.end * each, true)
    }

    fn reads_panels(&self, which: usize) -> Access {
        Access::scratch(self.panels[which], 0..self.panel_bytes(which), false)
    }

    /// A product's result with the panels that it is made with.
    fn target<'a, R>(
        &self,
        cx: &Context<'_>,
        which: usize,
        own: Range<usize>,
        (result, add): (MatMut<'a, R>, Addition<'a, R>),
    ) -> ProductTarget<'a, R> {
        let words = panel_words(self.right(which)[0].div_ceil(E::PER_WORD));
        let used = self.used(which);
        let own = own.start.min(used)..own.end.min(used);
        ProductTarget { panels: cx.workspace::<u32>(self.panels[which]), words, own, result, add }
    }

    fn logits(&self) -> usize {
        logit_stride(self.chunk.classes())
    }

    /// Elements of a row of the gradient that products take: with zeros in the last words.
    fn row_elements(&self) -> usize {
        panel_words(self.chunk.classes().div_ceil(E::PER_WORD)) * E::PER_WORD
    }

    /// The gradient of the logits of some rows of the chunk, with its zeros.
    ///
    /// # Safety
    /// It has been computed, and nobody writes it meanwhile.
    unsafe fn gradient<'a>(&self, cx: &'a Context<'_>, rows: Range<usize>) -> Mat<'a, E> {
        let stride = self.logits() * size_of::<f32>() / size_of::<E>();
        let first = cx.workspace::<E>(self.chunk.logits).wrapping_add(rows.start * stride);
        let shape = [rows.len(), self.row_elements()];
        // SAFETY: each row of the gradient starts where the row of logits does, which is longer.
        unsafe { Mat::from_raw(first.cast_const(), shape, [stride as isize, 1]) }
    }

    /// Rows of x.
    ///
    /// # Safety
    /// The task declared that it reads them.
    unsafe fn x<'a>(&self, cx: &'a Context<'_>, rows: Range<usize>) -> Mat<'a, E> {
        let x = &self.chunk.inputs[0];
        let count = rows.len();
        // SAFETY: the caller's.
        let x = unsafe { Mat::rows_of(cx.get::<E>(x, x.of_rows(&rows)), count, x.width()) };
        x.block(0..count, 0..self.chunk.width())
    }
}

/// Packs the weight for both products that read it; workers divide the panels.
struct PackWeight<E, C>(Head<E, C>);

impl<E: PanelElement, C: CpuElement<Acc = f32>> Task for PackWeight<E, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let head = &self.0;
        let w = head.chunk.inputs[1].reads_all();
        vec![w, head.panel_access(0, share), head.panel_access(1, share)]
    }

    fn run(&self, cx: &Context<'_>) {
        let head = &self.0;
        let (chunk, shape) = (&head.chunk, head.right(0));
        // SAFETY: the task declared these accesses, and the strides are those of the weight.
        unsafe {
            let w = cx.ptr::<E>(&chunk.inputs[1]).cast_const();
            let w = Mat::from_raw(w, shape, chunk.weight_strides());
            for (which, w) in [(0, w), (1, w.t())] {
                let to = cx.workspace::<u32>(head.panels[which]);
                pack_right(&head.kernel, w, to, head.own_panels(which, cx.share));
            }
        }
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

/// A worker's rows of a chunk: logits, loss, their gradient over them, and the gradient of x.
struct Rows<E, C>(Head<E, C>);

impl<E: PanelElement, C: CpuElement<Acc = f32>> Task for Rows<E, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (head, p) = (&self.0, &self.0.chunk);
        let own = p.own(share);
        let rows = p.global(&own);
        let row = size_of::<f32>() * head.logits();
        let mut accesses = vec![
            p.outputs[0].writes(rows.clone()),
            p.outputs[1].writes(p.inputs[0].of_rows(&rows)),
            p.inputs[0].reads(p.inputs[0].of_rows(&rows)),
            p.inputs[2].reads(rows),
            p.inputs[3].reads_all(),
            Access::scratch(p.logits, own.start * row..own.end * row, true),
            head.reads_panels(0),
            head.reads_panels(1),
        ];
        if p.transposed {
            accesses.push(p.inputs[0].reads(p.inputs[0].of_rows(&p.rows)));
            accesses.push(head.panel_access(2, share));
        }
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let (head, p) = (&self.0, &self.0.chunk);
        if p.transposed {
            // SAFETY: the task declared that it reads x and writes these panels.
            unsafe {
                let (x, to) = (head.x(cx, p.rows.clone()), cx.workspace::<u32>(head.panels[2]));
                pack_right(&head.kernel, x, to, head.own_panels(2, cx.share));
            }
        }
        let own = p.own(cx.share);
        if own.is_empty() {
            return;
        }
        let (rows, count, classes) = (p.global(&own), own.len(), p.classes());
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(self.scratch(cx.share.workers) / size_of::<u32>()) };
        // SAFETY: the task declared these accesses; each worker uses its own rows of the logits, and the
        // weight was packed by an earlier task, behind a barrier.
        unsafe {
            let targets = cx.get::<i32>(&p.inputs[2], rows.clone());
            if !valid(cx, targets, classes) {
                return;
            }
            let stride = head.logits();
            let logits = || {
                let first = cx.workspace::<f32>(p.logits).add(own.start * stride);
                MatMut::from_raw(first, [count, stride], [stride as isize, 1])
            };
            let target = |_| {
                let result = logits().block(0..count, 0..classes);
                head.target(cx, 0, 0..head.used(0), (result, Addition::Nothing))
            };
            multiply(&head.kernel, head.x(cx, rows.clone()), 0..count, 1, target, scratch);
            let nll = cx.get_mut::<f32>(&p.outputs[0], rows.clone());
            let d_nll = cx.scalar(&p.inputs[3]) as f32;
            let columns = [classes, head.row_elements()];
            loss_and_rounded_gradient::<E>(logits(), columns, targets, d_nll, nll);
            let row = p.inputs[0].width();
            let target = |_| {
                let dx = cx.get_mut::<E>(&p.outputs[1], p.inputs[0].of_rows(&rows));
                let dx = MatMut::rows_of(dx, count, row).block(0..count, 0..p.width());
                head.target(cx, 1, 0..head.used(1), (dx, Addition::Nothing))
            };
            multiply(&head.kernel, head.gradient(cx, own), 0..count, 1, target, scratch);
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let (head, p) = (&self.0, &self.0.chunk);
        let count = p.rows.len().div_ceil(workers);
        let words = [p.width(), head.row_elements()]
            .map(|inner| multiply_scratch::<E>(&head.kernel, count, [inner, 1]));
        words[0].max(words[1]) * size_of::<u32>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

/// The gradient of the weight over the rows of a chunk; workers divide the classes.
struct Weight<E, C>(Head<E, C>);

impl<E: PanelElement, C: CpuElement<Acc = f32>> Weight<E, C> {
    /// A worker's classes: of a transposed gradient rows, otherwise the columns of its panels.
    fn own(&self, share: Share) -> Range<usize> {
        let (head, classes) = (&self.0, self.0.chunk.classes());
        if head.chunk.transposed {
            return share.of(classes);
        }
        let panels = head.own_panels(2, share);
        let column = |panel: usize| (panel * head.kernel.columns).min(classes);
        column(panels.start)..column(panels.end)
    }
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Task for Weight<E, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (head, p) = (&self.0, &self.0.chunk);
        let bytes = p.rows.len() * head.logits() * size_of::<f32>();
        let own = self.own(share);
        let row = p.inputs[0].width();
        // Rows of a transposed gradient are contiguous; columns of a plain one are not.
        let written = match p.transposed {
            true => own.start * row..own.end * row,
            false if own.is_empty() => 0..0,
            false => 0..p.outputs[2].elements(),
        };
        let panels = match p.transposed {
            true => head.reads_panels(2),
            false => head.panel_access(2, share),
        };
        vec![
            p.inputs[0].reads(p.inputs[0].of_rows(&p.rows)),
            Access::scratch(p.logits, 0..bytes, false),
            panels,
            p.outputs[2].writes(written),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        let (head, p) = (&self.0, &self.0.chunk);
        let (own, width, classes) = (self.own(cx.share), p.width(), p.classes());
        let panels = head.own_panels(2, cx.share);
        let adds = !p.first || cx.adds(&p.outputs[2]);
        let add = if adds { Addition::Result } else { Addition::Nothing };
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch(self.scratch(cx.share.workers) / size_of::<u32>()) };
        // SAFETY: the task declared these accesses; each worker writes the gradient of its own classes,
        // which is described by the strides of the weight.
        unsafe {
            let x = head.x(cx, p.rows.clone());
            let d = head.gradient(cx, 0..p.rows.len()).block(0..p.rows.len(), 0..classes);
            let dw = || {
                let dw = cx.ptr::<C>(&p.outputs[2]);
                MatMut::from_raw(dw, [width, classes], p.weight_strides())
            };
            if p.transposed {
                let target = |_| head.target(cx, 2, 0..head.used(2), (dw().t(), add));
                return multiply(&head.kernel, d.t(), own, 1, target, scratch);
            }
            let to = cx.workspace::<u32>(head.panels[2]);
            pack_right(&head.kernel, d, to, panels.clone());
            let target = |_| head.target(cx, 2, panels.clone(), (dw(), add));
            multiply(&head.kernel, x.t(), 0..width, 1, target, scratch);
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let (head, p) = (&self.0, &self.0.chunk);
        let rows = if p.transposed { p.classes().div_ceil(workers) } else { p.width() };
        multiply_scratch::<E>(&head.kernel, rows, [p.rows.len(), 0]) * size_of::<u32>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
