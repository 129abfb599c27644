//! `phalanx schedule --plan`: stages that cover a measured model, and settings that run.

use serde_json::Value;

use crate::command::{FOUR_LAYERS, phalanx};

const OWN: [&str; 2] = ["train.batch_size=16", "train.microbatches=4"];

/// The model's instances, one after the other.
const NAMES: [&str; 6] = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"];

fn planned(planner: &str, devices: &str, more: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let sets: Vec<&str> =
        FOUR_LAYERS.iter().chain(&OWN).chain(more).flat_map(|set| ["--set", set]).collect();
    let asked = ["schedule", "--plan", planner, "--devices", devices, "--preset", "tiny", "--json"];
    phalanx(dir.path(), &[&asked, &sets]).ok().json()
}

/// Settings of a plan do what one rank does.
fn runs(plan: &Value) {
    let dir = tempfile::tempdir().unwrap();
    let own = plan["settings"].as_array().unwrap().iter().map(|set| set.as_str().unwrap());
    let sets = FOUR_LAYERS.into_iter().chain(OWN).chain(["optim.clip=none"]).chain(own);
    let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
    phalanx(dir.path(), &[&["verify", "--preset", "tiny", "--steps", "2"], &sets]).ok();
}

#[test]
fn plans_cover_the_model_and_run() {
    for (planner, devices, most) in
        [("pipedream", "2", 2), ("dapple", "2", 2), ("dapple", "2,2", 4)]
    {
        let plans = planned(planner, devices, &["optim.clip=none"]);
        assert_eq!(plans.len(), 1, "{plans:?}");
        let stages = plans[0]["stages"].as_array().unwrap();
        let name = |stage: &Value, end: &str| {
            let name = stage[end].as_str().unwrap().to_owned();
            NAMES.iter().position(|known| *known == name).unwrap_or_else(|| panic!("{name}"))
        };
        let mut next = 0;
        for stage in stages {
            assert_eq!(name(stage, "first"), next, "{plans:?}");
            next = name(stage, "last") + 1;
        }
        assert_eq!(next, NAMES.len(), "{plans:?}");
        let used: u64 = stages.iter().map(|stage| stage["devices"].as_u64().unwrap()).sum();
        assert!(used <= most && plans[0]["seconds"].as_f64().unwrap() > 0.0, "{plans:?}");
        // Either settings that run, or the reason why there are none.
        match plans[0]["refused"].as_str() {
            Some(why) => assert!(why.contains("nearest"), "{why}"),
            None => runs(&plans[0]),
        }
    }
}

/// Slow links make wide stages of what has few weights: a large head is not replicated, and layers before it are.
#[test]
fn a_plan_of_several_widths_has_settings_that_run() {
    let mut found = Vec::new();
    for planner in ["pipedream", "dapple"] {
        for rate in ["1e7", "1e8", "1e9", "1e10"] {
            let dir = tempfile::tempdir().unwrap();
            let sets = FOUR_LAYERS.iter().chain(&OWN).chain(&["optim.clip=none"]);
            let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
            let asked = ["schedule", "--plan", planner, "--devices", "3", "--bandwidth", rate];
            let plan = phalanx(dir.path(), &[&asked, &["--preset", "tiny", "--json"], &sets]);
            found.extend(plan.ok().json());
        }
    }
    let uneven = |plan: &&Value| {
        let shape = plan["shape"].as_str().unwrap();
        shape.split('-').any(|count| count != shape.split('-').next().unwrap())
    };
    for plan in found.iter().filter(uneven) {
        let settings = plan["settings"].as_array().unwrap();
        let holders = settings.iter().filter_map(Value::as_str);
        let holders = holders.filter_map(|set| set.strip_prefix("parallel.holders=")).next();
        match plan["refused"].as_str() {
            Some(why) => assert!(why.contains("nearest"), "{why}"),
            None => {
                assert_eq!(holders, plan["shape"].as_str(), "{plan}");
                runs(plan);
            }
        }
    }
}

/// The fastest first.
#[test]
fn two_versions_are_planned_within_a_memory() {
    let plans = planned("2bw", "4", &["run.memory_limit=1GiB"]);
    let rates: Vec<f64> = plans.iter().map(|p| p["samples_per_s"].as_f64().unwrap()).collect();
    assert!(!rates.is_empty() && rates.is_sorted_by(|a, b| a >= b), "{plans:?}");
    runs(plans.iter().find(|plan| plan["refused"].is_null()).unwrap());
}

