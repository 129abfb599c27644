//! DAPPLE's planner (Fan et al., 2021): stages for a synchronous step of 1F1B.
//!
//! A stage on r devices splits every micro-batch among them. Messages between stages count as stages of their own. The latency of a
//! step is estimated around a pivot, the stage that hardly waits: forwards up to it, its turns for all other micro-batches, and the
//! backwards after it with the sums of gradients. The search goes over cuts, numbers of devices and three ways to place a stage on
//! machines; the best five by estimate are simulated, because the estimate leaves out waits.

use std::collections::BTreeMap;

use super::{LayerProfile, PipelinePlan, PlannedStage, Sums, legal, ring_sum};
use crate::costs::{Times, TurnCosts};
use crate::error::{PipelineError, Result};
use crate::named::{NamedSchedule, ScheduleShape};
use crate::simulate::simulate;

/// How many plans are simulated.
const FINALISTS: usize = 5;

/// The plan with the shortest step of `m` micro-batches on machines with so many devices each. Devices of one machine are linked by
/// the first bandwidth, others by the second.
pub fn dapple(
    layers: &[LayerProfile],
    m: usize,
    machines: &[usize],
    bandwidths: [f64; 2],
) -> Result<PipelinePlan> {
    let mut ranked = search(layers, m, machines, bandwidths, FINALISTS)?;
    Ok(ranked.swap_remove(0))
}

/// The same with the next best plans behind it: the others of the best five, then more in the order of their estimates.
pub fn dapple_ranked(
    layers: &[LayerProfile],
    m: usize,
    machines: &[usize],
    bandwidths: [f64; 2],
) -> Result<Vec<PipelinePlan>> {
    search(layers, m, machines, bandwidths, RANKED)
}

/// How many plans are ranked for those who cannot run the first.
const RANKED: usize = 32;

fn search(
    layers: &[LayerProfile],
    m: usize,
    machines: &[usize],
    bandwidths: [f64; 2],
    most: usize,
) -> Result<Vec<PipelinePlan>> {
    let devices = machines.iter().sum();
    legal(layers, devices, &bandwidths)?;
    let costs = |part: fn(&LayerProfile) -> f64| Sums::of(layers, part);
    let [forward, backward] = [costs(|l| l.forward), costs(|l| l.backward)];
    let weights = costs(|l| l.weights);
    let mut search =
        Search { layers, m, bandwidths, forward, backward, weights, found: Vec::new() };
    search.place(&[], 0, machines, &mut BTreeMap::new());
    search.found.sort_by(|a, b| a.0.total_cmp(&b.0));
    search.found.truncate(most);
    let plan = |(_, stages): &(f64, Vec<PlacedStage>)| {
        let seconds = search.simulated(stages)?;
        let stages = stages.iter().map(|placed| placed.stage.clone()).collect();
        Ok(PipelinePlan { stages, seconds })
    };
    let mut ranked: Vec<PipelinePlan> = search.found.iter().map(plan).collect::<Result<_>>()?;
    let finalists = ranked.len().min(FINALISTS);
    ranked[..finalists].sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    if ranked.is_empty() {
        return Err(PipelineError::Costs {
            what: format!("a step of {m} micro-batches takes too long for a number"),
            help: "usual fix: a larger unit of time".to_owned(),
        });
    }
    Ok(ranked)
}

/// A stage of a step, or a message between two.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DappleStage {
    /// Seconds of a micro-batch forward.
    pub forward: f64,
    /// Seconds of a micro-batch backward.
    pub backward: f64,
    /// Seconds to sum the gradients at the end.
    pub sum: f64,
}

impl DappleStage {
    fn both(&self) -> f64 {
        self.forward + self.backward
    }
}

/// DAPPLE's estimate of a step, in which messages are stages of their own.
pub fn dapple_latency(stages: &[DappleStage], m: usize) -> f64 {
    let Some(last) = stages.len().checked_sub(1) else { return 0.0 };
    let rounds = m.saturating_sub(1) as f64;
    let mut pivot = last;
    for s in (0..last).rev() {
        let between: f64 = stages[s + 1..pivot.max(s + 1)].iter().map(DappleStage::both).sum();
        if rounds * stages[s].both() > rounds * stages[pivot].both() + between {
            pivot = s;
        }
    }
    let first: f64 = stages[..=pivot].iter().map(|stage| stage.forward).sum();
    // When the last backward of a stage ends, seen from the start of the pivot's.
    let back = |stages: &[DappleStage]| stages.iter().map(|stage| stage.backward).sum::<f64>();
    let end = |s: usize| match s <= pivot {
        true => back(&stages[s..=pivot]),
        false => -back(&stages[pivot + 1..s]),
    };
    let ending = stages.iter().enumerate().map(|(s, stage)| end(s) + stage.sum).fold(0.0, f64::max);
    first + rounds * stages[pivot].both() + ending
}

/// A stage on machines: how many devices of each.
#[derive(Clone)]
struct PlacedStage {
    stage: PlannedStage,
    machines: Vec<usize>,
}

