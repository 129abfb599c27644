//! The script that averages replicas: what each holds is a summand of as many times the mean.
//!
//! Replicas are worlds of their own with the same layout, so ranks at the same place of all replicas
//! hold the same part. The mean is taken of what an update writes: master weights where there are
//! any, from which narrow weights follow, and the optimizer's state if it is asked for. Where ranks of
//! a replica keep whole weights and update a part, they exchange the parts, as after an update.

use std::collections::BTreeSet;
use std::sync::Arc;

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor};
use phalanx_spmd::Gathering;

use super::finish::{gather_weights, held, own_weights, push_as};
use super::{Precision, Script, ScriptError, State, TrainingScript, Unit};
use crate::factored::StateOf;

/// The ranks of all replicas that hold the same stages of the model.
#[derive(Clone, Debug)]
pub struct ReplicaRanks {
    /// The axis along which replicas lie.
    pub axis: Axis,
    /// The ranks of each replica, in the order of its mesh.
    pub ranks: Vec<Vec<usize>>,
}

/// The script that takes the mean over replicas: of weights and, if `states`, of optimizer state.
pub fn average_script(
    training: &TrainingScript<'_>,
    state: &State,
    replicas: &ReplicaRanks,
    states: bool,
) -> Result<Script, ScriptError> {
    let (own, count) = (training.ranks(), replicas.ranks.len());
    let axes: Vec<(Axis, usize)> = own.mesh.axes().collect();
    let axes = axes.iter().map(|(axis, size)| (axis.name(), *size));
    let mesh = Mesh::new([(replicas.axis.name(), count)].into_iter().chain(axes))?;
    let members: Arc<[usize]> = replicas.ranks.iter().flatten().copied().collect();
    let mut script = state.script();
    for (unit, b) in state.units.iter().zip(&state.buffers) {
        let averaged = if states { b.states.len() } else { 0 };
        let kept: Vec<StateOf> = b.states[..averaged].iter().map(|held| held.of).collect();
        let program = mean(unit, training.precision, &kept, &mesh, replicas.axis)?;
        let weights = own_weights(unit, b, own);
        let mut views = vec![b.master.as_ref().map_or(weights, held)];
        views.extend(b.states[..averaged].iter().map(held));
        let mut outputs = views.clone();
        outputs.extend(b.master.as_ref().map(|_| weights));
        let program = script.program_of(training.world.library.placed(&program), members.clone());
        push_as(&mut script, &format!("average {}", unit.name), program, views, &outputs, None);
        if unit.facts.gathering == Gathering::AfterUpdate {
            gather_weights(&mut script, unit, weights, training)?;
        }
    }
    Ok(script)
}

/// The mean of what a rank updates of a unit, and of these states of it.
fn mean(
    unit: &Unit,
    precision: Precision,
    states: &[StateOf],
    mesh: &Mesh,
    axis: Axis,
) -> Result<Program, ScriptError> {
    let b = Builder::on("average", precision.state, mesh.clone());
    let share = 1.0 / mesh.count(&[axis]) as f64;
    let sum = |name: &str, of: StateOf| -> Result<Tensor<'_>, ScriptError> {
        let ty = unit.state(of, precision.state, mesh);
        let summand = ty.with_layout(ty.layout.with_partial(BTreeSet::from([axis]))?);
        let own = b.input(name, Role::State, summand).scale(share);
        Ok(b.apply(Collective::new(CollectiveKind::AllReduce, vec![axis]), &[own]))
    };
    let weights = sum("w", StateOf::Elements)?;
    b.port("w", Role::State, weights);
    for (i, &of) in states.iter().enumerate() {
        b.port(&format!("s{i}"), Role::State, sum(&format!("s{i}"), of)?);
    }
    let narrow: Option<DType> = precision.has_masters().then_some(precision.weights);
    if let Some(narrow) = narrow {
        b.port("copy", Role::State, weights.cast(narrow));
    }
    Ok(b.finish()?)
}
