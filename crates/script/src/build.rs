//! From a model and a schedule to a script: every port of every run gets its buffer.

mod bind;
mod collect;
mod finish;
mod hold;
mod programs;
mod reduce;

use phalanx_autodiff::Phases;
use phalanx_ir::{DType, Mesh, Model, Port, Program, Role, TensorType};

use crate::action::{
    Action, Buffer, BufferId, Category, Contribution, Kind, Lane, Names, Run, Script, Source, View,
    Write,
};
use crate::error::ScriptError;
use crate::schedule::{Part, Turn};
use crate::unit::{Unit, units};
use bind::{Binder, Places};
use collect::Collector;
use phalanx_spmd::{Sharded, Sharing};
use reduce::Reducer;

pub use hold::{Held, UnitBuffers};

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

    /// The type that a segment's programs read a parameter as, if they do.
    pub fn param_type(&self, segment: usize, local: &str) -> Option<&TensorType> {
        let of = |program: &'_ Program| program.inputs_with(Role::Param).any(|p| p.name == local);
        let phases = &self.phases[segment];
        let program = [&phases.f, &phases.bw, &phases.fbw].into_iter().find(|p| of(p))?;
        port_type(program, program.inputs_with(Role::Param), local)
    }

    /// The type in which a segment's programs form a parameter's gradient, if they do.
    pub fn gradient_type(&self, segment: usize, local: &str) -> Option<&TensorType> {
        let program = &self.phases[segment].bw;
        port_type(program, program.outputs_with(Role::Gradient), local)
    }

    /// The program that a step runs.
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

/// Element types of what lives between turns.
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

/// What determines the script of a training step on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Training<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its programs.
    pub compiled: &'a Compiled,
    /// The order of their runs.
    pub turns: &'a [Turn],
    /// Element types.
    pub precision: Precision,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The largest gradient norm.
    pub clip: Option<f64>,
    /// The rank and those it shares the model with.
    pub ranks: Ranks<'a>,
}

/// One rank of a mesh, and how ranks share what they hold.
#[derive(Clone, Copy, Debug)]
pub struct Ranks<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// This rank.
    pub rank: usize,
    /// How units are shared.
    pub sharing: &'a Sharing,
}

static ONE_RANK: (Mesh, Sharing) = (Mesh::single(), Sharing::none());

impl Ranks<'static> {
    /// One rank that shares nothing with anybody.
    pub fn alone() -> Self {
        Self { mesh: &ONE_RANK.0, rank: 0, sharing: &ONE_RANK.1 }
    }
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

/// The script of one training step: the schedule's runs, with gathers and reductions where units
/// are shared, the norm, then the updates.
pub fn train_script(training: &Training<'_>) -> Result<TrainPlan, ScriptError> {
    let Training { model, compiled, turns, precision, optimizer, ranks, .. } = *training;
    let units = units(model, compiled, ranks.mesh, precision.grads, ranks.sharing)?;
    let mut script = Script::default();
    let buffers = hold::buffers(&mut script, &units, precision, optimizer, ranks);
    script.names = Names {
        params: model.params().iter().map(|p| p.name.clone()).collect(),
        instances: model.instances().iter().map(|i| i.name.clone()).collect(),
    };
    let weights: Vec<BufferId> = buffers.iter().map(|b| b.weights.buffer).collect();
    let mut binder = Binder::new(model, compiled, script);
    binder.weights = Places::new(model, &units, &weights, precision.weights);
    let mut collector = Collector::new(training, &units, &weights, turns);
    let mut reducer = Reducer::new(training, &units, &buffers, &mut binder);
    for (index, turn) in turns.iter().enumerate() {
        collector.before(index, &mut binder)?;
        reducer.before(*turn, &mut binder)?;
        binder.turn(*turn)?;
        collector.after(index, &mut binder);
        reducer.after(index, &mut binder)?;
    }
    let mut script = binder.script;
    let (loss, grad_norm) = finish::append(&mut script, &units, &buffers, training)?;
    Ok(TrainPlan { script, units, buffers, loss, grad_norm })
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
    ranks: Ranks<'_>,
) -> Result<(Script, BufferId), ScriptError> {
    // Transient buffers of the training step keep their numbers but have no life here.
    let script = Script { buffers: plan.script.buffers.clone(), ..Script::default() };
    let weights: Vec<BufferId> = plan.buffers.iter().map(|b| b.weights.buffer).collect();
    let forward = Forward { model, compiled, microbatches, weights: precision.weights, ranks };
    forward.script(script, &plan.units, &weights)
}

/// A script that only runs forward, with weights of its own.
#[derive(Clone, Debug)]
pub struct ForwardPlan {
    /// The script.
    pub script: Script,
    /// The packed parameters.
    pub units: Vec<Unit>,
    /// The weights of each unit.
    pub weights: Vec<Held>,
    /// Where the sum of the losses is found; zero if the model gives none.
    pub loss: BufferId,
}

/// The script of a model that is evaluated but not trained: no gradients, no optimizer state.
pub fn forward_script(
    model: &Model,
    compiled: &Compiled,
    microbatches: usize,
    weights: DType,
    ranks: Ranks<'_>,
) -> Result<ForwardPlan, ScriptError> {
    let units = units(model, compiled, ranks.mesh, weights, ranks.sharing)?;
    let mut script = Script::default();
    let held = hold::weights(&mut script, &units, weights, ranks);
    let buffers: Vec<BufferId> = held.iter().map(|h| h.buffer).collect();
    let forward = Forward { model, compiled, microbatches, weights, ranks };
    let (script, loss) = forward.script(script, &units, &buffers)?;
    Ok(ForwardPlan { script, units, weights: held, loss })
}

/// What determines a script that only runs forward.
struct Forward<'a> {
    model: &'a Model,
    compiled: &'a Compiled,
    microbatches: usize,
    weights: DType,
    ranks: Ranks<'a>,
}

impl Forward<'_> {
    /// Every instance forward, one micro-batch after the other; then the sum of the losses.
    fn script(
        &self,
        script: Script,
        units: &[Unit],
        weights: &[BufferId],
    ) -> Result<(Script, BufferId), ScriptError> {
        let instances = self.model.instances().len();
        let turns: Vec<Turn> = (0..self.microbatches)
            .flat_map(|microbatch| {
                (0..instances).map(move |instance| Turn { instance, part: Part::F, microbatch })
            })
            .collect();
        let mut binder = Binder::new(self.model, self.compiled, script);
        binder.weights = Places::new(self.model, units, weights, self.weights);
        let source = collect::Source {
            model: self.model,
            compiled: self.compiled,
            weights: self.weights,
            ranks: self.ranks,
        };
        let mut collector = Collector::of(source, units, weights, &turns);
        for (index, turn) in turns.iter().enumerate() {
            collector.before(index, &mut binder)?;
            binder.turn(*turn)?;
            collector.after(index, &mut binder);
        }
        let mut script = binder.script;
        let loss = finish::sum_losses(&mut script, "eval_loss", self.ranks.mesh)?;
        Ok((script, loss))
    }
}

fn port_type<'p>(
    program: &'p Program,
    mut ports: impl Iterator<Item = &'p Port>,
    name: &str,
) -> Option<&'p TensorType> {
    ports.find(|p| p.name == name).map(|port| program.ty(port.value))
}
