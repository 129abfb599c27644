//! Pipelines on the command line: tables that run, and shapes that don't.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::command::{Done, FOUR_LAYERS, phalanx};

/// Two sequences a micro-batch.
const OWN: [&str; 2] = ["train.batch_size=8", "parallel.dp=1"];

fn run(dir: &Path, command: &str, sets: &[&str]) -> Done {
    let sets: Vec<&str> =
        FOUR_LAYERS.iter().chain(&OWN).chain(sets).flat_map(|set| ["--set", set]).collect();
    phalanx(dir, &[&[command, "--preset", "tiny"], &sets])
}

/// Every command that would run it refuses it in the same words.
fn refused(dir: &Path, sets: &[&str], words: &[&str]) {
    for command in ["train", "verify"] {
        run(dir, command, sets).refused(words);
    }
    assert!(!dir.join("runs").exists(), "nothing was started");
}

#[test]
fn shapes_that_a_schedule_does_not_take_are_refused_with_what_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let refused = |sets: &[&str], words: &[&str]| refused(dir, sets, words);
    let interleaved = "parallel.schedule=interleaved";
    refused(
        &["parallel.pp=2", "train.microbatches=1", interleaved],
        &["1 micro-batch on 2 stages", "nearest that work: 2"],
    );
    refused(
        &["parallel.pp=2", "train.microbatches=3", "train.batch_size=6", interleaved],
        &["3 micro-batches on 2 stages", "nearest that work: 2 or 4"],
    );
    refused(
        &["parallel.pp=2", "parallel.chunks=2", "parallel.schedule=zb-h1"],
        &[
            "zb-h1 cannot have 2 chunks",
            "each stage group holds one stage",
            "1 chunk; or interleaved",
        ],
    );
    refused(
        &["parallel.pp=2", "parallel.chunks=3", "parallel.schedule=zb-v"],
        &["zb-v cannot have 3 chunks", "2 chunks; or interleaved"],
    );
    refused(
        &["parallel.pp=2", "parallel.warmup=pb", "parallel.schedule=gpipe"],
        &["gpipe cannot have the warm-up pb", "warm-up pa; or 1f1b"],
    );
    let one = "has no effect with parallel.pp = 1";
    refused(&["parallel.split=measured"], &["parallel.split = \"measured\"", one, "2 or more"]);
    refused(&["parallel.warmup=pb"], &["parallel.warmup = \"pb\"", one, "2 or more"]);
    refused(
        &["parallel.chunks=2"],
        &["1f1b cannot have 2 chunks", "interleaved or breadth-first with 2"],
    );
}

#[test]
fn fewer_layers_than_stages_are_refused_with_numbers_that_fit() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    refused(
        dir,
        &["parallel.pp=5", "train.microbatches=2"],
        &["4 layers can't be cut into 5 stages", "nearest that work: 4 stages, or 5 layers"],
    );
    refused(
        dir,
        &["parallel.pp=2", "train.microbatches=2", "parallel.chunks=3"],
        &["1f1b cannot have 3 chunks", "interleaved or breadth-first with 3"],
    );
    for schedule in ["interleaved", "breadth-first"] {
        let schedule = format!("parallel.schedule={schedule}");
        refused(
            dir,
            &["parallel.pp=2", "train.microbatches=2", "parallel.chunks=3", &schedule],
            &[
                "4 layers can't be cut into 2·3 = 6 stages",
                "there are stage groups · chunks stages",
                "1·3 = 3 stages, or 2·2 = 4 stages, or 6 layers",
            ],
        );
    }
    let sets = ["parallel.pp=4", "train.microbatches=4", "parallel.schedule=zb-v"];
    refused(dir, &sets, &["4·2 = 8 stages", "2·2 = 4 stages, or 4·1 = 4 stages, or 8 layers"]);
}

#[test]
fn a_table_runs_as_its_schedule_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // Chunks, turns on zeros, replicas of stages, versions of weights.
    for name in
        ["zb-h1", "zb-v", "interleaved", "vectorised", "chimera", "pipedream", "pipedream-2bw"]
    {
        let shape = ["--stages", "2", "--microbatches", "4", "--csv", "own.csv"];
        phalanx(dir, &[&["schedule", name], &shape]).ok();
        let verified = |schedule: &str| {
            let schedule = format!("parallel.schedule={schedule}");
            let sets = ["parallel.pp=2", "train.microbatches=4", "optim.clip=none", &schedule];
            run(dir, "verify", &sets).ok().out
        };
        let own = verified("csv:own.csv");
        assert!(own.contains("all agree"), "{name}: {own}");
        assert_eq!(own, verified(name), "{name}: bytes, memory and differences");
    }
}

/// The table of the documentation: backwards in reverse order.
#[test]
fn a_table_may_run_backwards_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tables/reversed.csv");
    let schedule = format!("parallel.schedule=csv:{table}");
    let sets = ["parallel.pp=2", "train.microbatches=4", &schedule];
    let found = run(dir.path(), "verify", &sets).ok().out;
    assert!(found.contains("all agree"), "{found}");
}

