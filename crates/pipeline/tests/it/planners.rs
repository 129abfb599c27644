//! Planners against exhaustive search.

use std::ops::Range;

use phalanx_pipeline::plan::{
    DappleStage, LayerProfile, PlannedStage, TwoBwDemand, dapple, dapple_latency, pipedream,
    pipedream_levels, two_bw,
};
use phalanx_pipeline::{NamedSchedule, ScheduleShape, TurnCosts, simulate};

use crate::support::{same, times};

/// Numbers that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        0.1 + (self.0 >> 33) as f64 / (1_u64 << 31) as f64
    }

    fn layers(&mut self, count: usize) -> Vec<LayerProfile> {
        let mut layer = || LayerProfile {
            forward: self.next(),
            backward: 2.0 * self.next(),
            output: self.next(),
            weights: 4.0 * self.next(),
            kept: self.next(),
        };
        (0..count).map(|_| layer()).collect()
    }
}

/// All ways to cut layers into stages on up to so many devices.
fn all(layers: Range<usize>, devices: usize) -> Vec<Vec<PlannedStage>> {
    let mut found = Vec::new();
    for own in 1..=devices {
        found.push(vec![PlannedStage { layers: layers.clone(), devices: own }]);
        for cut in layers.start + 1..layers.end {
            for rest in all(cut..layers.end, devices - own) {
                let first = PlannedStage { layers: layers.start..cut, devices: own };
                found.push([first].into_iter().chain(rest).collect());
            }
        }
    }
    found
}

/// The slowest stage of a plan, by PipeDream's rule.
fn slowest(layers: &[LayerProfile], plan: &[PlannedStage], bandwidth: f64) -> f64 {
    let stage = |stage: &PlannedStage| {
        let own = &layers[stage.layers.clone()];
        let work: f64 = own.iter().map(LayerProfile::seconds).sum();
        let weights: f64 = own.iter().map(|layer| layer.weights).sum();
        let k = stage.devices as f64;
        let sum = 2.0 * (k - 1.0) / k * weights / bandwidth;
        let message = match stage.layers.start {
            0 => 0.0,
            first => 2.0 * layers[first - 1].output / bandwidth,
        };
        (work.max(sum) / k).max(message)
    };
    plan.iter().map(stage).fold(0.0, f64::max)
}

#[test]
fn pipedream_finds_the_best_of_all_cuts() {
    let mut numbers = Numbers(3);
    for case in 0..120 {
        let (count, devices) = (1 + case % 5, 1 + case % 4);
        let (layers, bandwidth) = (numbers.layers(count), 4.0 * numbers.next());
        let plans = all(0..count, devices);
        let best = plans.iter().map(|plan| slowest(&layers, plan, bandwidth));
        let best = best.fold(f64::INFINITY, f64::min);
        let found = pipedream(&layers, devices, bandwidth).unwrap();
        same(found.seconds, best, &format!("case {case}"));
        same(slowest(&layers, &found.stages, bandwidth), best, &format!("case {case}, stages"));
        assert!(found.devices() <= devices);
        let ends = found.stages.iter().map(|stage| stage.layers.end);
        assert_eq!(ends.max(), Some(count));
    }
}

/// One level of one machine beside it changes nothing, and with links that take no time levels are devices.
#[test]
fn levels_of_machines_are_plans_of_plans() {
    let mut numbers = Numbers(5);
    for _ in 0..20 {
        let layers = numbers.layers(5);
        let flat = pipedream(&layers, 4, 2.0).unwrap();
        for levels in [[(4, 2.0), (1, 0.1)], [(1, 0.1), (4, 2.0)]] {
            same(pipedream_levels(&layers, &levels).unwrap().seconds, flat.seconds, "one machine");
        }
        let two = pipedream_levels(&layers, &[(2, 8.0), (2, 1.0)]).unwrap();
        let fast = pipedream(&layers, 4, 8.0).unwrap();
        assert!(two.seconds + 1e-12 >= fast.seconds, "slow links between machines cost time");
        assert!(two.devices() <= 4);
    }
}

fn stage(forward: f64, backward: f64) -> DappleStage {
    DappleStage { forward, backward, sum: 0.0 }
}

/// Equal stages take (m + p − 1)(F + B), and the estimate is below the simulation where nothing is summed.
#[test]
fn dapples_estimate_is_exact_for_equal_stages_and_else_a_lower_bound() {
    for (p, m) in [(2, 4), (4, 8), (8, 8)] {
        let found = dapple_latency(&vec![stage(1.0, 2.0); p], m);
        same(found, (m + p - 1) as f64 * 3.0, "equal stages");
    }
    let mut numbers = Numbers(7);
    for _ in 0..100 {
        let stages: Vec<DappleStage> =
            (0..4).map(|_| stage(numbers.next(), numbers.next())).collect();
        let low = dapple_latency(&stages, 6);
        let schedule = NamedSchedule::OneFOneB.build(ScheduleShape::new(4, 6)).unwrap();
        let costs = stages.iter().map(|s| times(s.forward, s.backward, 0.0)).collect();
        let played = simulate(&schedule, &TurnCosts::uneven(costs, 0.0).unwrap()).unwrap();
        assert!(low <= played.makespan + 1e-9, "{low}, {}", played.makespan);
    }
}

