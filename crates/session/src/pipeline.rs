//! The schedule of a pipeline, and which layers each stage has.

use std::ops::Range;
use std::sync::Arc;

use phalanx_ir::{Mesh, Model, Role};
use phalanx_pipeline::{
    NamedSchedule, RoundConcat, Schedule, ScheduleShape, Times, TurnCosts, Warmup, split,
};
use phalanx_script::{ParkedMove, Part, ScheduledRun, Updates};

use crate::custom::read_schedule;
use phalanx_config::{PipelineSchedule, PipelineSplit};
use phalanx_error::{Error, Problem, Result};

/// The order of a pipeline's work.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The schedule.
    pub order: PipelineOrder,
    /// Chunks of layers that a stage group holds; by default as many as the schedule usually has.
    pub chunks: Option<usize>,
    /// How many forwards 1F1B starts with.
    pub warmup: Warmup,
    /// Pipelines in each direction of Chimera.
    pub pairs: usize,
    /// How Chimera runs more micro-batches than stage groups.
    pub concat: RoundConcat,
    /// The memory of zb-auto, in shares.
    pub memory: f64,
    /// Whether the layers of a pair of turns, a forward and a backward, take turns.
    pub braid: bool,
    /// Whether a micro-batch of PipeDream reads the same version of the weights on all stages.
    pub vertical_sync: bool,
    /// Whether the steps of a block go on before the norm of the step before is known.
    pub post_validation: bool,
    /// When one stage group updates its weights, if that follows the rule of another layout's pipeline: delays are by
    /// instance of the model.
    pub delayed: Option<Updates>,
    /// For each instance of the model: its measured costs, once they are needed and known.
    pub costs: Option<Vec<InstanceCosts>>,
    /// Which layers a stage gets.
    pub split: StageSplit,
    /// Whether a stage keeps only its input and recomputes its forward before the backward.
    pub rematerialise: bool,
    /// The meshes of the stage groups, one after the other over the ranks, if they differ. Empty:
    /// each has the mesh without its axis `pp`.
    pub meshes: Vec<Mesh>,
    /// For each stage of PipeDream: how many stage groups hold it, and take micro-batches in turn. Empty: one each.
    pub holders: Vec<usize>,
}

/// A schedule by name, or a user's own.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum PipelineOrder {
    Named(NamedSchedule),
    Own(Arc<Schedule>),
}

impl From<NamedSchedule> for PipelineOrder {
    fn from(named: NamedSchedule) -> Self {
        PipelineOrder::Named(named)
    }
}

impl From<Schedule> for PipelineOrder {
    fn from(schedule: Schedule) -> Self {
        PipelineOrder::Own(Arc::new(schedule))
    }
}

/// What an instance costs for one micro-batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct InstanceCosts {
    /// Its times.
    pub times: Times,
    /// Bytes that it keeps from F to B.
    pub until_b: f64,
    /// Bytes that it keeps from B to W.
    pub until_w: f64,
}

impl InstanceCosts {
    /// How long it takes in all.
    pub fn seconds(&self) -> f64 {
        self.times.f + self.times.b + self.times.w
    }

    fn even(time: f64) -> Self {
        Self { times: Times { f: time, b: time, w: time }, until_b: 0.0, until_w: 0.0 }
    }
}

/// Which layers a stage gets.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum StageSplit {
    /// The heaviest stage has as few FLOPs as possible; embedding and head count too.
    #[default]
    Flops,
    /// The same number of layers for each.
    Count,
    /// The heaviest stage takes as little time as possible, measured on this machine.
    Measured,
    /// Each has so many instances of the model, embedding and head included.
    Instances(Vec<usize>),
    /// The heaviest stage has as low a cost as possible, by these costs (for example measured
    /// ones): one for each instance of the model.
    Costs(Vec<f64>),
}

impl Default for Pipeline {
    fn default() -> Self {
        Self {
            order: PipelineOrder::Named(NamedSchedule::OneFOneB),
            chunks: None,
            warmup: Warmup::Pa,
            pairs: 1,
            concat: RoundConcat::Direct,
            memory: 1.0,
            braid: false,
            vertical_sync: false,
            post_validation: false,
            delayed: None,
            costs: None,
            split: StageSplit::default(),
            rematerialise: false,
            meshes: Vec::new(),
            holders: Vec::new(),
        }
    }
}

