//! Builds a script from a model and a schedule: every port of every run gets its buffer.

mod ahead;
mod average;
mod bind;
mod collect;
mod crossing;
mod finish;
mod flow;
mod hold;
mod links;
mod messages;
mod moves;
mod norm;
mod programs;
mod reduce;
mod rescale;
mod rounds;
mod save;
mod ties;
mod train;
mod update;
mod versions;
mod wiring;
mod world;

use phalanx_autodiff::Phases;
use phalanx_call::{Lane, Tier};
use phalanx_ir::ops::Narrow;
use phalanx_ir::{Builder, DType, Mesh, Port, Program, Role, TensorType};
use phalanx_spmd::Sharing;

use crate::action::{
    Action, Buffer, BufferId, Category, Contribution, Kind, Run, Script, Source, View, Write,
};
use crate::error::ScriptError;
use crate::key::{BufferKey, Scalar, StateKind};
use crate::optimizer::Optimizer;
use crate::scaling::LossScaling;
use crate::schedule::{Part, ScheduledRun};
use crate::stage_group::StageGroup;
use crate::unit::{Unit, units};
use ahead::Pending;
use bind::{Binder, Places};
use collect::Collector;
use finish::UnitUpdate;
use messages::Messenger;
use versions::VersionPlaces;

pub use ahead::AheadPart;
pub use average::{ReplicaRanks, average_script};
pub use hold::{HeldRange, UnitBuffers};
pub(crate) use ties::is_apart;
pub use train::{ahead_script, saving_script, train_script};
pub use world::World;

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
            Part::F | Part::R => &phases.f,
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
    /// Optimizer state; narrower weights have master copies in this type.
    pub state: DType,
    /// Whether masters are kept in halves of 16 bits, of which weights are the upper ones: then weights are
    /// bf16, state is f32, and the update is one op.
    pub split: bool,
}

impl Precision {
    /// The state that holds parameters in full precision.
    pub fn full_kind(&self) -> StateKind {
        if self.has_masters() { StateKind::Master } else { StateKind::Weights }
    }

    /// The element type of what is kept of masters, besides weights.
    pub fn masters(&self) -> DType {
        if self.split { DType::U16 } else { self.state }
    }

    /// What programs read of the weights that updates change.
    fn narrow(&self) -> Narrow {
        match (self.has_masters(), self.split) {
            (false, _) => Narrow::None,
            (true, false) => Narrow::Copy(self.weights),
            (true, true) => Narrow::Split,
        }
    }

    /// Whether weights are copies of wider masters.
    pub fn has_masters(&self) -> bool {
        self.weights != self.state
    }
}

/// What determines the script of a training step on one rank.
#[derive(Clone, Copy, Debug)]
pub struct TrainingScript<'a> {
    /// What all ranks have in common.
    pub world: &'a World<'a>,
    /// The rank.
    pub at: RankPlace,
    /// Element types.
    pub precision: Precision,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The largest gradient norm.
    pub clip: Option<f64>,
    /// How the loss is scaled, if it is.
    pub scaling: Option<LossScaling>,
}

/// Which rank: a stage group, and a place in its mesh.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankPlace {
    /// The stage group's index.
    pub stage_group: usize,
    /// The place in its mesh.
    pub place: usize,
}

impl<'a> TrainingScript<'a> {
    /// The stage group of the rank.
    pub(crate) fn stage_group(&self) -> StageGroup<'a> {
        self.world.stage_groups[self.at.stage_group]
    }

    /// The rank within its stage group.
    pub(crate) fn ranks(&self) -> RankOnMesh<'a> {
        RankOnMesh { mesh: self.stage_group().mesh, rank: self.at.place }
    }

    /// What the rank keeps from step to step.
    pub fn state(&self) -> Result<State, ScriptError> {
        let units = units(self.world, self.at.stage_group, self.precision.grads)?;
        let mut script = self.world.empty_script(self.at, &units);
        let ranks = self.ranks();
        let older = units.iter().map(|unit| Ok(self.world.timing(unit)?.older()));
        let older: Vec<usize> = older.collect::<Result<_, ScriptError>>()?;
        let kept = (&units[..], &older[..], self.world.previews);
        let buffers = hold::buffers(&mut script, kept, self.precision, self.optimizer, ranks);
        let scalars = self.scaling.iter().flat_map(LossScaling::scalars);
        let keep = |(scalar, initial): (Scalar, f64)| {
            let dtype = self.precision.state;
            let buffer = script.buffer(Buffer {
                key: BufferKey::Scalar(scalar.clone()),
                category: Category::Optimizer,
                bytes: dtype.size(),
                source: Source::State,
                tier: Tier::Device,
                padding: vec![],
            });
            StateScalar { scalar, buffer, dtype, initial }
        };
        let scalars = scalars.map(keep).collect();
        let pending = self.world.previews.then(|| Pending::keep(&mut script, self));
        Ok(State { units, buffers, scalars, pending, table: script })
    }
}

