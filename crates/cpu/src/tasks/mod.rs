//! Compiled instructions: what each worker of the pool does for one call.
//!
//! A [`Task`] knows the places of its operands, does one worker's share when it runs, and says
//! beforehand which bytes each worker will touch. From that the compiler places barriers: two calls
//! need one between them only if some worker touches what another one wrote.

mod attention;
mod collective;
mod extent;
mod fused;
mod loss;
mod lowered;
mod matmul;
mod movement;
mod padding;
mod placed;
mod reduce;
mod rows;
mod update;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_comm::Handle;
use phalanx_engine::{Args, EngineError};
use phalanx_ir::{DType, Instr, Op, OpDef, Program, ValueId};
use phalanx_script::{Place, Slots};

/// Which part of a task a worker does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) worker: usize,
    pub(crate) workers: usize,
}

impl Share {
    /// This worker's part of `n` things.
    pub(crate) fn of(self, n: usize) -> Range<usize> {
        n * self.worker / self.workers..n * (self.worker + 1) / self.workers
    }

    /// The only worker that does anything, for work too small to share.
    pub(crate) fn alone(self, n: usize) -> Range<usize> {
        if self.worker == 0 { 0..n } else { 0..0 }
    }
}

/// A value as a task sees it.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) place: Place,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// How many elements of each dim are valid; the rest is padding.
    pub(crate) valid: Vec<usize>,
}

impl Var {
    /// What a rank holds of a value.
    pub(crate) fn of(program: &Program, value: ValueId, place: Place, rank: usize) -> Self {
        let (ty, mesh) = (program.ty(value), program.mesh());
        let (shape, valid) = (ty.local_shape(mesh), ty.local_valid(mesh, rank));
        Self { place, dtype: ty.dtype, shape, valid }
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The last dim.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// All dims but the last, multiplied.
    pub(crate) fn rows(&self) -> usize {
        self.elements() / self.width().max(1)
    }

    /// A worker's rows: whole samples if they divide evenly, so that consecutive ops of different
    /// widths have the same borders and need no barrier between them.
    pub(crate) fn own_rows(&self, share: Share) -> Range<usize> {
        share.of(self.rows())
    }

    pub(crate) fn access(&self, elements: Range<usize>, write: bool) -> Access {
        let size = self.dtype.size();
        let bytes = elements.start * size..elements.end * size;
        Access { place: self.place, bytes, write }
    }

    pub(crate) fn reads(&self, elements: Range<usize>) -> Access {
        self.access(elements, false)
    }

    pub(crate) fn writes(&self, elements: Range<usize>) -> Access {
        self.access(elements, true)
    }

    pub(crate) fn reads_all(&self) -> Access {
        self.reads(0..self.elements())
    }

    /// Elements of these rows.
    pub(crate) fn of_rows(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width()..rows.end * self.width()
    }
}

/// Bytes of a value that one worker touches.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    place: Place,
    bytes: Range<usize>,
    write: bool,
}

impl Access {
    /// Bytes of an instruction's scratch memory in the workspace.
    pub(crate) fn scratch(offset: usize, bytes: Range<usize>, write: bool) -> Self {
        Self { place: Place::Workspace(offset), bytes, write }
    }

    /// Whether two workers must not make these accesses without a barrier between them.
    pub(crate) fn conflicts(&self, other: &Access) -> bool {
        if !(self.write || other.write) {
            return false;
        }
        let (a, b) = match (self.place, other.place) {
            (Place::Workspace(a), Place::Workspace(b)) => (a, b),
            (a, b) if a == b => (0, 0),
            _ => return false,
        };
        let (x, y) = (&self.bytes, &other.bytes);
        a + x.start < b + y.end && b + y.start < a + x.end
    }
}

/// One compiled call.
pub(crate) trait Task: Send + Sync {
    /// What a worker touches.
    fn accesses(&self, share: Share) -> Vec<Access>;

    /// Does a worker's share.
    fn run(&self, cx: &Context<'_>);

    /// Bytes of scratch memory that each worker needs.
    fn scratch(&self, _workers: usize) -> usize {
        0
    }

    /// Whether its time counts as matrix products.
    fn is_matmul(&self) -> bool {
        false
    }

    /// The call that it makes, if it does nothing but talk to other ranks.
    fn transfer(&self) -> Option<&Transfer> {
        None
    }
}

/// What a running task has: its share, the memory, and a place for errors.
pub(crate) struct Context<'a> {
    pub(crate) share: Share,
    pub(crate) base: *mut u8,
    pub(crate) args: Args<'a>,
    pub(crate) scratch: *mut u8,
    pub(crate) scratch_bytes: usize,
    pub(crate) failure: &'a Failure,
    /// The way to other ranks, if there are any.
    pub(crate) comm: Option<&'a Endpoint>,
    /// By value: the calls that were started and not yet waited for.
    pub(crate) handles: &'a [Mutex<Option<Handle>>],
}

