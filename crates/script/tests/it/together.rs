//! The checker of all ranks together, against ranks that are played move by move.
//!
//! Random scripts send, receive, compute and sum over ranks. A naive player issues each rank's
//! actions one after the other, as an engine of one thread does: the step ends, or it gets stuck.
//! The checker must say beforehand which. Mistakes that can be named are planted one by one.

use std::collections::BTreeMap;

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, TensorType};
use phalanx_script::{
    Action, Block, Buffer, BufferId, BufferKey, Category, Kind, Lane, Message, Placed, Run, Script,
    ScriptError, Slots, Source, Value, View, Write, check_together,
};
use phalanx_testing::cases::Dice;

const BYTES: usize = 16;

/// A rank of a world, with buffers that hold something from the start.
fn rank(rank: usize, world: usize, buffers: usize) -> Script {
    let mut script = Script::of_rank(rank, (0..world).collect());
    script.names.instances = (0..9).map(|number| format!("v{number}")).collect();
    for index in 0..buffers {
        script.buffer(Buffer {
            key: BufferKey::Own(format!("b{index}").into()),
            category: Category::Workspace,
            bytes: BYTES,
            source: Source::State,
            tier: Default::default(),
            padding: vec![],
        });
    }
    script
}

fn message(peer: usize, channel: u32) -> Message {
    let block = Block { first: 0, stride: 4, rows: 1, len: 4 };
    Message { peer, channel, value: value(0), dtype: DType::F32, blocks: vec![block] }
}

/// The value of this number, called `v3` or so.
fn value(number: usize) -> Value {
    Value { instance: number, port: "h".into(), microbatch: 0, again: false }
}

fn push(script: &mut Script, label: String, lane: Lane, kind: Kind) {
    script.actions.push(Action { label, lane, kind, after: vec![] });
}

fn send(script: &mut Script, peer: usize, channel: u32, buffer: usize) {
    let (buffer, messages) = (BufferId(buffer), vec![message(peer, channel)]);
    push(script, format!("send to {peer}"), Lane::Send, Kind::Send { buffer, messages });
}

fn receive(script: &mut Script, peer: usize, channel: u32, buffer: usize) {
    let (buffer, messages) = (BufferId(buffer), vec![message(peer, channel)]);
    let kind = Kind::Receive { buffer, messages };
    push(script, format!("receive from {peer}"), Lane::Receive, kind);
}

fn run(script: &mut Script, program: &Program, lane: Lane, from: usize, into: usize) {
    let view = |buffer| View { buffer: BufferId(buffer), offset: 0 };
    let run = Run {
        program: script.program(Placed::new(program.clone(), Slots::default())),
        inputs: vec![view(from)],
        outputs: vec![(view(into), Write::Overwrite)],
        contributes: vec![],
    };
    push(script, format!("{} {from} to {into}", program.name), lane, Kind::Run(run));
}

/// Names what travels by its place in its channel, on both ends.
fn named(mut scripts: Vec<Script>) -> Vec<Script> {
    let mut counts: BTreeMap<(Medium, Lane), usize> = BTreeMap::new();
    for script in &mut scripts {
        for at in 0..script.actions.len() {
            let (medium, lane) = (medium(script, at), script.actions[at].lane);
            if let (Some(medium), Kind::Send { messages, .. } | Kind::Receive { messages, .. }) =
                (medium, &mut script.actions[at].kind)
            {
                let count = counts.entry((medium, lane)).or_default();
                messages[0].value = value(*count);
                *count += 1;
            }
        }
    }
    scripts
}

/// Doubles a buffer on one rank.
fn double() -> Program {
    let b = Builder::new("double", DType::F32);
    let x = b.input("x", Role::State, TensorType::new(DType::F32, [4]));
    b.port("y", Role::State, x.scale(2.0));
    b.finish().unwrap()
}

