//! Compiled instructions: what a call issues on the stream.
//!
//! A [`Task`] knows the places of its operands and issues kernels, library calls or copies on them.
//! Everything of a rank is issued on one stream, so tasks run in the order of their program.

mod arguments;
mod attention;
mod collective;
mod elementwise;
#[cfg(test)]
mod every;
mod factors;
mod grouped;
mod halo;
mod key_product;
mod loss;
mod matmul;
mod movement;
mod place;
mod position;
mod reduce;
mod rotary;
mod routing;
mod rows;
mod update;
mod var;
mod window;

use std::fmt;
use std::sync::Arc;

use phalanx_call::{Slot, Slots};
use phalanx_comm::CountedEndpoint;
use phalanx_engine::EngineError;
use phalanx_ir::{DType, Instr, LocalPart, Op, OpDef, Program, ValueId};

pub(crate) use arguments::{Arg, KernelTask};
pub(crate) use collective::{Extent, Transfer, message};
pub(crate) use movement::copy;
pub(crate) use place::{Place, Run};
pub(crate) use var::Var;

use crate::folds::Folds;
use crate::fused_attention::{AttentionPlan, FusedCall, FusedShape};
use crate::kernels::KernelSpec;
use crate::products::{Product, ProductPlan, ProductShape};

/// Ops that this engine refuses, by name: programs that have them are not compiled. It may only
/// become shorter.
pub const WITHOUT_KERNEL: [&str; 0] = [];

/// One thing that a program issues.
pub(crate) enum Task {
    /// A kernel.
    Kernel(KernelTask),
    /// A matrix product of the library.
    Product(Box<Product>),
    /// An attention of the library.
    Attention(Box<FusedCall>),
    /// Bytes from one place to another.
    Copy { from: Place, to: Place, bytes: usize },
    /// Zeros, unless the value is added to what its output holds.
    Clear { to: Place, bytes: usize },
    /// What ranks do together, from its start to its end.
    Transfer(Transfer),
    /// The same, waited for by another task.
    Start(Transfer, usize),
    /// Waits for what was started under this number.
    Done(usize),
}

pub(crate) type Tasks = Vec<Task>;

/// What a trace shows of it.
impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Kernel(kernel) => f.write_str(&kernel.kernel.title),
            Task::Product(product) => product.fmt(f),
            Task::Attention(call) => call.fmt(f),
            Task::Copy { bytes, .. } => write!(f, "copy of {bytes} bytes"),
            Task::Clear { bytes, .. } => write!(f, "clearing of {bytes} bytes"),
            Task::Transfer(_) => f.write_str("transfer"),
            Task::Start(..) => f.write_str("start of a transfer"),
            Task::Done(_) => f.write_str("end of a transfer"),
        }
    }
}

impl Task {
    /// The kernels that it launches.
    pub(crate) fn kernels(&mut self) -> Vec<&mut KernelTask> {
        match self {
            Task::Kernel(kernel) => vec![kernel],
            Task::Product(product) => product.own_kernels().collect(),
            _ => Vec::new(),
        }
    }
}

/// The operands and results of one instruction, as tasks are made from them.
pub(crate) struct Operation<'a> {
    pub(crate) program: &'a Program,
    pub(crate) instr: &'a Instr,
    pub(crate) slots: &'a Slots,
    /// What instructions compute of those that follow.
    pub(crate) folds: &'a Folds,
    /// Offset of the instruction's scratch memory in the workspace.
    pub(crate) scratch: Option<usize>,
    /// This rank, in the program's mesh.
    pub(crate) rank: usize,
    /// The ranks of the mesh, as ranks of the world.
    pub(crate) ranks: &'a [usize],
    /// What the engine has for all programs.
    pub(crate) engine: &'a mut dyn Resources,
}

/// What tasks need from their engine while they are made.
pub(crate) trait Resources {
    /// Numbers in the GPU's memory that kernels read; equal ones are kept once.
    fn constant(&mut self, bytes: &[u8]) -> Result<Arg, EngineError>;

    /// A number for this instruction, under which kernels report bad ids.
    fn site(&mut self, program: &str, what: &'static str) -> i64;

    /// How many blocks a kernel over many elements takes at most.
    fn blocks(&self) -> u32;

    /// The library's way to compute a product, if it has one.
    fn product(&mut self, shape: &ProductShape) -> Result<Option<Arc<ProductPlan>>, EngineError>;

    /// The library's way to compute an attention, if it is there and has one.
    fn attention(&mut self, shape: &FusedShape) -> Result<Option<Arc<AttentionPlan>>, EngineError>;

    /// This rank's endpoint to the others.
    fn endpoint(&mut self) -> Option<&mut CountedEndpoint>;
}

impl Operation<'_> {
    pub(crate) fn input(&self, i: usize) -> Var {
        self.var(self.instr.inputs[i])
    }

    pub(crate) fn inputs(&self) -> Vec<Var> {
        (0..self.instr.inputs.len()).map(|i| self.input(i)).collect()
    }

    pub(crate) fn output(&self, i: usize) -> Var {
        self.var(self.instr.outputs[i])
    }

    pub(crate) fn outputs(&self) -> Vec<Var> {
        (0..self.instr.outputs.len()).map(|i| self.output(i)).collect()
    }

    pub(crate) fn var(&self, value: ValueId) -> Var {
        Var::of(self.program, value, self.slots.by_value[value.index()], self.rank)
    }

