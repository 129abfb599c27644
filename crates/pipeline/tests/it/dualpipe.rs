//! DualPipe against its closed forms.

use phalanx_pipeline::{NamedSchedule, Part};

use crate::support::{TIMES, build, run, same, total};

/// If tF ≤ tB a step waits (p/2 − 1)(F&B + B − 3W), where B is a whole backward and F&B takes as long as both, and every group keeps
/// p + 1 micro-batches, however many there are.
#[test]
fn bubble_and_memory_are_those_of_the_paper() {
    for p in (2..=16).step_by(2) {
        for m in [2 * p, 2 * p + 2, 3 * p, 8 * p] {
            for times in TIMES.into_iter().filter(|times| times.f <= times.b) {
                let (schedule, what) =
                    (build(NamedSchedule::DualPipe, p, m), format!("p {p} m {m}"));
                let found = run(&schedule, times, 0.0);
                let (whole, half) = (times.b + times.w, (p / 2 - 1) as f64);
                let waits = half * (times.f + whole + whole - 3.0 * times.w);
                same(found.makespan - m as f64 * total(times), waits, &what);
                assert_eq!(found.peak_in_flight, vec![p + 1; p], "{what}");
            }
        }
    }
}

/// At each end of a group's list there are weight gradients by themselves; the turns between are pairs.
#[test]
fn only_the_ends_are_split() {
    for (p, m) in [(2, 4), (4, 8), (8, 20)] {
        let schedule = build(NamedSchedule::DualPipe, p, m);
        for group in 0..p {
            let turns = schedule.turns(group);
            let outside = group.min(p - 1 - group);
            let split = turns.iter().filter(|turn| turn.part == Part::W).count();
            assert_eq!(split, p - 1 - outside, "p {p}, group {group}");
        }
    }
}

/// The list of few micro-batches is that of enough of them, without the last ones.
#[test]
fn few_micro_batches_are_the_first_of_many() {
    let many = build(NamedSchedule::DualPipe, 4, 8);
    for m in [2, 4, 6] {
        let few = build(NamedSchedule::DualPipe, 4, m);
        for group in 0..4 {
            let first = many.turns(group).iter().copied().filter(|turn| turn.microbatch < m);
            assert_eq!(few.turns(group), first.collect::<Vec<_>>());
        }
    }
}

/// Without pairs no turn waits for what only the other one needs. With tF = tB a step then waits (p/2 − 1)(tF + tB − tW).
#[test]
fn turns_that_are_not_in_pairs_wait_less() {
    for p in (2..=16).step_by(2) {
        for times in TIMES.into_iter().filter(|times| times.f == times.b) {
            let m = 3 * p;
            let found = run(&build(NamedSchedule::DualPipe, p, m).apart(), times, 0.0);
            let waits = (p / 2 - 1) as f64 * (times.f + times.b - times.w);
            same(found.makespan - m as f64 * total(times), waits, &format!("p {p}"));
        }
    }
}
