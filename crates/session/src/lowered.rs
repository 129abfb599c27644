//! What all ranks of a session share: the model on its mesh, and the programs of its segments.

mod describe;
mod on_mesh;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use phalanx_call::Requirements;
use phalanx_config::CpuUnits;
use phalanx_ir::{Axis, DType, Mesh, Model, TensorType};
use phalanx_script::{
    Compiled, Library, ParkedMove, RankOnMesh, RankPlace, ReplicaRanks, RollingTurns, ScheduledRun,
    Script, ScriptKey, StageGroup, Unit, Updates, forward, merge_adjacent,
};
use phalanx_spmd::{Gathering, Keep, Partition, Share};

use self::on_mesh::OnMesh;
use super::compile::compile_forward;
use super::planner::Planner;
use super::replicas::Replicas;
use super::{ForwardModel, Models, Settings};
use crate::{asynchronous, host, parked};
use phalanx_error::{Error, Problem, Result};

/// Steps that go ahead of their norms together, with post-validation.
pub const BLOCK: usize = 8;

/// Steps that are taken together at most where a pipeline does not drain between them: it fills once for all of them.
/// With m micro-batches of a step, m at least p, stage groups are busy for 32m/(32m + p − 1) of the time: 0.97 or more for
/// up to 97 stage groups.
pub const ROW: usize = 32;

/// A model's programs, before any engine is involved.
pub struct Lowered {
    /// How it is trained.
    pub settings: Settings,
    /// The model that is trained.
    pub model: Model,
    /// The same with more and more room for the rows of experts.
    pub(super) roomier: Vec<Model>,
    /// The same in which every rank reads all experts, if steps may choose that.
    pub(super) gathered: Option<Model>,
    /// The models that are run forward, by the key of their script.
    pub(super) forward: BTreeMap<ScriptKey, ForwardModel>,
    /// The model on each distinct mesh.
    on_mesh: Vec<OnMesh>,
    /// One for each stage group; one in all if there is no pipeline.
    groups: Vec<GroupRuns>,
    /// The programs that were placed so far, for the engines that will run them.
    pub(crate) library: Arc<Library>,
    /// Whether the model is trained, or only evaluated.
    pub(crate) trains: bool,
    /// When weights are updated, if not once at the end of a step.
    pub(crate) updates: Option<Updates>,
    /// Micro-batches that wait on other stage groups for their backward.
    pub(crate) moves: Vec<ParkedMove>,
    /// What stage groups do where steps follow each other without a flush: the first script of a row, those in the
    /// middle, the last one. Empty if they cannot.
    pub(crate) rows: Vec<RollingTurns>,
}

/// A rank's training step.
#[derive(Clone, Debug)]
pub struct TrainPlan {
    /// The script.
    pub script: Script,
    /// The packed parameters that the rank keeps.
    pub units: Vec<Unit>,
}

/// What the ranks of a stage group do.
struct GroupRuns {
    /// Which of the distinct meshes it has.
    on_mesh: usize,
    turns: Vec<ScheduledRun>,
    forward: BTreeMap<ScriptKey, Vec<ScheduledRun>>,
    /// By replica.
    ranks: Vec<Vec<usize>>,
}

impl Lowered {
    /// Partitions the models over their meshes and compiles their programs, for this machine's
    /// engine.
    pub fn new(models: &Models, settings: Settings) -> Result<Self> {
        let requirements = host::requirements_of(settings.device, settings.units);
        Self::for_engine(models, settings.measured(models)?, requirements)
    }

