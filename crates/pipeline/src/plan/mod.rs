//! Planners: how many stages, which layers each has, and on how many devices each is replicated.
//!
//! A planner is given the profile of a model, one entry per layer, and devices with links; it answers with a [`PipelinePlan`].
//! [`pipedream`] minimises the time of the slowest stage by a dynamic program, [`dapple`] the latency of a synchronous step, and
//! [`two_bw`] sweeps over widths and depths of equal pipelines within a memory.

mod dapple;
mod pipedream;
mod two_bw;

use std::fmt;
use std::ops::Range;

pub use dapple::{DappleStage, dapple, dapple_latency, dapple_ranked};
pub use pipedream::{pipedream, pipedream_levels, pipedream_ranked};
pub use two_bw::{TwoBwChoice, TwoBwDemand, two_bw};

use crate::error::{PipelineError, Result};
use crate::words::typed;

/// The planners, by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlannerName {
    /// [`pipedream_levels`].
    PipeDream,
    /// [`dapple`].
    Dapple,
    /// [`two_bw`].
    TwoBw,
}

impl PlannerName {
    /// Every planner.
    pub const ALL: [PlannerName; 3] =
        [PlannerName::PipeDream, PlannerName::Dapple, PlannerName::TwoBw];

    /// The word on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            PlannerName::PipeDream => "pipedream",
            PlannerName::Dapple => "dapple",
            PlannerName::TwoBw => "2bw",
        }
    }
}

impl fmt::Display for PlannerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a layer costs for one micro-batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerProfile {
    /// Seconds of its forward.
    pub forward: f64,
    /// Seconds of its whole backward.
    pub backward: f64,
    /// Bytes of its output, which the next layer reads.
    pub output: f64,
    /// Bytes of its weights.
    pub weights: f64,
    /// Bytes that it keeps from its forward to its backward.
    pub kept: f64,
}

impl LayerProfile {
    /// Forward and backward.
    pub fn seconds(&self) -> f64 {
        self.forward + self.backward
    }
}

/// A stage of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedStage {
    /// Its layers.
    pub layers: Range<usize>,
    /// How many devices hold it.
    pub devices: usize,
}

/// Stages, one after the other, and how long the planner expects a micro-batch or a step to take.
#[derive(Clone, PartialEq, Debug)]
pub struct PipelinePlan {
    /// The stages.
    pub stages: Vec<PlannedStage>,
    /// Seconds: of PipeDream and 2BW between two micro-batches, of DAPPLE for a step.
    pub seconds: f64,
}

impl PipelinePlan {
    /// How many devices it uses.
    pub fn devices(&self) -> usize {
        self.stages.iter().map(|stage| stage.devices).sum()
    }

    /// Devices of each stage, such as `2-1-1`.
    pub fn shape(&self) -> String {
        let devices: Vec<String> = self.stages.iter().map(|s| s.devices.to_string()).collect();
        devices.join("-")
    }
}

/// Sums over layers from the first on: the sum of a range is a difference.
struct Sums(Vec<f64>);

impl Sums {
    fn of(layers: &[LayerProfile], part: impl Fn(&LayerProfile) -> f64) -> Self {
        let mut sums = vec![0.0];
        for layer in layers {
            sums.push(sums[sums.len() - 1] + part(layer));
        }
        Self(sums)
    }

    fn over(&self, layers: &Range<usize>) -> f64 {
        self.0[layers.end] - self.0[layers.start]
    }
}

/// Refuses what cannot be planned.
fn legal(layers: &[LayerProfile], devices: usize, bandwidths: &[f64]) -> Result<()> {
    let refuse =
        |what: String, help: &str| Err(PipelineError::Costs { what, help: help.to_owned() });
    if layers.is_empty() || devices == 0 {
        let what = format!("{} layers cannot be planned on {devices} devices", layers.len());
        return refuse(what, "nearest that work: 1 layer on 1 device");
    }
    let plain = |number: f64| number >= 0.0 && number.is_finite();
    let numbers = |l: &LayerProfile| [l.forward, l.backward, l.output, l.weights, l.kept];
    if let Some(layer) = layers.iter().position(|layer| !numbers(layer).into_iter().all(plain)) {
        let what =
            format!("layer {layer} has a cost that is not a number from 0 on: {:?}", layers[layer]);
        return refuse(what, "give seconds and bytes, 0 or above");
    }
    match bandwidths.iter().find(|b| b.is_nan() || **b <= 0.0) {
        Some(bandwidth) => {
            let what = format!("a link of {} bytes per second", typed(*bandwidth));
            refuse(what, "a link needs a rate above 0; inf for one that takes no time")
        }
        None => Ok(()),
    }
}

/// Seconds in which `devices` sum gradients of so many bytes by a ring.
fn ring_sum(bytes: f64, devices: usize, bandwidth: f64) -> f64 {
    2.0 * (devices - 1) as f64 / devices as f64 * bytes / bandwidth
}
