//! The end of a step: the updates.

use std::sync::Arc;

use phalanx_ir::{Axis, DType, Mesh};
use phalanx_spmd::{Gathering, Share};

use super::norm::StepNumbers;
use super::versions::{NextVersion, VersionPlaces};
use super::{
    Action, Buffer, BufferId, Category, HeldRange, Kind, Lane, RankOnMesh, Run, Script,
    ScriptError, Source, StageGroup, State, Tier, TrainingScript, Unit, UnitBuffers, View, Write,
    hold, programs, update,
};
use crate::action::ProgramId;
use crate::key::{BufferKey, Number, Scalar};
use crate::library::Placed;

/// Appends the next update of all units, and the gathers of new weights; gradients are multiplied by the
/// coefficient.
pub(super) fn append(
    script: &mut Script,
    state: &State,
    training: &TrainingScript<'_>,
    StepNumbers { coefficient, go }: StepNumbers,
    versions: &mut VersionPlaces<'_>,
) -> Result<(), ScriptError> {
    let (TrainingScript { world, precision, optimizer, .. }, ranks) = (*training, training.ranks());
    let update = versions.done();
    // Where steps may change nothing, the optimizer counts those that changed something.
    let applied = state.scalars.iter().find(|kept| kept.scalar == Scalar::Applied);
    for (number, (unit, b)) in state.units.iter().zip(&state.buffers).enumerate() {
        let NextVersion { from, into } = versions.next(number, script, precision.weights)?;
        let [own, new] = [from, into].map(|buffer| View { buffer, ..own_weights(unit, b, ranks) });
        if !unit.updates(ranks) {
            gather_weights(script, unit, new, training)?;
            continue;
        }
        let mut given = |of| scalar(script, world.scalar_key(of, update), precision.state);
        let lr = given(Scalar::LearningRate);
        let step = match applied {
            Some(applied) => applied.buffer,
            None => given(Scalar::Step),
        };
        let (mesh, members) = updating(unit, training)?;
        let program = update::update(unit, precision, optimizer, go.is_some(), &mesh)?;
        // Lower halves go beside the weights; whole masters, instead of them.
        let (lower, master) = match precision.split {
            true => (b.master.as_ref().map(held), None),
            false => (None, b.master.as_ref().map(held)),
        };
        let mut inputs = vec![master.unwrap_or(own), held(b.trained())];
        inputs.extend(lower.into_iter().chain(b.states.iter().map(held)));
        inputs.extend([lr, step, coefficient].into_iter().chain(go).map(whole));
        let mut outputs = vec![master.unwrap_or(new)];
        outputs.extend(lower.into_iter().chain(b.states.iter().map(held)));
        outputs.extend(master.map(|_| new));
        let label = format!("update {}", unit.name);
        let program = script.program_of(training.world.library.placed(&program), members);
        push_as(script, &label, program, inputs, &outputs, Some(b.trained().buffer));
        if unit.facts.gathering == Gathering::AfterUpdate {
            gather_weights(script, unit, new, training)?;
        }
    }
    versions.updated();
    Ok(())
}

/// The ranks that update a unit together, and their mesh: those of the stage group, or only those that
/// are first along the axes of the unit's facts.
fn updating(
    unit: &Unit,
    training: &TrainingScript<'_>,
) -> Result<(Mesh, Arc<[usize]>), ScriptError> {
    let StageGroup { mesh, ranks, .. } = training.stage_group();
    if unit.facts.state.share != Share::Root {
        return Ok((mesh.clone(), ranks.into()));
    }
    let axes = &unit.facts.axes;
    let rest: Vec<(Axis, usize)> = mesh.axes().filter(|(axis, _)| !axes.contains(axis)).collect();
    let first = (0..mesh.ranks()).filter(|&place| mesh.shard(place, axes) == 0);
    let members = first.map(|place| ranks[place]).collect();
    Ok((Mesh::new(rest.iter().map(|(axis, size)| (axis.name(), *size)))?, members))
}

/// A scalar that the host provides.
fn scalar(script: &mut Script, key: BufferKey, dtype: DType) -> BufferId {
    script.find(&key).unwrap_or_else(|| {
        script.buffer(Buffer {
            key,
            category: Category::Inputs,
            bytes: dtype.size(),
            source: Source::Host,
            tier: Tier::Device,
            padding: vec![],
        })
    })
}

/// Where the part of a unit's weights that this rank updates lies.
pub(super) fn own_weights(unit: &Unit, buffers: &UnitBuffers, ranks: RankOnMesh<'_>) -> View {
    let offset = match (unit.facts.state.share, unit.facts.weights.share) {
        // If it keeps whole weights, a rank updates the part for which it has the optimizer state.
        (Share::Shard, Share::Whole) => hold::own(unit, ranks).start * buffers.weights.dtype.size(),
        _ => 0,
    };
    View { buffer: buffers.weights.buffer, offset }
}

/// If ranks keep whole weights and each has updated its part, they exchange the parts. If one has updated
/// all, it gives them to the others.
pub(super) fn gather_weights(
    script: &mut Script,
    unit: &Unit,
    own: View,
    training: &TrainingScript<'_>,
) -> Result<(), ScriptError> {
    let program = programs::gather(unit, training.precision.weights, training.ranks().mesh)?;
    let run = Run {
        program: script.program(training.world.library.placed(&program)),
        inputs: vec![own],
        outputs: vec![(whole(own.buffer), Write::Overwrite)],
        contributes: vec![],
    };
    script.actions.push(Action {
        label: format!("gather {}", unit.name),
        lane: Lane::Gather,
        kind: Kind::Gather(run),
        after: vec![],
    });
    Ok(())
}

/// A scalar that the host reads after the step.
pub(super) fn result(script: &mut Script, number: Number, dtype: DType) -> BufferId {
    script.buffer(Buffer {
        key: BufferKey::Number(number),
        category: Category::Workspace,
        bytes: dtype.size(),
        source: Source::Result,
        tier: Tier::Device,
        padding: vec![],
    })
}

pub(super) fn whole(buffer: BufferId) -> View {
    View { buffer, offset: 0 }
}

pub(super) fn held(held: &HeldRange) -> View {
    View { buffer: held.buffer, offset: held.at * held.dtype.size() }
}

pub(super) fn push(
    script: &mut Script,
    label: &str,
    program: Placed,
    inputs: Vec<View>,
    outputs: &[View],
    updates: Option<BufferId>,
) {
    let program = script.program(program);
    push_as(script, label, program, inputs, outputs, updates);
}

pub(super) fn push_as(
    script: &mut Script,
    label: &str,
    program: ProgramId,
    inputs: Vec<View>,
    outputs: &[View],
    updates: Option<BufferId>,
) {
    let run = Run {
        program,
        inputs,
        outputs: outputs.iter().map(|view| (*view, Write::Overwrite)).collect(),
        contributes: vec![],
    };
    let kind = match updates {
        Some(gradient) => Kind::Update { run, gradient },
        None => Kind::Run(run),
    };
    let label = label.to_owned();
    script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
}