    /// The same, for engines with these requirements.
    pub fn for_engine(
        models: &Models,
        settings: Settings,
        requirements: Arc<dyn Requirements>,
    ) -> Result<Self> {
        let model = &models.train;
        if models.roomier.len() > usize::from(ScriptKey::BOUNDS) {
            let (most, found) = (ScriptKey::BOUNDS, models.roomier.len());
            let problem = Problem::new(format!("{found} bounds of the room for rows of experts"));
            let why = format!(
                "a session has scripts for {most}, each with twice the room of the one before"
            );
            return Err(Error::refused(
                problem.because(why).fix("a larger parallel.expert_slack, or 0"),
            ));
        }
        let stage_groups = settings.parallel.stage_groups()?;
        let parts = settings.microbatches;
        let pipeline = &settings.parallel.pipeline;
        let updates = pipeline.updates(model, stage_groups.len(), parts)?;
        asynchronous::check(&settings, model, updates.as_ref())?;
        let turns = pipeline.turns(model, stage_groups.len(), parts, 1)?;
        // Forwards ahead must be fewer than the micro-batches of a script.
        let steps_each = pipeline.steps_each(stage_groups.len(), parts);
        let mut row = match pipeline.has_rows() {
            true => pipeline.turns(model, stage_groups.len(), parts, 3 * steps_each)?,
            false => vec![Vec::new(); turns.len()],
        };
        let (mut on_mesh, mut groups): (Vec<OnMesh>, Vec<GroupRuns>) = (Vec::new(), Vec::new());
        for (((mesh, ranks), turns), row) in stage_groups.into_iter().zip(turns).zip(&mut row) {
            let known = on_mesh.iter().position(|l| l.mesh == mesh);
            let index = known.unwrap_or(on_mesh.len());
            if known.is_none() {
                on_mesh.push(OnMesh::new(models, &settings, &mesh)?);
            }
            let owned = on_mesh[index].partition.sharing().facts().state.share == Share::Root;
            let ahead = settings.parallel.pipeline.post_validation;
            if owned && (updates.is_some() || ahead) {
                let name = settings.parallel.pipeline.name();
                return Err(asynchronous::owner_updates(if ahead {
                    "post-validation"
                } else {
                    name
                }));
            }
            let held: BTreeSet<usize> = turns.iter().map(|turn| turn.instance).collect();
            // Of a stage that several groups hold, each evaluates the micro-batches that it trains.
            let trained: BTreeSet<(usize, usize)> =
                turns.iter().map(|turn| (turn.instance, turn.microbatch)).collect();
            let once = |(key, own): (ScriptKey, &ForwardModel)| {
                let mut runs = forward(held.iter().copied(), own.microbatches);
                runs.retain(|run| trained.contains(&(run.instance, run.microbatch % parts)));
                (key, runs)
            };
            let forward = models.forward().map(once).collect();
            let [turns, endless] = [turns, std::mem::take(row)]
                .map(|turns| merged(turns, model, &on_mesh[index].partition));
            *row = endless;
            groups.push(GroupRuns { on_mesh: index, turns, forward, ranks });
        }
        let turns: Vec<&[ScheduledRun]> = groups.iter().map(|group| &group.turns[..]).collect();
        let moves = pipeline.moves(model, parts, &turns)?;
        parked::check(&moves, pipeline.name(), |a, b| groups[a].on_mesh == groups[b].on_mesh)?;
        let rows = match pipeline.has_rows() {
            true => RollingTurns::cut(&row, parts * steps_each)?.into(),
            false => Vec::new(),
        };
        let forward = models.forward().map(|(key, own)| (key, own.clone())).collect();
        let (model, library) = (model.clone(), Arc::new(Library::new(requirements)));
        let roomier = models.roomier.clone();
        let trains = true;
        Ok(Self {
            settings,
            model,
            roomier,
            gathered: models.gathered.clone(),
            forward,
            on_mesh,
            groups,
            library,
            trains,
            updates,
            moves,
            rows,
        })
    }

    /// A model that is evaluated on one rank and never trained.
    pub(crate) fn forward(
        model: &Model,
        weights: DType,
        microbatches: usize,
        (threads, units): (usize, CpuUnits),
        requirements: Arc<dyn Requirements>,
    ) -> Result<Self> {
        let settings = Settings { units, ..Settings::forward(weights, microbatches, threads) };
        let mesh = Mesh::single();
        let partition = settings.parallel.partition(model, &mesh, None)?;
        let compiled = compile_forward(model, weights, &partition)?;
        let key = ScriptKey::Evaluate;
        let programs = BTreeMap::from([(key, compiled.clone())]);
        let (roomier, gathered) = (Vec::new(), None);
        let on_mesh = OnMesh { mesh, partition, forward: programs, roomier, gathered, compiled };
        let turns = forward(0..model.instances().len(), microbatches);
        let runs = BTreeMap::from([(key, turns.clone())]);
        let group = GroupRuns { on_mesh: 0, turns, forward: runs, ranks: vec![vec![0]] };
        let own = ForwardModel { model: model.clone(), microbatches };
        Ok(Self {
            settings,
            model: model.clone(),
            roomier: Vec::new(),
            gathered: None,
            forward: BTreeMap::from([(key, own)]),
            on_mesh: vec![on_mesh],
            groups: vec![group],
            library: Arc::new(Library::new(requirements)),
            trains: false,
            updates: None,
            moves: Vec::new(),
            rows: Vec::new(),
        })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.groups.iter().flat_map(|group| &group.ranks).map(Vec::len).sum()
    }

