//! From a model and a schedule to a script: every port of every run gets its buffer.

mod bind;
mod finish;

use phalanx_autodiff::Phases;
use phalanx_ir::{DType, Model, Program};

use crate::action::{Accumulator, Buffer, BufferId, Category, Contribution, Names, Script, Source};
use crate::error::ScriptError;
use crate::schedule::{Part, Turn};
use crate::unit::Unit;
use bind::{Binder, Places};

/// The programs of each distinct segment of a model.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// By segment.
    pub phases: Vec<Phases>,
}

impl Compiled {
    /// The forward programs of a model that is never trained: its other parts are empty.
    pub fn forward(programs: Vec<Program>) -> Self {
        let phases = programs.into_iter().map(|f| {
            let empty = Program::new(f.name.clone(), f.mesh().clone());
            let [b, w, bw, fbw] = [(); 4].map(|()| empty.clone());
            Phases { f, b, w, bw, fbw }
        });
        Self { phases: phases.collect() }
    }

    /// The program that a turn runs.
    pub fn program(&self, segment: usize, part: Part) -> &Program {
        let phases = &self.phases[segment];
        match part {
            Part::F => &phases.f,
            Part::B => &phases.b,
            Part::W => &phases.w,
            Part::BW => &phases.bw,
            Part::FBW => &phases.fbw,
        }
    }
}

/// Element types of what lives between steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Precision {
    /// Weights as programs read them.
    pub weights: DType,
    /// Gradients as they are stored and accumulated.
    pub grads: DType,
    /// Optimizer state; weights narrower than this have masters of it.
    pub state: DType,
}

impl Precision {
    /// Whether weights are copies of wider masters.
    pub fn has_masters(&self) -> bool {
        self.weights != self.state
    }
}

/// The update rule; `decay` applies to units that decay.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the fields are those of the ops")]
pub enum Optimizer {
    AdamW { beta1: f64, beta2: f64, eps: f64, decay: f64 },
    Sgd { momentum: f64, nesterov: bool, decay: f64 },
}

impl Optimizer {
    /// AdamW with the constants that language models are usually trained with.
    pub const fn adamw() -> Self {
        Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 }
    }

    /// Gradient descent with momentum (0: none) and nothing else.
    pub const fn sgd(momentum: f64) -> Self {
        Optimizer::Sgd { momentum, nesterov: false, decay: 0.0 }
    }

    /// How many state buffers it keeps beside a master.
    pub fn states(&self) -> usize {
        match self {
            Optimizer::AdamW { .. } => 2,
            Optimizer::Sgd { .. } => 1,
        }
    }
}

/// The buffers of one unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitBuffers {
    /// What programs read.
    pub weights: BufferId,
    /// The accumulator.
    pub gradient: BufferId,
    /// The wide copy that is updated, if weights are narrow.
    pub master: Option<BufferId>,
    /// Moments or momentum.
    pub states: Vec<BufferId>,
}

/// A training step as a script, with the names that its host needs.
#[derive(Clone, Debug)]
pub struct TrainPlan {
    /// The script.
    pub script: Script,
    /// The packed parameters.
    pub units: Vec<Unit>,
    /// Their buffers.
    pub buffers: Vec<UnitBuffers>,
    /// Where the loss is found after the step.
    pub loss: BufferId,
    /// Where the gradient norm is found after the step.
    pub grad_norm: BufferId,
}

/// The script of one training step: the schedule's turns, the norm, then the updates.
pub fn train_script(
    model: &Model,
    compiled: &Compiled,
    turns: &[Turn],
    units: &[Unit],
    precision: Precision,
    optimizer: Optimizer,
    clip: Option<f64>,
) -> Result<TrainPlan, ScriptError> {
    let mut script = Script::default();
    let buffers = unit_buffers(&mut script, units, precision, optimizer);
    let (weights, gradients) = places(model, units, &buffers, precision);
    let mut binder = Binder::new(model, compiled, weights, Some(gradients), script);
    for turn in turns {
        binder.turn(*turn)?;
    }
    let mut script = binder.finish(turns)?;
    script.accumulators = accumulators(model, units, &buffers, precision.grads, turns);
    script.names = Names {
        params: model.params().iter().map(|p| p.name.clone()).collect(),
        instances: model.instances().iter().map(|i| i.name.clone()).collect(),
    };
    let (loss, grad_norm) =
        finish::append(&mut script, units, &buffers, precision, optimizer, clip)?;
    Ok(TrainPlan { script, units: units.to_vec(), buffers, loss, grad_norm })
}

