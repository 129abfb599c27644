//! Pipelines without a flush: PipeDream and PipeDream-2BW against their papers' numbers.

use phalanx_pipeline::{NamedSchedule, Part, Schedule, ScheduleShape, Times, TurnCosts, simulate};

use crate::support::{TIMES, grid, run, same, times, total};

fn pipedream(p: usize, m: usize, vertical: bool) -> Schedule {
    let shape = ScheduleShape::new(p, m).vertical_sync(vertical);
    NamedSchedule::PipeDream.build(shape).unwrap()
}

fn two_bw(p: usize, m: usize, batches: usize) -> Schedule {
    NamedSchedule::PipeDream2bw.build(ScheduleShape::new(p, m).steps(batches)).unwrap()
}

/// Stage i keeps a version for each of the p − i micro-batches that it has in flight.
#[test]
fn stashing_keeps_as_many_versions_as_micro_batches_in_flight() {
    // As many micro-batches as it takes until the oldest version is not the first.
    for (p, m) in grid().filter(|(p, m)| *m >= 2 * *p) {
        let found = run(&pipedream(p, m, false), times(1.0, 1.0, 1.0), 0.0);
        let kept: Vec<usize> = (0..p).map(|i| p - i).collect();
        assert_eq!(found.weight_versions, kept, "p {p} m {m}");
        assert_eq!(found.peak_in_flight, kept, "p {p} m {m}");
    }
}

/// With vertical sync every stage keeps p: a stage late in the pipeline has made many that it may not read yet.
#[test]
fn vertical_sync_keeps_a_version_for_each_stage_on_every_stage() {
    for (p, m) in grid().filter(|(p, m)| *m >= 2 * *p) {
        let found = run(&pipedream(p, m, true), times(1.0, 1.0, 1.0), 0.0);
        assert_eq!(found.weight_versions, vec![p; p], "p {p} m {m}");
    }
}

/// The sheet's rule: micro-batch k, counted from 1, reads version max(⌊(k − 1)/m⌋ − 1, 0), on every stage.
#[test]
fn two_versions_are_enough_for_batches() {
    for (p, m) in grid().filter(|(p, m)| *m >= *p && *p <= 8 && *m <= 24) {
        let schedule = two_bw(p, m, 4);
        for (_, turn) in schedule.all() {
            assert_eq!(turn.version, (turn.microbatch / m).saturating_sub(1), "{turn}");
        }
        let found = run(&schedule, times(1.0, 1.0, 1.0), 0.0);
        assert_eq!(found.weight_versions, vec![2; p], "p {p} m {m}");
        assert_eq!(found.peak_in_flight, (0..p).map(|i| p - i).collect::<Vec<_>>());
    }
}

/// A version is read only after the update that makes it, which comes after the last backward of its round on the
/// same stage.
#[test]
fn no_version_is_read_before_it_exists() {
    let schedules = grid()
        .filter(|(p, m)| *m >= *p && *p <= 6)
        .flat_map(|(p, m)| [pipedream(p, m, false), pipedream(p, m, true), two_bw(p, m, 3)]);
    for schedule in schedules {
        let updates = schedule.updates().unwrap();
        for stage in 0..schedule.stage_groups() {
            let mut backwards = 0;
            for turn in schedule.turns(stage) {
                assert!(turn.version <= backwards / updates.round, "{schedule}");
                backwards += usize::from(turn.part == Part::BW);
            }
        }
    }
}

/// The pipeline fills once: many steps take as long as one long step of 1F1B, and the share of waiting goes to zero.
#[test]
fn the_pipeline_fills_once() {
    for (p, m, steps) in [(2, 4, 8), (4, 8, 8), (3, 5, 6), (8, 8, 4), (1, 3, 2)] {
        for t in TIMES {
            let found = run(&two_bw(p, m, steps), t, 0.0);
            same(found.makespan, (m * steps + p - 1) as f64 * total(t), "makespan");
            same(found.ideal, (m * steps) as f64 * total(t), "work");
        }
    }
    // Two stages, blocks of eight steps of eight micro-batches: 64 of 65 are work.
    let found = run(&two_bw(2, 8, 8), times(1.0, 1.0, 1.0), 0.0);
    assert!(found.ideal / found.makespan > 0.98, "{}", found.ideal / found.makespan);
}

