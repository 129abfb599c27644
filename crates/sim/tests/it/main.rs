//! The player on small scripts that are written by hand, with exact results.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

use phalanx_call::{Block, Lane, Message, Slots, Value};
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, TensorType};
use phalanx_script::{
    Action, Buffer, BufferId, BufferKey, Category, Class, HappensBefore, Kind, Placed, Run, Script,
    ScriptError, Source, View, Write,
};
use phalanx_sim::{ActionTimes, Durations, IssueRule, Playback, play};

/// One of two ranks, with three buffers that hold something from the start.
fn rank(rank: usize) -> Script {
    let mut script = Script::of_rank(rank, [0, 1].into());
    script.names.instances = vec!["v".to_owned()];
    for index in 0..3 {
        script.buffer(Buffer {
            key: BufferKey::Own(format!("b{index}").into()),
            category: Category::Workspace,
            bytes: 16,
            source: Source::State,
            tier: Default::default(),
            padding: vec![],
        });
    }
    script
}

fn push(script: &mut Script, lane: Lane, kind: Kind) {
    script.actions.push(Action { label: format!("{lane:?}"), lane, kind, after: vec![] });
}

fn messages(peer: usize) -> Vec<Message> {
    let blocks = vec![Block { first: 0, stride: 4, rows: 1, len: 4 }];
    let value = Value { instance: 0, port: "h".into(), microbatch: 0, again: false };
    vec![Message { peer, channel: 0, value, dtype: DType::F32, blocks }]
}

fn send(script: &mut Script, peer: usize, buffer: usize) {
    let (buffer, messages) = (BufferId(buffer), messages(peer));
    push(script, Lane::Send, Kind::Send { buffer, messages });
}

fn receive(script: &mut Script, peer: usize, buffer: usize) {
    let (buffer, messages) = (BufferId(buffer), messages(peer));
    push(script, Lane::Receive, Kind::Receive { buffer, messages });
}

fn run(script: &mut Script, program: &Program, lane: Lane, from: usize, into: usize) {
    let view = |buffer| View { buffer: BufferId(buffer), offset: 0 };
    let run = Run {
        program: script.program(Placed::new(program.clone(), Slots::default())),
        inputs: vec![view(from)],
        outputs: vec![(view(into), Write::Overwrite)],
        contributes: vec![],
    };
    push(script, lane, Kind::Run(run));
}

fn double() -> Program {
    let b = Builder::new("double", DType::F32);
    let x = b.input("x", Role::State, TensorType::new(DType::F32, [4]));
    b.port("y", Role::State, x.scale(2.0));
    b.finish().unwrap()
}

fn gather() -> Program {
    let mesh = Mesh::new([("tp", 2)]).unwrap();
    let b = Builder::on("gather", DType::F32, mesh.clone());
    let x = b.input("x", Role::State, TensorType::parse("f32[4]{0:tp}", &mesh).unwrap());
    let axes = vec![Axis::new("tp").unwrap()];
    let whole = b.apply(Collective::new(CollectiveKind::AllGather { dim: 0 }, axes), &[x]);
    b.port("y", Role::State, whole);
    b.finish().unwrap()
}

/// Plays two ranks with these durations of their actions.
fn played(
    scripts: &[Script; 2],
    works: [&[f64]; 2],
    rule: IssueRule,
) -> Result<Playback, ScriptError> {
    let orders = scripts.each_ref().map(|script| HappensBefore::of(script).unwrap());
    let classes: Vec<Class<'_>> = (scripts.iter().zip(&orders))
        .map(|(script, order)| Class { script, order, others: vec![] })
        .collect();
    let mut durations = Durations::given(&classes, |_, _| 0.0);
    for (own, works) in durations.actions.iter_mut().zip(works) {
        own.iter_mut().zip(works).for_each(|(own, work)| own.work = *work);
    }
    let played = play(&classes, &durations, rule)?;
    // What was played, taken as a measurement, gives itself again.
    let measured: Vec<_> =
        played.classes.iter().map(|own| own.iter().copied().map(Some).collect()).collect();
    let traced = Durations::traced(&classes, &measured)?;
    assert_eq!(play(&classes, &traced, rule)?, played);
    Ok(played)
}

fn times(issued: f64, started: f64, ended: f64) -> ActionTimes {
    ActionTimes { issued, started, ended }
}

