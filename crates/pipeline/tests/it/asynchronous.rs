//! Pipelines without a flush: PipeDream and PipeDream-2BW against their papers' numbers.

use phalanx_pipeline::{NamedSchedule, Part, Schedule, ScheduleShape};

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
