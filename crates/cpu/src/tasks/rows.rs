//! Ops that work row by row: norms, rotary, softmax, dropout, embeddings.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::{self, NORM_PARTS};

use super::{
    Access, Context, Operation, Share, Task, Tasks, Var, for_float, for_floats, placed, task,
};
use crate::element::{Element, Float};
use crate::kernels::{dropout, embedding, norm, rotary, softmax};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    match &op.instr.op {
        Op::RmsNorm(n) => forward(op, Forward::RmsNorm { eps: n.eps }),
        Op::LayerNorm(n) => forward(op, Forward::LayerNorm { eps: n.eps }),
        Op::RmsNormGrad(_) | Op::LayerNormGrad(_) => norm_grad(op),
        Op::Rotary(r) => rotation(op, r),
        Op::Softmax(_) => forward(op, Forward::Softmax),
        Op::SoftmaxGrad(_) => forward(op, Forward::SoftmaxGrad),
        Op::Dropout(d) => {
            let first = placed::first_sample(op);
            forward(op, Forward::Dropout { p: d.p, site: d.site, first })
        }
        Op::Embedding(_) => forward(op, Forward::Embedding { held: placed::held(op)? }),
        Op::EmbeddingGrad(_) => embedding_grad(op),
        _ => Err(op.unsupported("it does not work by rows")),
    }
}

/// Ops of one float type whose every operand is either shared by rows or read whole.
enum Forward {
    RmsNorm { eps: f64 },
    LayerNorm { eps: f64 },
    Softmax,
    SoftmaxGrad,
    /// `first` is the number of the first sample held here.
    Dropout {
        p: f64,
        site: u32,
        first: usize,
    },
    Embedding {
        held: embedding::Held,
    },
}

struct Rows<T> {
    kind: Forward,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    types: PhantomData<T>,
}

fn forward(op: &Operation<'_>, kind: Forward) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let made = for_float!(op, outputs[0].dtype, T => {
        task(Rows::<T> { kind, inputs, outputs, types: PhantomData })
    })?;
    Ok(vec![made])
}

impl<T: Element> Rows<T> {
    fn rows(&self, share: Share) -> Range<usize> {
        self.outputs[0].own_rows(share)
    }

    /// Operands that are read whole: gains, biases, keys, tables.
    fn whole(&self, input: usize) -> bool {
        match self.kind {
            Forward::RmsNorm { .. } | Forward::LayerNorm { .. } | Forward::Dropout { .. } => {
                input > 0
            }
            Forward::Embedding { .. } => input == 0,
            Forward::Softmax | Forward::SoftmaxGrad => false,
        }
    }

    /// Elements of a value that belong to some rows.
    fn part(&self, var: &Var, rows: &Range<usize>) -> Range<usize> {
        let width = var.elements() / self.outputs[0].rows().max(1);
        rows.start * width..rows.end * width
    }

    /// Elements of an operand that a worker reads.
    fn read(&self, input: usize, rows: &Range<usize>) -> Range<usize> {
        let var = &self.inputs[input];
        match self.whole(input) {
            _ if rows.is_empty() => 0..0,
            true => 0..var.elements(),
            false => self.part(var, rows),
        }
    }
}

impl<T: Element> Task for Rows<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.rows(share);
        let reads = self.inputs.iter().enumerate().map(|(i, v)| v.reads(self.read(i, &rows)));
        reads.chain(self.outputs.iter().map(|v| v.writes(self.part(v, &rows)))).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.rows(cx.share);
        if rows.is_empty() {
            return;
        }
        // SAFETY: the task declared these accesses, and the types are the values'.
        let input = |i: usize| unsafe { cx.get::<T>(&self.inputs[i], self.read(i, &rows)) };
        // SAFETY: as above; results are distinct.
        let output = |i: usize| unsafe {
            cx.get_mut::<T>(&self.outputs[i], self.part(&self.outputs[i], &rows))
        };
        match self.kind {
            Forward::RmsNorm { eps } => {
                // SAFETY: as above.
                let rstd = unsafe { self.statistic(cx, 1, &rows) };
                norm::rms_norm(input(0), input(1), eps, output(0), rstd);
            }
            Forward::LayerNorm { eps } => {
                // SAFETY: as above; the two are distinct.
                let (mean, rstd) =
                    unsafe { (self.statistic(cx, 1, &rows), self.statistic(cx, 2, &rows)) };
                let (x, gain, bias) = (input(0), input(1), input(2));
                norm::layer_norm(x, gain, bias, eps, output(0), mean, rstd);
            }
            Forward::Softmax => softmax::softmax(input(0), self.outputs[0].width(), output(0)),
            Forward::SoftmaxGrad => {
                softmax::gradient(input(0), input(1), self.outputs[0].width(), output(0));
            }
            Forward::Dropout { p, site, first } => {
                let mask = dropout::Mask { key: self.key(cx), site, p };
                let sample = self.outputs[0].elements() / self.outputs[0].shape[0].max(1);
                let first = first * sample + rows.start * self.outputs[0].width();
                dropout::dropout(input(0), mask, sample, first, output(0));
            }
            Forward::Embedding { held } => {
                let table = &self.inputs[0];
                // SAFETY: the task declared these accesses.
                let (table_data, ids) = unsafe {
                    (
                        cx.get::<T>(table, 0..table.elements()),
                        cx.get::<i32>(&self.inputs[1], rows.clone()),
                    )
                };
                let found = embedding::gather(table_data, held, table.width(), ids, output(0));
                if let Err(unknown) = found {
                    cx.failure.report(unknown.to_string());
                }
            }
        }
    }
}