/// Gathers a buffer's parts over all ranks.
fn together(world: usize) -> Program {
    let mesh = Mesh::new([("tp", world)]).unwrap();
    let b = Builder::on("gather", DType::F32, mesh.clone());
    let part = TensorType::parse(&format!("f32[{world}]{{0:tp}}"), &mesh).unwrap();
    let x = b.input("x", Role::State, part);
    let axes = vec![Axis::new("tp").unwrap()];
    b.port(
        "y",
        Role::State,
        b.apply(Collective::new(CollectiveKind::AllGather { dim: 0 }, axes), &[x]),
    );
    b.finish().unwrap()
}

/// Whether ranks that issue one action after the other all reach their ends.
fn play(scripts: &[Script]) -> bool {
    let conflict = |a: &Action, b: &Action| {
        let (reads, writes) = ((a.reads(), b.reads()), (a.writes(), b.writes()));
        let meets = |x: &[BufferId], y: &[BufferId]| x.iter().any(|b| y.contains(b));
        meets(&writes.0, &writes.1) || meets(&writes.0, &reads.1) || meets(&reads.0, &writes.1)
    };
    let mut begun: Vec<usize> = vec![0; scripts.len()];
    let mut ended: Vec<Vec<bool>> = scripts.iter().map(|s| vec![false; s.actions.len()]).collect();
    loop {
        let mut moved = false;
        for (me, script) in scripts.iter().enumerate() {
            let at = begun[me];
            let Some(action) = script.actions.get(at) else { continue };
            let blocks = |earlier: &usize| {
                let other = &script.actions[*earlier];
                let lane = other.lane == action.lane
                    && ![Lane::Send, Lane::Receive].contains(&action.lane);
                let inline =
                    *earlier + 1 == at && ![Lane::Send, Lane::Receive].contains(&other.lane);
                !ended[me][*earlier] && (lane || inline || conflict(other, action))
            };
            if !(0..at).any(|earlier| blocks(&earlier)) {
                begun[me] += 1;
                moved = true;
            }
        }
        // The ends: of what a rank does alone at once, of the rest when the others have begun.
        let of = |rank: usize| scripts.iter().position(|s| s.rank == rank).unwrap();
        for me in 0..scripts.len() {
            for at in (0..begun[me]).filter(|&at| !ended[me][at]).collect::<Vec<_>>() {
                let peers: Vec<usize> = match &scripts[me].actions[at].kind {
                    Kind::Send { messages, .. } | Kind::Receive { messages, .. } => {
                        vec![of(messages[0].peer)]
                    }
                    _ if !is_shared(&scripts[me], at) => vec![],
                    _ => (0..scripts.len()).collect(),
                };
                let twin = |&peer: &usize| other_end(scripts, me, at, peer) < begun[peer];
                if peers.iter().all(twin) {
                    ended[me][at] = true;
                    moved = true;
                }
            }
        }
        if !moved {
            return ended.iter().flatten().all(|&end| end);
        }
    }
}

/// Whether an action is a program of several ranks.
fn is_shared(script: &Script, at: usize) -> bool {
    let run = script.actions[at].run().unwrap();
    script.programs[run.program.0].ranks.len() > 1
}

/// What an action communicates by: the ends of a channel, or a program of all.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Medium {
    Channel(usize, usize, u32),
    Program,
}

fn medium(script: &Script, at: usize) -> Option<Medium> {
    let own = script.rank;
    match &script.actions[at].kind {
        Kind::Send { messages, .. } => {
            Some(Medium::Channel(own, messages[0].peer, messages[0].channel))
        }
        Kind::Receive { messages, .. } => {
            Some(Medium::Channel(messages[0].peer, own, messages[0].channel))
        }
        _ => is_shared(script, at).then_some(Medium::Program),
    }
}

/// Which action of a peer belongs to this one: the one with the same number on the same medium.
fn other_end(scripts: &[Script], me: usize, at: usize, peer: usize) -> usize {
    let own = medium(&scripts[me], at);
    let number = (0..at).filter(|&a| medium(&scripts[me], a) == own).count();
    let all = 0..scripts[peer].actions.len();
    all.filter(|&a| medium(&scripts[peer], a) == own).nth(number).unwrap()
}

