//! What all ranks of a session share: the model on its mesh, and the programs of its segments.

use std::collections::BTreeSet;

use phalanx_ir::{Axis, Mesh, Model, TensorType};
use phalanx_script::{
    BufferId, Compiled, Device, Forward, MemoryPlan, Place, Ranks, Script, TrainPlan, Training,
    Turn, eval_script, forward, merge_adjacent, plan, plan_beside, train_script,
};
use phalanx_spmd::{Keep, Partition, Sharded};

use super::compile::{compile, compile_forward};
use super::{Models, Settings, Split, measure};
use crate::error::{Error, Result};

/// A model's programs, before any engine is involved.
pub struct Lowered {
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    evaluate: Option<Model>,
    /// The model on each distinct mesh.
    laid: Vec<Laid>,
    /// By device of the pipeline; one if there is none.
    stations: Vec<Station>,
}

/// A model on a mesh.
struct Laid {
    mesh: Mesh,
    partition: Partition,
    compiled: Compiled,
    evaluate: Option<Compiled>,
}

impl Laid {
    fn new(models: &Models, settings: &Settings, mesh: &Mesh) -> Result<Self> {
        let partition = settings.parallel.partition(&models.train, mesh)?;
        let (precision, recompute) = (settings.precision, settings.recompute);
        let compiled = compile(&models.train, precision, recompute, &partition)?;
        let forward = |model: &Model| {
            let partition = settings.parallel.partition(model, mesh)?;
            Ok::<_, Error>(compile_forward(model, precision.weights, &partition)?)
        };
        let evaluate = models.evaluate.as_ref().map(forward).transpose()?;
        Ok(Self { mesh: mesh.clone(), partition, compiled, evaluate })
    }
}

/// What the ranks of a device do.
struct Station {
    /// Which of the distinct meshes it has.
    laid: usize,
    turns: Vec<Turn>,
    evaluate: Vec<Turn>,
    ranks: Vec<usize>,
}

impl Lowered {
    /// Lays the models on their meshes and forms their programs.
    pub fn new(models: &Models, mut settings: Settings) -> Result<Self> {
        let model = &models.train;
        let devices = settings.parallel.devices()?;
        if settings.parallel.pipeline.split == Split::Measured {
            settings.parallel.pipeline.split = Split::Costs(measure::costs(models, &settings)?);
        }
        let parts = settings.microbatches;
        let turns = settings.parallel.pipeline.turns(model, devices.len(), parts)?;
        let (mut laid, mut stations): (Vec<Laid>, Vec<Station>) = (Vec::new(), Vec::new());
        for ((mesh, ranks), turns) in devices.into_iter().zip(turns) {
            let known = laid.iter().position(|l| l.mesh == mesh);
            let index = known.unwrap_or(laid.len());
            if known.is_none() {
                laid.push(Laid::new(models, &settings, &mesh)?);
            }
            let held: BTreeSet<usize> = turns.iter().map(|turn| turn.instance).collect();
            let evaluate = forward(held.iter().copied(), parts);
            let turns = merged(turns, model, &laid[index].partition);
            stations.push(Station { laid: index, turns, evaluate, ranks });
        }
        let (model, evaluate) = (model.clone(), models.evaluate.clone());
        Ok(Self { settings, model, evaluate, laid, stations })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.stations.iter().map(|station| station.ranks.len()).sum()
    }

    /// Whether ranks hold different stages of the model.
    pub fn is_pipeline(&self) -> bool {
        self.stations.len() > 1
    }

    /// The mesh of the first device, with the splits that strategies asked for.
    pub fn mesh(&self) -> &Mesh {
        self.laid[0].partition.mesh()
    }

    /// The programs of each segment, on the mesh of the first device.
    pub fn compiled(&self) -> &Compiled {
        &self.laid[0].compiled
    }

    /// The programs of each segment, on the mesh of a rank's device.
    pub(crate) fn compiled_of(&self, rank: usize) -> &Compiled {
        &self.laid[self.stations[self.place(rank).device].laid].compiled
    }

    /// The mesh of all ranks: that of the configuration, or one axis where devices differ.
    pub(crate) fn whole_mesh(&self) -> Result<Mesh> {
        match (self.stations.len(), &self.settings.parallel.pipeline.meshes[..]) {
            (1, _) => Ok(self.mesh().clone()),
            (_, []) => Ok(self.settings.parallel.mesh.clone()),
            _ => Ok(Mesh::new([(Axis::STAGES.name(), self.ranks())])?),
        }
    }

    /// The most chunks that a device of the pipeline holds: runs of neighbouring instances.
    pub(crate) fn chunks(&self) -> usize {
        let chunks = |station: &Station| {
            let held: BTreeSet<usize> = station.turns.iter().map(|turn| turn.instance).collect();
            held.iter().filter(|&&i| i == 0 || !held.contains(&(i - 1))).count()
        };
        self.stations.iter().map(chunks).max().unwrap_or(1)
    }

