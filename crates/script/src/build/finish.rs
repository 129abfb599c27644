//! The end of a step: the loss, the global gradient norm, the clip coefficient, the updates.

use std::collections::BTreeSet;

use phalanx_ir::ops::{Collective, CollectiveKind, SumSquares, UnaryKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor, TensorType};

use super::{
    Action, Buffer, BufferId, Category, Held, Kind, Lane, Precision, Ranks, Run, Script,
    ScriptError, Sharded, Source, Training, Unit, UnitBuffers, View, Write, hold, programs,
};

/// Appends the norm, the updates and the gathers of new weights; returns where loss and gradient
/// norm are found.
pub(super) fn append(
    script: &mut Script,
    units: &[Unit],
    buffers: &[UnitBuffers],
    training: &Training<'_>,
) -> Result<(BufferId, BufferId), ScriptError> {
    let Training { precision, optimizer, clip, ranks, .. } = *training;
    let losses = losses(script);
    let loss = result(script, "loss", precision.state);
    let grad_norm = result(script, "grad_norm", precision.state);
    let coefficient = script.buffer(Buffer {
        name: "clip".to_owned(),
        category: Category::Workspace,
        bytes: precision.state.size(),
        source: Source::Script,
        padding: vec![],
    });
    let program = norm_program(&losses, units, precision, clip, ranks)?;
    let mut inputs: Vec<View> = losses.iter().map(|(buffer, _)| whole(*buffer)).collect();
    inputs.extend(buffers.iter().map(|b| held(&b.gradient)));
    let outputs = [loss, grad_norm, coefficient].map(whole);
    push(script, "norm and clip", &program, inputs, &outputs, None);

    let scalar = |script: &mut Script, name: &str| match script.named(name) {
        Some(found) => found,
        None => script.buffer(Buffer {
            name: name.to_owned(),
            category: Category::Inputs,
            bytes: precision.state.size(),
            source: Source::Host,
            padding: vec![],
        }),
    };
    let (lr, step) = (scalar(script, "lr"), scalar(script, "step"));
    for (unit, b) in units.iter().zip(buffers) {
        let program = programs::update(unit, precision, optimizer, ranks)?;
        let own = own_weights(unit, b, ranks);
        let stored = b.master.as_ref().map_or(own, held);
        let mut inputs = vec![stored, held(&b.gradient)];
        inputs.extend(b.states.iter().map(held));
        inputs.extend([lr, step, coefficient].map(whole));
        let mut outputs = vec![stored];
        outputs.extend(b.states.iter().map(held));
        outputs.extend(b.master.as_ref().map(|_| own));
        let label = format!("update {}", unit.name);
        push(script, &label, &program, inputs, &outputs, Some(b.gradient.buffer));
        if matches!(ranks.sharing.sharded(), Sharded::State | Sharded::Gradients) {
            gather_weights(script, unit, b, own, training)?;
        }
    }
    Ok((loss, grad_norm))
}

/// Where the part of a unit's weights lies that this rank updates.
fn own_weights(unit: &Unit, buffers: &UnitBuffers, ranks: Ranks<'_>) -> View {
    let offset = match ranks.sharing.sharded() {
        Sharded::Nothing | Sharded::Weights => 0,
        _ => hold::own(unit, ranks).start * buffers.weights.dtype.size(),
    };
    View { buffer: buffers.weights.buffer, offset }
}

