//! An op on every rank: the valid elements of local blocks, through the reference interpreter.
//!
//! Ops that need to know where a block lies (causal attention over a part of a sequence, a part of
//! a vocabulary, dropout) see the parts along those factors together, and give each rank its own.

use std::collections::BTreeSet;

use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::{Broadcast, Fill, Reshape};
use phalanx_ir::rule::FactorKind;
use phalanx_ir::{Axis, Instr, Mesh, Op, OpDef, Phase, Program, Role, Rule, TensorType, ValueId};
use phalanx_reference::{RefTensor, run};

use super::blocks::{Block, global, indices, is_valid, offset};
use super::bugs::Bug;
use super::windows::Windows;

/// The results of an instruction, by result and rank.
pub(super) fn compute(
    program: &Program,
    instr: &Instr,
    values: &[Vec<Block>],
    bug: Option<Bug>,
) -> Result<Vec<Vec<Block>>, String> {
    let mesh = program.mesh();
    let rule = program.rule(instr);
    let types = |ids: &[ValueId]| ids.iter().map(|&v| program.ty(v)).collect::<Vec<_>>();
    let (ins, outs) = (types(&instr.inputs), types(&instr.outputs));
    let assignment = rule.check(mesh, &ins, &outs).map_err(|e| format!("{e:?}"))?;
    let joined = joined_axes(&instr.op, &rule, &assignment, bug);
    let mut results = vec![Vec::new(); outs.len()];
    let windows = Windows { program, instr, bug };
    let reads_images = matches!(instr.op, Op::Conv2d(_) | Op::Pooling(_));
    let bug = bug.filter(|&bug| bug != Bug::PaddingRows || reads_images);
    for rank in 0..mesh.ranks() {
        let joins_sums = !windows.are_of_weights();
        let view = View { mesh, rank, joined: &joined, joins_sums, bug };
        let mut operands: Vec<Block> = (instr.inputs.iter().zip(&ins))
            .map(|(v, ty)| view.operand(ty, &values[v.index()]))
            .collect::<Result<_, _>>()?;
        windows.hide(rank, &mut operands);
        let shapes: Vec<Vec<usize>> =
            outs.iter().map(|ty| view.extents(ty)).collect::<Result<_, _>>()?;
        let made = apply(&instr.op, &ins, &operands, &shapes)?;
        for ((result, block), ty) in results.iter_mut().zip(made).zip(&outs) {
            result.push(view.result(ty, &block)?);
        }
    }
    Ok(results)
}

/// The axes along which an op must see the parts together.
fn joined_axes(op: &Op, rule: &Rule, assignment: &[Sharding], bug: Option<Bug>) -> BTreeSet<Axis> {
    let names: &[&str] = match op {
        Op::Embedding(_) | Op::EmbeddingGrad(_) | Op::CrossEntropyGrad(_) => &["v"],
        Op::Attention(a) if !a.drops() => &["s"],
        Op::AttentionGrad(a) if !a.of.drops() => &["s"],
        Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_) => &["y", "x"],
        Op::Pooling(_) | Op::PoolingGrad(_) => &["y", "x"],
        Op::Rotary(_) if bug != Some(Bug::LocalPositions) => &["s"],
        _ => &[],
    };
    let all = matches!(op, Op::Dropout(_) | Op::Noise(_) if bug != Some(Bug::LocalMask))
        || matches!(op, Op::Attention(a) if a.drops())
        || matches!(op, Op::AttentionGrad(a) if a.of.drops());
    let lowered = bug != Some(Bug::LocalStatistics);
    let joined = rule.factors.iter().zip(assignment).filter(|(f, _)| {
        all || lowered && f.kind == FactorKind::Lowered || names.contains(&f.name.as_str())
    });
    joined.flat_map(|(_, sharding)| sharding.axes.iter().copied()).collect()
}

/// What one rank sees of values when some axes are joined.
struct View<'a> {
    mesh: &'a Mesh,
    rank: usize,
    joined: &'a BTreeSet<Axis>,
    /// Whether the sum over joined axes is in what a rank computes, or only its own summand is.
    joins_sums: bool,
    bug: Option<Bug>,
}