impl Pipeline {
    /// The pipeline that a configuration asks for.
    pub fn new(config: &phalanx_config::ParallelConfig) -> Result<Self> {
        let order = match &config.schedule {
            PipelineSchedule::Named(named) => PipelineOrder::Named(*named),
            PipelineSchedule::Auto => {
                let problem = Problem::new("parallel.schedule = \"auto\" was not chosen yet");
                return Err(Error::refused(problem.fix(
                    "name a schedule: only a configuration that is read whole can choose one",
                )));
            }
            PipelineSchedule::Csv(file) => PipelineOrder::Own(Arc::new(read_schedule(file)?)),
        };
        let warmup = config.warmup;
        let chunks = match order {
            PipelineOrder::Named(_) => Some(config.chunks.get()),
            PipelineOrder::Own(_) => None,
        };
        let split = match &config.split {
            PipelineSplit::Flops => StageSplit::Flops,
            PipelineSplit::Count => StageSplit::Count,
            PipelineSplit::Measured => StageSplit::Measured,
            PipelineSplit::Given(counts) => StageSplit::Instances(counts.clone()),
        };
        let (pairs, concat) = (config.pairs.get(), config.concat);
        let memory = config.schedule_memory.get();
        let (braid, vertical_sync) = (config.braid, config.vertical_sync);
        let own = Self { order, chunks, warmup, pairs, concat, memory, split, ..Self::default() };
        let post_validation = config.post_validation;
        let holders = if config.takes_turns() { config.holders.0.clone() } else { Vec::new() };
        Ok(Self { braid, vertical_sync, post_validation, holders, ..own })
    }

    /// What the schedule is called.
    pub fn name(&self) -> &str {
        match &self.order {
            PipelineOrder::Named(named) => named.name(),
            PipelineOrder::Own(schedule) => schedule.name(),
        }
    }

    /// Whether, with one stage, it is the same as no schedule: forward and backward of each
    /// micro-batch in turn.
    pub(crate) fn is_usual(&self) -> bool {
        matches!(self.order, PipelineOrder::Named(NamedSchedule::OneFOneB))
    }

    /// Whether the schedule is searched for, which needs the costs of the model's instances.
    pub(crate) fn is_searched(&self) -> bool {
        matches!(self.order, PipelineOrder::Named(NamedSchedule::ZbAuto))
    }

    /// Whether weights are updated without a flush.
    pub fn is_asynchronous(&self) -> bool {
        match &self.order {
            PipelineOrder::Named(named) => named.is_asynchronous(),
            PipelineOrder::Own(schedule) => schedule.updates().is_some(),
        }
    }

    /// How many steps a script of a row has: a stage group has fewer forwards ahead than it has micro-batches in them.
    pub(crate) fn steps_each(&self, stage_groups: usize, microbatches: usize) -> usize {
        let most = self.holders.iter().copied().max().unwrap_or(0);
        (stage_groups + 2 * most).div_ceil(microbatches)
    }

    /// Whether steps can follow each other without a flush: not those of a table, which has one step.
    pub fn has_rows(&self) -> bool {
        matches!(self.order, PipelineOrder::Named(named) if named.is_asynchronous())
    }

    /// When weights are updated, with delays by instance of the model; none if once at the end of a step.
    pub fn updates(
        &self,
        model: &Model,
        stage_groups: usize,
        microbatches: usize,
    ) -> Result<Option<Updates>> {
        if self.delayed.is_some() || !self.is_asynchronous() {
            return Ok(self.delayed.clone());
        }
        let (schedule, stages) = self.timetable(model, stage_groups, microbatches, 1)?;
        let by_instance = |updates: &Updates| {
            let of_stage =
                |(stage, held): (usize, &Range<usize>)| std::iter::repeat_n(stage, held.len());
            let all: Vec<usize> = stages.iter().enumerate().flat_map(of_stage).collect();
            updates.over(&all)
        };
        Ok(schedule.updates().map(by_instance))
    }