    /// The part of a value's dim that this rank holds.
    pub(crate) fn part(&self, value: ValueId, dim: usize) -> LocalPart {
        self.program.ty(value).part(dim, self.program.mesh(), self.rank)
    }

    /// The parts of all dims of a value.
    pub(crate) fn parts(&self, value: ValueId) -> Vec<LocalPart> {
        (0..self.program.ty(value).shape.len()).map(|dim| self.part(value, dim)).collect()
    }

    /// The number in the whole of the first element that this rank holds of a flat value.
    pub(crate) fn first_element(&self, value: ValueId) -> Result<usize, EngineError> {
        let parts = self.parts(value);
        let Some(part) = parts.first() else { return Ok(0) };
        let start = part.start().ok_or_else(|| self.unsupported("it is not sharded in blocks"))?;
        Ok(start * self.var(value).shape.iter().skip(1).product::<usize>())
    }

    /// The place of the instruction's scratch memory, from a byte of it on.
    pub(crate) fn scratch_at(&self, offset: usize) -> Result<Place, EngineError> {
        let missing = || self.unsupported("its scratch memory was not planned");
        Ok(Place { slot: Slot::Workspace(self.scratch.ok_or_else(missing)?), offset })
    }

    /// The name of a float type in kernels, or a refusal.
    pub(crate) fn float(&self, dtype: DType) -> Result<&'static str, EngineError> {
        match dtype.is_float() {
            true => Ok(crate::kernels::type_name(dtype)),
            false => Err(self.unsupported(format!("it has no kernel for {dtype}"))),
        }
    }

    pub(crate) fn unsupported(&self, why: impl Into<String>) -> EngineError {
        EngineError::Unsupported {
            engine: "cuda",
            program: self.program.name.clone(),
            op: self.instr.op.name().to_owned(),
            why: why.into(),
        }
    }

    /// A kernel over this many elements, with a thread for each as far as the GPU has room.
    pub(crate) fn over(&self, elements: usize, kernel: KernelSpec, args: Vec<Arg>) -> Task {
        over(&*self.engine, elements, kernel, args)
    }
}

fn over(engine: &dyn Resources, elements: usize, kernel: KernelSpec, args: Vec<Arg>) -> Task {
    let blocks = elements.div_ceil(THREADS as usize).clamp(1, engine.blocks() as usize);
    Task::Kernel(KernelTask::new(kernel, [blocks as u32, 1, 1], THREADS, args))
}

/// Threads of a block, where nothing asks for another number.
pub(crate) const THREADS: u32 = 256;

/// The tasks of one instruction.
pub(crate) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match &op.instr.op {
        // The result is the operand with another type.
        Op::Reshape(_) => Ok(vec![]),
        Op::Matmul(_) | Op::PackedMatmul(_) => matmul::compile(op),
        Op::Unary(_)
        | Op::UnaryGrad(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select(_)
        | Op::Scale(_)
        | Op::Shift(_)
        | Op::Cast(_)
        | Op::Fused(_) => elementwise::compile(op),
        Op::Fill(_)
        | Op::Transpose(_)
        | Op::Slice(_)
        | Op::Pad(_)
        | Op::Concat(_)
        | Op::Broadcast(_)
        | Op::ZeroPadding(_) => movement::compile(op),
        Op::Reduce(_) | Op::SumSquares(_) => reduce::compile(op),
        Op::RmsNorm(_)
        | Op::LayerNorm(_)
        | Op::Softmax(_)
        | Op::SoftmaxGrad(_)
        | Op::CrossEntropy(_)
        | Op::CrossEntropyGrad(_)
        | Op::RmsNormGrad(_)
        | Op::LayerNormGrad(_) => rows::compile(op),
        Op::Embedding(_) | Op::EmbeddingGrad(_) | Op::Dropout(_) | Op::Noise(_) => {
            position::compile(op)
        }
        Op::Rotary(_) => rotary::compile(op),
        Op::TopK(_)
        | Op::TopKGrad(_)
        | Op::Assign(_)
        | Op::Queue(_)
        | Op::Deal(_)
        | Op::Histogram(_)
        | Op::Dispatch(_)
        | Op::Combine(_)
        | Op::GateGrad(_) => routing::compile(op),
        Op::GroupedMatmul(_) | Op::GroupedMatmulGrad(_) => grouped::compile(op),
        Op::Attention(_) | Op::AttentionGrad(_) | Op::Attend(_) | Op::AttendGrad(_) => {
            attention::compile(op)
        }
        Op::KeyProduct(product) => {
            let product = *product;
            key_product::compile(op, product)
        }
        Op::Conv2d(_)
        | Op::Conv2dInputGrad(_)
        | Op::Conv2dWeightGrad(_)
        | Op::Pooling(_)
        | Op::PoolingGrad(_) => window::compile(op),
        Op::LinearCrossEntropy(loss) => {
            let loss = *loss;
            loss::compile(op, loss)
        }
        Op::FactorMeans(means) => {
            let factors = means.factors.clone();
            factors::means(op, &factors)
        }
        Op::FactorDirection(direction) => {
            let factors = direction.factors.clone();
            factors::direction(op, &factors)
        }
        Op::AdamW(_)
        | Op::Sgd(_)
        | Op::Lion(_)
        | Op::LambDirection(_)
        | Op::MemberSquares(_)
        | Op::MemberScale(_) => update::compile(op),
        Op::Collective(collective) => {
            let collective = collective.clone();
            collective::compile(op, &collective)
        }
    }
}
