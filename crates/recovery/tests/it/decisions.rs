//! Single decisions, one by one.

use phalanx_recovery::{
    Allowed, Coordinator, JobAction, JobEnd, JobEvent, Left, ProcessEnd, RankProgress, StartPoint,
};

fn killed() -> ProcessEnd {
    ProcessEnd::Killed("SIGKILL".into())
}

fn ended(epoch: u64, rank: usize, end: ProcessEnd) -> JobEvent {
    JobEvent::Ended { epoch, rank, end }
}

fn at(entered: u64, done: u64) -> RankProgress {
    RankProgress { entered, done }
}

fn left(progress: &[RankProgress]) -> Left {
    let allowed = Some(Allowed { restarts: 9, smaller: [0; 8] });
    let (progress, checkpoint) = (progress.to_vec(), Some(4));
    Left { allowed, progress, memory: true, checkpoint, ..Left::default() }
}

/// A job of two ranks of which one was lost, up to the question of what is left.
fn lost(end: ProcessEnd) -> Coordinator {
    let (mut job, first) = Coordinator::new(2);
    assert_eq!(first, [JobAction::Start { epoch: 0, ranks: 2, from: StartPoint::Beginning }]);
    assert_eq!(job.on(ended(0, 1, end)), [JobAction::Kill { epoch: 0 }]);
    // Who was ended by the job is no reason of its own.
    assert_eq!(job.on(ended(0, 0, killed())), [JobAction::Inspect { epoch: 0 }]);
    assert_eq!(job.cause().unwrap().0, 1);
    job
}

fn next(job: &mut Coordinator, left: Left) -> Vec<JobAction> {
    job.on(JobEvent::Found { epoch: job.epoch(), left })
}

fn start(from: StartPoint) -> Vec<JobAction> {
    vec![JobAction::Start { epoch: 1, ranks: 2, from }]
}

#[test]
fn memory_is_used_only_if_all_stand_after_the_same_step() {
    let cases = [
        ([at(7, 7), at(7, 7)], StartPoint::Memory(7)),
        // Inside the updates of step 8, on one rank or on both.
        ([at(8, 7), at(7, 7)], StartPoint::Checkpoint(4)),
        ([at(8, 8), at(7, 7)], StartPoint::Checkpoint(4)),
        ([at(8, 8), at(8, 7)], StartPoint::Checkpoint(4)),
        ([at(4, 4), at(4, 4)], StartPoint::Memory(4)),
        // Memory is behind a checkpoint that is there: never back to before it.
        ([at(3, 3), at(3, 3)], StartPoint::Checkpoint(4)),
    ];
    for (progress, from) in cases {
        assert_eq!(next(&mut lost(killed()), left(&progress)), start(from), "{progress:?}");
    }
    let whole = [at(7, 7), at(7, 7)];
    let gone = Left { memory: false, ..left(&whole) };
    assert_eq!(next(&mut lost(killed()), gone), start(StartPoint::Checkpoint(4)));
    let broken = ProcessEnd::Broken("SIGSEGV".into());
    assert_eq!(next(&mut lost(broken), left(&whole)), start(StartPoint::Checkpoint(4)));
    let nothing = Left { checkpoint: None, ..left(&[at(0, 0), at(0, 0)]) };
    assert_eq!(next(&mut lost(killed()), nothing), start(StartPoint::Beginning));
}

#[test]
fn an_error_that_was_reported_ends_the_job_and_a_loss_behind_it_does_not() {
    let (mut job, _) = Coordinator::new(2);
    assert_eq!(job.on(ended(0, 0, ProcessEnd::Failed(1))), [JobAction::Allow { epoch: 0 }]);
    assert_eq!(job.on(JobEvent::Overdue { epoch: 0 }), [JobAction::Kill { epoch: 0 }]);
    let end = job.on(ended(0, 1, killed()));
    assert_eq!(end, [JobAction::Finish(JobEnd::Failed(1))]);
    // Rank 0 fails because rank 1 was lost, and is seen first.
    let (mut job, _) = Coordinator::new(2);
    job.on(ended(0, 0, ProcessEnd::Failed(1)));
    assert_eq!(job.on(ended(0, 1, killed())), [JobAction::Inspect { epoch: 0 }]);
    assert_eq!(job.cause(), Some((1, &killed())));
}

#[test]
fn what_is_not_allowed_ends_with_the_reason() {
    let whole = left(&[at(7, 7), at(7, 7)]);
    let reason = |actions: Vec<JobAction>| match &actions[..] {
        [JobAction::Finish(JobEnd::Lost { rank: 1, why, .. })] => why.clone(),
        other => panic!("{other:?}"),
    };
    let silent = Left { allowed: None, ..whole.clone() };
    assert_eq!(reason(next(&mut lost(killed()), silent)), "");
    let never = Left { allowed: Some(Allowed { restarts: 0, smaller: [0; 8] }), ..whole.clone() };
    assert_eq!(reason(next(&mut lost(killed()), never)), "run.restarts = 0");
    let mut job = lost(killed());
    job.on(JobEvent::StopAsked);
    assert_eq!(reason(next(&mut job, whole)), "it was asked to stop");
}