/// Rank 0 computes for 2 and sends for 1; rank 1 receives what it has been waiting for since 0 and computes for 3. What
/// rank 0 computes afterwards does not wait for the message.
#[test]
fn a_message_begins_when_both_ends_are_there() {
    let mut scripts = [rank(0), rank(1)];
    run(&mut scripts[0], &double(), Lane::Compute, 0, 1);
    send(&mut scripts[0], 1, 1);
    run(&mut scripts[0], &double(), Lane::Compute, 0, 2);
    receive(&mut scripts[1], 0, 0);
    run(&mut scripts[1], &double(), Lane::Compute, 0, 1);
    let works: [&[f64]; 2] = [&[2.0, 1.0, 4.0], &[1.0, 3.0]];
    let lanes = played(&scripts, works, IssueRule::Lanes).unwrap();
    assert_eq!(lanes.classes[1], [times(0.0, 0.0, 3.0), times(0.0, 3.0, 6.0)]);
    let thread = played(&scripts, works, IssueRule::OneThread).unwrap();
    let sent = [times(0.0, 0.0, 2.0), times(2.0, 2.0, 3.0), times(2.0, 2.0, 6.0)];
    assert_eq!(thread.classes[0], sent);
    assert_eq!((lanes.makespan, thread.makespan), (6.0, 6.0));
    // If it writes what is being sent, it waits.
    let last = scripts[0].actions.pop().unwrap();
    let Kind::Run(mut program) = last.kind else { panic!("{last:?}") };
    program.outputs[0].0.buffer = BufferId(1);
    push(&mut scripts[0], Lane::Compute, Kind::Run(program));
    let waits = played(&scripts, works, IssueRule::Lanes).unwrap();
    assert_eq!(waits.classes[0][2], times(0.0, 3.0, 7.0));
}

/// A gather on its own lane goes on beside a program, and begins when the later rank has come to it.
#[test]
fn a_collective_begins_with_its_last_rank() {
    let mut scripts = [rank(0), rank(1)];
    for (number, script) in scripts.iter_mut().enumerate() {
        if number == 1 {
            run(script, &double(), Lane::Compute, 0, 1);
        }
        run(script, &gather(), Lane::Gather, 0, 2);
        run(script, &double(), Lane::Compute, 0, 1);
        run(script, &double(), Lane::Compute, 2, 1);
    }
    let works: [&[f64]; 2] = [&[0.5, 1.0, 1.0], &[5.0, 0.5, 1.0, 1.0]];
    let found = played(&scripts, works, IssueRule::Lanes).unwrap();
    // Rank 1 gathers what it does not compute, so both are there at 0.
    assert_eq!(found.classes[0][0], times(0.0, 0.0, 0.5));
    // One thread: rank 1 begins its gather only after its program.
    let found = played(&scripts, works, IssueRule::OneThread).unwrap();
    assert_eq!(found.classes[0][0], times(0.0, 0.0, 5.5));
    assert_eq!(found.classes[0][1..], [times(0.0, 0.0, 1.0), times(1.0, 5.5, 6.5)]);
    assert_eq!(found.classes[1][2], times(5.0, 5.0, 6.0));
    assert_eq!(found.makespan, 7.0);
}

/// Issuing takes the thread's time, and ranks may begin at different times.
#[test]
fn the_thread_has_its_own_time() {
    let mut script = rank(0);
    run(&mut script, &double(), Lane::Compute, 0, 1);
    run(&mut script, &double(), Lane::Compute, 1, 2);
    let order = HappensBefore::of(&script).unwrap();
    let classes = [Class { script: &script, order: &order, others: vec![] }];
    let mut durations = Durations::given(&classes, |_, _| 1.0);
    durations.actions[0][0].issue = 0.25;
    durations.begins[0] = 10.0;
    let found = play(&classes, &durations, IssueRule::OneThread).unwrap();
    assert_eq!(found.classes[0], [times(10.0, 10.0, 11.0), times(11.25, 11.25, 12.25)]);
    assert_eq!(found.makespan, 2.25);
    let usual = durations.medians(|_| ());
    assert_eq!((usual.begins[0], usual.actions[0][0].issue), (0.0, 0.25));
}

/// Ranks that wait for each other are named, and nothing is played.
#[test]
fn what_never_ends_is_not_played() {
    let mut scripts = [rank(0), rank(1)];
    for (number, script) in scripts.iter_mut().enumerate() {
        receive(script, 1 - number, 0);
        run(script, &double(), Lane::Compute, 0, 1);
        send(script, 1 - number, 1);
    }
    let works: [&[f64]; 2] = [&[0.0; 3], &[0.0; 3]];
    let refused = played(&scripts, works, IssueRule::Lanes);
    assert!(matches!(refused, Err(ScriptError::Deadlock { .. })), "{refused:?}");
}
