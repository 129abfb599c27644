//! What can be seen of the ranks of a job, by its recorder: for the launcher, and for `phalanx doctor`.

use std::path::Path;
use std::time::Duration;

use phalanx_comm::{Did, FlightRecorder};
use phalanx_recovery::{Blame, Life, RankSight, Spent};
use phalanx_sys::{machine_nanos, write_atomic};
use serde_json::{Value, json};

/// The file in a run's folder that says where the recorder of a running job is.
pub const JOB: &str = "job.json";

/// The file in a run's folder with what ranks did last before a failure.
pub const FLIGHT: &str = "flight.json";

/// How many events of each rank are written to [`FLIGHT`].
const LAST: usize = 32;

/// What each rank of a job is doing; `life` says of a rank and its process whether it lives.
pub fn sights(recorder: &FlightRecorder, life: impl Fn(usize, u64) -> Life) -> Vec<RankSight> {
    let now = machine_nanos();
    let ranks = 0..recorder.job().active().min(recorder.ranks());
    let sight = |rank: usize| {
        let words = recorder.rank(rank);
        let (process, begun) = (words.process(), words.begun());
        let inside = begun > words.progress().done;
        let events = words.events();
        let last = |did: Did| events.iter().rev().find(|event| event.did == did);
        let action = last(Did::Began).filter(|event| inside && event.step == begun);
        RankSight {
            process,
            life: life(rank, process),
            step: begun,
            inside,
            action: action.map(|event| event.words()).unwrap_or_default(),
            call: last(Did::Called).map(|event| event.words()).unwrap_or_default(),
            waits_for: words.waits_for(),
            meets: words.meets(),
            quiet: Duration::from_nanos(now.saturating_sub(words.pulse())),
        }
    };
    ranks.map(sight).collect()
}

/// All of that as JSON, with the last events of each rank.
pub fn report(recorder: &FlightRecorder, sights: &[RankSight], blame: Option<&Blame>) -> Value {
    let now = machine_nanos();
    let rank = |(rank, sight): (usize, &RankSight)| {
        let words = recorder.rank(rank);
        let events = words.events();
        let events: Vec<Value> = events[events.len().saturating_sub(LAST)..]
            .iter()
            .map(|event| {
                let ago = now.saturating_sub(event.at) as f64 / 1e6;
                let (did, what) = (event.did.name(), event.words());
                json!({"ms_ago": ago, "in_step": event.step, "did": did, "what": what})
            })
            .collect();
        json!({
            "rank": rank,
            "process": sight.process,
            "life": match &sight.life {
                Life::Runs => "runs".to_owned(),
                Life::Stopped => "stopped".to_owned(),
                Life::Ended(how) => how.clone(),
            },
            "in_step": sight.step,
            "steps_done": words.progress().done,
            "updates_begun": words.progress().entered,
            "phase": words.phase(),
            "action": sight.action,
            "last_call": sight.call,
            "waits_for": sight.waits_for,
            "quiet_s": sight.quiet.as_secs_f64(),
            "events": events,
        })
    };
    json!({
        "epoch": recorder.job().epoch(),
        "blame": blame.map(|blame| blame.rank),
        "sentence": blame.map(|blame| blame.sentence.clone()),
        "seconds": ledger(recorder),
        "ranks": sights.iter().enumerate().map(rank).collect::<Vec<_>>(),
    })
}

/// Where the time of a run went so far.
pub(super) fn ledger(recorder: &FlightRecorder) -> Value {
    let ledger = recorder.job().ledger();
    let spent = |kind: Spent| (kind.name().to_owned(), json!(ledger.spent(kind).as_secs_f64()));
    let mut all = serde_json::Map::from_iter(Spent::ALL.map(spent));
    all.insert("restarts".to_owned(), json!(ledger.restarts));
    all.insert("goodput".to_owned(), json!(ledger.goodput().unwrap_or(0.0)));
    Value::Object(all)
}

/// Writes a file of a run's folder. It only informs: where it cannot be written, it is missing.
pub(super) fn put(folder: &Path, name: &str, content: &Value) {
    let text = format!("{content:#}\n");
    let _ = write_atomic(&folder.join(name), |out| out.write_all(text.as_bytes()));
}
