//! Chimera against its closed forms and published examples.

use phalanx_pipeline::{NamedSchedule, RoundConcat, Schedule, ScheduleShape, Timeline};

use crate::support::{run, same, times};

fn chimera(p: usize, m: usize, pairs: usize, concat: RoundConcat) -> Schedule {
    let shape = ScheduleShape::new(p, m).pairs(pairs).concat(concat);
    NamedSchedule::Chimera.build(shape).unwrap()
}

fn played(p: usize, m: usize, pairs: usize, concat: RoundConcat, back: f64) -> Timeline {
    run(&chimera(p, m, pairs, concat), times(1.0, back, 0.0), 0.0)
}

#[test]
fn one_round_takes_what_the_paper_says() {
    for p in (2..=16).step_by(2) {
        for pairs in (1..=p / 2).filter(|pairs| (p / 2_usize).is_multiple_of(*pairs)) {
            for back in [0.5, 1.0, 2.0, 3.0] {
                let found = played(p, p, pairs, RoundConcat::Direct, back);
                let (m, low, high) = (p as f64, back.min(1.0), back.max(1.0));
                let long = m * low + (m + (p / pairs) as f64 - 2.0) * high;
                same(found.makespan, long, &format!("p {p}, {pairs} pairs, tB {back}"));
                let least = p - p / (2 * pairs) + 1;
                assert!(found.peak_in_flight.iter().all(|kept| (least..=p).contains(kept)));
            }
        }
    }
}

/// The end stage groups keep least, those in the middle most.
#[test]
fn examples() {
    for (p, m, pairs, even, twice, kept) in [
        (4, 4, 1, 10.0, 16.0, vec![3, 4, 4, 3]),
        (6, 6, 1, 16.0, 26.0, vec![4, 5, 6, 6, 5, 4]),
        (8, 8, 1, 22.0, 36.0, vec![5, 6, 7, 8, 8, 7, 6, 5]),
        (8, 8, 2, 18.0, 28.0, vec![7, 8, 8, 7, 7, 8, 8, 7]),
        (8, 8, 4, 16.0, 24.0, vec![8; 8]),
        (4, 8, 1, 18.0, 30.0, vec![3, 4, 4, 3]),
        (4, 16, 1, 34.0, 58.0, vec![3, 4, 4, 3]),
    ] {
        for (back, long) in [(1.0, even), (2.0, twice)] {
            let found = played(p, m, pairs, RoundConcat::Direct, back);
            same(found.makespan, long, &format!("p {p} m {m} tB {back}"));
            assert_eq!(found.peak_in_flight, kept, "p {p} m {m}");
        }
    }
    same(played(8, 32, 1, RoundConcat::Direct, 2.0).makespan, 126.0, "four rounds of eight");
}

#[test]
fn rounds_wait_for_each_other_and_pairs_of_forwards_do_not() {
    for p in (4..=16).step_by(2) {
        for rounds in 2..=5 {
            let (m, size) = (rounds * p, p as f64);
            let direct = played(p, m, 1, RoundConcat::Direct, 2.0).makespan;
            same(direct, rounds as f64 * (4.0 * size - 2.0) + size - 2.0, "direct");
            if m.is_multiple_of(4) {
                let found = played(p, m, 1, RoundConcat::Doubling, 2.0);
                same(found.makespan, 3.0 * m as f64 + 1.5 * (size - 2.0), "doubling");
                assert!(found.peak_in_flight.iter().all(|kept| *kept <= 2 * p));
            }
            let found = played(p, m, 1, RoundConcat::Halving, 2.0);
            same(found.makespan, 3.0 * m as f64 + 0.75 * (size - 2.0), "halving");
            // In halves of a micro-batch.
            assert!(found.peak_in_flight.iter().all(|kept| *kept <= 2 * p));
        }
    }
}

/// What is in use at once shares no slot, and each direction takes every other micro-batch.
#[test]
fn the_order_of_both_directions() {
    let text = chimera(4, 4, 1, RoundConcat::Direct).to_string();
    assert_eq!(
        text.replace("BW", "B"),
        "0: F0 F2 F1.1 B1.1 F3.1 B3.1 B0 B2\n\
         1: F0 F1.1 F2 F3.1 B1.1 B0 B3.1 B2\n\
         2: F1.1 F0 F3.1 F2 B0 B1.1 B2 B3.1\n\
         3: F1.1 F3.1 F0 B0 F2 B2 B1.1 B3.1\n"
    );
}

#[test]
fn shapes_that_cannot_be_are_refused_with_the_nearest() {
    for (shape, words) in [
        (ScheduleShape::new(3, 4), ["3 stages", "2 or 4 stages"]),
        (ScheduleShape::new(1, 4), ["1 stage", "work: 2 stages"]),
        (ScheduleShape::new(8, 8).pairs(3), ["3 pairs over 8 stages", "1, 2, 4"]),
        (ScheduleShape::new(4, 5), ["5 micro-batches", "4 or 6 micro-batches"]),
        (ScheduleShape::new(4, 1), ["1 micro-batch", "2 micro-batches"]),
        (
            ScheduleShape::new(4, 6).concat(RoundConcat::Doubling),
            ["6 micro-batches", "4 or 8 micro-batches"],
        ),
        (
            ScheduleShape::new(8, 8).pairs(2).concat(RoundConcat::Halving),
            ["2 pairs with", "1 pair"],
        ),
    ] {
        let text = NamedSchedule::Chimera.build(shape).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    let text =
        NamedSchedule::GPipe.build(ScheduleShape::new(4, 4).pairs(2)).unwrap_err().to_string();
    assert!(text.contains("only chimera has a choice of pipelines"), "{text}");
}
