//! Makespan, span, bubble and memory of every schedule against their closed forms, over a grid.
//!
//! The forms are those of the papers; where a paper states a condition, so does the test.

use phalanx_pipeline::{NamedSchedule, ScheduleShape, Timeline, Warmup};

use crate::support::{TIMES, build, grid, run, same, times, total};

/// Peaks that are the same for every device, or a rule by device.
fn peaks(p: usize, rule: impl Fn(usize) -> usize) -> Vec<usize> {
    (0..p).map(rule).collect()
}

/// What holds for every timeline, whatever the schedule.
fn sane(timeline: &Timeline, p: usize, m: usize, ideal: f64) {
    same(timeline.ideal, ideal, "ideal");
    let waste = timeline.span - timeline.ideal;
    same(timeline.bubble_ideal, waste / ideal, "bubble_ideal");
    let ratio = timeline.bubble_ideal / (1.0 + timeline.bubble_ideal);
    same(timeline.bubble_total, ratio, "bubble_total");
    assert!(timeline.span <= timeline.makespan + 1e-9);
    assert_eq!(timeline.weight_versions, vec![1; p]);
    assert_eq!(timeline.stage_groups.len(), p, "{m}");
}

#[test]
fn naive_uses_one_device_at_a_time() {
    for (p, m) in grid() {
        let schedule = build(NamedSchedule::Naive, p, m);
        for t in TIMES {
            let found = run(&schedule, t, 0.0);
            same(found.makespan, (m * p) as f64 * total(t), "makespan");
            sane(&found, p, m, m as f64 * total(t));
            assert_eq!(found.peak_in_flight, vec![1; p]);
        }
    }
}

#[test]
fn gpipe_and_one_forward_one_backward_are_equally_long() {
    for (p, m) in grid() {
        for (named, warmup, peak) in [
            (NamedSchedule::GPipe, Warmup::Pa, peaks(p, |_| m)),
            (NamedSchedule::Vectorised, Warmup::Pa, peaks(p, |_| m + p - 1)),
            (NamedSchedule::OneFOneB, Warmup::Pa, peaks(p, |i| m.min(p - i))),
            (NamedSchedule::OneFOneB, Warmup::Pb, peaks(p, |i| m.min(2 * (p - i) - 1))),
        ] {
            let schedule = named.build(ScheduleShape::new(p, m).warmup(warmup)).unwrap();
            for t in TIMES {
                let long = (m + p - 1) as f64 * total(t);
                let found = run(&schedule, t, 0.0);
                same(found.makespan, long, "makespan");
                same(found.span, long, "span");
                same(found.bubble_ideal, (p - 1) as f64 / m as f64, "bubble_ideal");
                same(found.bubble_total, (p - 1) as f64 / (m + p - 1) as f64, "bubble_total");
                sane(&found, p, m, m as f64 * total(t));
                assert_eq!(found.peak_in_flight, peak, "{named} {p} {m}");
                assert_eq!(found.peak_until_w, peak, "{named} {p} {m}");
            }
        }
    }
}

/// Each p micro-batches pay a full round trip when nothing hides it, and the links' own warm-up
/// hides it again.
#[test]
fn a_hop_lengthens_one_forward_one_backward() {
    let (t, hop) = (times(10.0, 12.0, 8.0), 0.5);
    for (p, m) in grid().filter(|(p, m)| m % p == 0 && *p > 1) {
        let found = run(&build(NamedSchedule::OneFOneB, p, m), t, hop);
        let trips = ((p - 1) * (m / p + 1) - 1) as f64;
        same(found.makespan, (m + p - 1) as f64 * total(t) + 2.0 * hop * trips, "makespan");
        let warm =
            NamedSchedule::OneFOneB.build(ScheduleShape::new(p, m).warmup(Warmup::Pb)).unwrap();
        let warm = run(&warm, t, hop);
        let fill = 2.0 * hop * (p - 1) as f64;
        same(warm.makespan, (m + p - 1) as f64 * total(t) + fill, "makespan with pb");
    }
}