    /// The devices of the pipeline.
    pub(crate) fn devices(&self) -> Vec<Device<'_>> {
        self.devices_with(|laid| Some(&laid.compiled), |station| &station.turns)
    }

    fn devices_with<'a>(
        &'a self,
        compiled: impl Fn(&'a Laid) -> Option<&'a Compiled>,
        turns: impl Fn(&'a Station) -> &'a [Turn],
    ) -> Vec<Device<'a>> {
        let device = |station: &'a Station| {
            let laid = &self.laid[station.laid];
            Some(Device {
                compiled: compiled(laid)?,
                turns: turns(station),
                mesh: laid.partition.mesh(),
                sharing: laid.partition.sharing(),
                ranks: &station.ranks,
            })
        };
        self.stations.iter().filter_map(device).collect()
    }

    /// Where a rank is.
    pub(crate) fn place(&self, rank: usize) -> Place {
        let found = self.stations.iter().enumerate().find_map(|(device, station)| {
            let place = station.ranks.iter().position(|&r| r == rank)?;
            Some(Place { device, place })
        });
        found.unwrap_or_default()
    }

    /// A rank among those of its device, and how they share what they hold.
    pub(crate) fn at(&self, rank: usize) -> Ranks<'_> {
        let Place { device, place } = self.place(rank);
        let partition = &self.laid[self.stations[device].laid].partition;
        Ranks { mesh: partition.mesh(), rank: place, sharing: partition.sharing() }
    }

    /// The script of a rank's training step.
    pub fn plan(&self, rank: usize) -> Result<TrainPlan> {
        Ok(train_script(&Training {
            model: &self.model,
            devices: &self.devices(),
            at: self.place(rank),
            precision: self.settings.precision,
            optimizer: self.settings.optimizer,
            clip: self.settings.clip,
        })?)
    }

    /// The model that is evaluated, and a rank's script of it on the state of its training step.
    pub(crate) fn evaluation(
        &self,
        rank: usize,
        plan: &TrainPlan,
    ) -> Result<Option<(&Model, Script, BufferId)>> {
        let Some(model) = &self.evaluate else { return Ok(None) };
        let devices = self.devices_with(|laid| laid.evaluate.as_ref(), |station| &station.evaluate);
        let weights = self.settings.precision.weights;
        let forward = Forward { model, devices: &devices, at: self.place(rank), weights };
        let (script, loss) = eval_script(&forward, plan)?;
        Ok(Some((model, script, loss)))
    }

    /// The memory of a rank's step, and the bytes of the arena that evaluation shares with it.
    pub(crate) fn memory(&self, rank: usize) -> Result<(MemoryPlan, usize)> {
        let train = self.plan(rank)?;
        let memory = plan(&train.script)?;
        let mut arena = memory.arena;
        if let Some((_, script, _)) = self.evaluation(rank, &train)? {
            arena = arena.max(plan_beside(&script, Some(&memory))?.arena);
        }
        Ok((memory, arena))
    }

    /// Bytes of the largest rank's arena, and of all together.
    pub(crate) fn arenas(&self) -> Result<(usize, usize)> {
        let (mut largest, mut all) = (0, 0);
        for station in &self.stations {
            let (_, arena) = self.memory(station.ranks[0])?;
            largest = largest.max(arena);
            all += arena * station.ranks.len();
        }
        Ok((largest, all))
    }

    /// The ranks and how they divide the work, in one line.
    pub fn describe(&self) -> String {
        let (parallel, sharing) = (&self.settings.parallel, self.laid[0].partition.sharing());
        let ranks = self.ranks();
        let told = self.stations.len() > 1 || !parallel.pipeline.is_usual();
        let pipeline = told.then(|| parallel.pipeline.name().to_owned());
        if ranks == 1 {
            return pipeline.map_or("1 rank".to_owned(), |name| format!("1 rank: {name}"));
        }
        let degrees = |mesh: &Mesh| -> String {
            let degrees: Vec<String> =
                mesh.axes().map(|(axis, size)| format!("{axis} {size}")).collect();
            degrees.join(" · ")
        };
        let devices = match (&parallel.pipeline.meshes[..], self.stations.len()) {
            ([], 1) => degrees(self.mesh()),
            ([], devices) => [format!("pp {devices}"), degrees(self.mesh())]
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join(" · "),
            (meshes, _) => {
                let each: Vec<String> =
                    meshes.iter().map(|m| format!("({})", degrees(m))).collect();
                each.join(" → ")
            }
        };
        let names: Vec<String> =
            (parallel.strategies.iter().map(|s| s.name().to_owned())).chain(pipeline).collect();
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
        format!("{ranks} ranks, {devices}: {}{shards}", names.join(", "))
    }

    /// By parameter: how a rank's programs read it.
    pub(crate) fn param_types(&self, rank: usize) -> Vec<Option<TensorType>> {
        let compiled = self.compiled_of(rank);
        let mut types = vec![None; self.model.params().len()];
        for instance in self.model.instances() {
            for (local, &param) in &instance.params {
                let ty = compiled.param_type(instance.segment, local).cloned();
                types[param] = types[param].take().or(ty);
            }
        }
        types
    }
}

/// Where the last instance's backward follows its forward, both are one run, unless its weights are to be
/// gathered for each of the two.
fn merged(turns: Vec<Turn>, model: &Model, partition: &Partition) -> Vec<Turn> {
    let sharing = partition.sharing();
    match (sharing.sharded(), sharing.keep) {
        (Sharded::Weights, Keep::Run) => turns,
        _ => merge_adjacent(&turns, model.instances().len()),
    }
}
