//! Orders that are known in full.

use phalanx_pipeline::{NamedSchedule, ScheduleShape, Warmup};

use crate::support::build;

/// The lists of a schedule with whole backwards, a backward written `B`.
fn orders(named: NamedSchedule, p: usize, m: usize) -> Vec<String> {
    let text = build(named, p, m).to_string().replace("BW", "B");
    text.lines().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect()
}

#[test]
fn one_forward_one_backward() {
    let orders = orders(NamedSchedule::OneFOneB, 4, 6);
    assert_eq!(orders[0], "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
    assert_eq!(orders[1], "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
    assert_eq!(orders[3], "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
}

#[test]
fn simple_ones() {
    assert_eq!(orders(NamedSchedule::Naive, 2, 3), ["F0 B0 F1 B1 F2 B2"; 2]);
    assert_eq!(orders(NamedSchedule::GPipe, 2, 3), ["F0 F1 F2 B0 B1 B2"; 2]);
    // Numbers from 3 on have no micro-batch: 3 enters after all others, 4 is ahead of the first.
    let ticks = orders(NamedSchedule::Vectorised, 2, 3);
    assert_eq!(ticks, ["F0 F1 F2 F3 B3 B2 B1 B0", "F4 F0 F1 F2 B2 B1 B0 B4"]);
    let breadth = "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2";
    assert_eq!(orders(NamedSchedule::BreadthFirst, 2, 3), [breadth; 2]);
}

#[test]
fn interleaved_goes_in_groups() {
    let orders = orders(NamedSchedule::Interleaved, 2, 4);
    let first = "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3";
    assert_eq!(orders[0], first);
    let last = "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3";
    assert_eq!(orders[1], last);
}

#[test]
fn the_zero_bubble_schedules_run_their_weights_late() {
    let lines = |named| build(named, 3, 5).to_string();
    assert_eq!(
        lines(NamedSchedule::ZbH1),
        "0: F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4\n\
         1: F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4\n\
         2: F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4\n"
    );
    assert_eq!(
        lines(NamedSchedule::ZbH2),
        "0: F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4\n\
         1: F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4\n\
         2: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4\n"
    );
    assert_eq!(
        build(NamedSchedule::ZbV, 2, 4).to_string(),
        "0: F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3 B0 W0 F2.1 B2.1 W2.1 B1 W1 F3.1 B3.1 W3.1 \
         B2 W2 B3 W3\n\
         1: F0 F0.1 F1 F1.1 B0.1 W0.1 F2 B0 W0 F2.1 B1.1 W1.1 F3 B1 W1 F3.1 B2.1 W2.1 B2 B3.1 B3 \
         W2 W3.1 W3\n"
    );
}

#[test]
fn one_chunk_is_the_plain_schedule() {
    let with_one =
        |named: NamedSchedule| named.build(ScheduleShape::new(4, 8).chunks(1)).unwrap().to_string();
    assert_eq!(with_one(NamedSchedule::Interleaved), with_one(NamedSchedule::OneFOneB));
    assert_eq!(with_one(NamedSchedule::BreadthFirst), with_one(NamedSchedule::GPipe));
    let warm = NamedSchedule::OneFOneB.build(ScheduleShape::new(3, 4).warmup(Warmup::Pb)).unwrap();
    assert!(warm.to_string().starts_with("0: F0 F1 F2 F3 BW0"), "{warm}");
}
