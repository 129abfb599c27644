//! How the stages of a pipeline take turns, and which layers each has.

use std::ops::Range;
use std::sync::Arc;

use phalanx_ir::{Mesh, Model};
use phalanx_pipeline::{Named, Schedule, Shape, Warmup, split};
use phalanx_script::Turn;

use crate::custom::read_schedule;
use phalanx_config::{PipelineSchedule, PipelineSplit};
use phalanx_error::{Error, Problem, Result};

/// The order of a pipeline's work.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The schedule.
    pub order: Order,
    /// Chunks of layers that a device holds; by default as many as the schedule usually has.
    pub chunks: Option<usize>,
    /// How many forwards 1F1B starts with.
    pub warmup: Warmup,
    /// Which layers a stage gets.
    pub split: Split,
    /// Whether a stage keeps its input alone and runs its forward again before the backward.
    pub rematerialise: bool,
    /// The meshes of the devices, one after the other over the ranks, where they differ. Empty: each has
    /// the mesh without its axis `pp`.
    pub meshes: Vec<Mesh>,
}

/// A schedule by name, or one of its user's.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Order {
    Named(Named),
    Own(Arc<Schedule>),
}

impl From<Named> for Order {
    fn from(named: Named) -> Self {
        Order::Named(named)
    }
}

impl From<Schedule> for Order {
    fn from(schedule: Schedule) -> Self {
        Order::Own(Arc::new(schedule))
    }
}

/// Which layers a stage gets.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum Split {
    /// The heaviest stage is as light as it can be, by FLOPs; embedding and head count.
    #[default]
    Flops,
    /// Equally many layers each.
    Count,
    /// The heaviest stage is as light as it can be, by what segments take on this machine.
    Measured,
    /// The heaviest stage is as light as it can be, by these costs: one for each instance of the
    /// model, measured for example.
    Costs(Vec<f64>),
}

impl Default for Pipeline {
    fn default() -> Self {
        Self {
            order: Order::Named(Named::OneFOneB),
            chunks: None,
            warmup: Warmup::Pa,
            split: Split::default(),
            rematerialise: false,
            meshes: Vec::new(),
        }
    }
}

impl Pipeline {
    /// The pipeline that a configuration asks for.
    pub fn new(config: &phalanx_config::Parallel) -> Result<Self> {
        let order = match &config.schedule {
            PipelineSchedule::Named(named) => Order::Named(*named),
            PipelineSchedule::Csv(file) => Order::Own(Arc::new(read_schedule(file)?)),
        };
        let warmup = config.warmup.into();
        let chunks = match order {
            Order::Named(_) => Some(config.chunks.get()),
            Order::Own(_) => None,
        };
        let split = match config.split {
            PipelineSplit::Flops => Split::Flops,
            PipelineSplit::Count => Split::Count,
            PipelineSplit::Measured => Split::Measured,
        };
        Ok(Self { order, chunks, warmup, split, ..Self::default() })
    }

    /// What the schedule is called.
    pub fn name(&self) -> &str {
        match &self.order {
            Order::Named(named) => named.name(),
            Order::Own(schedule) => schedule.name(),
        }
    }

    /// Whether one stage goes through it as it would without a schedule: there and back with each
    /// micro-batch.
    pub(crate) fn is_usual(&self) -> bool {
        matches!(self.order, Order::Named(Named::OneFOneB))
    }

    /// The schedule over so many devices.
    pub(crate) fn schedule(&self, devices: usize, microbatches: usize) -> Result<Schedule> {
        match &self.order {
            Order::Named(named) => {
                let shape =
                    Shape { devices, microbatches, chunks: self.chunks, warmup: self.warmup };
                Ok(named.build(shape)?)
            }
            Order::Own(schedule) => {
                let chunks = self.chunks.unwrap_or(schedule.chunks());
                for (what, key, found, asked) in [
                    ("devices", "parallel.pp", schedule.devices(), devices),
                    ("micro-batches", "train.microbatches", schedule.microbatches(), microbatches),
                    ("chunks", "parallel.chunks", schedule.chunks(), chunks),
                ] {
                    if found != asked {
                        let name = schedule.name();
                        return Err(Error::refused(
                            Problem::new(format!("{name} has {found} {what}; {key} = {asked}"))
                                .because("a table is run as it is, and fits one size")
                                .nearest(format!("{key} = {found}")),
                        ));
                    }
                }
                let several = schedule.all().find(|(at, turn)| {
                    let held = schedule.placement().held(at.device, turn.chunk);
                    turn.version > 0 || held.is_some_and(|held| held.replica > 0)
                });
                if let Some((at, turn)) = several {
                    return Err(Error::refused(
                        Problem::new(format!(
                            "{}: turn {turn} of device {} has a weight version or a replica of its own",
                            schedule.name(),
                            at.device
                        ))
                        .because("pipelines without a flush and in two directions are not built yet")
                        .nearest("one replica, and version 0 everywhere"),
                    ));
                }
                Ok(Schedule::clone(schedule))
            }
        }
    }

    /// By device: the turns of the model's instances.
    pub(crate) fn turns(
        &self,
        model: &Model,
        devices: usize,
        microbatches: usize,
    ) -> Result<Vec<Vec<Turn>>> {
        let (schedule, stages) = self.timetable(model, devices, microbatches)?;
        Ok(match self.rematerialise {
            true => schedule.rematerialised(&stages),
            false => schedule.instances(&stages),
        })
    }

    /// The schedule, and the instances of each of its stages. One device is a pipeline of one stage:
    /// 1F1B then takes each micro-batch there and back before the next.
    pub(crate) fn timetable(
        &self,
        model: &Model,
        devices: usize,
        microbatches: usize,
    ) -> Result<(Schedule, Vec<Range<usize>>)> {
        let schedule = self.schedule(devices, microbatches)?;
        // Said in devices and chunks where that is what the stages come from.
        let (chunks, stages) = (schedule.chunks(), schedule.placement().stages());
        if stages == devices * chunks {
            split::enough_layers(model.instances().len(), devices, chunks)?;
        }
        let stages = self.stages(model, stages)?;
        Ok((schedule, stages))
    }

    /// By stage: its instances.
    pub(crate) fn stages(&self, model: &Model, stages: usize) -> Result<Vec<Range<usize>>> {
        let instances = model.instances();
        match &self.split {
            Split::Count => Ok(split::by_count(layers(model, stages), instances.len(), stages)?),
            // Who measures gives costs; without a machine at hand there are only FLOPs.
            Split::Flops | Split::Measured => {
                let flops = |segment: usize| model.segments()[segment].flops() as f64;
                let costs: Vec<f64> = instances.iter().map(|i| flops(i.segment)).collect();
                Ok(split::by_cost(&costs, stages)?)
            }
            Split::Costs(costs) if costs.len() == instances.len() => {
                Ok(split::by_cost(costs, stages)?)
            }
            Split::Costs(costs) => Err(Error::refused(
                Problem::new(format!(
                    "{} costs for the {} instances of the model",
                    costs.len(),
                    instances.len()
                ))
                .fix("give one for each, embedding and head included"),
            )),
        }
    }
}

/// The instances that are dealt to stages: from the first to the last of those whose segment is
/// repeated, the layers; all, if these are too few for the stages.
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
