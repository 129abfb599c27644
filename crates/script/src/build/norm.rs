//! The loss and the global gradient norm of a step, over all ranks of all stage groups.
//!
//! The loss is the sum of the micro-batches' losses. The norm runs over all units; gradients are
//! multiplied by min(1, clip / (norm + 1e-6)), as `clip_grad_norm_` of PyTorch does. If the loss is
//! scaled, so are the gradients: norm and coefficient take the scale out, and a norm that is not finite
//! tells that the step must change nothing. So does a row of experts that found no room on some rank: their number is
//! added up beside the other two, where the model counts them.
//!
//! Each rank sums what it holds. What several ranks hold in copies counts on one of them only; the
//! types ensure that: the sums become partial over all axes before they are added. Stages have
//! different units, so each sums its own, and one collective over all ranks adds these sums.

use std::collections::BTreeSet;
use std::sync::Arc;

use phalanx_ir::ops::{Collective, CollectiveKind, CompareKind, SumSquares, UnaryKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor, TensorType};

use super::finish::{held, push, push_as, result, whole};
use super::{
    Buffer, BufferId, Category, Script, ScriptError, Source, StageGroup, State, Tier,
    TrainingScript, Unit, View, World,
};
use crate::key::{BufferKey, Number, Scalar};
use crate::stage_group::together;

/// Numbers that updates read.
#[derive(Clone, Copy)]
pub(super) struct StepNumbers {
    /// The coefficient by which gradients are multiplied.
    pub(super) coefficient: BufferId,
    /// Whether anything is updated, if that is not certain.
    pub(super) go: Option<BufferId>,
    /// How many rows of experts found no room, if some may not.
    pub(super) lacks: Option<BufferId>,
}

/// Appends the loss, the norm and the clip coefficient.
pub(super) fn append(
    script: &mut Script,
    kept: &State,
    training: &TrainingScript<'_>,
) -> Result<StepNumbers, ScriptError> {
    let TrainingScript { world, at, precision, .. } = *training;
    let (units, buffers, state) = (&kept.units, &kept.buffers, precision.state);
    let [losses, lacking] = [Number::Loss, Number::Lacking].map(|of| losses(script, of));
    let (loss, grad_norm) =
        (result(script, Number::Loss, state), result(script, Number::GradNorm, state));
    // Where steps go ahead, the host asks whether a step was clipped.
    let coefficient = match world.previews {
        true => result(script, Number::Clip, state),
        false => transient(script, Number::Clip, state.size()),
    };
    // Parameters that stage groups share count in the first of them.
    let counts = |unit: &&Unit| unit.stage_groups.first() == Some(&at.stage_group);
    let counted: Vec<&Unit> = units.iter().filter(counts).collect();
    let counted_here = losses.iter().chain(&lacking);
    let mut inputs: Vec<View> = counted_here.map(|(buffer, _)| whole(*buffer)).collect();
    inputs.extend(
        (units.iter().zip(buffers)).filter(|(u, _)| counts(u)).map(|(_, b)| held(b.trained())),
    );
    let mut outputs = [loss, grad_norm, coefficient].map(whole).to_vec();
    let scale = kept.scalars.iter().find(|kept| kept.scalar == Scalar::LossScale);
    let scale = scale.map(|kept| whole(kept.buffer));
    let bounded = world.counts_lacking();
    let go = (scale.is_some() || bounded).then(|| result(script, Number::Go, state));
    outputs.extend(go.map(whole));
    outputs.extend(scale.map(|_| whole(result(script, Number::LossScale, state))));
    let lacks = bounded.then(|| result(script, Number::Lacking, state));
    outputs.extend(lacks.map(whole));
    let lacking = bounded.then_some(&lacking[..]);
    let sums = Sums { losses: &losses, lacking, units: &counted, training };
    match &world.stage_groups[..] {
        [_] => {
            inputs.extend(scale);
            let program = world.library.placed(&sums.on_one_mesh()?);
            push(script, "norm and clip", program, inputs, &outputs, None);
        }
        stage_groups => {
            let numbers = sums.numbers();
            let own = transient(script, Number::Sums, numbers * state.size());
            let program = world.library.placed(&sums.of_group()?);
            push(script, "sums", program, inputs, &[whole(own)], None);
            let all: Vec<&StageGroup<'_>> = stage_groups.iter().collect();
            let (mesh, members) = together(&all)?;
            let program = over_all(&mesh, (state, numbers), |sums| {
                finish(sums, training);
            })?;
            let program = script.program_of(world.library.placed(&program), members);
            let inputs = [whole(own)].into_iter().chain(scale).collect();
            push_as(script, "norm and clip", program, inputs, &outputs, None);
        }
    }
    Ok(StepNumbers { coefficient, go, lacks })
}

