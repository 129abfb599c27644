//! The end of a step: the updates.

use std::sync::Arc;

use phalanx_ir::{Axis, DType, Mesh};
use phalanx_spmd::{Gathering, Share};

use super::norm::StepNumbers;
use super::update::Results;
use super::versions::{NextVersion, VersionPlaces};
use super::{
    Action, Buffer, BufferId, Category, HeldRange, Kind, Lane, RankOnMesh, Run, Script,
    ScriptError, Source, StageGroup, State, Tier, TrainingScript, Unit, UnitBuffers, View, Write,
    hold, programs, update,
};
use crate::action::ProgramId;
use crate::key::{BufferKey, Number, Scalar};
use crate::library::Placed;

/// An update of a unit, counted from 0 in the script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct UnitUpdate {
    pub(super) unit: usize,
    pub(super) update: usize,
}

/// Appends the next update of all units, and the gathers of new weights; gradients are multiplied by the
/// coefficient. The rate and the number of the step are given by the host, unless they are carried from the step before.
pub(super) fn append(
    script: &mut Script,
    state: &State,
    training: &TrainingScript<'_>,
    numbers: StepNumbers,
    versions: &mut VersionPlaces<'_>,
    carried: Option<[BufferId; 2]>,
) -> Result<(), ScriptError> {
    (0..state.units.len()).try_for_each(|number| {
        append_of(script, (state, number), training, numbers, versions, carried)
    })
}

/// The same for one unit.
pub(super) fn append_of(
    script: &mut Script,
    (state, number): (&State, usize),
    training: &TrainingScript<'_>,
    numbers: StepNumbers,
    versions: &mut VersionPlaces<'_>,
    carried: Option<[BufferId; 2]>,
) -> Result<(), ScriptError> {
    let TrainingScript { world, precision, .. } = *training;
    let (unit, buffers) = (&state.units[number], &state.buffers[number]);
    let (update, rounds) = (versions.done(number), versions.timing(number).holders);
    // Where steps may change nothing, the optimizer counts those that changed something.
    let applied = state.scalars.iter().find(|kept| kept.scalar == Scalar::Applied);
    let NextVersion { from, into } = versions.next(number, script, precision.weights)?;
    versions.updated(number);
    if !unit.updates(training.ranks()) {
        let new = View { buffer: into, ..own_weights(unit, buffers, training.ranks()) };
        return gather_weights(script, unit, new, training);
    }
    let mut given = |of| scalar(script, world.scalar_key(of, update, rounds), precision.state);
    let given = carried.unwrap_or_else(|| {
        let step = applied.map(|applied| applied.buffer);
        [given(Scalar::LearningRate), step.unwrap_or_else(|| given(Scalar::Step))]
    });
    let of = UpdateOf { unit, buffers, numbers, given, results: Results::All };
    update_unit(script, training, &of, [from, into])
}

/// An update of a unit.
pub(super) struct UpdateOf<'a> {
    pub(super) unit: &'a Unit,
    pub(super) buffers: &'a UnitBuffers,
    pub(super) numbers: StepNumbers,
    /// The learning rate and the number of the step.
    pub(super) given: [BufferId; 2],
    pub(super) results: Results,
}

/// Appends the update of a unit from the weights of one buffer into another.
pub(super) fn update_unit(
    script: &mut Script,
    training: &TrainingScript<'_>,
    of: &UpdateOf<'_>,
    weights: [BufferId; 2],
) -> Result<(), ScriptError> {
    let TrainingScript { precision, optimizer, .. } = *training;
    let UpdateOf { unit, buffers: b, numbers: StepNumbers { coefficient, go, .. }, given, results } =
        *of;
    let ranks = training.ranks();
    let [own, new] = weights.map(|buffer| View { buffer, ..own_weights(unit, b, ranks) });
    let (mesh, members) = updating(unit, training)?;
    let program = update::update(unit, precision, optimizer, (go.is_some(), results), &mesh)?;
    // Lower halves go beside the weights; whole masters, instead of them.
    let (lower, master) = match precision.split {
        true => (b.master.as_ref().map(held), None),
        false => (None, b.master.as_ref().map(held)),
    };
    let mut inputs = vec![master.unwrap_or(own), held(b.trained())];
    inputs.extend(lower.into_iter().chain(b.states.iter().map(held)));
    inputs.extend(given.into_iter().chain([coefficient]).chain(go).map(whole));
    let (what, outputs) = match results {
        Results::Weights => ("preview", vec![new]),
        Results::All => {
            let mut outputs = vec![master.unwrap_or(new)];
            outputs.extend(lower.into_iter().chain(b.states.iter().map(held)));
            outputs.extend(master.map(|_| new));
            ("update", outputs)
        }
    };
    let label = format!("{what} {}", unit.name);
    let program = script.program_of(training.world.library.placed(&program), members);
    push_as(script, &label, program, inputs, &outputs, Some(b.trained().buffer));
    if unit.facts.gathering == Gathering::AfterUpdate {
        gather_weights(script, unit, new, training)?;
    }
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
pub(super) fn scalar(script: &mut Script, key: BufferKey, dtype: DType) -> BufferId {
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