impl Context<'_> {
    fn address(&self, place: Place) -> *mut u8 {
        let offset = match place {
            Place::Input(i) => self.args.inputs[i].offset,
            Place::Output(o) => self.args.outputs[o].span.offset,
            Place::Workspace(offset) => self.args.workspace.offset + offset,
            Place::Unused => unreachable!("a task has no operand that lies nowhere"),
        };
        self.base.wrapping_add(offset)
    }

    /// The address of a value's first element.
    pub(crate) fn ptr<T>(&self, var: &Var) -> *mut T {
        self.address(var.place).cast()
    }

    /// The address of scratch memory in the workspace.
    pub(crate) fn workspace<T>(&self, offset: usize) -> *mut T {
        self.address(Place::Workspace(offset)).cast()
    }

    /// Elements of a value, to read.
    ///
    /// # Safety
    /// The task declared the access, and `T` is the value's element type.
    pub(crate) unsafe fn get<T>(&self, var: &Var, elements: Range<usize>) -> &[T] {
        debug_assert!(elements.end <= var.elements() && size_of::<T>() == var.dtype.size());
        // SAFETY: the planner gave the value this memory, aligned, for its whole life; barriers
        // keep writers of other workers away, and the task writes it through no other reference.
        unsafe {
            std::slice::from_raw_parts(self.ptr::<T>(var).add(elements.start), elements.len())
        }
    }

    /// Elements of a value, to write.
    ///
    /// # Safety
    /// The task declared the access, `T` is the value's element type, and no other reference to
    /// these elements is in use.
    #[allow(
        clippy::mut_from_ref,
        reason = "shares are disjoint, which barriers and borders ensure"
    )]
    pub(crate) unsafe fn get_mut<T>(&self, var: &Var, elements: Range<usize>) -> &mut [T] {
        debug_assert!(elements.end <= var.elements() && size_of::<T>() == var.dtype.size());
        // SAFETY: as above; the caller holds no other reference, and workers' shares are disjoint.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr::<T>(var).add(elements.start), elements.len())
        }
    }

    /// A number of the step.
    ///
    /// # Safety
    /// The task declared that it reads the value, which is an `f32` or `f64` scalar.
    pub(crate) unsafe fn scalar(&self, var: &Var) -> f64 {
        // SAFETY: the caller's.
        unsafe {
            match var.dtype {
                DType::F64 => self.get::<f64>(var, 0..1)[0],
                _ => f64::from(self.get::<f32>(var, 0..1)[0]),
            }
        }
    }

    /// This worker's scratch memory.
    ///
    /// # Safety
    /// No other slice of it is in use: a second one would alias the first.
    #[allow(clippy::mut_from_ref, reason = "each worker has its own")]
    pub(crate) unsafe fn scratch<T: bytemuck::Pod>(&self, elements: usize) -> &mut [T] {
        assert!(elements * size_of::<T>() <= self.scratch_bytes, "scratch memory is too small");
        // SAFETY: the memory is this worker's own for the run, page-aligned and initialised; the
        // caller uses no other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.scratch.cast(), elements) }
    }

    /// Whether a value is added to what its output holds.
    pub(crate) fn adds(&self, var: &Var) -> bool {
        matches!(var.place, Place::Output(o) if self.args.outputs[o].add)
    }
}

/// The first error of a run.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    message: Mutex<Option<String>>,
    /// Nanoseconds that the first worker spent in matrix products.
    matmul: AtomicU64,
}

impl Failure {
    pub(crate) fn report(&self, message: String) {
        if let Ok(mut first) = self.message.lock() {
            first.get_or_insert(message);
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.message.lock().is_ok_and(|m| m.is_some())
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.message.lock().ok().and_then(|mut m| m.take())
    }

    pub(crate) fn spent(&self, nanoseconds: u64) {
        self.matmul.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn matmul_nanoseconds(&self) -> u64 {
        self.matmul.load(Ordering::Relaxed)
    }
}

/// The operands and results of one instruction, as tasks are made from them.
pub(crate) struct Operation<'a> {
    pub(crate) program: &'a Program,
    pub(crate) instr: &'a Instr,
    pub(crate) slots: &'a Slots,
    /// Offset of the instruction's scratch memory in the workspace.
    pub(crate) scratch: Option<usize>,
    /// This rank, in the program's mesh.
    pub(crate) rank: usize,
    /// The way to other ranks, if there are any.
    pub(crate) comm: Option<&'a Endpoint>,
}

impl Operation<'_> {
    pub(crate) fn input(&self, i: usize) -> Var {
        self.var(self.instr.inputs[i])
    }