impl<T: Element> Rows<T> {
    /// A statistic of the rows: a result after the first.
    ///
    /// # Safety
    /// The task declared the access, and holds no other reference to it.
    #[allow(clippy::mut_from_ref, reason = "shares are disjoint")]
    unsafe fn statistic<'a>(
        &self,
        cx: &'a Context<'_>,
        i: usize,
        rows: &Range<usize>,
    ) -> &'a mut [T::Acc] {
        // SAFETY: the caller's; statistics have the accumulator type.
        unsafe { cx.get_mut(&self.outputs[i], rows.clone()) }
    }

    fn key(&self, cx: &Context<'_>) -> [i32; 5] {
        // SAFETY: the task declared that it reads its key, which has five words.
        let words = unsafe { cx.get::<i32>(&self.inputs[1], 0..5) };
        std::array::from_fn(|i| words[i])
    }
}

/// Gradients of norms: rows of dx and sums of parts of the rows; then the sum of the parts.
fn norm_grad(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let dx = op.output(0);
    let vectors: Vec<Var> = (1..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let sums = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    for_floats!(op, dx.dtype, vectors[0].dtype, T, C => {
        let total = SumParts { sums, vectors: vectors.clone(), types: PhantomData };
        let total: SumParts<<T as Element>::Acc, C> = total;
        let rows = NormGrad::<T, C> { inputs, dx, vectors, sums, types: PhantomData };
        let tasks: Tasks = vec![task(rows), task(total)];
        tasks
    })
}

struct NormGrad<T, C> {
    inputs: Vec<Var>,
    dx: Var,
    vectors: Vec<Var>,
    /// Offset of the parts' sums in the workspace.
    sums: usize,
    types: PhantomData<(T, C)>,
}

impl<T: Element, C: Element<Acc = T::Acc>> NormGrad<T, C> {
    /// The rows of one of the fixed parts.
    fn rows(&self, part: usize) -> Range<usize> {
        Share { worker: part, workers: NORM_PARTS }.of(self.dx.rows())
    }

    /// Bytes of one part's sums.
    fn part_bytes(&self) -> usize {
        self.vectors.len() * self.dx.width() * size_of::<T::Acc>()
    }
}

impl<T: Element, C: Element<Acc = T::Acc>> Task for NormGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let parts = share.of(NORM_PARTS);
        if parts.is_empty() {
            return vec![];
        }
        let rows = self.rows(parts.start).start..self.rows(parts.end - 1).end;
        let statistics = 2..self.inputs.len() - 1;
        let mut accesses = vec![
            self.inputs[0].reads(self.dx.of_rows(&rows)),
            self.inputs[1].reads_all(),
            self.inputs[statistics.end].reads(self.dx.of_rows(&rows)),
            self.dx.writes(self.dx.of_rows(&rows)),
        ];
        accesses.extend(statistics.map(|i| self.inputs[i].reads(rows.clone())));
        let bytes = parts.start * self.part_bytes()..parts.end * self.part_bytes();
        accesses.push(Access::scratch(self.sums, bytes, true));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        for part in cx.share.of(NORM_PARTS) {
            let rows = self.rows(part);
            let elements = self.dx.of_rows(&rows);
            let width = self.dx.width();
            // SAFETY: the task declared these accesses, and the types are the values'; the parts'
            // sums lie one after the other in the instruction's scratch memory.
            unsafe {
                let sums = cx.workspace::<T::Acc>(self.sums).add(part * self.vectors.len() * width);
                let sums = std::slice::from_raw_parts_mut(sums, self.vectors.len() * width);
                sums.fill(T::Acc::ZERO);
                let (first, second) = sums.split_at_mut(width);
                let x = cx.get::<T>(&self.inputs[0], elements.clone());
                let gamma = cx.get::<T>(&self.inputs[1], 0..width);
                let dy = cx.get::<T>(&self.inputs[self.inputs.len() - 1], elements.clone());
                let dx = cx.get_mut::<T>(&self.dx, elements);
                let statistic = |i: usize| cx.get::<T::Acc>(&self.inputs[i], rows.clone());
                if self.vectors.len() == 1 {
                    norm::rms_norm_gradient(x, gamma, statistic(2), dy, dx, first);
                } else {
                    let normed =
                        norm::LayerNormed { x, gamma, mean: statistic(2), rstd: statistic(3) };
                    norm::layer_norm_gradient(normed, dy, dx, first, second);
                }
            }
        }
    }
}

