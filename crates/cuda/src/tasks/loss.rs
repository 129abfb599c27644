//! Cross-entropy fused with its projection, in chunks of rows: logits of a chunk, their gradient in the
//! same memory, and from it the gradients of both operands.

use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::LinearCrossEntropy;
use phalanx_ir::{DType, ProductLoops, StridedLoop};

use super::rows::threads;
use super::{Arg, KernelTask, Operation, Place, Task, Tasks, Var};
use crate::kernels::{KernelSpec, MOST_SHARED, Source, is_narrow};
use crate::products::{Adding, Operands, Product};
use crate::requirements::{chunk_bytes, chunk_rows};

pub(super) fn compile(
    op: &mut Operation<'_>,
    loss: LinearCrossEntropy,
) -> Result<Tasks, EngineError> {
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let (x, w) = (&inputs[0], &inputs[1]);
    let types = (op.program.ty(op.instr.inputs[0]), op.program.ty(op.instr.inputs[1]));
    let planned = chunk_bytes(&loss, op.program.mesh(), types.0, types.1);
    let size = chunk_rows(&loss, op.program.mesh(), types.0, types.1);
    let runs = x.row_runs();
    let classes = w.valid[usize::from(!loss.transposed)];
    let mut tasks = Vec::new();
    let padded = |var: &Var| var.valid != var.shape;
    if padded(x) || padded(w) || runs.is_empty() {
        // Where nothing else writes; results that are added to keep what they have.
        let clear = |var: &Var| Task::Clear { to: var.place(), bytes: var.bytes() };
        tasks.extend(outputs.iter().map(clear));
    }
    let longest = runs.iter().map(|run| run.len().min(size)).max().unwrap_or(0);
    if longest * classes * x.dtype.size() < planned {
        tasks.push(Task::Clear { to: op.scratch_at(0)?, bytes: planned });
    }
    let chunks = runs.into_iter().flat_map(|run| {
        let end = run.end;
        run.step_by(size).map(move |start| start..(start + size).min(end))
    });
    for (index, rows) in chunks.enumerate() {
        let chunk = Chunk { loss, classes, rows, first: index == 0 };
        tasks.extend(chunk.tasks(op, &inputs, &outputs)?);
    }
    Ok(tasks)
}

struct Chunk {
    loss: LinearCrossEntropy,
    classes: usize,
    rows: Range<usize>,
    first: bool,
}

impl Chunk {
    fn tasks(
        &self,
        op: &mut Operation<'_>,
        inputs: &[Var],
        outputs: &[Var],
    ) -> Result<Tasks, EngineError> {
        let (x, w) = (&inputs[0], &inputs[1]);
        let logits = op.scratch_at(0)?;
        let (count, width, row) = (self.rows.len(), x.valid_width(), x.width());
        let extent = w.elements() / row.max(1);
        // Strides of w, and of its gradient, along the width and along the classes.
        let [by_width, by_class] = if self.loss.transposed { [1, row] } else { [extent, 1] };
        let own =
            |var: &Var, each: usize| var.place().add(self.rows.start * each * var.dtype.size());
        let sizes = [count, width, self.classes];
        // Strides along rows, width and classes.
        let (of_x, of_w, of_logits) = ([row, 1, 0], [0, by_width, by_class], [self.classes, 0, 1]);
        let narrow = [x.dtype; 2];
        let adding = match self.first {
            true => Adding::If(outputs[2].slot),
            false => Adding::Always,
        };
        let never = Adding::If(phalanx_call::Slot::Unused);
        let mut product = |[m, n, k]: [usize; 3],
                           strides: [[usize; 3]; 3],
                           places: [Place; 3],
                           types: [DType; 2],
                           adding: Adding| {
            let axis = |i: usize| StridedLoop {
                size: sizes[i],
                extent: sizes[i],
                strides: strides.map(|of| of[i]),
            };
            let (rows, cols, inner) = (axis(m), axis(n), axis(k));
            let loops = ProductLoops { rows, cols, inner, outer: vec![], sums: vec![] };
            let [a, b, out] = places;
            let operands = Operands { a, b, addend: None, out, adding };
            Ok::<_, EngineError>(Task::Product(Box::new(Product::new(
                op, loops, types, operands, None,
            )?)))
        };
        let (given, dx) = (own(x, row), own(&outputs[1], row));
        let forward =
            product([0, 2, 1], [of_x, of_w, of_logits], [given, w.place(), logits], narrow, never)?;
        let to_x =
            product([0, 1, 2], [of_logits, of_w, of_x], [logits, w.place(), dx], narrow, never)?;
        let to_w = product(
            [1, 2, 0],
            [of_x, of_logits, of_w],
            [given, logits, outputs[2].place()],
            [x.dtype, outputs[2].dtype],
            adding,
        )?;
        let site = op.engine.site(&op.program.name, "target");
        // A row of whole packs of 16 bits an element is kept in shared memory.
        let row = self.classes * x.dtype.size();
        let kept = is_narrow(x.dtype) && row.is_multiple_of(16) && row <= MOST_SHARED as usize;
        let args = vec![
            Arg::Pointer(logits),
            Arg::Pointer(own(&inputs[2], 1)),
            inputs[3].arg(),
            Arg::Pointer(own(&outputs[0], 1)),
            Arg::Int(count as i64),
            Arg::Int(self.classes as i64),
            Arg::Fault,
            Arg::Int(site),
        ];
        let blocks = [count as u32, 1, 1];
        let entropy = match kept {
            true => {
                let types = [op.float(x.dtype)?];
                let kernel = KernelSpec::of(Source::Loss, "entropy_of_kept_rows", &types);
                KernelTask::new(kernel, blocks, 512, args).sharing(row)
            }
            false => {
                let types = [op.float(x.dtype)?];
                let kernel = KernelSpec::of(Source::Loss, "entropy_in_place", &types);
                KernelTask::new(kernel, blocks, threads(self.classes), args)
            }
        };
        Ok(vec![forward, Task::Kernel(entropy), to_x, to_w])
    }
}
