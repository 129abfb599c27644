//! Measured steps: everything happens in the script's order, and drawings show it when it happened.

use phalanx_pipeline::Named;
use phalanx_script::{HappensBefore, Lane};
use phalanx_train::config::Loaded;
use phalanx_train::corpus::{self, with_step_data};
use phalanx_train::network::Network;
use phalanx_train::session::{Session, Trace, Traced};

use crate::support::{laid, llama, models, settings};

/// Two stages and four micro-batches.
fn pipeline(schedule: Named, more: &[&str]) -> Loaded {
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
    for (number, schedule) in Named::ALL.into_iter().enumerate() {
        for (turn, layout) in layouts.into_iter().enumerate() {
            // Second forwards in every other case.
            let again = (number + turn) % 2 == 1 && schedule != Named::Naive;
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

/// All ranks have one clock: no receive is over before its send began.
fn messages_arrive_after_they_were_sent(trace: &Trace) {
    let on = |rank: usize, lane: Lane| {
        trace.ranks[rank].iter().filter(move |t| t.times.lane == lane && !t.peers.is_empty())
    };
    let value = |t: &Traced| t.label.split_once(' ').unwrap().1.to_owned();
    for to in 0..trace.ranks.len() {
        for received in on(to, Lane::Receive) {
            for from in &received.peers {
                let mut sends = on(*from, Lane::Send)
                    .filter(|t| t.peers.contains(&to) && value(t) == value(received));
                let sent = sends.next().unwrap_or_else(|| panic!("nobody sent {received:?}"));
                assert!(sent.times.started <= received.times.ended, "{sent:?}, {received:?}");
            }
        }
    }
}