    pub(crate) fn output(&self, i: usize) -> Var {
        self.var(self.instr.outputs[i])
    }

    pub(crate) fn var(&self, value: ValueId) -> Var {
        Var::of(self.program, value, self.slots.places[value.index()], self.rank)
    }

    pub(crate) fn unsupported(&self, why: impl Into<String>) -> EngineError {
        EngineError::Unsupported {
            engine: "cpu",
            program: self.program.name.clone(),
            op: self.instr.op.name().to_owned(),
            why: why.into(),
        }
    }
}

pub(crate) type Tasks = Vec<Box<dyn Task>>;

/// A task of any kind.
pub(crate) fn task(task: impl Task + 'static) -> Box<dyn Task> {
    Box::new(task)
}

/// The calls of one instruction.
pub(crate) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    // What depends on where a rank's elements lie, or on which of them are padding, where that
    // makes a difference.
    if let Some(tasks) = lowered::compile(op)? {
        return Ok(tasks);
    }
    if let Some(tasks) = placed::compile(op)? {
        return Ok(tasks);
    }
    match &op.instr.op {
        // The result is the operand, under another type.
        Op::Reshape(_) => Ok(vec![]),
        Op::Matmul(matmul) => matmul::compile(op, matmul),
        Op::Unary(_)
        | Op::UnaryGrad(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select(_)
        | Op::Scale(_)
        | Op::Shift(_)
        | Op::Cast(_)
        | Op::Fused(_) => fused::compile(op),
        Op::Fill(_)
        | Op::Transpose(_)
        | Op::Slice(_)
        | Op::Pad(_)
        | Op::Concat(_)
        | Op::Broadcast(_) => movement::compile(op),
        Op::Reduce(_) | Op::SumSquares(_) => reduce::compile(op),
        Op::Embedding(_)
        | Op::EmbeddingGrad(_)
        | Op::RmsNorm(_)
        | Op::RmsNormGrad(_)
        | Op::LayerNorm(_)
        | Op::LayerNormGrad(_)
        | Op::Rotary(_)
        | Op::Softmax(_)
        | Op::SoftmaxGrad(_)
        | Op::Dropout(_) => rows::compile(op),
        Op::ZeroPadding(_) => padding::compile(op),
        Op::Attention(_) | Op::AttentionGrad(_) => attention::compile(op),
        Op::CrossEntropy(_) | Op::CrossEntropyGrad(_) | Op::LinearCrossEntropy(_) => {
            loss::compile(op)
        }
        Op::AdamW(_) | Op::Sgd(_) => update::compile(op),
        Op::Collective(collective) => collective::compile(op, collective),
    }
}

pub(crate) use collective::{Endpoint, Transfer};
pub(crate) use movement::copy;

/// Runs a generic constructor for the float type that a value has.
macro_rules! for_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_ir::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            phalanx_ir::DType::F64 => {
                type $T = f64;
                Ok($body)
            }
            phalanx_ir::DType::Bf16 => {
                type $T = half::bf16;
                Ok($body)
            }
            other => Err($op.unsupported(format!("it has no kernel for {other}"))),
        }
    };
}

/// Runs a generic constructor for a float type and a second one with the same accumulator.
macro_rules! for_floats {
    ($op:expr, $a:expr, $b:expr, $T:ident, $U:ident => $body:expr) => {
        match ($a, $b) {
            (phalanx_ir::DType::F32, phalanx_ir::DType::F32) => {
                type $T = f32;
                type $U = f32;
                Ok($body)
            }
            (phalanx_ir::DType::F64, phalanx_ir::DType::F64) => {
                type $T = f64;
                type $U = f64;
                Ok($body)
            }
            (phalanx_ir::DType::Bf16, phalanx_ir::DType::Bf16) => {
                type $T = half::bf16;
                type $U = half::bf16;
                Ok($body)
            }
            (phalanx_ir::DType::Bf16, phalanx_ir::DType::F32) => {
                type $T = half::bf16;
                type $U = f32;
                Ok($body)
            }
            (phalanx_ir::DType::F32, phalanx_ir::DType::Bf16) => {
                type $T = f32;
                type $U = half::bf16;
                Ok($body)
            }
            (a, b) => Err($op.unsupported(format!("it has no kernel for {a} and {b}"))),
        }
    };
}

pub(crate) use {for_float, for_floats};