    /// The schedule of so many steps, for this many stage groups.
    fn schedule(
        &self,
        model: &Model,
        stage_groups: usize,
        microbatches: usize,
        steps: usize,
    ) -> Result<Schedule> {
        match &self.order {
            PipelineOrder::Named(named) => {
                let shape = ScheduleShape {
                    stage_groups,
                    microbatches: microbatches / self.concat.pieces(),
                    chunks: self.chunks,
                    warmup: self.warmup,
                    pairs: self.pairs,
                    concat: self.concat,
                    memory: self.memory,
                    until_w: 1.0,
                    steps: if self.has_rows() { steps } else { 1 },
                    vertical_sync: self.vertical_sync,
                    holders: self.holders.clone(),
                };
                if !self.is_searched() {
                    return Ok(named.build(shape)?);
                }
                let (costs, until_w) = self.stage_costs(model, stage_groups)?;
                Ok(named.build_for(ScheduleShape { until_w, ..shape }, &costs)?)
            }
            PipelineOrder::Own(schedule) => {
                let found = schedule.placement().holders();
                if !self.holders.is_empty() && self.holders != found {
                    let [asked, found] = [&self.holders, &found].map(|counts| listed(counts));
                    return Err(Error::refused(
                        Problem::new(format!(
                            "{} has stages that are held {found} times, but {asked} holders are asked for",
                            schedule.name()
                        ))
                        .because("a schedule of one's own says itself who holds which stage")
                        .nearest("no holders: they are for the named schedule pipedream"),
                    ));
                }
                let chunks = self.chunks.unwrap_or(schedule.chunks());
                for (what, key, found, asked) in [
                    ("stage groups", "parallel.pp", schedule.stage_groups(), stage_groups),
                    ("micro-batches", "train.microbatches", schedule.microbatches(), microbatches),
                    ("chunks", "parallel.chunks", schedule.chunks(), chunks),
                ] {
                    if found != asked {
                        let name = schedule.name();
                        return Err(Error::refused(
                            Problem::new(format!("{name} has {found} {what}, but {key} = {asked}"))
                                .because("a table is for one size only")
                                .nearest(format!("{key} = {found}")),
                        ));
                    }
                }
                let other = schedule.all().find(|(_, turn)| turn.version > 0);
                let other = other.filter(|_| schedule.updates().is_none());
                if let Some((at, turn)) = other {
                    return Err(Error::refused(
                        Problem::new(format!(
                            "{}: turn {turn} of stage group {} uses another weight version",
                            schedule.name(),
                            at.stage_group
                        ))
                        .because("a table does not say when weights are updated")
                        .nearest(
                            "a column `round`, the micro-batches of an update; or version 0 \
                             everywhere",
                        ),
                    ));
                }
                Ok(Schedule::clone(schedule))
            }
        }
    }

    /// For each stage group: the turns of the model's instances in so many steps.
    pub(crate) fn turns(
        &self,
        model: &Model,
        stage_groups: usize,
        microbatches: usize,
        steps: usize,
    ) -> Result<Vec<Vec<ScheduledRun>>> {
        let (schedule, stages) = self.timetable(model, stage_groups, microbatches, steps)?;
        let mut turns = match self.rematerialise {
            true => schedule.rematerialised(&stages),
            false => schedule.instances(&stages),
        };
        if schedule.has_empty() {
            let real = schedule.microbatches();
            let works = |run: &ScheduledRun| run.microbatch < real || is_layer(model, run.instance);
            turns.iter_mut().for_each(|own| own.retain(works));
        }
        Ok(turns)
    }

    /// Micro-batches that wait on other stage groups, by the turns that each of them does.
    pub(crate) fn moves(
        &self,
        model: &Model,
        microbatches: usize,
        groups: &[&[ScheduledRun]],
    ) -> Result<Vec<ParkedMove>> {
        if !matches!(self.order, PipelineOrder::Named(NamedSchedule::BPipe)) {
            return Ok(Vec::new());
        }
        let (schedule, _) = self.timetable(model, groups.len(), microbatches, 1)?;
        let first = |group: usize, index: usize| {
            // After the last turn.
            let Some(turn) = schedule.turns(group).get(index) else { return groups[group].len() };
            let begins = |run: &ScheduledRun| {
                let forward = matches!(run.part, Part::F | Part::FBW);
                let part = if turn.part == Part::F { forward } else { run.part != Part::F };
                run.microbatch == turn.microbatch && part
            };
            let begin = groups[group].iter().position(begins);
            begin.expect("a stage has an instance, so every turn of it has a run")
        };
        Ok(schedule.moves().iter().map(|own| own.placed(first)).collect())
    }