/// Ranks whose messages and collectives match, in an order that may or may not work.
fn random(dice: &mut Dice) -> Vec<Script> {
    let (world, buffers) = (2 + dice.below(2), 4);
    let (double, gather) = (double(), together(world));
    let lane = [Lane::Compute, Lane::Gather][dice.below(2)];
    let mut lists: Vec<Vec<(usize, Script)>> = vec![Vec::new(); world];
    let mut place = |dice: &mut Dice, who: usize, one: Script| {
        // A little out of order, so that some of them wait for each other.
        let at = lists[who].len() * 10 + dice.below(35);
        lists[who].push((at, one));
    };
    for _ in 0..4 + dice.below(8) {
        let [a, b] = [dice.below(buffers), dice.below(buffers)];
        match dice.below(10) {
            0..6 => {
                let from = dice.below(world);
                let to = (from + 1 + dice.below(world - 1)) % world;
                let channel = dice.below(2) as u32;
                let mut one = rank(from, world, buffers);
                send(&mut one, to, channel, a);
                place(dice, from, one);
                let mut other = rank(to, world, buffers);
                receive(&mut other, from, channel, b);
                place(dice, to, other);
            }
            6..9 => {
                let who = dice.below(world);
                let mut one = rank(who, world, buffers);
                run(&mut one, &double, Lane::Compute, a, b);
                place(dice, who, one);
            }
            _ => {
                let into = (a + 1) % buffers;
                for who in 0..world {
                    let mut one = rank(who, world, buffers);
                    run(&mut one, &gather, lane, a, into);
                    place(dice, who, one);
                }
            }
        }
    }
    let join = |(who, mut list): (usize, Vec<(usize, Script)>)| {
        list.sort_by_key(|(at, _)| *at);
        let mut whole = rank(who, world, buffers);
        for (_, one) in list {
            for mut action in one.actions {
                if let Some(run) = action.run_mut() {
                    let placed = one.programs[run.program.0].placed.clone();
                    run.program = whole.program(placed);
                }
                whole.actions.push(action);
            }
        }
        whole
    };
    named(lists.into_iter().enumerate().map(join).collect())
}

#[test]
fn the_checker_knows_which_steps_end() {
    let (mut ends, mut stuck) = (0, 0);
    for seed in 0..4000 {
        let scripts = random(&mut Dice::new(seed));
        match (check_together(&scripts), play(&scripts)) {
            (Ok(()), true) => ends += 1,
            (Err(ScriptError::Deadlock { cycle }), false) => {
                assert!(cycle.len() > 1, "seed {seed}: {cycle:?}");
                stuck += 1;
            }
            (found, ended) => panic!("seed {seed}: {found:?}, but played: {ended}"),
        }
    }
    assert!(ends > 500 && stuck > 500, "{ends} end, {stuck} do not");
}

/// Two ranks that work: there and back, with a sum of both at the end.
fn working() -> Vec<Script> {
    let (double, gather) = (double(), together(2));
    let mut scripts = vec![rank(0, 2, 4), rank(1, 2, 4)];
    let [first, second] = &mut scripts[..] else { unreachable!() };
    for (channel, buffer) in [(0, 0), (0, 1)] {
        send(first, 1, channel, buffer);
        receive(second, 0, channel, buffer);
    }
    run(second, &double, Lane::Compute, 0, 2);
    send(second, 0, 1, 2);
    receive(first, 1, 1, 2);
    run(first, &double, Lane::Compute, 2, 3);
    scripts.iter_mut().for_each(|script| {
        run(script, &gather, Lane::Compute, 1, 3);
        run(script, &gather, Lane::Gather, 1, 2);
    });
    named(scripts)
}

/// What is wrong, how it comes about, and what the checker says.
type Mistake = (&'static str, fn(&mut Vec<Script>), &'static str);