    /// Whether ranks hold different stages of the model.
    pub fn is_pipeline(&self) -> bool {
        self.groups.len() > 1
    }

    /// The mesh of the first stage group, with the axis splits that strategies asked for.
    pub fn mesh(&self) -> &Mesh {
        self.on_mesh[0].partition.mesh()
    }

    /// The programs of each segment, on the mesh of the first stage group.
    pub fn compiled(&self) -> &Compiled {
        &self.on_mesh[0].compiled
    }

    /// The programs of each segment, on the mesh of a rank's stage group.
    pub fn compiled_of(&self, rank: usize) -> &Compiled {
        &self.on_mesh[self.groups[self.place(rank).stage_group].on_mesh].compiled
    }

    /// The instances of the model that a rank runs.
    pub fn instances_of(&self, rank: usize) -> BTreeSet<usize> {
        let runs = &self.groups[self.place(rank).stage_group].turns;
        runs.iter().map(|run| run.instance).collect()
    }

    /// The mesh of all ranks: that of the configuration, or one axis where the stage groups' meshes
    /// differ.
    pub fn whole_mesh(&self) -> Result<Mesh> {
        match (self.groups.len(), &self.settings.parallel.pipeline.meshes[..]) {
            (1, _) if self.replicas() == 1 => Ok(self.mesh().clone()),
            (_, []) => Ok(self.settings.parallel.mesh.clone()),
            _ => Ok(Mesh::new([(Axis::STAGES.name(), self.ranks())])?),
        }
    }

    /// The most chunks (runs of neighbouring instances) that a stage group holds.
    pub(crate) fn chunks(&self) -> usize {
        let chunks = |group: &GroupRuns| {
            let held: BTreeSet<usize> = group.turns.iter().map(|turn| turn.instance).collect();
            held.iter().filter(|&&i| i == 0 || !held.contains(&(i - 1))).count()
        };
        self.groups.iter().map(chunks).max().unwrap_or(1)
    }

    /// How many replicas train by themselves.
    pub fn replicas(&self) -> usize {
        self.settings.parallel.replica_count()
    }

