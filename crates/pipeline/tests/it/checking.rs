//! Schedules that are wrong, each in one way, and what the checker says.

use phalanx_pipeline::{
    Direction, HeldStage, NamedSchedule, Part, PipelineError, Placement, Schedule, Turn, Turns, b,
    bwd, fwd, w, weave,
};

use crate::support::{all, grid, run, times};

/// Two devices, one stage each, with these lists.
fn two(m: usize, first: Turns, second: Turns) -> Result<Schedule, PipelineError> {
    let lists = vec![first.list(), second.list()];
    Schedule::from_lists("test", m, Placement::looped(2, 1).unwrap(), lists)
}

fn refused(result: Result<Schedule, PipelineError>, words: &[&str]) {
    let text = result.unwrap_err().to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn work_that_is_lost_or_doubled() {
    let good = || fwd(0..2).then(bwd(0..2));
    assert!(two(2, good(), good()).is_ok());
    refused(
        two(2, good(), fwd(0..2).then(bwd(0..1))),
        &[
            "stage 1 (stage group 1, chunk 0) never runs B of micro-batch 1",
            "0 to 1",
            "add BW1 to stage group 1 after stage group 1, turn 1 (F1)",
        ],
    );
    refused(
        two(2, good(), fwd(0..2).then(b(0..2)).then(w(0..1))),
        &[
            "stage 1",
            "never runs W of micro-batch 1",
            "write BW instead of B at stage group 1, turn 3",
        ],
    );
    refused(
        two(2, good().then(fwd(1..2)), good()),
        &["stage group 0, turn 4 (F1): F of micro-batch 1 is done twice; first by stage group 0, \
            turn 1"],
    );
    refused(two(1, good(), good()), &["turn 1 (F1): there is no micro-batch 1, only 0 to 0"]);
    refused(two(2, good(), good().on(1)), &["stage group 1, turn 0 (F0.1): there is no chunk 1"]);
    refused(two(0, Turns::default(), Turns::default()), &["0 micro-batches", "nearest that work"]);
    let placement = Placement::looped(3, 1).unwrap();
    let lists = Schedule::from_lists("test", 1, placement, vec![good().list()]);
    refused(lists, &["lists for 1 stage group, but stages for 3"]);
}

#[test]
fn phases_out_of_order() {
    let good = || fwd(0..1).then(b(0..1)).then(w(0..1));
    refused(
        two(1, good(), b(0..1).then(fwd(0..1)).then(w(0..1))),
        &[
            "stage group 1, turn 0 (B0): B of micro-batch 0 comes before its F\n",
            "usual fix: move it after stage group 1, turn 1 (F0)",
        ],
    );
    refused(
        two(1, fwd(0..1).then(w(0..1)).then(b(0..1)), good()),
        &["stage group 0, turn 1 (W0): W of micro-batch 0 comes before its B"],
    );
}

#[test]
fn versions_of_a_microbatch_agree() {
    let turn = |part, version| Turn { part, microbatch: 0, chunk: 0, version };
    let lists = vec![vec![turn(Part::F, 0), turn(Part::BW, 1)]];
    let one = Placement::looped(1, 1).unwrap();
    refused(
        Schedule::from_lists("test", 1, one, lists),
        &[
            "turn 1 (BW0)",
            "version 1 of the weights",
            "turn 0 (F0) read version 0",
            "version 0 for both",
        ],
    );
}

/// Without a flush a stage reads new weights for new micro-batches while old ones are under way.
#[test]
fn versions_are_counted_while_they_are_in_use() {
    let read = |turns: Turns| -> Vec<Turn> {
        let newest = |turn: Turn| Turn { version: turn.microbatch, ..turn };
        turns.list().into_iter().map(newest).collect()
    };
    let lists = vec![
        read(fwd(0..1).then(weave([fwd(1..4), bwd(0..4)]))),
        read(weave([fwd(0..4), bwd(0..4)])),
    ];
    let schedule =
        Schedule::from_lists("test", 4, Placement::looped(2, 1).unwrap(), lists).unwrap();
    assert_eq!(run(&schedule, times(1.0, 1.0, 1.0), 0.0).weight_versions, [2, 1]);
}

#[test]
fn circles_are_named() {
    // The first device wants a gradient before it has sent what that gradient is made from.
    let early = weave([fwd(0..2), bwd(0..2)]);
    let late = fwd(0..2).then(bwd(0..2));
    refused(
        two(2, early, late),
        &[
            "usual fix: move stage group 0, turn 2 (F1) before stage group 0, turn 1 (BW0)",
            "stage group 0, turn 1 (BW0) waits for the message from stage group 1, turn 2",
        ],
    );
    // Both micro-batches are sent in one order and awaited in the other.
    let swapped = fwd(1..2).then(fwd(0..1)).then(bwd(0..2));
    refused(
        two(2, fwd(0..2).then(bwd(0..2)), swapped),
        &[
            "the message from stage group 0, turn 1 (F1)",
            "waits for the message from stage group 0, turn 0",
        ],
    );
    // Both devices have their lists the wrong way round, so no single move is enough.
    let hurried = || weave([fwd(0..3), bwd(0..3)]);
    let patient = fwd(0..3).then(bwd(0..3));
    refused(
        two(3, hurried(), patient),
        &["would deadlock", "usual fix: in every stage group run first all F"],
    );
}

/// Two replicas in opposite directions, as Chimera has them; a micro-batch stays with one holder of a stage.
#[test]
fn replicas_run_side_by_side() {
    let held = |stage, replica| HeldStage { stage, replica };
    let both = || {
        let stage_groups = vec![vec![held(0, 0), held(1, 1)], vec![held(1, 0), held(0, 1)]];
        Placement::new(stage_groups).unwrap()
    };
    let down = [fwd(0..1), bwd(0..1)];
    let [f, back] = &down;
    let up = |turns: Turns| turns.on(1);
    let lists = vec![
        f.clone().then(up(fwd(1..2))).then(up(bwd(1..2))).then(back.clone()).list(),
        up(fwd(1..2)).then(f.clone()).then(back.clone()).then(up(bwd(1..2))).list(),
    ];
    let schedule = Schedule::from_lists("both ways", 2, both(), lists).unwrap();
    let found = run(&schedule, times(2.0, 2.0, 0.0), 0.0);
    assert_eq!(found.makespan, 8.0, "two forwards and two backwards, each of a whole share");
    let lists = vec![
        f.clone().then(up(fwd(1..2))).then(back.clone()).list(),
        f.clone().then(back.clone()).then(up(fwd(0..1))).list(),
    ];
    refused(
        Schedule::from_lists("both ways", 2, both(), lists),
        &[
            "stage group 1, turn 2 (F0.1): stage 0 of its micro-batch is on chunk 0 of stage group 0, \
             which keeps what the backward needs\n",
            "give it to chunk 0 of stage group 0",
        ],
    );
}

/// Every schedule that is built has passed the checker; that it has passed says how much is sent.
#[test]
fn each_boundary_is_crossed_twice_by_each_microbatch() {
    for (p, m) in grid().filter(|(p, m)| *p <= 6 && *m <= 14) {
        for (named, schedule) in all(p, m) {
            let stages = schedule.placement().stages();
            let within = match named {
                named if named.is_vee() => 1,
                _ if p == 1 => stages - 1,
                _ => 0,
            };
            let messages = schedule.messages();
            // Empty micro-batches are shifted as others are: all but the last tick cross each boundary.
            let more = match named {
                NamedSchedule::Vectorised => 2 * (p - 1) * p.saturating_sub(2),
                _ => 0,
            };
            let crossed = 2 * m * (stages - 1 - within) + more;
            assert_eq!(messages.len(), crossed, "{named} {p} {m}");
            let forward = messages.iter().filter(|m| m.direction == Direction::Forward);
            assert_eq!(forward.count() * 2, messages.len());
            // Few micro-batches leave DualPipe nothing to split.
            let few = named == NamedSchedule::DualPipe && m < 2 * p;
            assert!(few || schedule.splits() == named.splits(), "{named} {p} {m}");
        }
    }
}