#[test]
fn tables_that_do_not_fit_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let shape = ["--stages", "2", "--microbatches", "4", "--csv", "own.csv"];
    phalanx(dir, &[&["schedule", "zb-h1"], &shape]).ok();
    let own = "parallel.schedule=csv:own.csv";
    refused(
        dir,
        &["train.microbatches=4", own],
        &[
            "csv:own.csv has 2 stage groups, but parallel.pp = 1",
            "nearest that work: parallel.pp = 2",
        ],
    );
    for (set, told) in [
        ("parallel.chunks=2", "parallel.chunks = 2 has no effect"),
        ("parallel.warmup=pb", "parallel.warmup = \"pb\" has no effect"),
    ] {
        let sets = ["parallel.pp=2", "train.microbatches=4", own, set];
        refused(dir, &sets, &[told, "a table states", "leave parallel."]);
    }
    refused(
        dir,
        &["parallel.pp=4", "train.microbatches=4", own],
        &[
            "csv:own.csv has 2 stage groups, but parallel.pp = 4",
            "nearest that work: parallel.pp = 2",
        ],
    );
    refused(
        dir,
        &["parallel.pp=2", "train.microbatches=2", own],
        &[
            "csv:own.csv has 4 micro-batches, but train.microbatches = 2",
            "nearest that work: train.microbatches = 4",
        ],
    );
    let table = fs::read_to_string(dir.join("own.csv")).unwrap();
    let spoil = |name: &str, edit: &dyn Fn(&str) -> String| {
        fs::write(dir.join(name), edit(&table)).unwrap();
        format!("parallel.schedule=csv:{name}")
    };
    let sets = ["parallel.pp=2", "train.microbatches=4"];
    let refused = |own: &str, words: &[&str]| refused(dir, &[sets[0], sets[1], own], words);
    let lost = spoil("lost.csv", &|text| {
        let kept: Vec<&str> = text.lines().filter(|line| *line != "1,B,3,0,1,0,0").collect();
        kept.join("\n")
    });
    refused(&lost, &["stage group 1", "W of micro-batch 3 comes before its B", "lost.csv:"]);
    let twice = spoil("twice.csv", &|text| format!("{text}0,F,0,0,0,0,0\n"));
    refused(&twice, &["stage group 0", "micro-batch 0", "twice.csv"]);
    let odd = spoil("odd.csv", &|text| text.replace("0,F,2,", "0,G,2,"));
    refused(&odd, &["part `G`", "parts are F, B, W", "odd.csv:"]);
    let held = spoil("held.csv", &|text| text.replace("0,F,2,0,0", "0,F,2,0,1"));
    refused(
        &held,
        &["chunk 0 of stage group 0 is stage 1", "says that it is stage 0", "held.csv:"],
    );
    // Both wait for the other's second micro-batch.
    let stuck =
        "device,part,microbatch\n0,F,0\n0,BW,0\n0,F,1\n0,BW,1\n1,F,0\n1,F,1\n1,BW,0\n1,BW,1\n";
    let stuck = spoil("stuck.csv", &|_| stuck.to_owned());
    let sets = ["parallel.pp=2", "train.microbatches=2", &stuck];
    self::refused(
        dir,
        &sets,
        &["(stuck.csv:4)", "move line 4 (F1 of stage group 0) before line 3 (BW0"],
    );
    refused("parallel.schedule=csv:none.csv", &["none.csv: no such file"]);
}

/// What a run tells: loss, norm and rate of each step, and the loss of evaluations by the step after which they were.
fn told(dir: &Path, name: &str) -> (BTreeMap<u64, [String; 3]>, BTreeMap<u64, String>) {
    let text = fs::read_to_string(dir.join("runs").join(name).join("metrics.jsonl")).unwrap();
    let (mut steps, mut evaluations) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if let Some(step) = line["step"].as_u64() {
            steps.insert(step, ["loss", "grad_norm", "lr"].map(|key| line[key].to_string()));
        } else if let (Some(step), true) = (line["after_step"].as_u64(), line["event"] == "eval") {
            evaluations.insert(step, line["val_loss"].to_string());
        }
    }
    (steps, evaluations)
}

/// A run without a flush takes blocks of eight steps, and single ones before an evaluation or a checkpoint. What it tells
/// does not depend on where the blocks are: a run that pauses after each step tells the same, and leaves the same weights.
#[test]
fn evaluations_inside_a_run_of_blocks_are_those_of_single_steps() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for schedule in ["pipedream", "pipedream-2bw"] {
        let schedule = format!("parallel.schedule={schedule}");
        let train = |name: &str, every: &str, saves: &str| {
            let name = format!("run.name={name}");
            let own = [every, saves, &name, &schedule, "train.steps=21", "train.eval_batches=2"];
            let rest = ["parallel.pp=2", "train.microbatches=4", "optim.clip=none"];
            run(dir, "train", &[&own[..], &rest].concat()).ok();
            told(dir, &name["run.name=".len()..])
        };
        let weights =
            |name: &str| fs::read(dir.join("runs").join(name).join("model.safetensors")).unwrap();
        let (steps, evaluations) = train("single", "train.eval_every=1", "run.checkpoint_every=0");
        assert_eq!((steps.len(), evaluations.len()), (21, 21), "{schedule}");
        for (name, every, saves, after) in [
            ("blocks", "train.eval_every=10", "run.checkpoint_every=0", vec![10, 20, 21]),
            ("saved", "train.eval_every=21", "run.checkpoint_every=9", vec![21]),
        ] {
            let found = train(name, every, saves);
            assert_eq!(found.0, steps, "{schedule}, {name}");
            let times: Vec<u64> = found.1.keys().copied().collect();
            assert_eq!(times, after, "{schedule}, {name}");
            assert!(found.1.iter().all(|(step, loss)| evaluations[step] == *loss), "{name}");
            assert!(weights(name) == weights("single"), "{schedule}, {name}");
        }
        fs::remove_dir_all(dir.join("runs")).unwrap();
    }
}