    /// The schedule, and the instances of each of its stages. One stage group is a pipeline of one
    /// stage: 1F1B then runs the forward and backward of each micro-batch before the next.
    pub(crate) fn timetable(
        &self,
        model: &Model,
        stage_groups: usize,
        microbatches: usize,
        steps: usize,
    ) -> Result<(Schedule, Vec<Range<usize>>)> {
        let schedule = self.schedule(model, stage_groups, microbatches, steps)?;
        let schedule = if self.braid { schedule } else { schedule.apart() };
        // The message speaks of stage groups and chunks if that is how stages were counted.
        let (chunks, stages) = (schedule.chunks(), schedule.placement().stages());
        if stages == stage_groups * chunks {
            split::enough_layers(model.instances().len(), stage_groups, chunks)?;
        }
        let stages = self.stages(model, stages)?;
        Ok((schedule, stages))
    }

    /// The times of stages, and the ratio of what is kept until W and until B. If nothing was measured, FLOPs count,
    /// and each of F, B and W takes as long.
    fn stage_costs(&self, model: &Model, stages: usize) -> Result<(TurnCosts, f64)> {
        let instances = model.instances();
        let by_flops = || {
            let flops = |segment: usize| model.segments()[segment].flops() as f64;
            instances.iter().map(|i| InstanceCosts::even(flops(i.segment))).collect()
        };
        let costs = self.costs.clone().unwrap_or_else(by_flops);
        let sum = |range: Range<usize>, part: fn(&InstanceCosts) -> f64| -> f64 {
            costs[range].iter().map(part).sum()
        };
        let times = |range: &Range<usize>| Times {
            f: sum(range.clone(), |c| c.times.f),
            b: sum(range.clone(), |c| c.times.b),
            w: sum(range.clone(), |c| c.times.w),
        };
        let times = self.stages(model, stages)?.iter().map(times).collect();
        let all = 0..costs.len();
        let until_b = sum(all.clone(), |c| c.until_b);
        let until_w = if until_b > 0.0 { sum(all, |c| c.until_w) / until_b } else { 1.0 };
        Ok((TurnCosts::uneven(times, 0.0)?, until_w))
    }

    /// For each stage: its instances.
    pub(crate) fn stages(&self, model: &Model, stages: usize) -> Result<Vec<Range<usize>>> {
        let instances = model.instances();
        match &self.split {
            StageSplit::Count => {
                Ok(split::by_count(layers(model, stages), instances.len(), stages)?)
            }
            // Measured costs arrive as `StageSplit::Costs`; if nothing was measured, FLOPs are used.
            StageSplit::Flops | StageSplit::Measured => {
                let flops = |segment: usize| model.segments()[segment].flops() as f64;
                let costs: Vec<f64> = instances.iter().map(|i| flops(i.segment)).collect();
                Ok(split::by_cost(&costs, stages)?)
            }
            StageSplit::Instances(counts) => Ok(split::given(counts, instances.len(), stages)?),
            StageSplit::Costs(costs) if costs.len() == instances.len() => {
                Ok(split::by_cost(costs, stages)?)
            }
            StageSplit::Costs(costs) => Err(Error::refused(
                Problem::new(format!(
                    "got {} costs for the {} instances of the model",
                    costs.len(),
                    instances.len()
                ))
                .fix("give one for each, embedding and head included"),
            )),
        }
    }
}

/// Numbers for each stage, such as `2-1-1`.
fn listed(counts: &[usize]) -> String {
    counts.iter().map(usize::to_string).collect::<Vec<_>>().join("-")
}

/// Whether an instance maps boundary values to boundary values. Others read data or return results, which an empty
/// micro-batch has none of.
fn is_layer(model: &Model, instance: usize) -> bool {
    let program = model.program(instance);
    let mut outputs = program.outputs().iter();
    program.inputs_with(Role::Data).next().is_none()
        && outputs.all(|port| port.role == Role::Boundary)
}

/// The instances that are divided among stages: the layers, from the first to the last instance of
/// a repeated segment; or all instances, if there are more stages than layers.
fn layers(model: &Model, stages: usize) -> Range<usize> {
    let instances = model.instances();
    let repeated = |i: &usize| {
        instances.iter().filter(|other| other.segment == instances[*i].segment).count() > 1
    };
    let all = 0..instances.len();
    match (all.clone().find(repeated), all.clone().rfind(repeated)) {
        (Some(first), Some(last)) if last + 1 - first >= stages => first..last + 1,
        _ => all,
    }
}
