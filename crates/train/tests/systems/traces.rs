//! Measured steps: everything happens in the script's order, and drawings show it when it happened.

use phalanx_config::Loaded;
use phalanx_inspect::trace::{HiddenTransfers, Timelines, chrome, picture};
use phalanx_pipeline::{NamedSchedule, Schedule, Timeline};
use phalanx_script::{HappensBefore, Lane, Part};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{Session, Trace, Traced};

use crate::support::{laid, llama, models, settings};

/// Two stages and four micro-batches.
fn pipeline(schedule: NamedSchedule, more: &[&str]) -> Loaded {
    let schedule = format!("parallel.schedule={schedule}");
    let own = ["model.layers=4", "parallel.pp=2", "train.microbatches=4", &schedule];
    llama(&[&own, more].concat())
}

/// The second step, in which nothing is touched for the first time.
fn traced(loaded: &Loaded) -> Trace {
    let (network, settings) = (Network::new(loaded).unwrap(), settings(loaded, None));
    let mut session = Session::new(&models(loaded), settings, &*network.start()).unwrap();
    session.trace_at(2);
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    for _ in 0..2 {
        with_step_data(loader.next_batch().unwrap(), |data| session.step(data, 0.01)).unwrap();
    }
    session.take_trace().unwrap()
}

const LANES: [Lane; 5] = [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Send, Lane::Receive];

/// By their measured starts, the actions of each lane of each rank are the script's, all of them and in
/// its order; a lane of programs does one at a time; and nothing starts before what it waits for is over.
#[test]
fn measured_actions_are_in_the_order_of_the_script() {
    let layouts: [&[&str]; 4] = [
        &[],
        &["parallel.tp=2"],
        &["parallel.dp=2", "parallel.zero=3"],
        &["parallel.dp=2", "parallel.tp=2", "parallel.zero=3"],
    ];
    for (number, schedule) in NamedSchedule::ALL.into_iter().enumerate() {
        for (turn, layout) in layouts.into_iter().enumerate() {
            // Second forwards in every other case.
            let again = (number + turn) % 2 == 1 && schedule != NamedSchedule::Naive;
            let more = [layout, if again { &["train.recompute=stage"] } else { &[] }].concat();
            let loaded = pipeline(schedule, &more);
            let (trace, laid) = (traced(&loaded), laid(&loaded, None));
            assert_eq!(trace.ranks.len(), laid.lowered.ranks());
            for (rank, found) in trace.ranks.iter().enumerate() {
                let script = laid.lowered.plan(rank).unwrap().script;
                let what = format!("{schedule}, {more:?}, rank {rank}");
                in_order(found, &script, &what);
                let busy = |lane| found.iter().any(|t| t.times.lane == lane);
                assert!(busy(Lane::Compute) && busy(Lane::Send) && busy(Lane::Receive), "{what}");
                assert!(busy(Lane::Gather) || !layout.contains(&"parallel.zero=3"), "{what}");
            }
            messages_arrive_after_they_were_sent(&trace);
        }
    }
}

fn in_order(found: &[Traced], script: &phalanx_script::Script, what: &str) {
    for lane in LANES {
        let mut own: Vec<&Traced> = found.iter().filter(|t| t.times.lane == lane).collect();
        // Actions that start at the same tick of the clock have no measured order.
        own.sort_by_key(|t| (t.times.started, t.times.action));
        let measured: Vec<usize> = own.iter().map(|t| t.times.action).collect();
        let actions = script.actions.iter().enumerate();
        let calls = actions.filter(|(_, a)| a.lane == lane && a.ends().is_none());
        assert_eq!(measured, calls.map(|(at, _)| at).collect::<Vec<_>>(), "{what}, {lane:?}");
        for pair in own.windows(2).filter(|_| lane == Lane::Compute) {
            let [a, b] = [pair[0], pair[1]];
            assert!(a.times.ended <= b.times.started, "{what}: {a:?} goes on when {b:?} starts");
        }
    }
    let order = HappensBefore::of(script).unwrap();
    for b in found {
        assert!(b.times.issued <= b.times.started && b.times.started <= b.times.ended, "{b:?}");
        for a in found.iter().filter(|a| order.before(a.times.action, b.times.action)) {
            assert!(a.times.ended <= b.times.started, "{what}: {a:?} goes on when {b:?} starts");
        }
    }
}

/// Blocks of keys and of operands are on their way while earlier ones are computed with; of the time that
/// they are open, every moment is one of three kinds.
#[test]
fn transfers_are_hidden_by_computation() {
    for sets in [
        &["parallel.cp=2", "parallel.cp_kind=ring"][..],
        &["parallel.tp=4", "parallel.tp_kind=2d", "parallel.stream=true"],
    ] {
        let trace = traced(&llama(sets));
        let found = HiddenTransfers::of(&trace);
        assert!(found.started > 0 && found.share() > 0.0, "{sets:?}: {found:?}");
        assert!(found.hidden + found.moving + found.standing <= found.open, "{found:?}");
    }
}