    /// The replica that a rank belongs to.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn replica(&self, rank: usize) -> usize {
        let mut groups = self.groups.iter();
        let of_group = |group: &GroupRuns| group.ranks.iter().position(|own| own.contains(&rank));
        groups.find_map(of_group).expect("a rank is in one of the replicas")
    }

    /// The first rank of each replica.
    pub(crate) fn first_ranks(&self) -> Vec<usize> {
        let first = |replica: usize| {
            let ranks = self.groups.iter().flat_map(|group| &group.ranks[replica]);
            ranks.copied().min().expect("a replica has ranks")
        };
        (0..self.replicas()).map(first).collect()
    }

    /// The ranks of all replicas that hold what a stage group does.
    pub(crate) fn replica_ranks(&self, stage_group: usize) -> ReplicaRanks {
        let axis = Axis::new(Replicas::AXIS).expect("it is a legal name");
        ReplicaRanks { axis, ranks: self.groups[stage_group].ranks.clone() }
    }

    /// The stage groups of the pipeline, in the first replica.
    pub fn stage_groups(&self) -> Vec<StageGroup<'_>> {
        self.stage_groups_of(0)
    }

    /// The stage groups of the pipeline, in a replica.
    pub(crate) fn stage_groups_of(&self, replica: usize) -> Vec<StageGroup<'_>> {
        self.devices_with(replica, |on_mesh| Some(&on_mesh.compiled), |group| &group.turns)
    }

    /// The same with more room for the rows of experts: one of the larger bounds, counted from 1.
    pub(crate) fn roomier_groups_of(&self, replica: usize, bound: usize) -> Vec<StageGroup<'_>> {
        self.devices_with(replica, |on_mesh| on_mesh.roomier.get(bound - 1), |group| &group.turns)
    }

    /// The same in which every rank reads all experts.
    pub(crate) fn gathered_groups_of(&self, replica: usize) -> Vec<StageGroup<'_>> {
        self.devices_with(replica, |on_mesh| on_mesh.gathered.as_ref(), |group| &group.turns)
    }

    /// The same, with the turns of a script of an endless row.
    pub(crate) fn row_groups_of<'a>(
        &'a self,
        replica: usize,
        row: &'a RollingTurns,
    ) -> Vec<StageGroup<'a>> {
        let own = self.stage_groups_of(replica).into_iter().zip(&row.turns);
        own.map(|(group, turns)| StageGroup { turns, ..group }).collect()
    }

    fn devices_with<'a>(
        &'a self,
        replica: usize,
        compiled: impl Fn(&'a OnMesh) -> Option<&'a Compiled>,
        turns: impl Fn(&'a GroupRuns) -> &'a [ScheduledRun],
    ) -> Vec<StageGroup<'a>> {
        let stage_group = |group: &'a GroupRuns| {
            let on_mesh = &self.on_mesh[group.on_mesh];
            Some(StageGroup {
                compiled: compiled(on_mesh)?,
                turns: turns(group),
                mesh: on_mesh.partition.mesh(),
                sharing: on_mesh.partition.sharing(),
                ranks: &group.ranks[replica],
            })
        };
        self.groups.iter().filter_map(stage_group).collect()
    }

    /// The stage group of a rank, and its place there.
    ///
    /// # Panics
    /// If there is no such rank.
    pub(crate) fn place(&self, rank: usize) -> RankPlace {
        let found = self.groups.iter().enumerate().find_map(|(stage_group, group)| {
            let places = |ranks: &Vec<usize>| ranks.iter().position(|&r| r == rank);
            let place = group.ranks.iter().find_map(places)?;
            Some(RankPlace { stage_group, place })
        });
        found.expect("a rank is in one of the stage groups")
    }

    /// A rank within its stage group.
    pub fn at(&self, rank: usize) -> RankOnMesh<'_> {
        let RankPlace { stage_group, place } = self.place(rank);
        let partition = &self.on_mesh[self.groups[stage_group].on_mesh].partition;
        RankOnMesh { mesh: partition.mesh(), rank: place }
    }

    /// The script of a rank's training step, and the units that it keeps.
    pub fn plan(&self, rank: usize) -> Result<TrainPlan> {
        let planner = Planner::new(self)?;
        Ok(TrainPlan { script: planner.train_script(rank)?, units: planner.state(rank)?.units })
    }

    /// For each script that is run forward: its model, and the stage groups that run it in a replica.
    pub(crate) fn forwards(
        &self,
        replica: usize,
    ) -> impl Iterator<Item = (ScriptKey, &Model, Vec<StageGroup<'_>>)> {
        self.forward.iter().map(move |(key, own)| {
            let stage_groups = self.devices_with(
                replica,
                |on_mesh| on_mesh.forward.get(key),
                |group| &group.forward[key],
            );
            (*key, &own.model, stage_groups)
        })
    }

    /// The micro-batches of a script's batch.
    pub(crate) fn microbatches(&self, key: ScriptKey) -> usize {
        self.forward.get(&key).map_or(self.settings.microbatches, |own| own.microbatches)
    }

    /// Bytes of the largest rank's arena and of what its engine keeps beside it, and of all ranks together.
    pub fn arenas(&self) -> Result<(usize, usize)> {
        let (mut largest, mut all) = (0, 0);
        for class in Planner::new(self)?.classes()? {
            let arena = class.arena(self.settings.device);
            largest = largest.max(arena);
            all += arena * class.ranks.len();
        }
        let beside = self.library.beside();
        Ok((largest + beside, all + beside * self.ranks()))
    }

    /// For each parameter: how a rank's programs read it.
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

/// Merges the forward and the backward of the last instance where they follow each other, unless
/// its weights must be gathered for each of them.
fn merged(turns: Vec<ScheduledRun>, model: &Model, partition: &Partition) -> Vec<ScheduledRun> {
    match partition.sharing().facts().gathering {
        Gathering::ForRuns { keep: Keep::Run, .. } => turns,
        _ => merge_adjacent(&turns, model.instances().len()),
    }
}
