//! PipeDream's partitioning (Narayanan et al., 2019): the dynamic program over layers and devices.
//!
//! A stage on k devices takes whole micro-batches in turn, so per micro-batch it needs 1/k of its time, or of the time to sum its
//! gradients if that is longer. A(j, k), the time of the slowest stage when the first j layers are on k devices, is the best of one stage,
//! and of every cut: A(i, k − k'), the last stage on k' devices, and the message between them, both ways. More devices can be
//! worse, because gradients take longer to sum: the best number up to the given one is taken.
//!
//! A runtime may not take every plan: round robin cannot feed all shapes. So each cell keeps not one plan but the few best.

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
    let mut ranked = pipedream_ranked(layers, levels)?;
    Ok(ranked.swap_remove(0))
}

/// The same with the next best plans behind it, the few best for each number of devices: for those who cannot run the first.
pub fn pipedream_ranked(
    layers: &[LayerProfile],
    levels: &[(usize, f64)],
) -> Result<Vec<PipelinePlan>> {
    let most = levels.iter().map(|(count, _)| *count).min().unwrap_or(0);
    let bandwidths: Vec<f64> = levels.iter().map(|(_, bandwidth)| *bandwidth).collect();
    legal(layers, most, &bandwidths)?;
    let seconds = Sums::of(layers, LayerProfile::seconds);
    let alone = |range: &Range<usize>| {
        let stages = vec![PlannedStage { layers: range.clone(), devices: 1 }];
        vec![Choice { seconds: seconds.over(range), stages }]
    };
    let count = layers.len();
    let mut below: Vec<Vec<Choices>> =
        (0..count).map(|from| (from + 1..=count).map(|to| alone(&(from..to))).collect()).collect();
    for &(devices, bandwidth) in levels {
        let level = Level { layers, bandwidth, below: &below };
        below = (0..count).map(|from| level.from(from, devices)).collect();
    }
    let all = below[0].pop().expect("there is a layer, and a way to run it on one device");
    Ok(all.into_iter().map(|Choice { seconds, stages }| PipelinePlan { stages, seconds }).collect())
}

/// How many plans a cell keeps.
const KEPT: usize = 4;

/// The best ways to run a range of layers, the fastest first.
type Choices = Vec<Choice>;

/// A way to run a range of layers.
#[derive(Clone)]
struct Choice {
    seconds: f64,
    stages: Vec<PlannedStage>,
}

struct Level<'a> {
    layers: &'a [LayerProfile],
    bandwidth: f64,
    /// For each first layer, and for each layer from it on: the best of the level below that end with it.
    below: &'a [Vec<Choices>],
}

impl Level<'_> {
    /// For each end of a range that begins at `from`: the best on up to `devices` devices.
    fn from(&self, from: usize, devices: usize) -> Vec<Choices> {
        let ends = self.layers.len() - from;
        // By number of devices, then by end.
        let mut best: Vec<Vec<Choices>> = Vec::new();
        for k in 1..=devices {
            let row = (0..ends).map(|end| self.best(from, end, k, &best)).collect();
            best.push(row);
        }
        let ranked = |end: usize| {
            let mut all: Choices = best.iter().flat_map(|row| row[end].iter().cloned()).collect();
            all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
            all
        };
        (0..ends).map(ranked).collect()
    }

    /// The best of the layers from `from` to `from + end`, on exactly k devices, given the best on fewer.
    fn best(&self, from: usize, end: usize, k: usize, fewer: &[Vec<Choices>]) -> Choices {
        let last = from + end + 1;
        let mut best = self.stage(&(from..last), k);
        for (cut, layer) in self.layers[from..last - 1].iter().enumerate() {
            let message = 2.0 * layer.output / self.bandwidth;
            // The stages before the cut are on fewer devices; the last stage has the others.
            for (number, before) in fewer.iter().map(|row| &row[cut]).enumerate() {
                let own = k - (number + 1);
                let afters = self.stage(&(from + cut + 1..last), own);
                for (before, after) in
                    before.iter().flat_map(|before| afters.iter().map(move |after| (before, after)))
                {
                    let seconds = before.seconds.max(message).max(after.seconds);
                    keep(&mut best, seconds, || {
                        before.stages.iter().chain(&after.stages).cloned().collect()
                    });
                }
            }
        }
        best
    }

    /// One stage on k devices, or on k plans of the level below.
    fn stage(&self, range: &Range<usize>, k: usize) -> Choices {
        let weights: f64 = self.layers[range.clone()].iter().map(|layer| layer.weights).sum();
        let sums = ring_sum(weights, k, self.bandwidth);
        let below = self.below[range.start][range.len() - 1].iter().take(KEPT);
        let times = |below: &Choice| {
            let stages = below.stages.iter();
            let stages =
                stages.map(|stage| PlannedStage { devices: stage.devices * k, ..stage.clone() });
            Choice { seconds: below.seconds.max(sums) / k as f64, stages: stages.collect() }
        };
        below.map(times).collect()
    }
}

/// Adds a way to those that are kept, if it is faster than one of them or there are few.
fn keep(best: &mut Choices, seconds: f64, stages: impl FnOnce() -> Vec<PlannedStage>) {
    let at = best.partition_point(|known| known.seconds <= seconds);
    if at >= KEPT {
        return;
    }
    let stages = stages();
    if best.iter().all(|known| known.stages != stages) {
        best.insert(at, Choice { seconds, stages });
        best.truncate(KEPT);
    }
}