/// The sum of the parts, in their order; the columns of each vector are shared.
pub(super) struct SumParts<A, C> {
    pub(super) sums: usize,
    pub(super) vectors: Vec<Var>,
    pub(super) types: PhantomData<(A, C)>,
}

impl<A: Float, C: Element<Acc = A>> Task for SumParts<A, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.vectors[0].elements());
        let bytes = NORM_PARTS * self.vectors.len() * self.vectors[0].elements() * size_of::<A>();
        let mut accesses = vec![Access::scratch(self.sums, 0..bytes, false)];
        accesses.extend(self.vectors.iter().map(|v| v.writes(own.clone())));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let width = self.vectors[0].elements();
        let own = cx.share.of(width);
        for (index, var) in self.vectors.iter().enumerate() {
            let adds = cx.adds(var);
            // SAFETY: the task declared these accesses; the parts were written before the barrier
            // that lies between.
            unsafe {
                let sums = cx.workspace::<A>(self.sums);
                let out = cx.get_mut::<C>(var, own.clone());
                for (out, column) in out.iter_mut().zip(own.clone()) {
                    let mut sum = if adds { out.load() } else { A::ZERO };
                    for part in 0..NORM_PARTS {
                        sum += *sums.add((part * self.vectors.len() + index) * width + column);
                    }
                    *out = C::store(sum);
                }
            }
        }
    }
}

fn rotation(op: &Operation<'_>, rotation: &ops::Rotary) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let (seq, head_dim) = (x.shape[1], x.shape[3]);
    let part = op.part(op.instr.inputs[0], 1);
    let frequencies = rotation.frequencies(head_dim);
    let direction = match rotation.inverse {
        false => rotary::Direction::Forward,
        true => rotary::Direction::Inverse,
    };
    let made = for_float!(op, x.dtype, T => {
        let mut tables = vec![<T as Element>::Acc::ZERO; seq * head_dim];
        let (cos, sin) = tables.split_at_mut(seq * head_dim / 2);
        rotary::fill_tables((0..seq).map(|i| part.global(i)), &frequencies, cos, sin);
        task(Rotation::<T> { x, out, tables, direction })
    })?;
    Ok(vec![made])
}

struct Rotation<T: Element> {
    x: Var,
    out: Var,
    /// Cosines, then sines.
    tables: Vec<T::Acc>,
    direction: rotary::Direction,
}

impl<T: Element> Rotation<T> {
    /// Rows are positions; a row is all heads of one.
    fn rows(&self, share: Share) -> Range<usize> {
        share.of(self.x.shape[0] * self.x.shape[1])
    }

    fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        let width = self.x.shape[2] * self.x.shape[3];
        rows.start * width..rows.end * width
    }
}

impl<T: Element> Task for Rotation<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.elements(&self.rows(share));
        vec![self.x.reads(own.clone()), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.rows(cx.share);
        let (cos, sin) = self.tables.split_at(self.tables.len() / 2);
        let turn = rotary::Rotary {
            cos,
            sin,
            head_dim: self.x.shape[3],
            heads: self.x.shape[2],
            seq: self.x.shape[1],
            offset: 0,
            first_row: rows.start,
            direction: self.direction,
        };
        let stride = turn.heads * turn.head_dim;
        let own = self.elements(&rows);
        // SAFETY: the task declared these accesses; in place, there is only the one slice.
        unsafe {
            let out = cx.get_mut::<T>(&self.out, own.clone());
            if cx.ptr::<T>(&self.x) == cx.ptr::<T>(&self.out) {
                turn.rotate_in_place(rows.len(), out, stride);
            } else {
                turn.rotate(rows.len(), cx.get::<T>(&self.x, own), stride, out, stride);
            }
        }
    }
}

fn embedding_grad(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (ids, dy, out, held) = (op.input(0), op.input(1), op.output(0), placed::held(op)?);
    let made = for_floats!(op, dy.dtype, out.dtype, T, C => {
        task(TableGrad::<T, C> { ids, dy, out, held, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// The gradient of a table: each worker owns some of its rows and goes through all ids.
struct TableGrad<T, C> {
    ids: Var,
    dy: Var,
    out: Var,
    held: embedding::Held,
    types: PhantomData<(T, C)>,
}

impl<T: Element, C: Element<Acc = T::Acc>> Task for TableGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.out.own_rows(share);
        vec![self.ids.reads_all(), self.dy.reads_all(), self.out.writes(self.out.of_rows(&rows))]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.out.own_rows(cx.share);
        let (first, width) = (self.held.first + rows.start, self.out.width());
        let held = embedding::Held { first, rows: rows.len(), ..self.held };
        let adds = cx.adds(&self.out);
        // SAFETY: the task declared these accesses.
        let found = unsafe {
            let ids = cx.get::<i32>(&self.ids, 0..self.ids.elements());
            let dy = cx.get::<T>(&self.dy, 0..self.dy.elements());
            let grad = cx.get_mut::<C>(&self.out, self.out.of_rows(&rows));
            embedding::gather_gradient(ids, dy, width, held, adds, grad)
        };
        if let Err(unknown) = found {
            cx.failure.report(unknown.to_string());
        }
    }
}
