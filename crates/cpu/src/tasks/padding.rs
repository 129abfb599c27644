//! Writes zeros into padding.

use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::DType;
use phalanx_ir::ops::BinaryKind;

use super::extent::{common, gaps};
use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::CpuElement;
use crate::kernels::elementwise::{ElementOperand, binary_in_place};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    Ok(vec![Box::new(Clear { runs: x.runs(), x, out })])
}

struct Clear {
    x: Var,
    out: Var,
    /// The valid elements.
    runs: Vec<Range<usize>>,
}

impl Clear {
    fn own(&self, share: Share) -> Range<usize> {
        share.of(self.out.elements())
    }

    fn add<T: CpuElement>(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        for run in self.runs.iter().map(|run| common(run, &own)) {
            // SAFETY: the task declared these accesses; what is added to overlaps no other value.
            unsafe {
                let from = cx.get::<T>(&self.x, run.clone());
                let to = cx.get_mut::<T>(&self.out, run);
                binary_in_place(BinaryKind::Add, to, ElementOperand::Chunk(from));
            }
        }
    }

    fn copy(&self, cx: &Context<'_>) {
        let (own, size) = (self.own(cx.share), self.out.dtype.size());
        let (from, to) = (cx.ptr::<u8>(&self.x), cx.ptr::<u8>(&self.out));
        // SAFETY: the task declared these accesses; both places hold this worker's elements, and
        // they are the same place or do not overlap.
        unsafe {
            for run in self.runs.iter().map(|run| common(run, &own)).filter(|_| from != to) {
                let at = run.start * size;
                std::ptr::copy_nonoverlapping(from.add(at), to.add(at), run.len() * size);
            }
            for gap in gaps(&self.runs, own) {
                to.add(gap.start * size).write_bytes(0, gap.len() * size);
            }
        }
    }
}

impl Task for Clear {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        vec![self.x.reads(own.clone()), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        match self.out.dtype {
            DType::F32 if cx.adds(&self.out) => self.add::<f32>(cx),
            DType::F64 if cx.adds(&self.out) => self.add::<f64>(cx),
            DType::Bf16 if cx.adds(&self.out) => self.add::<half::bf16>(cx),
            DType::F16 if cx.adds(&self.out) => self.add::<half::f16>(cx),
            _ => self.copy(cx),
        }
    }
}

/// Zeros where nothing else writes: the padding of results, and a sum of no rows at all.
pub(super) struct Blank {
    var: Var,
    ranges: Vec<Range<usize>>,
}

impl Blank {
    /// For these results, of which the third is a sum over rows.
    pub(super) fn of(outputs: &[Var], no_rows: bool) -> Option<Box<dyn Task>> {
        let all = |var: &Var| 0..var.elements();
        let blanks = outputs.iter().enumerate().map(|(i, var)| Blank {
            ranges: match i == 2 && no_rows {
                true => vec![all(var)],
                false => gaps(&var.runs(), all(var)).collect(),
            },
            var: var.clone(),
        });
        let needed: Vec<Blank> = blanks.filter(|blank| !blank.ranges.is_empty()).collect();
        (!needed.is_empty()).then(|| Box::new(Blanks(needed)) as Box<dyn Task>)
    }
}

struct Blanks(Vec<Blank>);

impl Task for Blanks {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let whole = |blank: &Blank| blank.var.writes(share.alone(blank.var.elements()));
        self.0.iter().map(whole).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        for blank in self.0.iter().filter(|b| cx.share.worker == 0 && !cx.adds(&b.var)) {
            let size = blank.var.dtype.size();
            for range in &blank.ranges {
                // SAFETY: the task declared that it writes the value.
                unsafe {
                    let start = cx.ptr::<u8>(&blank.var).add(range.start * size);
                    start.write_bytes(0, range.len() * size);
                }
            }
        }
    }
}

/// Zeros in the part of an instruction's scratch memory that only rows of padding would use: it is
/// planned for all rows, and what is planned is written on every rank.
pub(super) struct Spare {
    /// Offset of the scratch memory in the workspace.
    scratch: usize,
    /// The bytes that no valid row uses.
    bytes: Range<usize>,
}

impl Spare {
    /// What is planned at an offset of the workspace beyond what is used.
    pub(super) fn after(scratch: usize, used: usize, planned: usize) -> Option<Box<dyn Task>> {
        (used < planned).then(|| Box::new(Self { scratch, bytes: used..planned }) as Box<dyn Task>)
    }
}

impl Task for Spare {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.alone(self.bytes.len());
        let bytes = self.bytes.start + own.start..self.bytes.start + own.end;
        vec![Access::scratch(self.scratch, bytes, true)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.alone(self.bytes.len());
        // SAFETY: the task declared that it writes these bytes, which lie in the scratch memory.
        unsafe {
            let start = cx.workspace::<u8>(self.scratch).add(self.bytes.start + own.start);
            start.write_bytes(0, own.len());
        }
    }
}