/// A forward-only script over the weights of a training plan: what evaluation runs. Its state
/// buffers are those of the plan, under the same numbers; losses of its micro-batches are summed
/// into `loss`.
pub fn eval_script(
    model: &Model,
    compiled: &Compiled,
    microbatches: usize,
    plan: &TrainPlan,
    precision: Precision,
) -> Result<(Script, BufferId), ScriptError> {
    // Transient buffers of the training step keep their numbers but have no life here.
    let script = Script { buffers: plan.script.buffers.clone(), ..Script::default() };
    let (weights, _) = places(model, &plan.units, &plan.buffers, precision);
    let binder = Binder::new(model, compiled, weights, None, script);
    let mut script = forwards(binder, model, microbatches)?;
    let loss = finish::sum_losses(&mut script, "eval_loss")?;
    Ok((script, loss))
}

/// A script that only runs forward, with weights of its own.
#[derive(Clone, Debug)]
pub struct ForwardPlan {
    /// The script.
    pub script: Script,
    /// The packed parameters.
    pub units: Vec<Unit>,
    /// The weights of each unit.
    pub weights: Vec<BufferId>,
    /// Where the sum of the losses is found; zero if the model gives none.
    pub loss: BufferId,
}

/// The script of a model that is evaluated but not trained: no gradients, no optimizer state.
pub fn forward_script(
    model: &Model,
    compiled: &Compiled,
    microbatches: usize,
    units: &[Unit],
    weights: DType,
) -> Result<ForwardPlan, ScriptError> {
    let mut script = Script::default();
    let buffers: Vec<BufferId> = (units.iter())
        .map(|unit| script.buffer(unit_buffer(unit, "weights", Category::Weights, weights)))
        .collect();
    let places = Places::new(model, units, &buffers, weights);
    let binder = Binder::new(model, compiled, places, None, script);
    let mut script = forwards(binder, model, microbatches)?;
    let loss = finish::sum_losses(&mut script, "eval_loss")?;
    Ok(ForwardPlan { script, units: units.to_vec(), weights: buffers, loss })
}

/// Every instance forward, one micro-batch after the other.
fn forwards(
    mut binder: Binder<'_>,
    model: &Model,
    microbatches: usize,
) -> Result<Script, ScriptError> {
    for microbatch in 0..microbatches {
        for instance in 0..model.instances().len() {
            binder.turn(Turn { instance, part: Part::F, microbatch })?;
        }
    }
    binder.finish(&[])
}

fn unit_buffers(
    script: &mut Script,
    units: &[Unit],
    precision: Precision,
    optimizer: Optimizer,
) -> Vec<UnitBuffers> {
    (units.iter())
        .map(|unit| {
            let mut state = |what: &str, category: Category, dtype: DType| {
                script.buffer(unit_buffer(unit, what, category, dtype))
            };
            UnitBuffers {
                weights: state("weights", Category::Weights, precision.weights),
                gradient: state("gradient", Category::Gradients, precision.grads),
                master: (precision.has_masters())
                    .then(|| state("master", Category::Optimizer, precision.state)),
                states: (0..optimizer.states())
                    .map(|i| state(&format!("state{i}"), Category::Optimizer, precision.state))
                    .collect(),
            }
        })
        .collect()
}

/// A buffer with a place for every member of a unit, which outlives the script.
fn unit_buffer(unit: &Unit, what: &str, category: Category, dtype: DType) -> Buffer {
    Buffer {
        name: format!("{}/{what}", unit.name),
        category,
        bytes: unit.elements * dtype.size(),
        source: Source::State,
        padding: unit.padding(dtype),
    }
}

/// Where the weights and the gradients of a plan's units are found.
fn places(
    model: &Model,
    units: &[Unit],
    buffers: &[UnitBuffers],
    precision: Precision,
) -> (Places, Places) {
    let weights: Vec<BufferId> = buffers.iter().map(|b| b.weights).collect();
    let gradients: Vec<BufferId> = buffers.iter().map(|b| b.gradient).collect();
    (
        Places::new(model, units, &weights, precision.weights),
        Places::new(model, units, &gradients, precision.grads),
    )
}

/// What every accumulator must hold before its update: one contribution of each user of each
/// member, for each micro-batch.
fn accumulators(
    model: &Model,
    units: &[Unit],
    buffers: &[UnitBuffers],
    dtype: DType,
    turns: &[Turn],
) -> Vec<Accumulator> {
    let microbatches = turns.iter().map(|t| t.microbatch + 1).max().unwrap_or(0);
    let of = |unit: &Unit| {
        let mut all = Vec::new();
        for member in &unit.members {
            for (instance, bound) in model.instances().iter().enumerate() {
                if bound.params.values().any(|&p| p == member.param) {
                    all.extend((0..microbatches).map(|microbatch| Contribution {
                        param: member.param,
                        instance,
                        microbatch,
                    }));
                }
            }
        }
        all
    };
    (units.iter().zip(buffers))
        .map(|(unit, b)| Accumulator { buffer: b.gradient, dtype, complete: of(unit) })
        .collect()
}
