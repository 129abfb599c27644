//! The profile of a model for planners of pipelines: what each of its instances costs on this machine.
//!
//! What planners place are not ranks but groups of tensor- and context-parallel ranks, which share the work of a layer. So a layer has
//! the time, the weights and the kept bytes of a rank of such a group, which works while the others do, and of its output each rank sends
//! its part.

use phalanx_config::{
    Config, Count, Loaded, PipelineSchedule, PipelineSplit, PlanKind, StageCounts,
};
use phalanx_config::{SyncKind, ZeroStage};
use phalanx_error::Result;
use phalanx_ir::{Model, Port, Role};
use phalanx_pipeline::NamedSchedule;
use phalanx_pipeline::plan::LayerProfile;
use phalanx_script::Part;

use crate::network::Network;
use crate::{InstanceCosts, Lowered, Models, Parallel, Settings, measure};

/// A model as planners see it.
#[derive(Clone, Debug)]
pub struct ModelProfile {
    /// What each instance is called, embedding and head included.
    pub names: Vec<String>,
    /// What each costs for one micro-batch.
    pub layers: Vec<LayerProfile>,
    /// Sequences or samples of a micro-batch.
    pub samples: usize,
    /// Bytes that an update keeps for each byte of weights: gradients, masters, states.
    pub state: f64,
}

/// Measures the configured model on the ranks of one group on this machine.
pub fn profile(loaded: &Loaded) -> Result<ModelProfile> {
    of_costs(loaded, measure::costs_of_job)
}

/// Predicts the times of the configured model's layers, the same on every machine.
pub(crate) fn predicted(loaded: &Loaded) -> Result<ModelProfile> {
    of_costs(loaded, |models, settings, group| measure::predicted(&models.train, settings, group))
}

/// The ranks that share the work of a layer, alone.
fn group(config: &Config) -> Result<Parallel> {
    let mut own = config.clone();
    let parallel = &mut own.parallel;
    for count in [
        &mut parallel.dp,
        &mut parallel.pp,
        &mut parallel.ep,
        &mut parallel.dp_shard,
        &mut parallel.chunks,
    ] {
        *count = Count::MIN;
    }
    parallel.holders = StageCounts::default();
    parallel.schedule = PipelineSchedule::Named(NamedSchedule::OneFOneB);
    parallel.split = PipelineSplit::Flops;
    parallel.plan = PlanKind::None;
    (parallel.zero, parallel.fsdp, parallel.sync) = (ZeroStage::Zero, false, SyncKind::Ddp);
    Parallel::new(&own)
}

fn of_costs(
    loaded: &Loaded,
    costs: impl Fn(&Models, &Settings, &Parallel) -> Result<Vec<InstanceCosts>>,
) -> Result<ModelProfile> {
    let config = &loaded.config;
    let models = Network::new(loaded)?.models(config, false)?;
    let (model, settings) = (&models.train, Settings::new(config)?);
    let group = group(config)?;
    let costs = costs(&models, &settings, &group)?;
    let precision = settings.precision;
    let ranks = group.ranks() as f64;
    let alone =
        Settings { parallel: group, microbatches: 1, memory_limit: None, ..settings.clone() };
    let lowered = Lowered::new(&models, alone)?;
    let layer = |(index, cost): (usize, &InstanceCosts)| LayerProfile {
        forward: cost.times.f,
        backward: cost.times.b + cost.times.w,
        output: output(model, index) / ranks,
        weights: weights(&lowered, model.instances()[index].segment),
        kept: cost.until_b,
    };
    let [state, weights] = [precision.state, precision.weights].map(|dtype| dtype.size() as f64);
    let shapes = model.params().iter().map(|param| &param.shape[..]);
    let states: usize = settings.optimizer.kept(shapes).map(|(_, count)| count).sum();
    let masters = if precision.has_masters() { precision.masters().size() } else { 0 };
    let kept = states as f64 / model.elements() as f64 * state + masters as f64;
    Ok(ModelProfile {
        names: model.instances().iter().map(|instance| instance.name.clone()).collect(),
        layers: costs.iter().enumerate().map(layer).collect(),
        samples: config.train.batch_size.get() / config.microbatches(),
        state: (kept + precision.grads.size() as f64) / weights,
    })
}

/// Bytes of a segment's weights on a rank.
fn weights(lowered: &Lowered, segment: usize) -> f64 {
    let program = lowered.compiled().program(segment, Part::FBW);
    let bytes = |port: &Port| program.ty(port.value).local_bytes(program.mesh()) as f64;
    program.inputs_with(Role::Param).map(bytes).sum()
}

/// Bytes that an instance gives to the next.
fn output(model: &Model, index: usize) -> f64 {
    let program = &model.segments()[model.instances()[index].segment];
    let bytes = |port: &Port| {
        let ty = program.ty(port.value);
        (ty.elements() * ty.dtype.size()) as f64
    };
    program.outputs_with(Role::Boundary).map(bytes).sum()
}
