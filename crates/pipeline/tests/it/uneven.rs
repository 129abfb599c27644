//! Stages that take different times, against a naive fixed point and DAPPLE's estimate.

use std::collections::HashMap;

use phalanx_pipeline::{
    At, HeldStage, NamedSchedule, Part, Schedule, ScheduleShape, Times, Turn, TurnCosts, simulate,
};

use crate::support::{all, same, times};

/// Numbers between 1 and 10 that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1.0 + (self.0 >> 33) as f64 * 9.0 / (1_u64 << 31) as f64
    }

    fn stages(&mut self, count: usize) -> Vec<Times> {
        (0..count).map(|_| times(self.next(), self.next(), self.next())).collect()
    }
}

/// Ends of all turns, by raising them until nothing changes: (part letter, stage, micro-batch) → end.
fn fixed_point(
    schedule: &Schedule,
    stages: &[Times],
    hop: f64,
) -> HashMap<(char, usize, usize), f64> {
    let mut ends: HashMap<(char, usize, usize), f64> = HashMap::new();
    loop {
        let before = ends.clone();
        for stage_group in 0..schedule.stage_groups() {
            let mut free = 0.0_f64;
            for turn in schedule.turns(stage_group) {
                let HeldStage { stage, replica } =
                    schedule.placement().held(stage_group, turn.chunk).unwrap();
                let get =
                    |part, stage| ends.get(&(part, stage, turn.microbatch)).copied().unwrap_or(0.0);
                let lag = |other: usize| {
                    let needed = HeldStage { stage: other, replica };
                    let holds = |c| schedule.placement().held(stage_group, c) == Some(needed);
                    if (0..schedule.placement().chunks(stage_group)).any(holds) { 0.0 } else { hop }
                };
                // Empty micro-batches go through some stages only.
                let goes = |stage: usize| {
                    let here = |(at, other): (At, Turn)| {
                        other.microbatch == turn.microbatch && schedule.stage(at) == stage
                    };
                    !schedule.is_empty(turn) || schedule.all().any(here)
                };
                let t = stages[stage];
                let (ready, long, letters) = match turn.part {
                    Part::F if stage == 0 || !goes(stage - 1) => (0.0, t.f, "F"),
                    Part::F => (get('F', stage - 1) + lag(stage - 1), t.f, "F"),
                    Part::W => (get('B', stage), t.w, "W"),
                    part => {
                        let next = match stage + 1 == stages.len() || !goes(stage + 1) {
                            true => 0.0,
                            false => get('B', stage + 1) + lag(stage + 1),
                        };
                        let whole = part == Part::BW;
                        let long = if whole { t.b + t.w } else { t.b };
                        (next.max(get('F', stage)), long, if whole { "BW" } else { "B" })
                    }
                };
                free = free.max(ready) + long;
                for letter in letters.chars() {
                    ends.insert((letter, stage, turn.microbatch), free);
                }
            }
        }
        if ends == before {
            return ends;
        }
    }
}

#[test]
fn the_simulator_finds_the_fixed_point() {
    let mut numbers = Numbers(1);
    for (p, m) in [(1, 3), (2, 4), (3, 6), (4, 4), (5, 10), (4, 12)] {
        // Pairs are blocks, which have a closed form of their own, and moves wait for more than values.
        let plain = |schedule: &Schedule| !schedule.has_pairs() && schedule.moves().is_empty();
        for (named, schedule) in all(p, m).filter(|(_, schedule)| plain(schedule)) {
            let stages = numbers.stages(schedule.placement().stages());
            let hop = numbers.next() / 4.0;
            let costs = TurnCosts::uneven(stages.clone(), hop).unwrap();
            let found = simulate(&schedule, &costs).unwrap();
            let expected = fixed_point(&schedule, &stages, hop);
            for timed in found.stage_groups.iter().flatten() {
                for letter in timed.turn.part.to_string().chars() {
                    let key = (letter, timed.stage, timed.turn.microbatch);
                    same(timed.end, expected[&key], &format!("{named} {p} {m} {key:?}"));
                }
            }
            same(found.makespan, expected.values().copied().fold(0.0, f64::max), "makespan");
        }
    }
}

/// DAPPLE's estimate of 1F1B: fill up to the pivot stage, run it without a pause, drain. It leaves
/// out the pivot's inner bubbles, so it is never above the truth, and often equal to it.
#[test]
fn dapples_estimate_is_a_lower_bound() {
    let (mut numbers, mut exact) = (Numbers(7), 0);
    for _ in 0..300 {
        let (p, m) = (2 + numbers.next() as usize % 5, 2 + 2 * numbers.next() as usize);
        let stages = numbers.stages(p);
        let costs = TurnCosts::uneven(stages.clone(), 0.0).unwrap();
        let found =
            simulate(&NamedSchedule::OneFOneB.build(ScheduleShape::new(p, m)).unwrap(), &costs)
                .unwrap();
        let (f, b) = (|s: usize| stages[s].f, |s: usize| stages[s].b + stages[s].w);
        let steady = |s: usize| (m - 1) as f64 * (f(s) + b(s));
        let mut pivot = p - 1;
        for s in (0..p - 1).rev() {
            let between: f64 = (s + 1..pivot).map(|a| f(a) + b(a)).sum();
            if steady(s) > steady(pivot) + between {
                pivot = s;
            }
        }
        let fill: f64 = (0..=pivot).map(f).sum();
        let drain: f64 = (0..=pivot).map(b).sum();
        let estimate = fill + steady(pivot) + drain;
        assert!(estimate <= found.makespan + 1e-9, "{p} {m} {stages:?}: {estimate}");
        exact += usize::from((estimate - found.makespan).abs() < 1e-9);
    }
    assert!(exact > 60, "exact in {exact} of 300");
}
