//! Single numbers that other simulators and papers give.

use phalanx_pipeline::{NamedSchedule, ScheduleShape};

use crate::support::{build, run, same, times};

/// Makespans and peaks with whole backwards: schedule, p, m, v, (makespan at tB = 1, at tB = 2), peaks.
#[test]
fn whole_backwards() {
    type Row = (NamedSchedule, usize, usize, usize, [f64; 2], Option<Vec<usize>>);
    let rows: [Row; 11] = [
        (NamedSchedule::GPipe, 4, 8, 1, [22.0, 33.0], Some(vec![8; 4])),
        (NamedSchedule::OneFOneB, 4, 8, 1, [22.0, 33.0], Some(vec![4, 3, 2, 1])),
        (NamedSchedule::OneFOneB, 8, 24, 1, [62.0, 93.0], Some((1..=8).rev().collect())),
        (NamedSchedule::Interleaved, 4, 8, 2, [38.0, 57.0], Some(vec![11, 9, 7, 5])),
        (NamedSchedule::Interleaved, 4, 12, 3, [78.0, 117.0], Some(vec![15, 13, 11, 9])),
        (
            NamedSchedule::Interleaved,
            8,
            16,
            4,
            [142.0, 213.0],
            Some((25..=39).rev().step_by(2).collect()),
        ),
        (NamedSchedule::Interleaved, 4, 4, 2, [22.0, 33.0], Some(vec![8, 8, 7, 5])),
        (NamedSchedule::BreadthFirst, 4, 8, 2, [38.0, 57.0], Some(vec![16; 4])),
        (NamedSchedule::BreadthFirst, 4, 6, 2, [30.0, 45.0], None),
        (NamedSchedule::BreadthFirst, 4, 7, 3, [48.0, 72.0], None),
        (NamedSchedule::BreadthFirst, 8, 16, 4, [142.0, 213.0], None),
    ];
    for (named, p, m, v, makespans, peaks) in rows {
        let schedule = named.build(ScheduleShape::new(p, m).chunks(v)).unwrap();
        for (long, backward) in makespans.into_iter().zip([1.0, 2.0]) {
            // The vectors give the times of a chunk; the share of a device is v of them.
            let found = run(&schedule, times(v as f64, v as f64 * backward, 0.0), 0.0);
            same(found.makespan, long, &format!("{named} {p} {m} {v}"));
            if let Some(peaks) = &peaks {
                assert_eq!(&found.peak_in_flight, peaks, "{named} {p} {m} {v}");
            }
        }
    }
    let hop = run(&build(NamedSchedule::OneFOneB, 8, 24), times(10.0, 20.0, 0.0), 0.5);
    same(hop.makespan, 957.0, "1f1b with a hop");
}

#[test]
fn split_backwards() {
    let equal = times(1.0, 1.0, 1.0);
    let found = run(&build(NamedSchedule::ZbH1, 4, 8), equal, 0.0);
    assert_eq!((found.span, found.peak_until_w), (27.0, vec![4; 4]));
    let found = run(&build(NamedSchedule::ZbH2, 4, 8), equal, 0.0);
    assert_eq!((found.span, found.makespan), (24.0, 27.0));
    assert_eq!(found.peak_until_w, [7; 4]);
    let real = times(10.0, 10.0, 7.0);
    same(run(&build(NamedSchedule::ZbH1, 8, 24), real, 0.0).span, 24.0 * 27.0 + 91.0, "zb-h1");
    same(run(&build(NamedSchedule::ZbH2, 8, 24), real, 0.0).span, 24.0 * 27.0 + 42.0, "zb-h2");
    let few = times(3.0, 4.0, 2.0);
    for named in [NamedSchedule::ZbH1, NamedSchedule::ZbH2] {
        same(run(&build(named, 8, 4), few, 0.0).span, 79.0, "few micro-batches");
    }
    same(run(&build(NamedSchedule::OneFOneB, 8, 4), few, 0.0).span, 99.0, "few micro-batches");
    // Outside of tW ≤ min(tF, tB) the closed forms do not hold; these are the true bubbles.
    let heavy = times(2.0, 2.0, 3.0);
    same(
        run(&build(NamedSchedule::ZbH1, 4, 8), heavy, 0.0).span - 56.0,
        6.0,
        "zb-h1 with a heavy W",
    );
    same(
        run(&build(NamedSchedule::ZbH2, 4, 8), heavy, 0.0).span - 56.0,
        0.0,
        "zb-h2 with a heavy W",
    );
}

/// In the V, chunks of the times given: each device's own wait, from its first start to its last end.
#[test]
fn the_v_device_by_device() {
    for (p, m, t, chunk, waits, keeps) in [
        (4, 8, times(2.0, 2.0, 2.0), 3.0, vec![0.0; 4], 8),
        (8, 24, times(20.0, 20.0, 14.0), 27.0, (0..8).rev().map(|k| 6.0 * k as f64).collect(), 16),
    ] {
        let found = run(&build(NamedSchedule::ZbV, p, m), t, 0.0);
        let spans = found.stage_groups.iter().map(|d| d[d.len() - 1].end - d[0].start);
        let waited: Vec<f64> = spans.map(|span| span - 2.0 * m as f64 * chunk).collect();
        for (found, expected) in waited.iter().zip(&waits) {
            same(*found, *expected, &format!("zb-v {p} {m}: {waited:?}"));
        }
        assert_eq!(found.peak_until_w, vec![keeps; p]);
    }
}