struct Search<'a> {
    layers: &'a [LayerProfile],
    m: usize,
    bandwidths: [f64; 2],
    forward: Sums,
    backward: Sums,
    weights: Sums,
    /// Whole plans with their estimates.
    found: Vec<(f64, Vec<PlacedStage>)>,
}

impl Search<'_> {
    /// Tries every next stage after those before it. Where layers and free devices are the same, only the best beginning goes on.
    fn place(
        &mut self,
        before: &[PlacedStage],
        done: usize,
        free: &[usize],
        seen: &mut BTreeMap<(usize, Vec<usize>), f64>,
    ) {
        let left: usize = free.iter().sum();
        let rest = PlannedStage { layers: done..self.layers.len(), devices: left };
        let whole = PlacedStage { stage: rest, machines: free.to_vec() };
        let plan: Vec<PlacedStage> = before.iter().cloned().chain([whole]).collect();
        let estimate = self.estimate(&plan);
        let known = seen.entry((done, free.to_vec())).or_insert(f64::INFINITY);
        if estimate >= *known {
            return;
        }
        *known = estimate;
        self.found.push((estimate, plan));
        for end in done + 1..self.layers.len() {
            for devices in 1..left {
                for machines in placements(free, devices) {
                    let rest: Vec<usize> = free.iter().zip(&machines).map(|(a, b)| a - b).collect();
                    let stage = PlannedStage { layers: done..end, devices };
                    let next = before.iter().cloned().chain([PlacedStage { stage, machines }]);
                    self.place(&next.collect::<Vec<_>>(), end, &rest, seen);
                }
            }
        }
    }

    fn estimate(&self, plan: &[PlacedStage]) -> f64 {
        dapple_latency(&self.turned(plan), self.m)
    }

    /// The stages, with the messages between them as stages.
    fn turned(&self, plan: &[PlacedStage]) -> Vec<DappleStage> {
        let mut stages = Vec::new();
        for (number, PlacedStage { stage, machines }) in plan.iter().enumerate() {
            if let Some(before) = number.checked_sub(1).map(|before| &plan[before]) {
                let output = self.layers[stage.layers.start - 1].output;
                let pairs = stage.devices.min(before.stage.devices) as f64;
                let message = output / pairs / self.link(&before.machines, machines);
                stages.push(DappleStage { forward: message, backward: message, sum: 0.0 });
            }
            let split = |sums: &Sums| sums.over(&stage.layers) / stage.devices as f64;
            let weights = self.weights.over(&stage.layers);
            stages.push(DappleStage {
                forward: split(&self.forward),
                backward: split(&self.backward),
                sum: ring_sum(weights, stage.devices, self.link(machines, machines)),
            });
        }
        stages
    }

    /// The bandwidth between devices of two stages: that between machines, unless one machine has all of them.
    fn link(&self, one: &[usize], other: &[usize]) -> f64 {
        let used = one.iter().zip(other).filter(|(a, b)| **a + **b > 0).count();
        self.bandwidths[usize::from(used > 1)]
    }

    /// A step by the simulator: the turns, and sums of gradients after the last backward of a stage.
    fn simulated(&self, plan: &[PlacedStage]) -> Result<f64> {
        let stages = self.turned(plan);
        let times = stages.iter().map(|s| Times { f: s.forward, b: s.backward, w: 0.0 }).collect();
        let schedule = NamedSchedule::OneFOneB.build(ScheduleShape::new(stages.len(), self.m))?;
        let timeline = simulate(&schedule, &TurnCosts::uneven(times, 0.0)?)?;
        let ends = timeline.stage_groups.iter().zip(&stages);
        let ends = ends.filter_map(|(turns, stage)| Some(turns.last()?.end + stage.sum));
        Ok(ends.fold(0.0, f64::max))
    }
}

/// Three ways to take devices from machines: new ones first, those in use first, and some of each.
fn placements(free: &[usize], devices: usize) -> Vec<Vec<usize>> {
    let most = free.iter().copied().max().unwrap_or(0);
    let by = |order: &dyn Fn(usize) -> (usize, usize)| {
        let mut machines: Vec<usize> = (0..free.len()).collect();
        machines.sort_by_key(|machine| order(*machine));
        let (mut left, mut taken) = (devices, vec![0; free.len()]);
        for machine in machines {
            taken[machine] = left.min(free[machine]);
            left -= taken[machine];
        }
        taken
    };
    // A machine of which everything is free is new.
    let fresh = by(&|machine| (usize::MAX - free[machine], machine));
    let append =
        by(&|machine| (if free[machine] < most { free[machine] } else { usize::MAX }, machine));
    let mut scatter = vec![0; free.len()];
    let mut left = devices;
    while left > 0 {
        for machine in 0..free.len() {
            if left > 0 && scatter[machine] < free[machine] {
                scatter[machine] += 1;
                left -= 1;
            }
        }
    }
    let mut all = vec![fresh, append, scatter];
    all.sort();
    all.dedup();
    all
}