/// All ranks have one clock: no receive is over before its send began.
fn messages_arrive_after_they_were_sent(trace: &Trace) {
    let on = |rank: usize, lane: Lane| {
        trace.ranks[rank].iter().filter(move |t| t.times.lane == lane && !t.peers.is_empty())
    };
    for to in 0..trace.ranks.len() {
        for received in on(to, Lane::Receive) {
            for from in &received.peers {
                let mut sends = on(*from, Lane::Send)
                    .filter(|t| t.peers.contains(&to) && t.value == received.value);
                let sent = sends.next().unwrap_or_else(|| panic!("nobody sent {received:?}"));
                assert!(sent.times.started <= received.times.ended, "{sent:?}, {received:?}");
            }
        }
    }
}

/// Ranks along tp each receive a slice of what is sent, and its arrow still has both ends.
#[test]
fn arrows_go_from_sends_to_receives() {
    let trace = traced(&pipeline(NamedSchedule::OneFOneB, &["parallel.tp=2"]));
    let events = chrome(&trace, &Timelines::new(&trace).unwrap());
    let ends = |phase: &str| -> Vec<u64> {
        let events = events["traceEvents"].as_array().unwrap().iter();
        let mut ids: Vec<u64> =
            events.filter(|e| e["ph"] == phase).map(|e| e["id"].as_u64().unwrap()).collect();
        ids.sort_unstable();
        ids
    };
    let (sent, received) = (ends("s"), ends("f"));
    assert!(sent.windows(2).all(|pair| pair[0] < pair[1]), "a message is sent once: {sent:?}");
    assert_eq!(sent, received);
    // Hidden values and their gradients, four micro-batches, at least one message for each rank.
    assert!(sent.len() >= 2 * 4 * 2, "{sent:?}");
}

/// Stages that keep their input alone: every second forward is a block of its own, where it ran. A
/// backward starts when its gradient is there, but the forward before it need not wait for that.
#[test]
fn second_forwards_are_drawn_when_they_ran() {
    for schedule in [
        NamedSchedule::GPipe,
        NamedSchedule::OneFOneB,
        NamedSchedule::ZbH1,
        NamedSchedule::BreadthFirst,
    ] {
        let trace = traced(&pipeline(schedule, &["train.recompute=stage"]));
        let played = Timelines::new(&trace).unwrap();
        let first = &trace.ranks[0];
        let ran = |part: Part, microbatch: usize| {
            let of = move |t: &&Traced| {
                t.turn.is_some_and(|turn| (turn.part, turn.microbatch) == (part, microbatch))
            };
            first.iter().filter(of).map(|t| t.times)
        };
        let again = (0..4).filter(|mb| ran(Part::R, *mb).next().is_some());
        assert!(again.clone().count() > 0, "{schedule}");
        // With one chunk, all that a rank runs again for a micro-batch is one block.
        let origin =
            [0, 1].into_iter().flat_map(|rank| &trace.ranks[rank]).map(|t| t.times.issued).min();
        for mb in again.filter(|_| played.schedule.chunks() == 1) {
            let ms = |time: std::time::Duration| 1e3 * (time - origin.unwrap()).as_secs_f64();
            let start = ms(ran(Part::R, mb).map(|t| t.started).min().unwrap());
            let end = ms(ran(Part::R, mb).map(|t| t.ended).max().unwrap());
            let mut blocks = played.measured.stage_groups[0].iter();
            let block = blocks.find(|b| (b.turn.part, b.turn.microbatch) == (Part::R, mb)).unwrap();
            assert!((block.start - start).abs() + (block.end - end).abs() < 1e-9, "{block:?}");
        }
        for timeline in [&played.measured, &played.predicted] {
            one_at_a_time(&played.schedule, timeline);
        }
        let drawing = picture(&played);
        let second = played.schedule.all().filter(|(_, turn)| turn.part == Part::R).count();
        assert_eq!(drawing.matches("<title>R of micro-batch").count(), 2 * second, "{schedule}");
        assert!(drawing.contains("R, forward run again"));
    }
    let kept = picture(&Timelines::new(&traced(&pipeline(NamedSchedule::GPipe, &[]))).unwrap());
    assert!(!kept.contains("run again") && !kept.contains("<title>R of"));
}

/// Blocks of a device do not overlap, and no block starts before what it waits for has ended.
fn one_at_a_time(schedule: &Schedule, timeline: &Timeline) {
    for blocks in &timeline.stage_groups {
        for pair in blocks.windows(2) {
            assert!(pair[0].end <= pair[1].start + 1e-9, "{pair:?}");
        }
    }
    for (at, _) in schedule.all() {
        let own = timeline.stage_groups[at.stage_group][at.index];
        for (needed, _) in schedule.needs(at) {
            let needed = timeline.stage_groups[needed.stage_group][needed.index];
            assert!(needed.end <= own.start + 1e-9, "{needed:?}, {own:?}");
        }
    }
}
