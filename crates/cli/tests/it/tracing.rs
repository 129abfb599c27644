//! `phalanx train --trace`: the measured timeline of a step, as events and as a drawing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::command::{Done, SMALL, phalanx};

/// Two stages of two layers, four micro-batches of two sequences.
const PIPELINE: &[&str] = &[
    "--set",
    "model.layers=4",
    "--set",
    "parallel.pp=2",
    "--set",
    "parallel.schedule=1f1b",
    "--set",
    "train.microbatches=4",
    "--set",
    "train.eval_every=0",
    "--json",
];

fn traced(dir: &Path, settings: &[&str]) -> (Done, Vec<Value>, String) {
    let trace = ["--trace", "t.json", "--set", "train.steps=5"];
    let done = phalanx(dir, &[&["train"], SMALL, settings, &trace]).ok();
    let text = fs::read_to_string(dir.join("t.json")).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(trace["otherData"]["step"], 4);
    let events = trace["traceEvents"].as_array().unwrap().clone();
    (done, events, fs::read_to_string(dir.join("t.svg")).unwrap())
}

fn of<'a>(events: &'a [Value], phase: &str, rank: u64) -> Vec<&'a Value> {
    events.iter().filter(|e| e["ph"] == phase && e["pid"] == rank).collect()
}

/// `F0 F1 BW0 …`: the turns of a rank, each named once though it has several instances.
fn turns(events: &[Value], rank: u64) -> String {
    let mut words: Vec<String> = Vec::new();
    for event in of(events, "X", rank) {
        if let Some(part) = event["args"]["part"].as_str() {
            let word = format!("{part}{}", event["args"]["microbatch"]);
            if words.last() != Some(&word) {
                words.push(word);
            }
        }
    }
    words.join(" ")
}

