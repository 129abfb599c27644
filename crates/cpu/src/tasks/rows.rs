//! Ops in which each operand is either divided by rows or read whole: norms, softmax, dropout,
//! embeddings.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, placed, task};
use crate::element::CpuElement;
use crate::kernels::{dropout, embedding, norm, softmax};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    match &op.instr.op {
        Op::RmsNorm(n) => forward(op, Forward::RmsNorm { eps: n.eps }),
        Op::LayerNorm(n) => forward(op, Forward::LayerNorm { eps: n.eps }),
        Op::Softmax(_) => forward(op, Forward::Softmax),
        Op::SoftmaxGrad(_) => forward(op, Forward::SoftmaxGrad),
        Op::Dropout(d) => {
            let first = placed::first_sample(op);
            forward(op, Forward::Dropout { p: d.p, site: d.site, first })
        }
        Op::Embedding(_) => forward(op, Forward::Embedding { held: placed::held(op)? }),
        _ => Err(op.unsupported("it does not work by rows")),
    }
}

/// The ops, each of one float type.
enum Forward {
    RmsNorm {
        eps: f64,
    },
    LayerNorm {
        eps: f64,
    },
    Softmax,
    SoftmaxGrad,
    /// `first` is the number of the first sample held here.
    Dropout {
        p: f64,
        site: u32,
        first: usize,
    },
    Embedding {
        held: embedding::HeldRows,
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

impl<T: CpuElement> Rows<T> {
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

impl<T: CpuElement> Task for Rows<T> {
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

impl<T: CpuElement> Rows<T> {
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