const MISTAKES: [Mistake; 10] = [
    ("nothing", |_| (), ""),
    (
        "a receive is missing",
        |s| drop(s[1].actions.remove(1)),
        "rank 0: 2 messages are sent on channel 0 from rank 0 to rank 1, but 1 are received",
    ),
    (
        "a send is missing",
        |s| drop(s[1].actions.remove(3)),
        "rank 0: 0 messages are sent on channel 1 from rank 1 to rank 0, but 1 are received",
    ),
    (
        "values of the same shape in another order",
        |s| s[1].actions.swap(0, 1),
        "rank 1: message 0 on channel 0 from rank 0 to rank 1 is `v0/h@mb0` as f32 [1 x 4] in rank 0, \
             action 0 (send to 1), but `v1/h@mb0` as f32 [1 x 4] in rank 1, action 0 (receive from 0)",
    ),
    (
        "half of a message",
        |s| {
            let Kind::Send { messages, .. } = &mut s[0].actions[1].kind else { unreachable!() };
            messages[0].blocks[0].len = 2;
        },
        "rank 1: message 1 on channel 0 from rank 0 to rank 1 is `v1/h@mb0` as f32 [1 x 2] in rank 0, action 1 \
             (send to 1), but `v1/h@mb0` as f32 [1 x 4] in rank 1, action 1 (receive from 0)",
    ),
    (
        "another type",
        |s| {
            let Kind::Receive { messages, .. } = &mut s[1].actions[0].kind else { unreachable!() };
            messages[0].dtype = DType::Bf16;
        },
        "is `v0/h@mb0` as f32 [1 x 4] in rank 0, action 0 (send to 1), but `v0/h@mb0` as bf16 [1 \
        x 4]",
    ),
    (
        "one sum fewer",
        |s| drop(s[1].actions.pop()),
        "rank 1: it communicates 1 times with the ranks [0, 1], but others of them do so more \
        often",
    ),
    (
        "sums in another order",
        |s| s[1].actions.swap(4, 5),
        "rank 1: call 0 of the ranks [0, 1] is rank 0, action 4 (gather 1 to 3) on one, but rank \
        1, action 4 (gather 1 to 2) on another",
    ),
    ("the same rank twice", |s| s[1].rank = 0, "rank 0: it has two scripts"),
    (
        "a send behind what waits for it",
        |s| {
            let send = s[1].actions.remove(3);
            s[1].actions.insert(4, send);
        },
        "ranks wait for each other forever",
    ),
];

#[test]
fn what_does_not_fit_is_named() {
    for (what, change, words) in MISTAKES {
        let mut scripts = working();
        change(&mut scripts);
        let told = check_together(&scripts).map_err(|error| error.to_string());
        match told {
            Ok(()) => assert_eq!(words, "", "{what} was accepted"),
            Err(told) => assert!(!words.is_empty() && told.contains(words), "{what}: {told}"),
        }
    }
}

/// The cycle that is told is one: short, and from each action to what it waits for.
#[test]
fn a_circle_is_told_in_order() {
    let double = double();
    let mut scripts = vec![rank(0, 2, 2), rank(1, 2, 2)];
    for (me, other) in [(0, 1), (1, 0)] {
        let script = &mut scripts[me];
        receive(script, other, 0, 0);
        run(script, &double, Lane::Compute, 0, 1);
        send(script, other, 0, 1);
    }
    let told = check_together(&scripts).unwrap_err().to_string();
    let expected = "ranks wait for each other forever: rank 0, action 0 (receive from 1)
  waits for rank 1, action 2 (send to 0)
  waits for rank 1, action 1 (double 0 to 1)
  waits for rank 1, action 0 (receive from 0)
  waits for rank 0, action 2 (send to 1)
  waits for rank 0, action 1 (double 0 to 1)
  waits for the first
  issue what one of these waits for earlier";
    assert_eq!(told, expected);
    // Sent first, it works.
    for script in &mut scripts {
        script.actions.rotate_right(1);
    }
    check_together(&scripts).unwrap();
}