#[test]
fn a_pipelines_ranks_do_what_their_schedule_says_one_thing_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (done, events, drawing) = traced(dir.path(), PIPELINE);
    // 1F1B; the last stage turns around at once, and its head runs there and back in one.
    assert_eq!(turns(&events, 0), "F0 F1 BW0 F2 BW1 F3 BW2 BW3");
    let last: Vec<String> = (0..4).map(|mb| format!("F{mb} FBW{mb} BW{mb}")).collect();
    assert_eq!(turns(&events, 1), last.join(" "));
    for rank in 0..2 {
        // By thread: when its last action ended, and the last instruction inside it.
        let mut threads: BTreeMap<u64, [f64; 2]> = BTreeMap::new();
        for event in of(&events, "X", rank) {
            let (start, long) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let [end, inside] = threads.entry(event["tid"].as_u64().unwrap()).or_default();
            // Events are in the order of the script, and a thread does one thing at a time.
            if event["cat"] == "kernel" || event["cat"] == "transfer" {
                assert!(
                    start >= *inside - 2e-3 && start + long <= *end + 2e-3,
                    "{event} until {end}"
                );
                *inside = start + long;
                continue;
            }
            assert!(start >= *end - 2e-3 && long >= 0.0, "{event} before {end}");
            (*end, *inside) = (start + long, start);
        }
        let instructions = of(&events, "X", rank).iter().filter(|e| e["cat"] == "kernel").count();
        assert!(instructions > 100, "{instructions} instructions");
        let names = of(&events, "M", rank);
        let named = |name: &str| names.iter().any(|e| e["args"]["name"] == name);
        assert!(named(&format!("rank {rank}: stage group {rank}")), "{names:?}");
        assert!(named("compute") && named("send") && named("receive"), "{names:?}");
    }
    // Hidden values forth and gradients back: 2 sequences of 16 positions, 16 wide, in 4 bytes.
    let sends = events.iter().filter(|e| e["ph"] == "X" && e["cat"] == "send");
    let bytes: Vec<u64> = sends.map(|e| e["args"]["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes.iter().filter(|b| **b == 2 * 16 * 16 * 4).count(), 8, "{bytes:?}");
    let ends = |phase: &str| -> BTreeMap<u64, f64> {
        let ends = events.iter().filter(|e| e["ph"] == phase);
        ends.map(|e| (e["id"].as_u64().unwrap(), e["ts"].as_f64().unwrap())).collect()
    };
    let (sent, received) = (ends("s"), ends("f"));
    assert_eq!(sent.keys().collect::<BTreeSet<_>>(), received.keys().collect::<BTreeSet<_>>());
    assert!(sent.len() >= 8 && sent.iter().all(|(id, ts)| *ts <= received[id]));
    for words in [">measured<", ">predicted<", "1f1b, 2 devices, 4 micro-batches", "time, ms"] {
        assert!(drawing.contains(words), "`{words}` is not in the drawing");
    }
    for words in [">rank 0<", ">rank 1<"] {
        assert_eq!(drawing.matches(words).count(), 2, "{words}");
    }
    // Two pictures of two devices with eight turns.
    assert_eq!(drawing.matches("of micro-batch").count(), 32);
    // One version of the weights, one replica of the model, and nothing parked.
    for word in ["version", "replica", "parked_on"] {
        assert!(events.iter().all(|event| event["args"][word].is_null()), "{word}");
    }
    let summary = done.json().pop().unwrap();
    assert_eq!(summary["summary"]["trace"], "t.json");
    assert!(done.err.contains("trace of step 4: t.json"), "{}", done.err);
}

/// Which weights a turn reads, which replica it is of, and where its micro-batch waits.
#[test]
fn turns_tell_version_replica_and_where_they_wait() {
    let seen = |sets: &[&str], word: &str| -> BTreeSet<(u64, u64, Option<i64>)> {
        let dir = tempfile::tempdir().unwrap();
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let (_, events, _) = traced(dir.path(), &[PIPELINE, &sets].concat());
        let turns = events.iter().filter(|event| event["args"]["part"].is_string());
        let own = |event: &Value| {
            let number = |key: &str| event["args"][key].as_u64().unwrap();
            (number("stage"), number("microbatch"), event["args"][word].as_i64())
        };
        turns.map(own).collect()
    };
    // The batch of a step reads the weights of the step before.
    let late = seen(&["parallel.schedule=pipedream-2bw", "optim.clip=none"], "version");
    assert!(late.len() == 8 && late.iter().all(|(.., version)| *version == Some(-1)), "{late:?}");
    // Of four micro-batches, every second one goes the other way.
    let both = seen(&["parallel.schedule=chimera"], "replica");
    assert!(both.len() == 8, "{both:?}");
    for (stage, microbatch, replica) in &both {
        let same = both.iter().filter(|other| other.1 == *microbatch);
        assert!(same.clone().all(|other| other.2 == *replica), "{stage}: {both:?}");
    }
    assert_eq!(both.iter().filter(|own| own.2 == Some(1)).count(), 4, "{both:?}");
    // From four stages on there is something to park.
    let own = ["parallel.schedule=bpipe", "parallel.pp=4", "train.microbatches=8"];
    let parked = seen(&[&own[..], &["train.batch_size=8"]].concat(), "parked_on");
    assert!(parked.iter().any(|own| own.2 == Some(3)), "{parked:?}");
    assert!(parked.iter().all(|(stage, .., on)| on.is_none() || *stage < 2), "{parked:?}");
}

#[test]
fn a_traced_run_learns_what_any_run_does() {
    let dir = tempfile::tempdir().unwrap();
    let split = [PIPELINE, &["--set", "parallel.schedule=zb-h1"]].concat();
    let (done, events, _) = traced(dir.path(), &split);
    assert!(turns(&events, 0).starts_with("F0 F1 B0 W0 F2"), "{}", turns(&events, 0));
    let plain = phalanx(dir.path(), &[&["train"], SMALL, &split, &["--set", "train.steps=5"]]).ok();
    let losses = |done: &Done| -> Vec<f64> {
        done.json().iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    assert_eq!(losses(&done).len(), 5);
    assert_eq!(losses(&done), losses(&plain));
    assert!(plain.json().pop().unwrap()["summary"].get("trace").is_none());
}

#[test]
fn one_rank_has_a_timeline_too() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--set", "train.microbatches=2", "--json"];
    let (_, events, drawing) = traced(dir.path(), &settings);
    assert!(turns(&events, 0).starts_with("F0 FBW0 BW0 F1"), "{}", turns(&events, 0));
    assert!(events.iter().all(|e| e["pid"] == 0 && e["ph"] != "s"));
    assert_eq!(drawing.matches(">rank 0<").count(), 2);
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_training() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("t.svg")).unwrap();
    for (file, reason) in [("none/t.json", "does not exist"), ("t.json", "a folder")] {
        let done = phalanx(dir.path(), &[&["train", "--trace", file], SMALL]);
        done.refused(&["no trace can be written to", reason]);
    }
    assert!(!dir.path().join("runs").exists(), "nothing was started");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was left behind");
}