/// Every plan of a small case, simulated: the planner's is nearly the best of them.
#[test]
fn dapple_is_near_the_best_of_all_plans() {
    let mut numbers = Numbers(11);
    let (mut regrets, m) = (Vec::new(), 6);
    for _ in 0..30 {
        let layers = numbers.layers(4);
        let found = dapple(&layers, m, &[3], [3.0, 1.0]).unwrap();
        assert_eq!(found.devices(), 3);
        let step = |plan: &[PlannedStage]| {
            let mut stages = Vec::new();
            let mut sums = Vec::new();
            for (number, stage) in plan.iter().enumerate() {
                let r = stage.devices as f64;
                let sum = |part: fn(&LayerProfile) -> f64| -> f64 {
                    layers[stage.layers.clone()].iter().map(part).sum()
                };
                if number > 0 {
                    let pairs = stage.devices.min(plan[number - 1].devices) as f64;
                    let message = layers[stage.layers.start - 1].output / pairs / 3.0;
                    stages.push(times(message, message, 0.0));
                    sums.push(0.0);
                }
                stages.push(times(sum(|l| l.forward) / r, sum(|l| l.backward) / r, 0.0));
                sums.push(2.0 * (r - 1.0) / r * sum(|l| l.weights) / 3.0);
            }
            let schedule =
                NamedSchedule::OneFOneB.build(ScheduleShape::new(stages.len(), m)).unwrap();
            let played = simulate(&schedule, &TurnCosts::uneven(stages, 0.0).unwrap()).unwrap();
            let ends = played.stage_groups.iter().zip(sums);
            ends.map(|(turns, sum)| turns.last().unwrap().end + sum).fold(0.0, f64::max)
        };
        let plans = all(0..4, 3).into_iter();
        let plans = plans.filter(|plan| plan.iter().map(|stage| stage.devices).sum::<usize>() == 3);
        let best = plans.map(|plan| step(&plan)).fold(f64::INFINITY, f64::min);
        same(step(&found.stages), found.seconds, "what is promised is what is simulated");
        regrets.push(found.seconds / best - 1.0);
    }
    let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
    assert!(mean < 0.01 && regrets.iter().all(|regret| *regret < 0.1), "{regrets:?}");
}

fn demand(memory: f64) -> TwoBwDemand {
    let layer = LayerProfile { forward: 1.0, backward: 2.0, output: 1.0, weights: 8.0, kept: 4.0 };
    TwoBwDemand {
        layers: vec![layer; 8],
        devices: 8,
        bandwidth: 1e3,
        memory,
        state: 2.0,
        batch: 64,
    }
}

/// With memory to spare all devices hold the whole model; with less of it pipelines become deeper, then stages keep only inputs.
#[test]
fn two_buffered_pipelines_are_as_deep_as_memory_asks() {
    let best = |memory: f64| two_bw(&demand(memory)).unwrap()[0];
    let plenty = best(1e9);
    assert_eq!((plenty.width, plenty.depth, plenty.recompute), (8, 1, false));
    let mut deep = 1;
    for memory in [1e9, 300.0, 170.0, 90.0, 60.0, 53.0] {
        let found = two_bw(&demand(memory)).unwrap();
        for pair in found.windows(2) {
            assert!(pair[0].rate >= pair[1].rate);
        }
        assert!(found[0].depth >= deep, "{memory}: {:?}", found[0]);
        deep = found[0].depth;
        assert!(found.iter().all(|choice| choice.width * choice.depth <= 8));
        // Each pipeline has a micro-batch for each of its stages.
        assert!(found.iter().all(|c| 64 / (c.width * c.microbatch) >= c.depth));
    }
    assert!(deep > 1);
    let text = two_bw(&demand(10.0)).unwrap_err().to_string();
    assert!(text.contains("no width and depth fit 10 bytes on 8 devices"), "{text}");
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let layers = Numbers(1).layers(2);
    let broken = LayerProfile { forward: f64::NAN, ..layers[0] };
    for (text, words) in [
        (pipedream(&[], 2, 1.0).unwrap_err().to_string(), "0 layers"),
        (pipedream(&layers, 0, 1.0).unwrap_err().to_string(), "0 devices"),
        (pipedream(&layers, 2, 0.0).unwrap_err().to_string(), "0 bytes per second"),
        (dapple(&[broken], 4, &[2], [1.0, 1.0]).unwrap_err().to_string(), "layer 0 has a cost"),
    ] {
        assert!(text.contains(words), "{text}");
    }
}
