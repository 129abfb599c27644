//! BPipe: the bound on both sides, the number of moves, and the time of 1F1B.

use phalanx_pipeline::{NamedSchedule, Schedule, ScheduleShape, Times, TurnCosts, simulate};

fn built(named: NamedSchedule, p: usize, m: usize) -> Schedule {
    named.build(ScheduleShape::new(p, m)).unwrap()
}

fn times() -> Times {
    Times { f: 1.0, b: 1.0, w: 1.0 }
}

/// Out and in, with m = 4p.
#[test]
fn moves_are_those_of_the_rule() {
    for (p, moves) in [(2, 0), (3, 0), (4, 14), (6, 34), (8, 68), (12, 152), (16, 276)] {
        assert_eq!(2 * built(NamedSchedule::BPipe, p, 4 * p).moves().len(), moves, "{p}");
    }
}

/// No stage group keeps more than ⌈(p + 2) / 2⌉, guests included; the first one keeps just as many, if 1F1B
/// would keep more.
#[test]
fn no_stage_group_keeps_more_than_its_bound() {
    for p in 1..=17 {
        for m in 1..=4 * p {
            let schedule = built(NamedSchedule::BPipe, p, m);
            let bound = (p + 2).div_ceil(2);
            let costs = TurnCosts::even(times(), 0.0).unwrap();
            let found = simulate(&schedule, &costs).unwrap();
            let plain = simulate(&built(NamedSchedule::OneFOneB, p, m), &costs).unwrap();
            assert!(found.peak_in_flight.iter().all(|kept| *kept <= bound), "{p}, {m}: {found:?}");
            assert_eq!(found.peak_in_flight[0], plain.peak_in_flight[0].min(bound), "{p}, {m}");
            // Moves that take no time do not change when anything runs.
            assert_eq!(found.stage_groups, plain.stage_groups, "{p}, {m}");
            for own in schedule.moves() {
                let (of, from) = (own.microbatch, schedule.turns(own.from));
                assert!(from[..own.sent].iter().any(|turn| turn.microbatch == of), "{own:?}");
                assert!(own.sent <= own.left && own.left < own.returned, "{own:?}");
                assert!(own.taken <= own.given && own.given < own.freed, "{own:?}");
                assert!(from[own.returned..].iter().any(|turn| turn.microbatch == of), "{own:?}");
            }
        }
    }
}

/// Moves that take as long as messages of the model: how much longer a step is than that of 1F1B with the same messages.
#[test]
fn moves_run_beside_the_work() {
    for (p, hop, expected) in [(8, 0.25, 1.011), (8, 0.5, 1.020), (8, 1.0, 1.032)] {
        let costs = TurnCosts::even(times(), hop).unwrap();
        let span = |named| simulate(&built(named, p, 4 * p), &costs).unwrap().makespan;
        let ratio = span(NamedSchedule::BPipe) / span(NamedSchedule::OneFOneB);
        assert!((ratio - expected).abs() < 5e-4, "{p}, {hop}: {ratio}");
    }
}