/// One rank of a mesh.
#[derive(Clone, Copy, Debug)]
pub struct RankOnMesh<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The rank's place in it.
    pub rank: usize,
}

static ONE_RANK: (Mesh, Sharing) = (Mesh::single(), Sharing::none());

impl RankOnMesh<'static> {
    /// A single rank, which shares nothing.
    pub fn alone() -> Self {
        Self { mesh: &ONE_RANK.0, rank: 0 }
    }
}

impl<'a> StageGroup<'a> {
    /// One rank that does these turns.
    pub fn alone(compiled: &'a Compiled, turns: &'a [ScheduledRun]) -> Self {
        Self { compiled, turns, mesh: &ONE_RANK.0, sharing: &ONE_RANK.1, ranks: &[0] }
    }
}

/// What a rank keeps between scripts: one table for all of them. Each script starts with the
/// buffers of this table, with the same indices.
#[derive(Clone, Debug)]
pub struct State {
    /// The packed parameters.
    pub units: Vec<Unit>,
    /// Their buffers.
    pub buffers: Vec<UnitBuffers>,
    /// Numbers that are kept beside them, the same on every rank.
    pub scalars: Vec<StateScalar>,
    /// What a step that goes ahead leaves to the next.
    pending: Option<Pending>,
    /// A script with these buffers, and nothing to do.
    table: Script,
}

/// A number that a rank keeps from step to step.
#[derive(Clone, PartialEq, Debug)]
pub struct StateScalar {
    /// Which number.
    pub scalar: Scalar,
    /// Its buffer.
    pub buffer: BufferId,
    /// Its type.
    pub dtype: DType,
    /// Its value before the first step.
    pub initial: f64,
}

impl State {
    /// A script that has the state at the same place as all others, and no actions yet.
    pub fn script(&self) -> Script {
        self.table.clone()
    }

    fn weights(&self) -> Vec<BufferId> {
        self.buffers.iter().map(|b| b.weights.buffer).collect()
    }
}

/// What determines a script that only runs forward on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Inference<'a> {
    /// What all ranks have in common; the turns of stage groups are [`forward`](crate::forward).
    pub world: &'a World<'a>,
    /// The rank.
    pub at: RankPlace,
    /// The element type of weights.
    pub weights: DType,
}

/// A forward-only script over the weights of a state: what evaluation runs. The sum of its
/// micro-batches' losses is [`Number::Loss`](crate::Number::Loss), zero if the model has no loss.
pub fn eval_script(forward: &Inference<'_>, state: &State) -> Result<Script, ScriptError> {
    forward.script(state)
}

impl Inference<'_> {
    /// What the rank keeps of a model that is never trained: its weights.
    pub fn state(&self) -> Result<State, ScriptError> {
        let Inference { world, at, weights } = *self;
        let units = units(world, at.stage_group, weights)?;
        let mut script = world.empty_script(at, &units);
        let ranks = RankOnMesh { mesh: world.stage_groups[at.stage_group].mesh, rank: at.place };
        let buffers = hold::weights(&mut script, &units, weights, ranks);
        let (scalars, pending) = (Vec::new(), None);
        Ok(State { units, buffers, scalars, pending, table: script })
    }

    /// The stage group's turns; then the sum of the losses.
    fn script(&self, state: &State) -> Result<Script, ScriptError> {
        let Inference { world, at, .. } = *self;
        let (units, weights, script) = (&state.units, &state.weights(), state.script());
        let versions = VersionPlaces::new(world, at.stage_group, state)?;
        let mut binder = Binder::new(world, at.stage_group, script);
        binder.weights = Places::new(world.model, units, weights, self.weights);
        let mut messenger = Messenger::new(world, at.stage_group, binder.script.rank);
        let mut collector = Collector::new(world, at.stage_group, units, self.weights);
        for (index, turn) in world.stage_groups[at.stage_group].turns.iter().enumerate() {
            messenger.before(index, &mut binder)?;
            collector.before(index, &versions, &mut binder)?;
            binder.turn(*turn)?;
            messenger.after(index, &mut binder)?;
            collector.after(index, &mut binder);
        }
        let mut script = binder.script;
        norm::sum_losses(&mut script, world, at.stage_group)?;
        messenger.finish(&mut script);
        Ok(script)
    }
}

fn port_type<'p>(
    program: &'p Program,
    mut ports: impl Iterator<Item = &'p Port>,
    name: &str,
) -> Option<&'p TensorType> {
    ports.find(|p| p.name == name).map(|port| program.ty(port.value))
}
