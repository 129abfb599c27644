//! The programs that move units: one collective over a flat buffer.
//!
//! A collective over a large unit is split into as many pieces as the bucket size asks for.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor, TensorType};
use phalanx_spmd::Share;

use super::{Action, BufferId, Kind, Lane, Run, Script, ScriptError, Unit, View, World, Write};

/// Sums a gradient over every axis that it is partial over, on every rank.
pub(super) fn all_reduce(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    on_gradient("reduce", unit.formed(dtype, mesh), mesh, |g| {
        sum_rest(g, &[], Calls { mesh, most: usize::MAX })
    })
}

/// Sums a gradient into shards; it stays partial over axes that do not shard it.
pub(super) fn scatter(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    on_gradient("scatter", unit.formed(dtype, mesh), mesh, |g| {
        deal(g, &unit.partial, &unit.facts.axes, Calls::reducing(unit, mesh))
    })
}

/// Adds a gradient to those before it.
pub(super) fn add(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    on_gradient("add", unit.formed(dtype, mesh), mesh, |g| g.scale(1.0))
}

/// Sums a gradient into shards and over every other axis that it is partial over.
pub(super) fn scatter_all(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    let (axes, calls) = (&unit.facts.axes, Calls::reducing(unit, mesh));
    on_gradient("scatter", unit.formed(dtype, mesh), mesh, |g| {
        sum_rest(deal(g, &unit.partial, axes, calls), axes, calls)
    })
}

/// Sums a gradient in shards over the axes that it is still partial over; nothing if there are none.
pub(super) fn sum_shard(
    unit: &Unit,
    dtype: DType,
    mesh: &Mesh,
) -> Result<Option<Program>, ScriptError> {
    let axes = &unit.facts.axes;
    let mut rest = unit.partial.clone();
    rest.retain(|axis| !axes.contains(axis));
    if rest.is_empty() {
        return Ok(None);
    }
    let shard = unit.shard(dtype, mesh);
    let partial = shard.with_layout(shard.layout.with_partial(rest)?);
    let calls = Calls::reducing(unit, mesh);
    on_gradient("reduce", partial, mesh, |g| sum_rest(g, axes, calls)).map(Some)
}

/// Sums the gradient of parameters over the stage groups that share them. The summands are what one
/// rank of each holds, whole or in shards.
pub(super) fn sum_groups(
    unit: &Unit,
    dtype: DType,
    own: &Mesh,
    mesh: &Mesh,
) -> Result<Program, ScriptError> {
    let stages = Axis::STAGES;
    let own = unit.updated(dtype, own);
    let formed = own.with_layout(own.layout.with_partial(BTreeSet::from([stages]))?);
    on_gradient("tie", formed, mesh, |g| sum_rest(g, &[], Calls::reducing(unit, mesh)))
}

/// What another stage group adds to a gradient, to be added as it is.
pub(super) fn as_it_is(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    on_gradient("tie", unit.updated(dtype, mesh), mesh, |g| g.scale(1.0))
}

/// Sums a gradient on the first rank along the axes of the unit's facts.
pub(super) fn to_root(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    let (axes, calls) = (&unit.facts.axes, Calls { mesh, most: usize::MAX });
    on_gradient("collect", unit.formed(dtype, mesh), mesh, |g| {
        let kind = CollectiveKind::ReduceBlock { dim: 0, block: 0 };
        calls.of(sum_rest(g, axes, calls), kind, axes)
    })
}

/// Gathers a unit from its shards, or gets it from the rank that updates it.
pub(super) fn gather(unit: &Unit, dtype: DType, mesh: &Mesh) -> Result<Program, ScriptError> {
    let b = Builder::on("gather", dtype, mesh.clone());
    if unit.facts.state.share == Share::Root {
        let slots = b.input("slots", Role::State, unit.slots(dtype, mesh));
        let kind = CollectiveKind::BroadcastBlock { dim: 0, block: 0 };
        let first = Collective::new(kind, unit.facts.axes.clone());
        b.port("unit", Role::State, b.apply(first, &[slots]));
        return Ok(b.finish()?);
    }
    let shard = b.input("shard", Role::State, unit.shard(dtype, mesh));
    let calls = Calls { mesh, most: unit.facts.gather_elements };
    let kind = CollectiveKind::AllGather { dim: 0 };
    b.port("unit", Role::State, calls.of(shard, kind, &unit.facts.axes));
    Ok(b.finish()?)
}

