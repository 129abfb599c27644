//! What all ranks of a session share: the model on its mesh, and the programs of its segments.

use phalanx_ir::{Mesh, Model, TensorType};
use phalanx_script::{
    Compiled, Ranks, TrainPlan, Training, Turn, accumulate, merge_adjacent, train_script,
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
