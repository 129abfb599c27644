//! Compiled instructions: what each worker of the pool does for one call.
//!
//! A [`Task`] knows the slots of its operands, does one worker's share when it runs, and says
//! beforehand which bytes each worker will touch. From that the compiler places barriers: two calls
//! need one between them only if some worker touches what another one wrote.

mod access;
mod attend;
mod attention;
mod collective;
mod context;
mod conv;
mod dispatch;
mod embedding_grad;
mod extent;
mod factors;
mod fused;
mod grouped;
mod halo;
mod key_product;
mod loss;
mod lowered;
mod matmul;
mod members;
mod message;
mod movement;
mod norm_grad;
mod padding;
mod placed;
mod pool;
mod reduce;
mod rotary;
mod routing;
mod rows;
mod transfer;
mod types;
mod update;

use phalanx_call::Slots;
use phalanx_engine::{EngineError, PartKind};
use phalanx_ir::{Instr, Op, OpDef, Program, ValueId};

use crate::products::ProductUnits;
pub(crate) use access::{Access, Share, Var};
pub(crate) use context::{Bases, Context, Failure};
pub(crate) use message::transfer as message;
pub(crate) use movement::{copy, copy_bytes};
pub(crate) use transfer::{Endpoint, Outstanding, Transfer};
pub(crate) use types::{for_float, for_floats};
use update::Rule;

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

    /// What it has to do with transfers between ranks.
    fn kind(&self) -> PartKind {
        PartKind::Computes
    }

    /// The call that it makes, if it only communicates with other ranks.
    fn transfer(&self) -> Option<&Transfer> {
        None
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
    /// The ranks of the mesh, as ranks of the world.
    pub(crate) ranks: &'a [usize],
    /// The endpoint to other ranks, if there are any.
    pub(crate) comm: Option<&'a Endpoint>,
    /// What own products are computed with.
    pub(crate) products: &'a ProductUnits,
}

impl Operation<'_> {
    pub(crate) fn input(&self, i: usize) -> Var {
        self.var(self.instr.inputs[i])
    }

    pub(crate) fn output(&self, i: usize) -> Var {
        self.var(self.instr.outputs[i])
    }

    pub(crate) fn var(&self, value: ValueId) -> Var {
        Var::of(self.program, value, self.slots.by_value[value.index()], self.rank)
    }

    /// The number in the whole of the first element that this rank holds of a flat value.
    pub(crate) fn first_element(&self, value: ValueId) -> Result<usize, EngineError> {
        let parts = self.parts(value);
        let Some(part) = parts.first() else { return Ok(0) };
        let start = part.start().ok_or_else(|| self.unsupported("it is not sharded in blocks"))?;
        Ok(start * self.var(value).shape.iter().skip(1).product::<usize>())
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
    // First, ops for which the place of a rank's elements or padding matters.
    if let Some(tasks) = lowered::compile(op)? {
        return Ok(tasks);
    }
    if let Some(tasks) = placed::compile(op)? {
        return Ok(tasks);
    }
    match &op.instr.op {
        // The result is the operand with another type.
        Op::Reshape(_) => Ok(vec![]),
        Op::Matmul(matmul) => matmul::compile(op, matmul),
        Op::PackedMatmul(packed) => matmul::compile_packed(op, packed),
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
        | Op::RmsNorm(_)
        | Op::LayerNorm(_)
        | Op::Softmax(_)
        | Op::SoftmaxGrad(_)
        | Op::Dropout(_) => rows::compile(op),
        Op::Noise(noise) => placed::noise(op, *noise),
        Op::ZeroPadding(_) => padding::compile(op),
        Op::RmsNormGrad(_) | Op::LayerNormGrad(_) => norm_grad::compile(op),
        Op::EmbeddingGrad(_) => embedding_grad::compile(op),
        Op::Rotary(rotary) => rotary::compile(op, rotary),
        Op::Attention(_) | Op::AttentionGrad(_) => attention::compile(op),
        Op::Attend(_) | Op::AttendGrad(_) => attend::compile(op),
        Op::KeyProduct(product) => key_product::compile(op, product),
        Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_) => conv::compile(op),
        Op::Pooling(_) | Op::PoolingGrad(_) => pool::compile(op),
        Op::CrossEntropy(_) | Op::CrossEntropyGrad(_) | Op::LinearCrossEntropy(_) => {
            loss::compile(op)
        }
        Op::TopK(_)
        | Op::TopKGrad(_)
        | Op::Assign(_)
        | Op::Queue(_)
        | Op::Deal(_)
        | Op::Histogram(_) => routing::compile(op),
        Op::Dispatch(_) | Op::Combine(_) | Op::GateGrad(_) => dispatch::compile(op),
        Op::GroupedMatmul(of) => grouped::product(op, *of),
        Op::GroupedMatmulGrad(_) => grouped::gradient(op),
        Op::AdamW(adamw) => update::compile(op, Rule::AdamW(*adamw)),
        Op::Sgd(sgd) => update::compile(op, Rule::Sgd(*sgd)),
        Op::Lion(lion) => update::compile(op, Rule::Lion(*lion)),
        Op::LambDirection(lamb) => update::compile(op, Rule::Lamb(*lamb)),
        Op::MemberSquares(of) => members::squares(op, &of.bounds),
        Op::MemberScale(of) => members::scale(op, &of.bounds),
        Op::FactorMeans(of) => factors::means(op, &of.factors),
        Op::FactorDirection(of) => factors::direction(op, &of.factors),
        Op::Collective(collective) => collective::compile(op, collective),
    }
}