/// Appends what one stage group adds to the loss of some micro-batches, and to squares if they are wanted, into a buffer
/// for both.
pub(super) fn sums_of_group(
    script: &mut Script,
    kept: &State,
    training: &TrainingScript<'_>,
    (into, squares): (BufferId, bool),
    these: impl Fn(usize) -> bool,
) -> Result<(), ScriptError> {
    let mut losses = losses(script, Number::Loss);
    losses.retain(|(buffer, _)| match &script.buffers[buffer.0].key {
        BufferKey::Value(value) => these(value.microbatch),
        _ => false,
    });
    let counts =
        |unit: &&Unit| squares && unit.stage_groups.first() == Some(&training.at.stage_group);
    let counted: Vec<&Unit> = kept.units.iter().filter(counts).collect();
    let mut inputs: Vec<View> = losses.iter().map(|(buffer, _)| whole(*buffer)).collect();
    let units = kept.units.iter().zip(&kept.buffers).filter(|(unit, _)| counts(unit));
    inputs.extend(units.map(|(_, b)| held(b.trained())));
    let sums = Sums { losses: &losses, lacking: None, units: &counted, training };
    let program = training.world.library.placed(&sums.of_group()?);
    push(script, "sums", program, inputs, &[whole(into)], None);
    Ok(())
}

/// The mesh of all ranks of all stage groups, and the ranks.
pub(super) fn all_ranks(world: &World<'_>) -> Result<(Mesh, Arc<[usize]>), ScriptError> {
    match &world.stage_groups[..] {
        [one] => Ok((one.mesh.clone(), one.ranks.into())),
        all => together(&all.iter().collect::<Vec<_>>()),
    }
}

/// A program over the ranks of all stage groups that adds up their parts of so many numbers.
pub(super) fn over_all(
    mesh: &Mesh,
    (dtype, numbers): (DType, usize),
    then: impl for<'b> FnOnce(&[Tensor<'b>]),
) -> Result<Program, ScriptError> {
    let b = Builder::on("norm", dtype, mesh.clone());
    let axes = all_axes(mesh);
    let ty = TensorType::new(dtype, vec![numbers]);
    let ty = ty.with_layout(ty.layout.with_partial(axes.iter().copied().collect())?);
    then(&apart(all_reduce(b.input("sums0", Role::Loss, ty), &axes)));
    Ok(b.finish()?)
}

/// A program over all ranks that adds up their parts of several pairs of numbers, and nothing else.
pub(super) fn summed(mesh: &Mesh, dtype: DType, pairs: usize) -> Result<Program, ScriptError> {
    let b = Builder::on("sums of all", dtype, mesh.clone());
    let axes = all_axes(mesh);
    let ty = TensorType::new(dtype, vec![2 * pairs]);
    let ty = ty.with_layout(ty.layout.with_partial(axes.iter().copied().collect())?);
    b.port("all", Role::Scalar, all_reduce(b.input("sums", Role::Loss, ty), &axes));
    Ok(b.finish()?)
}

/// Appends the sum of the micro-batches' losses: the loss of a script that only runs forward.
pub(super) fn sum_losses(
    script: &mut Script,
    world: &World<'_>,
    stage_group: usize,
) -> Result<(), ScriptError> {
    let stage_groups = &world.stage_groups;
    let StageGroup { compiled, mesh, .. } = stage_groups[stage_group];
    let losses = losses(script, Number::Loss);
    let ports = compiled.phases.iter().flat_map(|phases| {
        phases.f.outputs_with(Role::Loss).map(|port| phases.f.ty(port.value).dtype)
    });
    let dtype = ports.into_iter().next().unwrap_or(DType::F32);
    let total = result(script, Number::Loss, dtype);
    let inputs = losses.iter().map(|(buffer, _)| whole(*buffer)).collect();
    let b = Builder::on("losses", dtype, mesh.clone());
    let parts = loss_inputs(&b, &losses);
    let sum = sum(&b, &parts, dtype);
    if stage_groups.len() == 1 {
        let axes: Vec<Axis> = sum.ty().layout.partial().iter().copied().collect();
        b.probe("loss", all_reduce(sum, &axes));
        let program = world.library.placed(&b.finish()?);
        push(script, "sum of losses", program, inputs, &[whole(total)], None);
        return Ok(());
    }
    let own = transient(script, Number::Sums, 2 * dtype.size());
    side_by_side(&b, &[sum, b.constant(dtype, [], 0.0)], &all_axes(mesh));
    let program = world.library.placed(&b.finish()?);
    push(script, "sums", program, inputs, &[whole(own)], None);
    let all: Vec<&StageGroup<'_>> = stage_groups.iter().collect();
    let (mesh, members) = together(&all)?;
    let program = over_all(&mesh, (dtype, 2), |sums| sums[0].builder().probe("loss", sums[0]))?;
    let program = script.program_of(world.library.placed(&program), members);
    push_as(script, "sum of losses", program, vec![whole(own)], &[whole(total)], None);
    Ok(())
}

