//! Short ways to schedules and their timelines.

use phalanx_pipeline::{
    NamedSchedule, Schedule, ScheduleShape, Timeline, Times, TurnCosts, simulate,
};

/// The times of a grid: equal ones, those of a real model, and a cheap W.
pub(crate) const TIMES: [Times; 4] =
    [times(1.0, 1.0, 1.0), times(10.0, 10.0, 7.0), times(3.0, 4.0, 2.0), times(4.0, 3.0, 0.0)];

pub(crate) const fn times(f: f64, b: f64, w: f64) -> Times {
    Times { f, b, w }
}

pub(crate) fn total(times: Times) -> f64 {
    times.f + times.b + times.w
}

pub(crate) fn build(named: NamedSchedule, p: usize, m: usize) -> Schedule {
    named.build(ScheduleShape::new(p, m)).unwrap()
}

pub(crate) fn run(schedule: &Schedule, times: Times, hop: f64) -> Timeline {
    simulate(schedule, &TurnCosts::even(times, hop).unwrap()).unwrap()
}

/// All schedules of this shape. Two directions need an even number of both, and interleaved whole rounds.
pub(crate) fn all(p: usize, m: usize) -> impl Iterator<Item = (NamedSchedule, Schedule)> {
    NamedSchedule::ALL.into_iter().filter_map(move |named| {
        let built = named.build(ScheduleShape::new(p, m));
        let may_fail = match named {
            _ if named.goes_both_ways() => !p.is_multiple_of(2) || !m.is_multiple_of(2),
            NamedSchedule::Interleaved => !m.is_multiple_of(p),
            NamedSchedule::PipeDream2bw => m < p,
            _ => false,
        };
        assert!(built.is_ok() || may_fail, "{named} {p} {m}");
        Some((named, built.ok()?))
    })
}

/// Asserts equality up to the rounding of sums.
pub(crate) fn same(found: f64, expected: f64, what: &str) {
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs().max(1.0),
        "{what}: {found} is not {expected}"
    );
}

/// Devices, micro-batches up to 64, denser where pipelines are not yet full.
pub(crate) fn grid() -> impl Iterator<Item = (usize, usize)> {
    (1..=16).flat_map(|p| {
        (1..=64)
            .filter(move |m| *m <= 2 * p + 1 || m % 8 == 0 || m % p == 0 || *m == 63)
            .map(move |m| (p, m))
    })
}
