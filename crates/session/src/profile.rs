//! The profile of a model for planners of pipelines: what each of its instances costs on this machine.

use phalanx_config::Loaded;
use phalanx_error::Result;
use phalanx_ir::{Model, Role};
use phalanx_pipeline::plan::LayerProfile;

use crate::network::Network;
use crate::{InstanceCosts, Models, Settings, measure};

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

/// Measures the configured model on one rank of this machine.
pub fn profile(loaded: &Loaded) -> Result<ModelProfile> {
    of_costs(loaded, measure::costs_of_job)
}

/// Predicts the times of the configured model's layers, the same on every machine.
pub(crate) fn predicted(loaded: &Loaded) -> Result<ModelProfile> {
    of_costs(loaded, |models, settings| measure::predicted(&models.train, settings))
}

fn of_costs(
    loaded: &Loaded,
    costs: impl Fn(&Models, &Settings) -> Result<Vec<InstanceCosts>>,
) -> Result<ModelProfile> {
    let config = &loaded.config;
    let models = Network::new(loaded)?.models(config, false)?;
    let (model, settings) = (&models.train, Settings::new(config)?);
    let costs = costs(&models, &settings)?;
    let precision = settings.precision;
    let layer = |(index, cost): (usize, &InstanceCosts)| {
        let instance = &model.instances()[index];
        let elements: usize = instance.params.values().map(|p| model.params()[*p].elements()).sum();
        LayerProfile {
            forward: cost.times.f,
            backward: cost.times.b + cost.times.w,
            output: output(model, index),
            weights: (elements * precision.weights.size()) as f64,
            kept: cost.until_b,
        }
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

/// Bytes that an instance gives to the next.
fn output(model: &Model, index: usize) -> f64 {
    let program = &model.segments()[model.instances()[index].segment];
    let bytes = |port: &phalanx_ir::Port| {
        let ty = program.ty(port.value);
        (ty.elements() * ty.dtype.size()) as f64
    };
    program.outputs_with(Role::Boundary).map(bytes).sum()
}
