//! Chrome's trace event format: a process for every rank, a thread for every lane.
//!
//! Events of one thread must be disjoint or nested. Messages and collectives may overlap, so a lane
//! has as many threads as it has actions in flight at the same time. Arrows go from sends to
//! receives.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_engine::{CallPart, PartKind};
use phalanx_pipeline::{At as Place, Schedule, Turn};
use phalanx_script::Lane;
use serde_json::{Value, json};

use super::{HiddenTransfers, Timelines};
use phalanx_session::{Timetable, Trace, Traced};

/// Lanes from top to bottom, with the names of their threads.
const LANES: [(Lane, &str); 10] = [
    (Lane::Compute, "compute"),
    (Lane::Receive, "receive"),
    (Lane::Send, "send"),
    (Lane::Take, "take"),
    (Lane::Park, "park"),
    (Lane::Gather, "gather"),
    (Lane::Reduce, "reduce"),
    (Lane::Up, "up"),
    (Lane::Down, "down"),
    (Lane::Disk, "disk"),
];

/// Threads that a lane may have before two events of it share one number.
const ROWS: usize = 1000;

/// A trace as a JSON object, with a summary under `otherData`. Times are microseconds from the
/// first action of any rank.
pub fn chrome(trace: &Trace, played: &Timelines) -> Value {
    let issued = trace.ranks.iter().flatten().map(|traced| traced.times.issued);
    let origin = issued.min().unwrap_or_default();
    let mut events = Vec::new();
    let mut arrows = Arrows::default();
    for (rank, actions) in trace.ranks.iter().enumerate() {
        events.extend(process(trace, rank));
        for (lane, name) in LANES {
            let own: Vec<&Traced> = actions.iter().filter(|t| t.times.lane == lane).collect();
            let rows = rows(&own);
            for row in 0..rows.iter().map(|row| row + 1).max().unwrap_or(0) {
                events.extend(thread((rank, tid(lane, row)), name, row));
            }
            for (traced, row) in own.into_iter().zip(rows) {
                let at = At { rank, thread: tid(lane, row), origin };
                events.push(at.event(trace, traced, name));
                events.extend(traced.kernels.iter().map(|kernel| at.kernel(kernel)));
                events.extend(arrows.of(at, traced));
            }
        }
    }
    let transfers = HiddenTransfers::of(trace);
    let ms = |time: Duration| 1e3 * time.as_secs_f64();
    json!({
        "displayTimeUnit": "ms",
        "otherData": {
            "step": trace.step,
            "schedule": trace.timetable.schedule.name(),
            "measured_ms": played.replay.step,
            "replayed_ms": played.replay.replayed.makespan,
            "predicted_ms": played.replay.predicted.makespan,
            "transfers": {
                "started": transfers.started,
                "open_ms": ms(transfers.open),
                "hidden_ms": ms(transfers.hidden),
                "moving_ms": ms(transfers.moving),
                "standing_ms": ms(transfers.standing),
                "alone_ms": ms(transfers.alone),
            },
        },
        "traceEvents": events,
    })
}

/// The thread of a lane's row.
fn tid(lane: Lane, row: usize) -> usize {
    let lane = LANES.iter().position(|(other, _)| *other == lane).unwrap_or(LANES.len());
    1 + ROWS * lane + row.min(ROWS - 1)
}

/// The name and place of a rank.
fn process(trace: &Trace, rank: usize) -> [Value; 2] {
    let name = match trace.timetable.names[rank].as_str() {
        "" => format!("rank {rank}"),
        place => format!("rank {rank}: {place}"),
    };
    let meta =
        |what: &str, args: Value| json!({"ph": "M", "name": what, "pid": rank, "args": args});
    [
        meta("process_name", json!({"name": name})),
        meta("process_sort_index", json!({"sort_index": rank})),
    ]
}

/// The name and place of a thread.
fn thread((pid, tid): (usize, usize), lane: &str, row: usize) -> [Value; 2] {
    let name = if row == 0 { lane.to_owned() } else { format!("{lane} {}", row + 1) };
    let meta = |what: &str, args: Value| json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args});
    [
        meta("thread_name", json!({"name": name})),
        meta("thread_sort_index", json!({"sort_index": tid})),
    ]
}

/// For each action: the first row in which it overlaps no earlier one.
fn rows(actions: &[&Traced]) -> Vec<usize> {
    let mut free = Vec::new();
    let row = |traced: &&Traced| {
        let found = free.iter().position(|end| *end <= traced.times.started);
        let row = found.unwrap_or(free.len());
        free.resize(free.len().max(row + 1), traced.times.ended);
        free[row] = traced.times.ended;
        row
    };
    actions.iter().map(row).collect()
}