#[test]
fn a_hanging_rank_is_ended_with_the_others() {
    let (mut job, _) = Coordinator::new(2);
    assert_eq!(job.on(JobEvent::Hangs { epoch: 0, rank: 1 }), [JobAction::Kill { epoch: 0 }]);
    job.on(ended(0, 0, killed()));
    job.on(ended(0, 1, killed()));
    assert_eq!(job.cause().unwrap().0, 1);
    assert_eq!(next(&mut job, left(&[at(7, 7), at(7, 7)])), start(StartPoint::Memory(7)));
}

#[test]
fn without_a_new_step_a_run_gives_up_or_goes_on_with_fewer_ranks() {
    for fewer in [0, 1] {
        let mut job = lost(killed());
        let found = left(&[at(5, 5), at(5, 5)]);
        let allowed = Some(Allowed { restarts: 99, smaller: [fewer, 0, 0, 0, 0, 0, 0, 0] });
        let found = Left { allowed, ..found };
        let mut actions = next(&mut job, found.clone());
        let mut starts = 0;
        while let [JobAction::Start { epoch, ranks: 2, .. }] = actions[..] {
            starts += 1;
            job.on(ended(epoch, 1, killed()));
            job.on(ended(epoch, 0, killed()));
            actions = next(&mut job, found.clone());
        }
        match fewer {
            0 => {
                assert_eq!(starts, 3);
                let [JobAction::Finish(JobEnd::Lost { why, .. })] = &actions[..] else { panic!() };
                assert!(why.contains("did not get past step 6"), "{why}");
            }
            _ => {
                assert_eq!(starts, 1);
                // Another layout cannot use what lies in memory.
                let from = StartPoint::Checkpoint(4);
                assert_eq!(actions, [JobAction::Start { epoch: 2, ranks: 1, from }]);
            }
        }
    }
}

#[test]
fn events_of_an_earlier_epoch_change_nothing() {
    let mut job = lost(killed());
    next(&mut job, left(&[at(7, 7), at(7, 7)]));
    let before = job.clone();
    for event in [
        ended(0, 0, killed()),
        ended(0, 1, ProcessEnd::Broken("SIGBUS".into())),
        JobEvent::Hangs { epoch: 0, rank: 0 },
        JobEvent::Overdue { epoch: 0 },
        JobEvent::Found { epoch: 0, left: left(&[at(7, 7), at(7, 7)]) },
    ] {
        assert_eq!(job.on(event.clone()), [], "{event:?}");
        assert_eq!(job, before, "{event:?}");
    }
}

#[test]
fn copies_on_other_hosts_are_used_if_they_are_the_latest() {
    let inside = left(&[at(8, 7), at(7, 7)]);
    for (copies, from) in [
        (Some(6), StartPoint::Copies(6)),
        // Memory is faster than a disk.
        (Some(4), StartPoint::Copies(4)),
        (Some(3), StartPoint::Checkpoint(4)),
        (None, StartPoint::Checkpoint(4)),
    ] {
        let found = Left { copies, memory: false, ..inside.clone() };
        assert_eq!(next(&mut lost(killed()), found), start(from));
    }
}

#[test]
fn with_fewer_hosts_the_largest_layout_that_fits_goes_on_or_the_reason_is_given() {
    let found = |smaller: [usize; 2], room| {
        let [a, b] = smaller;
        let allowed = Some(Allowed { restarts: 9, smaller: [a, b, 0, 0, 0, 0, 0, 0] });
        let copies = Some(6);
        Left { allowed, copies, room: Some(room), memory: false, ..left(&[at(7, 7); 8]) }
    };
    let job = || {
        let (mut job, _) = Coordinator::new(8);
        (0..8).rev().for_each(|rank| drop(job.on(ended(0, rank, killed()))));
        job
    };
    let from = StartPoint::Copies(6);
    for (smaller, room, ranks) in [([4, 2], 8, 8), ([4, 2], 7, 4), ([4, 2], 3, 2)] {
        let actions = next(&mut job(), found(smaller, room));
        assert_eq!(actions, [JobAction::Start { epoch: 1, ranks, from }], "{room}");
    }
    let actions = next(&mut job(), found([4, 0], 3));
    let [JobAction::Finish(JobEnd::Lost { why, .. })] = &actions[..] else { panic!() };
    assert!(why.contains("room for 3 of 8 ranks"), "{why}");
}
