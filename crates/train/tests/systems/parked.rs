//! BPipe: the bits of 1F1B, less memory on the first stages, exactly the bytes of the moves, and planted bugs.

use phalanx_config::Loaded;
use phalanx_pipeline::{NamedSchedule, ScheduleShape};
use phalanx_script::{BufferKey, Category, Kind, Lane, Script, plan, traffic};
use phalanx_session::Planner;
use phalanx_session::corpus::{self, with_step_data};

use crate::bits::{params, trained};
use crate::support::{laid, llama};

fn loaded(schedule: &str, (p, m): (usize, usize), more: &[&str]) -> Loaded {
    let sets = [
        format!("parallel.schedule={schedule}"),
        format!("parallel.pp={p}"),
        format!("model.layers={p}"),
        format!("train.microbatches={m}"),
        format!("train.batch_size={}", 2 * m),
    ];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    llama(&[&sets[..], more].concat())
}

#[test]
fn parked_micro_batches_change_no_bit() {
    let layouts: [&[&str]; 5] = [
        &[],
        &["parallel.tp=2", "parallel.sp=true"],
        &["parallel.dp=2", "parallel.zero=3"],
        &["train.recompute=stage"],
        &["train.recompute=full", "precision.compute=f32"],
    ];
    for (layout, shape) in layouts.into_iter().zip([(4, 6), (4, 8), (5, 5), (4, 6), (6, 12)]) {
        let [own, plain] =
            ["bpipe", "1f1b"].map(|schedule| params(&loaded(schedule, shape, layout), None, 3));
        assert_eq!(own, plain, "{shape:?}, {layout:?}");
    }
}

/// Bytes of residuals on every rank, as planned; and as written, which must be the same.
fn residuals(own: &Loaded) -> Vec<usize> {
    let mut session = trained(own, None, 0);
    let mut loader = corpus::training(own, &corpus::open(own).unwrap()).unwrap();
    with_step_data(loader.next_batch().unwrap(), |data| session.step(data, 0.01)).unwrap();
    let lowered = laid(own, None).lowered;
    let written = session.observe().unwrap();
    let both = written.iter().enumerate().map(|(rank, observed)| {
        let planned = plan(&lowered.plan(rank).unwrap().script).unwrap().peak(Category::Residuals);
        let found = observed.peaks.iter().find(|(c, _)| *c == Category::Residuals).unwrap().1;
        assert_eq!(planned, found, "rank {rank}");
        planned
    });
    both.collect()
}

#[test]
fn no_rank_keeps_more_than_its_bound() {
    for shape @ (p, m) in [(4, 8), (6, 12)] {
        let [own, plain] = ["bpipe", "1f1b"].map(|name| residuals(&loaded(name, shape, &[])));
        let bound = (p + 2).div_ceil(2);
        // The second stage has a layer alone; the first one has the embedding too.
        let each = |rank: usize| plain[rank] / (p - rank).min(m);
        for (rank, bytes) in own.iter().enumerate() {
            assert!(
                *bytes <= bound * each(0).max(each(rank)),
                "{shape:?}, {rank}: {own:?}, {plain:?}"
            );
        }
        assert_eq!(own[0], bound * each(0), "{own:?}, {plain:?}");
        assert!(own.iter().max() < plain.iter().max(), "{own:?}, {plain:?}");
    }
}

/// Bytes that a rank sends.
fn sent(script: &Script) -> u64 {
    traffic(script).iter().filter(|(route, _)| route.op == "send").map(|(_, m)| m.bytes).sum()
}

#[test]
fn moves_cost_what_is_kept_twice() {
    let shape @ (p, m) = (4, 8);
    let schedule = NamedSchedule::BPipe.build(ScheduleShape::new(p, m)).unwrap();
    let [own, plain] = ["bpipe", "1f1b"].map(|name| laid(&loaded(name, shape, &[]), None).lowered);
    let sent = |lowered: &phalanx_session::Lowered, rank| sent(&lowered.plan(rank).unwrap().script);
    let moves = schedule.moves().len() as u64;
    let each = residuals(&loaded("1f1b", shape, &[]))[0] as u64 / p as u64;
    for rank in [0, 3] {
        assert_eq!(sent(&own, rank) - sent(&plain, rank), moves * each, "{rank}");
    }
    for rank in [1, 2] {
        assert_eq!(sent(&own, rank), sent(&plain, rank), "{rank}");
    }
}

/// A backward that reads what has left, memory that is used before it has, and micro-batches that come back in another
/// order.
#[test]
fn planted_bugs_of_moves_are_found() {
    let lowered = laid(&loaded("bpipe", (4, 8), &[]), None).lowered;
    let scripts: Vec<Script> = (0..4).map(|rank| lowered.plan(rank).unwrap().script).collect();
    phalanx_script::check_together(&scripts).unwrap();
    Planner::new(&lowered).unwrap().check().unwrap();
    let good = &scripts[0];
    let first =
        |key: fn(&BufferKey) -> bool| good.buffers.iter().position(|b| key(&b.key)).unwrap();
    let back = first(|key| matches!(key, BufferKey::Back(_)));
    let BufferKey::Back(value) = good.buffers[back].key.clone() else { unreachable!() };
    let original =
        good.buffers.iter().position(|b| b.key == BufferKey::Value(value.clone())).unwrap();
    let mut stale = good.clone();
    for action in &mut stale.actions {
        let Some(run) = action.run_mut() else { continue };
        let views = run.inputs.iter_mut().filter(|view| view.buffer.0 == back);
        views.for_each(|view| view.buffer.0 = original);
    }
    assert!(phalanx_script::check(&stale).is_err());
    let mut hasty = good.clone();
    let leaves = |a: &phalanx_script::Action| matches!(a.kind, Kind::Release { buffer } if buffer.0 == original);
    let parks = |a: &phalanx_script::Action| matches!(&a.kind, Kind::Send { buffer, .. } if buffer.0 == original && a.lane == Lane::Park);
    let (leave, park) = (
        good.actions.iter().position(leaves).unwrap(),
        good.actions.iter().position(parks).unwrap(),
    );
    assert!(park < leave);
    hasty.actions.swap(park, leave);
    assert!(phalanx_script::check(&hasty).is_err());
    let mut swapped = scripts.clone();
    let parked: Vec<usize> = (swapped[3].actions.iter().enumerate())
        .filter(|(_, action)| action.lane == Lane::Park)
        .map(|(at, _)| at)
        .collect();
    let (a, b) = (parked[0], *parked.last().unwrap());
    let [x, y] = [a, b].map(|at| scripts[3].actions[at].kind.clone());
    (swapped[3].actions[a].kind, swapped[3].actions[b].kind) = (y, x);
    assert!(phalanx_script::check_together(&swapped).is_err());
}