/// Microseconds, with the nanosecond precision of clocks.
fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Where events are put.
#[derive(Clone, Copy)]
struct At {
    rank: usize,
    thread: usize,
    origin: Duration,
}

impl At {
    /// A kernel lies inside the event of its action.
    fn kernel(&self, CallPart { name, started, ended, kind }: &CallPart) -> Value {
        let (pid, tid) = (self.rank, self.thread);
        let (category, after) = match kind {
            PartKind::Computes => ("kernel", ""),
            PartKind::Transfers | PartKind::TakesOn => ("transfer", ""),
            PartKind::Starts => ("transfer", " start"),
            PartKind::Ends => ("transfer", ""),
        };
        json!({
            "ph": "X", "name": format!("{name}{after}"), "cat": category, "pid": pid, "tid": tid,
            "ts": micros(started.saturating_sub(self.origin)),
            "dur": micros(ended.saturating_sub(*started)),
        })
    }

    fn event(&self, trace: &Trace, traced: &Traced, lane: &str) -> Value {
        let Traced { label, turn, peers, bytes, times, .. } = traced;
        let mut args = json!({"waited_us": micros(times.started - times.issued)});
        if let Some(turn) = turn {
            args["part"] = turn.part.to_string().into();
            args["microbatch"] = turn.microbatch.into();
            let Timetable { schedule, stages, places, .. } = &trace.timetable;
            let stage = stages.iter().position(|stage| stage.contains(&turn.instance));
            args["stage"] = stage.into();
            if let (Some(stage), Some(updates)) = (stage, schedule.updates()) {
                args["version"] = updates.version(stage, turn.microbatch).into();
            }
            let own = places[self.rank].stage_group;
            if schedule.placement().replicas() > 1 {
                let of = |stage| replica(schedule, own, (stage, turn.microbatch));
                args["replica"] = stage.and_then(of).into();
            }
            let parked = schedule
                .moves()
                .iter()
                .find(|parked| parked.from == own && parked.microbatch == turn.microbatch);
            if let Some(parked) = parked {
                args["parked_on"] = parked.to.into();
            }
        }
        if !peers.is_empty() {
            args["peers"] = peers.as_slice().into();
        }
        if *bytes > 0 {
            args["bytes"] = (*bytes).into();
        }
        let (pid, tid) = (self.rank, self.thread);
        json!({
            "ph": "X", "name": label, "cat": lane, "pid": pid, "tid": tid,
            "ts": micros(times.started - self.origin), "dur": micros(times.ended - times.started),
            "args": args,
        })
    }
}

/// The pipeline that a stage group's turn of a stage and a micro-batch belongs to.
fn replica(schedule: &Schedule, stage_group: usize, of: (usize, usize)) -> Option<usize> {
    let same = |(at, turn): &(Place, Turn)| {
        at.stage_group == stage_group && (schedule.stage(*at), turn.microbatch) == of
    };
    let (_, turn) = schedule.all().find(same)?;
    schedule.placement().held(stage_group, turn.chunk).map(|held| held.replica)
}

/// Messages of which one end or both were seen, each with a number.
#[derive(Default)]
struct Arrows {
    numbers: BTreeMap<(Option<phalanx_script::Value>, usize, usize), usize>,
}

impl Arrows {
    /// The ends of arrows at an action: what is sent and received under one name is one message.
    fn of(&mut self, at: At, traced: &Traced) -> Vec<Value> {
        let Traced { peers, value, times, .. } = traced;
        let sends = matches!(times.lane, Lane::Send | Lane::Park);
        let arrow = |peer: &usize| {
            let (from, to) = if sends { (at.rank, *peer) } else { (*peer, at.rank) };
            let next = self.numbers.len() + 1;
            let id = *self.numbers.entry((value.clone(), from, to)).or_insert(next);
            let (start, end) = (times.started - at.origin, times.ended - at.origin);
            // Just inside the event, so that a viewer attaches the arrow to it.
            let within = end.saturating_sub(Duration::from_nanos(1)).max(start);
            let (pid, tid) = (at.rank, at.thread);
            let (name, cat) = ("message", "message");
            match sends {
                true => json!({
                    "ph": "s", "id": id, "name": name, "cat": cat, "pid": pid, "tid": tid,
                    "ts": micros(start),
                }),
                false => json!({
                    "ph": "f", "bp": "e", "id": id, "name": name, "cat": cat, "pid": pid, "tid": tid,
                    "ts": micros(within),
                }),
            }
        };
        peers.iter().map(arrow).collect()
    }
}