/// What a stage group adds up.
struct Sums<'a> {
    losses: &'a [(BufferId, TensorType)],
    /// The rows of experts that found no room, if some stage group counts them.
    lacking: Option<&'a [(BufferId, TensorType)]>,
    units: &'a [&'a Unit],
    training: &'a TrainingScript<'a>,
}

impl Sums<'_> {
    /// How many numbers are added up.
    fn numbers(&self) -> usize {
        2 + usize::from(self.lacking.is_some())
    }

    /// What this rank holds of each number.
    fn parts<'b>(&self, b: &'b Builder) -> Vec<Vec<Tensor<'b>>> {
        let (precision, ranks) = (self.training.precision, self.training.ranks());
        let squares = self.units.iter().map(|unit| {
            let ty = unit.updated(precision.grads, ranks.mesh);
            let gradient = b.input(&format!("{}.g", unit.name), Role::Gradient, ty);
            let squares = b.apply(SumSquares, &[gradient]);
            // Holders of a stage are updated with the mean of what they add up.
            let timing = self.training.world.timing(unit);
            match timing.expect("a unit of a script is updated at one time").holders {
                1 => squares,
                holders => squares.scale(1.0 / (holders * holders) as f64),
            }
        });
        let lacking: &[_] = match self.lacking {
            Some(counted) => counted,
            None => &[],
        };
        let mut losses = loss_inputs(b, &[self.losses, lacking].concat());
        let lacking = losses.split_off(self.losses.len());
        let all = [losses, squares.collect(), lacking];
        all.into_iter().take(self.numbers()).collect()
    }

    fn builder(&self, name: &str) -> Builder {
        let TrainingScript { precision, .. } = *self.training;
        Builder::on(name, precision.state, self.training.ranks().mesh.clone())
    }

    /// The whole program, if there is only one stage group.
    fn on_one_mesh(&self) -> Result<Program, ScriptError> {
        let (b, state) = (self.builder("norm"), self.training.precision.state);
        let parts = self.parts(&b);
        let axes: BTreeSet<Axis> =
            parts.iter().flatten().flat_map(|part| part.ty().layout.partial().clone()).collect();
        let axes: Vec<Axis> = axes.into_iter().collect();
        let sums: Vec<_> =
            parts.into_iter().map(|parts| sum_partial(&b, parts, state, &axes)).collect();
        let sums = match axes.is_empty() {
            true => sums,
            false => {
                // All numbers in one collective.
                let each: Vec<_> = sums.into_iter().map(|sum| sum.reshape([1])).collect();
                apart(all_reduce(b.concat(&each, 0), &axes))
            }
        };
        finish(&sums, self.training);
        Ok(b.finish()?)
    }

    /// One stage group's share of all numbers, of which every rank of the group holds a part.
    fn of_group(&self) -> Result<Program, ScriptError> {
        let (b, state) = (self.builder("sums"), self.training.precision.state);
        let axes = all_axes(self.training.ranks().mesh);
        let parts = self.parts(&b).into_iter();
        let sums: Vec<_> = parts.map(|parts| sum_partial(&b, parts, state, &axes)).collect();
        side_by_side(&b, &sums, &axes);
        Ok(b.finish()?)
    }
}

fn sum_partial<'b>(
    b: &'b Builder,
    parts: Vec<Tensor<'b>>,
    dtype: DType,
    axes: &[Axis],
) -> Tensor<'b> {
    let parts: Vec<Tensor<'b>> = parts.into_iter().map(|part| to_partial(part, axes)).collect();
    sum(b, &parts, dtype)
}

