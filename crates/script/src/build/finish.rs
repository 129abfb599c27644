//! The end of a step: the loss, the global gradient norm, the clip coefficient, the updates.

use phalanx_ir::ops::{AdamW, Sgd, SumSquares, UnaryKind};
use phalanx_ir::{Builder, DType, Program, Role, Tensor, TensorType};

use super::{Optimizer, Precision, UnitBuffers};
use crate::action::{
    Action, Buffer, BufferId, Category, Kind, Lane, Run, Script, Source, View, Write,
};
use crate::error::ScriptError;
use crate::unit::Unit;

/// Appends the norm and the updates; returns where loss and gradient norm are found.
pub(super) fn append(
    script: &mut Script,
    units: &[Unit],
    buffers: &[UnitBuffers],
    precision: Precision,
    optimizer: Optimizer,
    clip: Option<f64>,
) -> Result<(BufferId, BufferId), ScriptError> {
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
    let program = norm_program(losses.len(), units, precision, clip)?;
    let mut inputs: Vec<BufferId> = losses;
    inputs.extend(buffers.iter().map(|b| b.gradient));
    let outputs = [loss, grad_norm, coefficient];
    push(script, "norm and clip", &program, &inputs, &outputs, None);

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
        let program = update_program(unit, precision, optimizer)?;
        let stored = b.master.unwrap_or(b.weights);
        let mut inputs = vec![stored, b.gradient];
        inputs.extend(&b.states);
        inputs.extend([lr, step, coefficient]);
        let mut outputs = vec![stored];
        outputs.extend(&b.states);
        outputs.extend(b.master.map(|_| b.weights));
        let label = format!("update {}", unit.name);
        push(script, &label, &program, &inputs, &outputs, Some(b.gradient));
    }
    Ok((loss, grad_norm))
}

/// Appends the sum of the micro-batches' losses into a result of this name.
pub(super) fn sum_losses(script: &mut Script, name: &str) -> Result<BufferId, ScriptError> {
    let losses = losses(script);
    let dtype = loss_dtype(script).unwrap_or(DType::F32);
    let total = result(script, name, dtype);
    let b = Builder::new("losses", dtype);
    let parts: Vec<Tensor<'_>> = (0..losses.len()).map(|i| loss_input(&b, i, dtype)).collect();
    b.probe("loss", sum(&b, &parts, dtype));
    let program = b.finish()?;
    push(script, "sum of losses", &program, &losses, &[total], None);
    Ok(total)
}

/// The buffers of the losses that the script's runs give.
fn losses(script: &Script) -> Vec<BufferId> {
    let mut losses = Vec::new();
    for action in &script.actions {
        let Some(run) = action.run() else { continue };
        let program = &script.programs[run.program.0].program;
        for (port, (view, _)) in program.outputs().iter().zip(&run.outputs) {
            if port.role == Role::Loss {
                losses.push(view.buffer);
            }
        }
    }
    losses
}

fn loss_dtype(script: &Script) -> Option<DType> {
    let programs = script.programs.iter().map(|e| &e.program);
    programs
        .filter_map(|p| p.outputs_with(Role::Loss).next().map(|port| p.ty(port.value).dtype))
        .next()
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

fn push(
    script: &mut Script,
    label: &str,
    program: &Program,
    inputs: &[BufferId],
    outputs: &[BufferId],
    updates: Option<BufferId>,
) {
    let view = |&buffer: &BufferId| View { buffer, offset: 0 };
    let run = Run {
        program: script.program(program),
        inputs: inputs.iter().map(view).collect(),
        outputs: outputs.iter().map(|b| (view(b), Write::Overwrite)).collect(),
        contributes: vec![],
    };
    let kind = match updates {
        Some(gradient) => Kind::Update { run, gradient },
        None => Kind::Run(run),
    };
    let label = label.to_owned();
    script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
}

fn loss_input<'b>(b: &'b Builder, index: usize, dtype: DType) -> Tensor<'b> {
    b.input(&format!("loss{index}"), Role::Loss, TensorType::new(dtype, []))
}

fn sum<'b>(b: &'b Builder, parts: &[Tensor<'b>], dtype: DType) -> Tensor<'b> {
    let zero = || b.constant(dtype, [], 0.0);
    parts.iter().copied().reduce(|a, x| a + x).unwrap_or_else(zero)
}

/// The loss is the sum of the micro-batches' losses. The norm runs over all units; gradients are
/// multiplied by min(1, clip / (norm + 1e-6)), as `clip_grad_norm_` of PyTorch does.
fn norm_program(
    losses: usize,
    units: &[Unit],
    precision: Precision,
    clip: Option<f64>,
) -> Result<Program, ScriptError> {
    let state = precision.state;
    let b = Builder::new("norm", state);
    let parts: Vec<Tensor<'_>> = (0..losses).map(|i| loss_input(&b, i, state)).collect();
    let squares: Vec<Tensor<'_>> = (units.iter())
        .map(|unit| {
            let ty = TensorType::unit(precision.grads, unit.elements);
            let gradient = b.input(&format!("{}.g", unit.name), Role::Gradient, ty);
            b.apply(SumSquares, &[gradient])
        })
        .collect();
    let loss = sum(&b, &parts, state);
    let norm = sum(&b, &squares, state).unary(UnaryKind::Sqrt);
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

fn update_program(
    unit: &Unit,
    precision: Precision,
    optimizer: Optimizer,
) -> Result<Program, ScriptError> {
    let b = Builder::new("update", precision.state);
    let buffer = |name: &str, role: Role, dtype: DType| {
        b.input(name, role, TensorType::unit(dtype, unit.elements))
    };
    let mut operands = vec![
        buffer("w", Role::State, precision.state),
        buffer("g", Role::Gradient, precision.grads),
    ];
    for i in 0..optimizer.states() {
        operands.push(buffer(&format!("s{i}"), Role::State, precision.state));
    }
    operands.extend([b.scalar("lr"), b.scalar("step"), b.scalar("clip")]);
    let narrow = precision.has_masters().then_some(precision.weights);
    let off = |decay: f64| if unit.decay { decay } else { 0.0 };
    let results = match optimizer {
        Optimizer::AdamW { beta1, beta2, eps, decay } => {
            b.apply_all(AdamW { beta1, beta2, eps, decay: off(decay), narrow }, &operands)
        }
        Optimizer::Sgd { momentum, nesterov, decay } => {
            b.apply_all(Sgd { momentum, nesterov, decay: off(decay), narrow }, &operands)
        }
    };
    for (i, value) in results.iter().enumerate() {
        b.port(&format!("o{i}"), Role::State, *value);
    }
    Ok(b.finish()?)
}