/// Every rank has updated its part of weights that all keep whole: they exchange the parts.
fn gather_weights(
    script: &mut Script,
    unit: &Unit,
    buffers: &UnitBuffers,
    own: View,
    training: &Training<'_>,
) -> Result<(), ScriptError> {
    let program = programs::gather(unit, training.precision.weights, training.ranks)?;
    let run = Run {
        program: script.program(&program),
        inputs: vec![own],
        outputs: vec![(whole(buffers.weights.buffer), Write::Overwrite)],
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

/// Appends the sum of the micro-batches' losses into a result of this name.
pub(super) fn sum_losses(
    script: &mut Script,
    name: &str,
    mesh: &Mesh,
) -> Result<BufferId, ScriptError> {
    let losses = losses(script);
    let dtype = losses.first().map_or(DType::F32, |(_, ty)| ty.dtype);
    let total = result(script, name, dtype);
    let b = Builder::on("losses", dtype, mesh.clone());
    let parts = loss_inputs(&b, &losses);
    let sum = sum(&b, &parts, dtype);
    let axes: Vec<Axis> = sum.ty().layout.partial().iter().copied().collect();
    b.probe("loss", all_reduce(sum, &axes));
    let program = b.finish()?;
    let inputs = losses.iter().map(|(buffer, _)| whole(*buffer)).collect();
    push(script, "sum of losses", &program, inputs, &[whole(total)], None);
    Ok(total)
}

/// The buffers of the losses that the script's runs give, and their types.
fn losses(script: &Script) -> Vec<(BufferId, TensorType)> {
    let mut losses = Vec::new();
    for action in &script.actions {
        let Some(run) = action.run() else { continue };
        let program = &script.programs[run.program.0].program;
        for (port, (view, _)) in program.outputs().iter().zip(&run.outputs) {
            if port.role == Role::Loss {
                losses.push((view.buffer, program.ty(port.value).clone()));
            }
        }
    }
    losses
}

fn result(script: &mut Script, name: &str, dtype: DType) -> BufferId {
    script.buffer(Buffer {
        name: name.to_owned(),
        category: Category::Workspace,
        bytes: dtype.size(),
        source: Source::Result,
        padding: vec![],
    })
}

fn whole(buffer: BufferId) -> View {
    View { buffer, offset: 0 }
}

fn held(held: &Held) -> View {
    View { buffer: held.buffer, offset: held.at * held.dtype.size() }
}

fn push(
    script: &mut Script,
    label: &str,
    program: &Program,
    inputs: Vec<View>,
    outputs: &[View],
    updates: Option<BufferId>,
) {
    let run = Run {
        program: script.program(program),
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

fn loss_inputs<'b>(b: &'b Builder, losses: &[(BufferId, TensorType)]) -> Vec<Tensor<'b>> {
    let numbered = losses.iter().enumerate();
    numbered.map(|(i, (_, ty))| b.input(&format!("loss{i}"), Role::Loss, ty.clone())).collect()
}

fn sum<'b>(b: &'b Builder, parts: &[Tensor<'b>], dtype: DType) -> Tensor<'b> {
    let zero = || b.constant(dtype, [], 0.0);
    parts.iter().copied().reduce(|a, x| a + x).unwrap_or_else(zero)
}

/// The loss is the sum of the micro-batches' losses. The norm runs over all units; gradients are
/// multiplied by min(1, clip / (norm + 1e-6)), as `clip_grad_norm_` of PyTorch does.
///
/// Each rank sums what it holds. What several ranks hold alike counts on one of them, which the
/// types see to: the sums become partial over all axes before they are added up.
fn norm_program(
    losses: &[(BufferId, TensorType)],
    units: &[Unit],
    precision: Precision,
    clip: Option<f64>,
    ranks: Ranks<'_>,
) -> Result<Program, ScriptError> {
    let state = precision.state;
    let b = Builder::on("norm", state, ranks.mesh.clone());
    let mut parts = loss_inputs(&b, losses);
    let loss_parts = parts.len();
    parts.extend(units.iter().map(|unit| {
        let ty = programs::updated(unit, precision.grads, ranks);
        let gradient = b.input(&format!("{}.g", unit.name), Role::Gradient, ty);
        b.apply(SumSquares, &[gradient])
    }));
    let axes: BTreeSet<Axis> =
        parts.iter().flat_map(|part| part.ty().layout.partial().clone()).collect();
    let axes: Vec<Axis> = axes.into_iter().collect();
    let parts: Vec<Tensor<'_>> = parts.into_iter().map(|part| to_partial(part, &axes)).collect();
    let loss = sum(&b, &parts[..loss_parts], state);
    let squares = sum(&b, &parts[loss_parts..], state);
    let [loss, squares] = match axes.is_empty() {
        true => [loss, squares],
        false => {
            // Both numbers in one exchange.
            let both = b.concat(&[loss.reshape([1]), squares.reshape([1])], 0);
            let both = all_reduce(both, &axes);
            [0, 1].map(|i| both.slice(0, i, 1).reshape([]))
        }
    };
    let norm = squares.unary(UnaryKind::Sqrt);
    let one = b.constant(state, [], 1.0);
    let coefficient = match clip {
        None => one,
        Some(clip) => norm.shift(1e-6).unary(UnaryKind::Recip).scale(clip).min(one),
    };
    b.probe("loss", loss);
    b.probe("grad_norm", norm);
    b.port("clip", Role::Scalar, coefficient);
    Ok(b.finish()?)
}

fn all_reduce<'b>(value: Tensor<'b>, axes: &[Axis]) -> Tensor<'b> {
    if axes.is_empty() {
        return value;
    }
    let (kind, axes) = (CollectiveKind::AllReduce, axes.to_vec());
    value.builder().apply(Collective::new(kind, axes), &[value])
}

/// Over the axes that a value is complete over, the first rank keeps it and the others hold zero.
fn to_partial<'b>(value: Tensor<'b>, axes: &[Axis]) -> Tensor<'b> {
    let layout = value.ty().layout;
    let axes: Vec<Axis> =
        axes.iter().copied().filter(|axis| !layout.partial().contains(axis)).collect();
    if axes.is_empty() {
        return value;
    }
    let kind = CollectiveKind::ToPartial;
    value.builder().apply(Collective::new(kind, axes), &[value])
}