impl View<'_> {
    /// By dim, whether it is seen whole; its axes are joined all together or not at all.
    fn whole(&self, ty: &TensorType) -> Result<Vec<bool>, String> {
        let dims = ty.layout.dims().iter();
        dims.map(|sharding| {
            let axes = &sharding.axes;
            match axes.iter().filter(|a| self.joined.contains(a)).count() {
                0 => Ok(false),
                n if n == axes.len() => Ok(true),
                _ => Err(format!("{ty} is seen in parts over {:?}", self.joined)),
            }
        })
        .collect()
    }

    /// The elements that are seen, per dim: the valid ones.
    fn extents(&self, ty: &TensorType) -> Result<Vec<usize>, String> {
        let local = match self.bug {
            Some(Bug::PaddingCounts) => ty.local_shape(self.mesh),
            _ => ty.local_valid(self.mesh, self.rank),
        };
        let whole = self.whole(ty)?;
        let all = match self.bug {
            Some(Bug::PaddingRows) => ty.padded(),
            _ => &ty.shape[..],
        };
        Ok((0..local.len()).map(|d| if whole[d] { all[d] } else { local[d] }).collect())
    }

    fn operand(&self, ty: &TensorType, blocks: &[Block]) -> Result<Block, String> {
        let (shape, whole) = (self.extents(ty)?, self.whole(ty)?);
        let unseen = match self.bug {
            Some(Bug::PaddingCounts) => 0.0,
            Some(Bug::PaddingRows) => 1.0,
            _ => f64::NAN,
        };
        let mut out = Block { data: vec![unseen; shape.iter().product()], shape };
        let joined: Vec<Axis> = self.joined.iter().copied().collect();
        for rank in self.mesh.group(self.rank, &joined) {
            let block = &blocks[rank];
            for (index, &number) in indices(&block.shape).zip(&block.data) {
                let at = global(ty, self.mesh, rank, &index);
                if is_valid(ty, &at) {
                    out.data[offset(&out.shape, &seen(&whole, &at, &index))] = number;
                }
            }
        }
        Ok(out)
    }

    /// This rank's part of a result. Of a sum over joined axes the first rank has all.
    fn result(&self, ty: &TensorType, block: &Block) -> Result<Block, String> {
        let (shape, whole) = (ty.local_shape(self.mesh), self.whole(ty)?);
        let partial = ty.layout.partial().intersection(self.joined);
        let has = !self.joins_sums
            || partial.into_iter().all(|&a| self.mesh.coordinate(self.rank, a) == 0);
        let data = indices(&shape).map(|index| {
            let at = global(ty, self.mesh, self.rank, &index);
            match (is_valid(ty, &at), has) {
                (false, _) => f64::NAN,
                (true, false) => 0.0,
                (true, true) => block.data[offset(&block.shape, &seen(&whole, &at, &index))],
            }
        });
        Ok(Block { data: data.collect(), shape })
    }
}

/// An index among what is seen: global along dims that are seen whole, local along others.
fn seen(whole: &[bool], global: &[usize], local: &[usize]) -> Vec<usize> {
    (0..whole.len()).map(|d| if whole[d] { global[d] } else { local[d] }).collect()
}

/// One op on blocks, through the reference interpreter.
fn apply(
    op: &Op,
    types: &[&TensorType],
    operands: &[Block],
    shapes: &[Vec<usize>],
) -> Result<Vec<Block>, String> {
    let shape = || shapes[0].clone();
    let local: Op = match op {
        Op::Reshape(_) => Reshape { shape: shape() }.into(),
        Op::Broadcast(b) => Broadcast { shape: shape(), dims: b.dims.clone() }.into(),
        Op::Fill(f) => Fill { shape: shape(), ..f.clone() }.into(),
        other => other.clone(),
    };
    let mut program = Program::new(op.name(), Mesh::single());
    let names: Vec<String> = (0..operands.len()).map(|i| format!("x{i}")).collect();
    let mut given: Vec<(&str, RefTensor)> = Vec::with_capacity(operands.len());
    let mut inputs = Vec::with_capacity(operands.len());
    for ((name, ty), block) in names.iter().zip(types).zip(operands) {
        let tensor =
            RefTensor::new(ty.dtype, &block.shape, &block.data).map_err(|e| e.to_string())?;
        let ty = TensorType::new(ty.dtype, block.shape.clone());
        inputs.push(program.input(name, Role::Probe, ty));
        given.push((name, tensor));
    }
    let made = program.push(local, &inputs, Phase::F).map_err(|e| e.to_string())?;
    for (i, value) in made.into_iter().enumerate() {
        program.output(format!("y{i}"), Role::Probe, value);
    }
    let results = run(&program, &given).map_err(|e| e.to_string())?;
    let blocks = results.into_iter();
    Ok(blocks.map(|(_, t)| Block { shape: t.shape().to_vec(), data: t.values() }).collect())
}
