//! PipeDream's partitioning (Narayanan et al., 2019): the dynamic program over layers and devices.
//!
//! A stage on k devices takes whole micro-batches in turn, so per micro-batch it needs 1/k of its time, or of the time to sum its
//! gradients if that is longer. A(j, k), the time of the slowest stage when the first j layers are on k devices, is the best of one stage,
//! and of every cut: A(i, k − k'), the last stage on k' devices, and the message between them, both ways. More devices can be
//! worse, because gradients take longer to sum: the best number up to the given one is taken.

use std::ops::Range;

use super::{LayerProfile, PipelinePlan, PlannedStage, Sums, legal, ring_sum};
use crate::error::Result;

/// The plan with the fastest slowest stage on up to `devices` devices, all linked by so many bytes per second.
pub fn pipedream(layers: &[LayerProfile], devices: usize, bandwidth: f64) -> Result<PipelinePlan> {
    pipedream_levels(layers, &[(devices, bandwidth)])
}

/// The same for devices in levels: each has so many of the level before it, the first of single devices, and a bandwidth between
/// them. Inside a level a plan of the level below is one device.
pub fn pipedream_levels(layers: &[LayerProfile], levels: &[(usize, f64)]) -> Result<PipelinePlan> {
    let most = levels.iter().map(|(count, _)| *count).min().unwrap_or(0);
    let bandwidths: Vec<f64> = levels.iter().map(|(_, bandwidth)| *bandwidth).collect();
    legal(layers, most, &bandwidths)?;
    let seconds = Sums::of(layers, LayerProfile::seconds);
    let alone = |range: &Range<usize>| Choice {
        seconds: seconds.over(range),
        stages: vec![PlannedStage { layers: range.clone(), devices: 1 }],
    };
    let count = layers.len();
    let mut below: Vec<Vec<Choice>> =
        (0..count).map(|from| (from + 1..=count).map(|to| alone(&(from..to))).collect()).collect();
    for &(devices, bandwidth) in levels {
        let level = Level { layers, bandwidth, below: &below };
        below = (0..count).map(|from| level.from(from, devices)).collect();
    }
    let best = below[0].pop().expect("there is a layer, and a way to run it on one device");
    Ok(PipelinePlan { stages: best.stages, seconds: best.seconds })
}

/// A way to run a range of layers.
#[derive(Clone)]
struct Choice {
    seconds: f64,
    stages: Vec<PlannedStage>,
}

struct Level<'a> {
    layers: &'a [LayerProfile],
    bandwidth: f64,
    /// For each first layer, and for each layer from it on: the best of the level below that ends with it.
    below: &'a [Vec<Choice>],
}

impl Level<'_> {
    /// For each end of a range that begins at `from`: the best on up to `devices` devices.
    fn from(&self, from: usize, devices: usize) -> Vec<Choice> {
        let ends = self.layers.len() - from;
        // By number of devices, then by end.
        let mut best: Vec<Vec<Choice>> = Vec::new();
        for k in 1..=devices {
            let row = (0..ends).map(|end| self.best(from, end, k, &best)).collect();
            best.push(row);
        }
        let fastest = |end: usize| {
            let all = best.iter().map(|row| &row[end]);
            all.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).cloned()
        };
        (0..ends).filter_map(fastest).collect()
    }

    /// The best of the layers from `from` to `from + end`, on exactly k devices, given the best on fewer.
    fn best(&self, from: usize, end: usize, k: usize, fewer: &[Vec<Choice>]) -> Choice {
        let last = from + end + 1;
        let mut best = self.stage(&(from..last), k);
        for (cut, layer) in self.layers[from..last - 1].iter().enumerate() {
            let message = 2.0 * layer.output / self.bandwidth;
            // The stages before the cut are on fewer devices; the last stage has the others.
            for (number, before) in fewer.iter().map(|row| &row[cut]).enumerate() {
                let own = k - (number + 1);
                let after = self.stage(&(from + cut + 1..last), own);
                let seconds = before.seconds.max(message).max(after.seconds);
                if seconds < best.seconds {
                    let stages = before.stages.iter().chain(&after.stages).cloned().collect();
                    best = Choice { seconds, stages };
                }
            }
        }
        best
    }

    /// One stage on k devices, or on k plans of the level below.
    fn stage(&self, range: &Range<usize>, k: usize) -> Choice {
        let below = &self.below[range.start][range.len() - 1];
        let weights: f64 = self.layers[range.clone()].iter().map(|layer| layer.weights).sum();
        let sums = ring_sum(weights, k, self.bandwidth);
        let seconds = below.seconds.max(sums) / k as f64;
        let stages = below
            .stages
            .iter()
            .map(|stage| PlannedStage { devices: stage.devices * k, ..stage.clone() });
        Choice { seconds, stages: stages.collect() }
    }
}