/// A schedule that is chosen runs, and a note says which and why.
#[test]
fn a_chosen_schedule_runs() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["parallel.pp=2", "parallel.schedule=auto"];
    let sets: Vec<&str> =
        FOUR_LAYERS.iter().chain(&OWN).chain(&more).flat_map(|set| ["--set", set]).collect();
    let done = phalanx(dir.path(), &[&["verify", "--preset", "tiny", "--steps", "2"], &sets]);
    assert!(done.ok().err.contains("note: parallel.schedule = \"auto\" is "));
}

/// Four layers are too few for schedules of two chunks on three devices: such a one is passed over, and said.
#[test]
fn a_schedule_that_cannot_be_built_is_not_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let sets = ["parallel.pp=3", "parallel.schedule=auto", "train.microbatches=6"];
    let more = ["train.batch_size=12", "run.threads=1"];
    let sets: Vec<&str> = sets.iter().chain(&more).flat_map(|set| ["--set", set]).collect();
    let asked = ["verify", "--preset", "mnist-cnn", "--steps", "1"];
    let done = phalanx(dir.path(), &[&asked, &sets[..]]).ok();
    assert!(done.err.contains("can't be cut into 3·2 = 6 stages"), "{}", done.err);
}

/// A table has no columns for what waits on another device.
#[test]
fn a_table_of_bpipe_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let asked = ["schedule", "bpipe", "--stages", "6", "--microbatches", "10", "--csv", "t.csv"];
    phalanx(dir.path(), &[&asked[..]]).refused(&["a table cannot say what bpipe parks where"]);
    assert!(!dir.path().join("t.csv").exists());
}

/// Two holders of the first stage keep two micro-batches and three versions each; so says a table of them.
#[test]
fn holders_that_take_turns_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let asked = ["schedule", "pipedream", "--holders", "2-1-1", "--microbatches", "8"];
    let shown = phalanx(dir.path(), &[&asked, &["--json"]]).ok().json();
    assert_eq!(shown[0]["peak_in_flight"], serde_json::json!([2, 2, 2, 1]));
    assert_eq!(shown[0]["weight_versions"], serde_json::json!([3, 3, 2, 1]));
    let drawn = phalanx(dir.path(), &[&asked[..]]).ok();
    assert!(drawn.out.contains("4 devices, stages on 2-1-1, 8 micro-batches"), "{}", drawn.out);
    phalanx(dir.path(), &[&asked, &["--csv", "t.csv"]]).ok();
    let table = phalanx(dir.path(), &[&["schedule", "csv:t.csv", "--json"]]).ok().json();
    assert_eq!(table[0]["weight_versions"], serde_json::json!([3, 3, 2, 1]));
    assert_eq!(table[0]["makespan"], shown[0]["makespan"]);
    let flush = ["schedule", "1f1b", "--holders", "2-1", "--microbatches", "8"];
    phalanx(dir.path(), &[&flush[..]]).refused(&["only pipedream deals", "or pipedream"]);
    let odd = ["schedule", "pipedream", "--holders", "2-1", "--microbatches", "3"];
    phalanx(dir.path(), &[&odd[..]]).refused(&["3 micro-batches in turn", "4 micro-batches"]);
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |more: &[&str], words: &[&str]| {
        phalanx(dir.path(), &[&["schedule", "--preset", "tiny", "--plan"], more]).refused(words);
    };
    refused(&["pipedream"], &["devices of each machine", "--devices 4"]);
    refused(&["dapple", "--devices", "2,0"], &["devices of each machine"]);
    refused(&["pipedream", "--devices", "2,3"], &["machines of [2, 3]", "--plan dapple"]);
    refused(&["dapple", "--devices", "2", "--bandwidth", "1,2,3"], &["3 numbers"]);
    refused(&["dapple", "--devices", "2", "--bandwidth", "-1"], &["-1 bytes per second"]);
    let small = ["2bw", "--devices", "4", "--set", "run.memory_limit=10KiB"];
    refused(&small, &["no width and depth fit 10240 bytes", "more devices or memory"]);
}
