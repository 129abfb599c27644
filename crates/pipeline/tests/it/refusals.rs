//! Numbers that no schedule can be made from.

use std::str::FromStr;

use phalanx_pipeline::{NamedSchedule, ScheduleShape, Times, TurnCosts, Warmup, simulate};

use crate::support::{build, times};

fn refused(named: NamedSchedule, shape: ScheduleShape, words: &[&str]) {
    let text = named.build(shape).unwrap_err().to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn shapes_with_the_nearest_that_work() {
    use NamedSchedule::{GPipe, Interleaved, OneFOneB, Vectorised, ZbH1, ZbV};
    refused(
        Interleaved,
        ScheduleShape::new(4, 6),
        &["6 micro-batches on 4 stages", "4 or 8 micro-batches"],
    );
    refused(
        Interleaved,
        ScheduleShape::new(4, 3),
        &["groups of 4", "nearest that work: 4 micro-batches"],
    );
    refused(ZbV, ScheduleShape::new(4, 8).chunks(1), &["zb-v cannot have 1 chunk\n", "2 chunks"]);
    refused(ZbV, ScheduleShape::new(4, 8).chunks(3), &["zb-v cannot have 3 chunks", "2 chunks"]);
    refused(
        OneFOneB,
        ScheduleShape::new(4, 8).chunks(2),
        &["1f1b cannot have 2 chunks", "interleaved"],
    );
    refused(
        Vectorised,
        ScheduleShape::new(4, 3).chunks(2),
        &[
            "cannot go around 2 times with 3 micro-batches on 4 stages",
            "4 micro-batches, or 1 chunk",
        ],
    );
    let long = "nearest that work: 524284 micro-batches, or fewer";
    refused(Vectorised, ScheduleShape::new(4, 1 << 20), &["too long", long]);
    refused(
        Vectorised,
        ScheduleShape::new(1 << 14, 2),
        &["nearest that work: 1024 stages, or fewer"],
    );
    refused(ZbH1, ScheduleShape::new(4, 8).warmup(Warmup::Pb), &["warm-up pb", "1f1b"]);
    for named in NamedSchedule::ALL {
        refused(named, ScheduleShape::new(0, 8), &["0 stages", "nearest that work: 1 stage"]);
        refused(named, ScheduleShape::new(4, 0), &["0 micro-batches", "work: 1 micro-batch"]);
        refused(named, ScheduleShape::new(4, 8).chunks(0), &["0 chunks"]);
        refused(named, ScheduleShape::new(usize::MAX, usize::MAX), &["too long"]);
    }
    refused(GPipe, ScheduleShape::new(1 << 20, 1 << 20), &["nearest that work: 2 micro-batches"]);
    refused(
        GPipe,
        ScheduleShape::new(1 << 21, 2),
        &["nearest that work: 1 micro-batch, or fewer stages"],
    );
    // One micro-batch would be too many already.
    refused(GPipe, ScheduleShape::new(1 << 22, 8), &["nearest that work: 262144 stages, or fewer"]);
}

#[test]
fn one_chunk_suits_all_but_the_v() {
    for named in NamedSchedule::ALL.into_iter().filter(|named| !named.is_vee()) {
        let schedule = named.build(ScheduleShape::new(4, 8).chunks(1)).unwrap();
        assert_eq!(schedule.placement().share(0, 0), 1, "{named}");
    }
    for named in NamedSchedule::ALL.into_iter().filter(|named| named.is_vee()) {
        assert_eq!(build(named, 4, 8).chunks(), 2);
    }
}

#[test]
fn names_are_exact_and_likely_ones_are_offered() {
    for named in NamedSchedule::ALL {
        assert_eq!(NamedSchedule::from_str(named.name()), Ok(named));
    }
    let said = |name| NamedSchedule::from_str(name).unwrap_err().to_string();
    assert!(said("ZBH1").ends_with("nearest that work: zb-h1"), "{}", said("ZBH1"));
    assert!(said("pipes").contains("naive | gpipe | vectorised | 1f1b"), "{}", said("pipes"));
}

#[test]
fn times_are_numbers_from_zero_on() {
    let said = |times, hop| TurnCosts::even(times, hop).unwrap_err().to_string();
    assert!(said(times(-1.0, 1.0, 1.0), 0.0).starts_with("tf = -1 is not accepted\n"));
    assert!(said(times(1.0, f64::NAN, 1.0), 0.0).starts_with("tb = NaN is not accepted\n"));
    assert!(said(times(1.0, 1.0, f64::INFINITY), 0.0).starts_with("tw = inf is not accepted\n"));
    assert!(said(times(1.0, 1.0, 1.0), -0.5).starts_with("hop = -0.5 is not accepted\n"));
    assert!(said(times(-1.0, 1.0, 1.0), 0.0).ends_with("\n  nearest that work: tf = 0"));
    assert!(said(times(1.0, f64::NAN, 1.0), 0.0).ends_with("such as tb = 1"));
    assert!(said(times(1e-310, 1.0, 1.0), 0.0).ends_with("nearest that work: tf = 0 or 1e-300"));
    assert!(said(times(0.0, 0.0, 0.0), 0.0).contains("above 0"));
    let two = TurnCosts::uneven(vec![Times { f: 1.0, b: 1.0, w: 1.0 }; 2], 0.0).unwrap();
    let text = simulate(&build(NamedSchedule::GPipe, 3, 2), &two).unwrap_err().to_string();
    assert!(text.contains("times of 2 stages, but `gpipe` has 3"), "{text}");
}

#[test]
fn schedules_end_at_a_time_that_is_a_number() {
    let play = |t: f64, hop| {
        simulate(
            &build(NamedSchedule::OneFOneB, 4, 4),
            &TurnCosts::even(times(t, 1.0, t), hop).unwrap(),
        )
    };
    let said = play(1e308, 0.0).unwrap_err().to_string();
    assert!(
        said.starts_with("tf = 1e308, tb = 1, tw = 1e308, hop = 0: the end of `1f1b`"),
        "{said}"
    );
    // What is offered works, also where it is the time of everything.
    let offered: f64 = said.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(offered > 1e300 && play(offered, offered).unwrap().makespan.is_finite());
    let stages = vec![times(1.0, 1.0, 1e308); 4];
    let uneven = TurnCosts::uneven(stages, 1e308).unwrap();
    let said = simulate(&build(NamedSchedule::GPipe, 4, 4), &uneven).unwrap_err().to_string();
    assert!(said.starts_with("times of stages up to 1e308, hop = 1e308"), "{said}");
}