/// The norm, and the coefficient that clips it, from loss and squares; then, if the loss is scaled or rows of experts
/// are counted that found no room, whether anything is updated; the scale; the number of these rows. Gives the coefficient.
pub(super) fn finish<'b>(sums: &[Tensor<'b>], training: &TrainingScript<'_>) -> Tensor<'b> {
    let (loss, squares, lacking) = (sums[0], sums[1], sums.get(2).copied());
    let (b, dtype) = (loss.builder(), loss.ty().dtype);
    let scale = training.scaling.map(|_| b.scalar(Scalar::LossScale.name()));
    let unscaled = scale.map(|scale| scale.unary(UnaryKind::Recip));
    let norm = squares.unary(UnaryKind::Sqrt);
    let norm = unscaled.map_or(norm, |by| norm * by);
    let one = b.constant(dtype, [], 1.0);
    let coefficient = match training.clip {
        None => one,
        Some(clip) => norm.shift(1e-6).unary(UnaryKind::Recip).scale(clip).min(one),
    };
    b.probe("loss", loss);
    b.probe("grad_norm", norm);
    b.port("clip", Role::Scalar, unscaled.map_or(coefficient, |by| coefficient * by));
    let is_zero = |number: Tensor<'b>| {
        let zero = b.constant(dtype, [], 0.0);
        number.compare(CompareKind::Eq, zero).select(one, zero)
    };
    // Zero times infinity, or times NaN, is NaN, and so not zero.
    let finite = scale.map(|_| is_zero(squares.scale(0.0)));
    let roomy = lacking.map(is_zero);
    let go = finite.into_iter().chain(roomy).reduce(|a, b| a * b);
    go.into_iter().for_each(|go| b.port("go", Role::Scalar, go));
    scale.into_iter().for_each(|scale| b.probe("loss_scale", scale));
    lacking.into_iter().for_each(|lacking| b.probe("lacking", lacking));
    coefficient
}

/// Returns numbers side by side, partial over these axes.
fn side_by_side<'b>(b: &'b Builder, numbers: &[Tensor<'b>], axes: &[Axis]) {
    let each: Vec<_> = numbers.iter().map(|own| to_partial(*own, axes).reshape([1])).collect();
    b.port("sums", Role::Loss, b.concat(&each, 0));
}

fn apart(all: Tensor<'_>) -> Vec<Tensor<'_>> {
    (0..all.shape()[0]).map(|i| all.slice(0, i, 1).reshape([])).collect()
}

fn all_axes(mesh: &Mesh) -> Vec<Axis> {
    mesh.axes().map(|(axis, _)| axis).collect()
}

fn transient(script: &mut Script, number: Number, bytes: usize) -> BufferId {
    script.buffer(Buffer {
        key: BufferKey::Number(number),
        category: Category::Workspace,
        bytes,
        source: Source::Script,
        tier: Tier::Device,
        padding: vec![],
    })
}

/// The buffers of the losses that the script's runs give and that count into a number, and their types.
fn losses(script: &Script, into: Number) -> Vec<(BufferId, TensorType)> {
    let mut losses = Vec::new();
    for action in &script.actions {
        let Some(run) = action.run() else { continue };
        let program = script.programs[run.program.0].program();
        for (port, (view, _)) in program.outputs().iter().zip(&run.outputs) {
            // A recomputed forward writes the same loss into the same buffer.
            let known = |(buffer, _): &(BufferId, TensorType)| *buffer == view.buffer;
            let counts = port.role == Role::Loss && Number::of_loss(&port.name) == into;
            if counts && !losses.iter().any(known) {
                losses.push((view.buffer, program.ty(port.value).clone()));
            }
        }
    }
    losses
}

fn loss_inputs<'b>(b: &'b Builder, losses: &[(BufferId, TensorType)]) -> Vec<Tensor<'b>> {
    let numbered = losses.iter().enumerate();
    numbered.map(|(i, (_, ty))| b.input(&format!("loss{i}"), Role::Loss, ty.clone())).collect()
}

fn sum<'b>(b: &'b Builder, parts: &[Tensor<'b>], dtype: DType) -> Tensor<'b> {
    let zero = || b.constant(dtype, [], 0.0);
    parts.iter().copied().reduce(|a, x| a + x).unwrap_or_else(zero)
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
