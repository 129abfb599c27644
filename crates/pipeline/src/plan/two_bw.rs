//! PipeDream-2BW's planner (Narayanan et al., 2021): equal pipelines, by a sweep over width and depth.
//!
//! `width` pipelines of `depth` stages run side by side. For each pair that fits on the devices, with and without recomputation, the
//! largest micro-batch that fits in memory is taken; the fastest samples per second win. A stage takes its share of the work, 4/3 of it with
//! recomputation, and its messages; gradients are summed once for all micro-batches of a batch. Two versions of the weights are kept.

use super::{LayerProfile, Sums, legal, ring_sum};
use crate::error::{PipelineError, Result};

/// What is planned for. Profiles of layers are those of one sample.
#[derive(Clone, PartialEq, Debug)]
pub struct TwoBwDemand {
    /// The layers, for one sample.
    pub layers: Vec<LayerProfile>,
    /// Devices.
    pub devices: usize,
    /// Bytes per second between two of them.
    pub bandwidth: f64,
    /// Bytes of memory of one of them.
    pub memory: f64,
    /// Bytes of optimizer state for a byte of weights.
    pub state: f64,
    /// Samples of a batch.
    pub batch: usize,
}

/// What was found for a width and a depth.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TwoBwChoice {
    /// Pipelines side by side.
    pub width: usize,
    /// Stages of each.
    pub depth: usize,
    /// Samples of a micro-batch.
    pub microbatch: usize,
    /// Whether a stage keeps only its input.
    pub recompute: bool,
    /// Seconds between two micro-batches.
    pub seconds: f64,
    /// Samples per second of all pipelines.
    pub rate: f64,
}

/// All choices that fit, the fastest first.
pub fn two_bw(demand: &TwoBwDemand) -> Result<Vec<TwoBwChoice>> {
    let TwoBwDemand { layers, devices, bandwidth, batch, memory, .. } = demand;
    legal(layers, *devices, &[*bandwidth])?;
    let mut found = Vec::new();
    for width in 1..=*devices {
        for depth in (1..=devices / width).filter(|depth| *depth <= layers.len()) {
            // A batch is a whole number of micro-batches on each pipeline, and at least one for each stage.
            let most = batch / (width * depth);
            let whole = |b: &usize| batch.is_multiple_of(width * b);
            for recompute in [false, true] {
                let fits = |b: &usize| demand.bytes(depth, *b, recompute) <= *memory;
                let largest = (1..=most).rev().filter(whole).find(fits);
                found.extend(largest.map(|b| demand.choice(width, depth, b, recompute)));
            }
        }
    }
    found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
    if found.is_empty() {
        return Err(PipelineError::Costs {
            what: format!("no width and depth fit {memory} bytes on {devices} devices"),
            help: format!(
                "one sample over {} stages with recomputation takes {:.0} bytes: usual fix: more devices or memory",
                layers.len().min(*devices),
                demand.bytes(layers.len().min(*devices), 1, true)
            ),
        });
    }
    Ok(found)
}

impl TwoBwDemand {
    /// Bytes of the fullest device: two versions of its weights, its gradient and optimizer state, and what `depth` micro-batches keep.
    fn bytes(&self, depth: usize, microbatch: usize, recompute: bool) -> f64 {
        let (deep, b) = (depth as f64, microbatch as f64);
        let sum = |part: fn(&LayerProfile) -> f64| {
            Sums::of(&self.layers, part).over(&(0..self.layers.len()))
        };
        let weights = sum(|l| l.weights) / deep;
        let kept = b * sum(|l| l.kept) / deep;
        let input = b * self.widest();
        let kept = if recompute { kept + deep * input } else { deep * kept };
        (3.0 + self.state) * weights + kept
    }

    fn choice(
        &self,
        width: usize,
        depth: usize,
        microbatch: usize,
        recompute: bool,
    ) -> TwoBwChoice {
        let (deep, b) = (depth as f64, microbatch as f64);
        let sum = |part: fn(&LayerProfile) -> f64| {
            Sums::of(&self.layers, part).over(&(0..self.layers.len()))
        };
        let work = b * sum(LayerProfile::seconds) / deep * if recompute { 4.0 / 3.0 } else { 1.0 };
        let message = if depth > 1 { 2.0 * b * self.widest() / self.bandwidth } else { 0.0 };
        let rounds = self.batch / (width * microbatch);
        let sums = ring_sum(sum(|l| l.weights) / deep, width, self.bandwidth) / rounds as f64;
        let seconds = (work + message).max(sums);
        let rate = width as f64 * b / seconds;
        TwoBwChoice { width, depth, microbatch, recompute, seconds, rate }
    }

    /// Bytes of the largest output for one sample.
    fn widest(&self) -> f64 {
        self.layers.iter().map(|layer| layer.output).fold(0.0, f64::max)
    }
}
