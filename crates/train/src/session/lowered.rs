//! What all ranks of a session share: the model on its mesh, and the programs of its segments.

use phalanx_ir::{Mesh, Model, TensorType};
use phalanx_script::{
    Compiled, MemoryPlan, Ranks, TrainPlan, Training, Turn, accumulate, eval_script,
    merge_adjacent, plan, plan_beside, train_script,
};
use phalanx_spmd::{Keep, Partition, Sharded};

use super::compile::{compile, compile_forward};
use super::{Models, Settings};
use crate::error::Result;

/// A model's programs, before any engine is involved.
pub struct Lowered {
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    pub(crate) compiled: Compiled,
    pub(crate) evaluate: Option<(Model, Compiled)>,
    partition: Partition,
    turns: Vec<Turn>,
}

impl Lowered {
    /// Lays the models on the mesh and forms their programs.
    pub fn new(models: &Models, settings: Settings) -> Result<Self> {
        let model = &models.train;
        let partition = settings.parallel.partition(model)?;
        let compiled = compile(model, settings.precision, settings.recompute, &partition)?;
        let evaluate = match &models.evaluate {
            None => None,
            Some(model) => {
                let partition = settings.parallel.partition(model)?;
                let compiled = compile_forward(model, settings.precision.weights, &partition)?;
                Some((model.clone(), compiled))
            }
        };
        let turns = turns(model, &settings, &partition);
        Ok(Self { model: model.clone(), settings, compiled, evaluate, partition, turns })
    }

    /// The mesh, with the splits that strategies asked for.
    pub fn mesh(&self) -> &Mesh {
        self.partition.mesh()
    }

    /// The programs of each segment.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// A rank, and how ranks share what they hold.
    pub(crate) fn ranks(&self, rank: usize) -> Ranks<'_> {
        Ranks { mesh: self.partition.mesh(), rank, sharing: self.partition.sharing() }
    }

    /// The script of a rank's training step.
    pub fn plan(&self, rank: usize) -> Result<TrainPlan> {
        Ok(train_script(&Training {
            model: &self.model,
            compiled: &self.compiled,
            turns: &self.turns,
            precision: self.settings.precision,
            optimizer: self.settings.optimizer,
            clip: self.settings.clip,
            ranks: self.ranks(rank),
        })?)
    }

    /// The memory of a rank's step, and the bytes of the arena that evaluation shares with it.
    pub(crate) fn memory(&self, rank: usize) -> Result<(MemoryPlan, usize)> {
        let train = self.plan(rank)?;
        let memory = plan(&train.script)?;
        let mut arena = memory.arena;
        if let Some((model, compiled)) = &self.evaluate {
            let (precision, parts) = (self.settings.precision, self.settings.microbatches);
            let ranks = self.ranks(rank);
            let (script, _) = eval_script(model, compiled, parts, &train, precision, ranks)?;
            arena = arena.max(plan_beside(&script, Some(&memory))?.arena);
        }
        Ok((memory, arena))
    }

    /// The ranks and how they divide the work, in one line.
    pub fn describe(&self) -> String {
        let (mesh, sharing) = (self.mesh(), self.partition.sharing());
        let ranks = mesh.ranks();
        if ranks == 1 {
            return "1 rank".to_owned();
        }
        let degrees: Vec<String> =
            mesh.axes().map(|(axis, size)| format!("{axis} {size}")).collect();
        let names: Vec<&str> =
            self.settings.parallel.strategies.iter().map(|strategy| strategy.name()).collect();
        let shards = match sharing.sharded() {
            Sharded::Nothing => None,
            Sharded::State => Some("optimizer state"),
            Sharded::Gradients => Some("gradients and optimizer state"),
            Sharded::Weights => Some("weights, gradients and optimizer state"),
        };
        let shards = shards.map(|what| {
            let axes: Vec<String> = sharing.axes().iter().map(ToString::to_string).collect();
            format!("; {what} in shards over {}", axes.join(" · "))
        });
        let shards = shards.unwrap_or_default();
        format!("{ranks} ranks, {}: {}{shards}", degrees.join(" · "), names.join(", "))
    }

    /// By parameter: how programs read it.
    pub(crate) fn param_types(&self) -> Vec<Option<TensorType>> {
        let mut types = vec![None; self.model.params().len()];
        for instance in self.model.instances() {
            for (local, &param) in &instance.params {
                let ty = self.compiled.param_type(instance.segment, local).cloned();
                types[param] = types[param].take().or(ty);
            }
        }
        types
    }
}

/// Each micro-batch through all instances and back. Where the last instance's backward follows its
/// forward, both are one run, unless its weights are to be gathered for each of the two.
fn turns(model: &Model, settings: &Settings, partition: &Partition) -> Vec<Turn> {
    let turns = accumulate(model.instances().len(), settings.microbatches);
    let sharing = partition.sharing();
    match (sharing.sharded(), sharing.keep) {
        (Sharded::Weights, Keep::Run) => turns,
        _ => merge_adjacent(&turns),
    }
}