/// Sum of busy time ÷ (p × span) over blocks of eight steps is 8m ÷ (8m + p − 1): the pipeline drains between blocks. From
/// m = 5 on for 2 stages, and from m = 13 on for 4, that is 0.97 or more.
#[test]
fn blocks_of_eight_steps_are_busy() {
    for (p, m) in [(2, 4), (2, 5), (2, 8), (4, 8), (4, 12), (4, 13), (4, 16), (8, 32)] {
        for schedule in [two_bw(p, m, 8), {
            let shape = ScheduleShape::new(p, m).steps(8);
            NamedSchedule::PipeDream.build(shape).unwrap()
        }] {
            let found = run(&schedule, times(1.0, 1.0, 1.0), 0.0);
            let all = found.stage_groups.iter().flatten();
            let busy: f64 = all.map(|timed| timed.end - timed.start).sum();
            let share = busy / (p as f64 * found.span);
            same(share, (8 * m) as f64 / (8 * m + p - 1) as f64, "share");
            let enough = m >= [5, 13, 29][p.ilog2() as usize - 1];
            assert_eq!(share >= 0.97, enough, "p {p} m {m}: {share}");
        }
    }
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let said = |named: NamedSchedule, shape| named.build(shape).unwrap_err().to_string();
    let few = said(NamedSchedule::PipeDream2bw, ScheduleShape::new(4, 3));
    assert!(
        few.contains("3 micro-batches for 4 stages") && few.contains("4 micro-batches"),
        "{few}"
    );
    let sync = said(NamedSchedule::PipeDream2bw, ScheduleShape::new(2, 4).vertical_sync(true));
    assert!(sync.contains("vertical sync") && sync.contains("pipedream"), "{sync}");
    let drains = said(NamedSchedule::OneFOneB, ScheduleShape::new(2, 4).steps(2));
    assert!(drains.contains("drains after each step"), "{drains}");
}

/// Every holder of stage s keeps as many micro-batches as it starts with, and one version for each update that its readers are
/// late, besides the newest; once full, no group waits if a stage takes as long as it has holders.
#[test]
fn holders_keep_what_they_start_with_and_never_wait() {
    for (holders, kept, versions) in [
        (vec![2, 1], [2, 1], [2, 1]),
        (vec![7, 1], [2, 1], [2, 1]),
        (vec![1, 2], [3, 1], [3, 2]),
        (vec![2, 3], [3, 1], [4, 2]),
    ] {
        let m = 6 * holders.iter().product::<usize>();
        let shape = ScheduleShape::held_by(&holders, m).steps(4);
        let schedule = NamedSchedule::PipeDream.build(shape).unwrap();
        let stage = |count: &usize| {
            let t = *count as f64;
            Times { f: t, b: t, w: t }
        };
        let costs = TurnCosts::uneven(holders.iter().map(stage).collect(), 0.0).unwrap();
        let found = simulate(&schedule, &costs).unwrap();
        for (group, turns) in found.stage_groups.iter().enumerate() {
            let stage = turns[0].stage;
            assert_eq!(found.peak_in_flight[group], kept[stage], "{holders:?}");
            assert_eq!(found.weight_versions[group], versions[stage], "{holders:?}");
            // In the middle of the row: all of the time is work.
            let middle = &turns[turns.len() / 3..turns.len() / 2];
            let busy: f64 = middle.iter().map(|timed| timed.end - timed.start).sum();
            let span = middle[middle.len() - 1].end - middle[0].start;
            same(busy, span, "busy");
            // Forward and backward of a micro-batch are the same holder's.
            let rank = group - holders[..stage].iter().sum::<usize>();
            assert!(turns.iter().all(|timed| timed.turn.microbatch % holders[stage] == rank));
        }
    }
}

/// An update of a stage takes one micro-batch of each holder; a holder reads a version only when the update that makes it is
/// complete on all of them.
#[test]
fn a_version_needs_the_backwards_of_all_holders() {
    let shape = ScheduleShape::held_by(&[2, 1, 1], 8).steps(3);
    let schedule = NamedSchedule::PipeDream.build(shape).unwrap();
    let found = simulate(&schedule, &TurnCosts::even(times(1.0, 2.0, 0.5), 0.25).unwrap()).unwrap();
    let ends = |stage: usize, microbatch: usize| {
        let all = found.stage_groups.iter().flatten();
        let own = all.filter(|t| (t.stage, t.turn.microbatch) == (stage, microbatch));
        own.map(|timed| timed.end).fold(0.0, f64::max)
    };
    let mut waits = 0;
    for timed in found.stage_groups.iter().flatten().filter(|t| t.stage == 0) {
        let needed = 0..2 * timed.turn.version;
        waits += needed.len();
        assert!(needed.clone().all(|microbatch| ends(0, microbatch) <= timed.start));
    }
    assert!(waits > 0);
}

#[test]
fn holders_are_those_of_pipedream_alone() {
    let said = |named: NamedSchedule, shape| named.build(shape).unwrap_err().to_string();
    let other = said(NamedSchedule::OneFOneB, ScheduleShape::held_by(&[2, 1], 4));
    assert!(other.contains("only pipedream deals"), "{other}");
    let count = ScheduleShape { stage_groups: 4, ..ScheduleShape::held_by(&[2, 1], 4) };
    let count = said(NamedSchedule::PipeDream, count);
    assert!(count.contains("the holders 2-1 are not 4 stage groups"), "{count}");
}
