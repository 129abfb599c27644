//! Zeros in place of padding.

use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::DType;
use phalanx_ir::ops::BinaryKind;

use super::extent::{common, gaps};
use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::Element;
use crate::kernels::elementwise::{Operand, binary_in_place};

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

    fn add<T: Element>(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        for run in self.runs.iter().map(|run| common(run, &own)) {
            // SAFETY: the task declared these accesses; what is added to overlaps no other value.
            unsafe {
                let from = cx.get::<T>(&self.x, run.clone());
                let to = cx.get_mut::<T>(&self.out, run);
                binary_in_place(BinaryKind::Add, to, Operand::Chunk(from));
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
            _ => self.copy(cx),
        }
    }
}