#[test]
fn chunks_shorten_the_filling() {
    for (p, m) in grid() {
        for v in 1..=4 {
            let long = |t| (m * v + p - 1) as f64 * total(t) / v as f64;
            let shape = ScheduleShape::new(p, m).chunks(v);
            let breadth = NamedSchedule::BreadthFirst.build(shape.clone()).unwrap();
            for t in TIMES {
                let found = run(&breadth, t, 0.0);
                assert_eq!(found.peak_in_flight, vec![m * v; p]);
                sane(&found, p, m, m as f64 * total(t));
                if m >= p {
                    same(found.makespan, long(t), "makespan");
                    let rate = (p - 1) as f64 / (m * v + p - 1) as f64;
                    same(found.bubble_total, rate, "bubble_total");
                }
            }
            if m >= p || v == 1 {
                let around = NamedSchedule::Vectorised.build(shape.clone()).unwrap();
                let ticks = m * v + p - 1;
                same(around.work(), ticks as f64 / (m * v) as f64, "work");
                for t in TIMES {
                    let found = run(&around, t, 0.0);
                    same(found.makespan, long(t), "makespan");
                    assert_eq!(found.peak_in_flight, vec![ticks; p]);
                    sane(&found, p, m, m as f64 * total(t));
                    // All stage groups are in step, and never wait.
                    let busy = found.stage_groups.iter().map(|turns| {
                        turns.windows(2).all(|two| (two[1].start - two[0].end).abs() < 1e-9)
                            && turns.len() == 2 * ticks
                    });
                    assert!(busy.clone().count() == p && busy.clone().all(|busy| busy));
                }
            }
            if m % p != 0 {
                continue;
            }
            let chunks = |d| match v {
                1 => m.min(p - d),
                _ => (m * v).min(2 * (p - 1 - d) + (v - 1) * p + 1),
            };
            let depth = NamedSchedule::Interleaved.build(shape).unwrap();
            for t in TIMES {
                let found = run(&depth, t, 0.0);
                same(found.makespan, long(t), "makespan");
                same(found.bubble_ideal, (p - 1) as f64 / (m * v) as f64, "bubble_ideal");
                sane(&found, p, m, m as f64 * total(t));
                assert_eq!(found.peak_in_flight, peaks(p, chunks), "{p} {m} {v}");
            }
        }
    }
}

/// Published peaks, and bubbles at equal times; the peaks hold at other times too, for the order is
/// the same.
#[test]
fn blocks_of_a_v_bound_the_memory() {
    for (p, m) in (2..=16).flat_map(|p| [p, p + 1, 2 * p, 3 * p + 2].map(|m| (p, m))) {
        let odd = if p % 2 == 1 { 0.5 } else { 0.0 };
        let thirds = if p % 3 == 0 { 1.0 } else { 0.0 };
        for (named, kept, waits) in [
            (NamedSchedule::VHalf, (p + 2) / 2, 1.5 * p as f64 - 1.5 - odd),
            (NamedSchedule::VMin, (p + 4) / 3, 2.0 * p as f64 - 2.5 + thirds),
        ] {
            let schedule = build(named, p, m);
            let found = run(&schedule, times(1.0, 1.0, 1.0), 0.0);
            sane(&found, p, m, 3.0 * m as f64);
            same(found.makespan - 3.0 * m as f64, waits, &format!("{named} {p} {m}"));
            let most = found.peak_until_w.iter().max().unwrap();
            assert_eq!(most.div_ceil(2), kept, "{named} {p} {m}: {:?}", found.peak_until_w);
        }
    }
}

/// The bubbles of the zero-bubble paper hold for tW ≤ min(tF, tB), full effect from m ≥ 2p − 1.
#[test]
fn weights_fill_the_bubble() {
    for (p, m) in grid() {
        for (named, late, keeps) in
            [(NamedSchedule::ZbH1, 1.0, p), (NamedSchedule::ZbH2, 2.0, 2 * p - 1)]
        {
            let schedule = build(named, p, m);
            for t in TIMES {
                let ideal = m as f64 * total(t);
                let found = run(&schedule, t, 0.0);
                sane(&found, p, m, ideal);
                if m <= p {
                    let span = (m + p - 1) as f64 * (t.f + t.b) + t.w;
                    same(found.span, span, &format!("{named} {p} {m} span"));
                }
                if m >= keeps {
                    let bubble = (p - 1) as f64 * (t.f + t.b - late * t.w);
                    same(found.span - ideal, bubble, &format!("{named} {p} {m} {t:?}"));
                    assert_eq!(found.peak_until_w, vec![keeps; p], "{named} {p} {m}");
                    let flying = peaks(p, |i| if keeps == p { p - i } else { 2 * (p - i) - 1 });
                    assert_eq!(found.peak_in_flight, flying, "{named} {p} {m}");
                }
            }
        }
    }
}

#[test]
fn the_v_has_no_bubble_at_equal_times() {
    for (p, m) in grid() {
        let schedule = build(NamedSchedule::ZbV, p, m);
        for t in [times(1.0, 1.0, 1.0), times(10.0, 10.0, 7.0), times(4.0, 4.0, 0.0)] {
            let found = run(&schedule, t, 0.0);
            let ideal = m as f64 * total(t);
            sane(&found, p, m, ideal);
            if m >= 2 * p - 1 {
                let bubble = (p - 1) as f64 * (t.f + t.b - 2.0 * t.w) / 2.0;
                same(found.span - ideal, bubble, &format!("{p} {m} {t:?}"));
                assert_eq!(found.peak_until_w, vec![2 * p; p], "{p} {m}");
            }
        }
    }
}