/// Appends an action that sets some bytes of a new buffer to zero.
pub(super) fn clear(
    world: &World<'_>,
    script: &mut Script,
    label: &str,
    buffer: BufferId,
    dtype: DType,
    gaps: &[Range<usize>],
) -> Result<(), ScriptError> {
    let sizes: Vec<usize> = gaps.iter().map(|gap| gap.len() / dtype.size()).collect();
    let outputs = gaps.iter().map(|gap| View { buffer, offset: gap.start });
    let run = Run {
        program: script.program(world.library.placed(&zeros(dtype, &sizes)?)),
        inputs: vec![],
        outputs: outputs.map(|view| (view, Write::Overwrite)).collect(),
        contributes: vec![],
    };
    let (label, kind) = (label.to_owned(), Kind::Clear { run });
    script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
    Ok(())
}

/// Zeros of these sizes.
fn zeros(dtype: DType, sizes: &[usize]) -> Result<Program, ScriptError> {
    let b = Builder::new("clear", dtype);
    for (index, &size) in sizes.iter().enumerate() {
        b.port(&format!("gap{index}"), Role::Gradient, b.constant(dtype, [size], 0.0));
    }
    Ok(b.finish()?)
}

fn on_gradient(
    name: &str,
    ty: TensorType,
    mesh: &Mesh,
    reduce: impl for<'b> Fn(Tensor<'b>) -> Tensor<'b>,
) -> Result<Program, ScriptError> {
    let b = Builder::on(name, ty.dtype, mesh.clone());
    let formed = b.input("formed", Role::Gradient, ty);
    b.port("gradient", Role::Gradient, reduce(formed));
    Ok(b.finish()?)
}

/// Divides a gradient into shards: summed over the axes that it is partial over, sliced along the
/// others. Neighbouring axes of one kind take one collective.
fn deal<'b>(
    gradient: Tensor<'b>,
    partial: &BTreeSet<Axis>,
    axes: &[Axis],
    calls: Calls<'_>,
) -> Tensor<'b> {
    let runs = axes.chunk_by(|a, b| partial.contains(a) == partial.contains(b));
    runs.fold(gradient, |g, run| {
        let kind = match partial.contains(&run[0]) {
            true => CollectiveKind::ReduceScatter { dim: 0 },
            false => CollectiveKind::Shard { dim: 0 },
        };
        calls.of(g, kind, run)
    })
}

/// Sums over the remaining axes.
fn sum_rest<'b>(gradient: Tensor<'b>, dealt: &[Axis], calls: Calls<'_>) -> Tensor<'b> {
    let ty = gradient.ty();
    let axes: Vec<Axis> =
        ty.layout.partial().iter().copied().filter(|axis| !dealt.contains(axis)).collect();
    if axes.is_empty() {
        return gradient;
    }
    calls.of(gradient, CollectiveKind::AllReduce, &axes)
}

/// Collectives in which no call takes more than a given number of elements of a unit.
#[derive(Clone, Copy)]
struct Calls<'a> {
    mesh: &'a Mesh,
    most: usize,
}

impl<'a> Calls<'a> {
    fn reducing(unit: &Unit, mesh: &'a Mesh) -> Self {
        Self { mesh, most: unit.facts.reduce_elements }
    }

    /// A collective in ⌈elements / most⌉ calls, but at most one call per element that a rank keeps.
    fn of<'b>(self, operand: Tensor<'b>, kind: CollectiveKind, axes: &[Axis]) -> Tensor<'b> {
        let (ty, n) = (operand.ty(), self.mesh.count(axes));
        let given = ty.local_bytes(self.mesh) / ty.dtype.size();
        let (whole, kept) = match kind {
            CollectiveKind::AllGather { .. } => (given * n, given),
            CollectiveKind::ReduceScatter { .. } => (given, given / n),
            CollectiveKind::AllReduce => (given, given),
            // Nothing is exchanged.
            _ => (1, 1),
        };
        let pieces = whole.div_ceil(self.most.max(1)).clamp(1, kept.max(1));
        let collective = Collective { pieces, ..Collective::new(kind, axes.to_vec()) };
        operand.builder().apply(collective, &[operand])
    }
}
