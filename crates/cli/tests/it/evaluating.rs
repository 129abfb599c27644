//! `phalanx eval` and `phalanx export`: a model goes out and comes back the same.

use crate::command::{phalanx, small_run};

#[test]
fn an_exported_model_answers_as_the_run_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let exported = phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf", "--json"]]).ok();
    assert_eq!(exported.json()[0]["dtype"], "f32");
    let answer = |model: &str, more: &[&str]| {
        let args = ["eval", "--model", model, "--ids", "3,1,4,1,5", "--json"];
        let lines = phalanx(dir, &[&args, more]).ok().json();
        assert_eq!(lines.len(), 1);
        let loss = lines[0]["loss"].as_f64().unwrap();
        let logits = lines[0]["logits_last"].as_array().unwrap().iter();
        let logits: Vec<f64> = logits.map(|x| x.as_f64().unwrap()).collect();
        (loss, logits)
    };
    let run = answer("run:runs/a", &[]);
    assert_eq!(run.1.len(), 32);
    assert_eq!(run, answer("hf:hf", &[]));
    // In f64 the same numbers come out, up to what f32 rounds away.
    let (loss, logits) = answer("hf:hf", &["--set", "precision.compute=f64"]);
    assert!((loss - run.0).abs() < 1e-5, "{loss} and {}", run.0);
    assert!(logits.iter().zip(&run.1).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_ne!(logits, run.1);
}

#[test]
fn a_run_is_evaluated_on_its_own_held_out_data() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let metrics = std::fs::read_to_string(dir.join("runs/a/metrics.jsonl")).unwrap();
    let told: Vec<serde_json::Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told = told.iter().rev().find(|line| line["event"] == "eval").unwrap();
    let lines = phalanx(dir, &[&["eval", "--model", "run:runs/a", "--json"]]).ok().json();
    assert_eq!(lines[0]["loss"], told["val_loss"]);
    assert_eq!(lines[0]["tokens"], 4 * 8 * 16);
    assert!(lines[0]["entropy_floor"].is_number());
}

/// The run's own configuration is the ground, and a preset, a file and single settings lie on it,
/// with and without ids.
#[test]
fn settings_are_laid_over_those_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    std::fs::write(dir.join("f64.toml"), "[precision]\ncompute = \"f64\"\n").unwrap();
    std::fs::write(dir.join("wide.toml"), "[model]\nwidth = 24\n").unwrap();
    let eval = ["eval", "--model", "run:runs/a", "--json"];
    let set = ["--set", "precision.compute=f64"];
    for ids in [&[][..], &["--ids", "3,1,4,1,5"]] {
        let loss = |more: &[&str]| {
            let lines = phalanx(dir, &[&eval, ids, more]).ok().json();
            lines[0]["loss"].as_f64().unwrap()
        };
        let (plain, by_file, by_set) = (loss(&[]), loss(&["f64.toml"]), loss(&set));
        assert_eq!(by_file, by_set);
        assert_ne!(by_file, plain);
        assert!((by_file - plain).abs() < 1e-4, "{by_file} and {plain}");
        // A preset yields to the model's shape; what the user writes must agree with it.
        phalanx(dir, &[&eval, ids, &["--preset", "tiny"]]).ok();
        let done = phalanx(dir, &[&eval, ids, &["wide.toml"]]);
        done.refused(&["model.width = 24 contradicts the model's 16"]);
    }
}

/// Training goes on from exported weights: the first loss is near where the run ended.
#[test]
fn training_starts_from_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf", "--dtype", "f64"]]).ok();
    let args = ["train", "--json", "--set", "model.from=hf:hf"];
    let small = ["--set", "train.steps=1", "--set", "train.batch_size=8", "--set", "data.seed=0"];
    let resumed = phalanx(dir, &[&args, &small, &["--set", "run.seed=7"]]).ok().json();
    let scratch = ["--set", "model.vocab=32", "--set", "model.width=16", "--set", "model.layers=1"];
    let expected = phalanx(dir, &[&["eval", "--model", "run:runs/a", "--json"]]).ok().json();
    let (a, b) = (&resumed[0]["loss"], &expected[0]["loss"]);
    assert!((a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 0.1, "{a} and {b}");
    // Its vocabulary is not to be changed, so data must fit it.
    std::fs::write(dir.join("ids.u16"), [200, 0].repeat(400)).unwrap();
    let data = ["--set", "data.kind=tokens", "--set", "data.path=ids.u16"];
    phalanx(dir, &[&args, &data])
        .refused(&["token 200", "usual fix: use data made with the tokenizer"]);
    // What contradicts the folder is refused, with both places.
    let done = phalanx(dir, &[&args, &small, &scratch, &["--set", "model.width=24"]]);
    done.refused(&["model.width = 24 contradicts the model's 16", "config.json"]);
}

#[test]
fn a_folder_without_data_is_evaluated_on_nothing_by_accident() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf"]]).ok();
    let eval = |more: &[&str]| phalanx(dir, &[&["eval", "--model", "hf:hf", "--json"], more]);
    eval(&[]).refused(&["no data to evaluate hf:hf on", "--ids", "data.path=FILE"]);
    // Asked for, the synthetic corpus is evaluated, with sequences that fit the model's context.
    let lines = eval(&["--set", "data.kind=synthetic"]).ok().json();
    assert_eq!(lines[0]["tokens"], 4 * 32 * 16);
}

#[test]
fn a_folder_of_the_other_kind_is_answered_with_what_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf"]]).ok();
    let eval = |model: &str| phalanx(dir, &[&["eval", "--ids", "1,2", "--model", model]]);
    eval("run:hf").refused(&["hf is a Hugging Face folder", "--model hf:hf"]);
    eval("hf:runs/a").refused(&["runs/a is the folder of a run", "--model run:runs/a"]);
    phalanx(dir, &[&["export", "--run", "hf", "--out", "x"]]).refused(&["it needs no export"]);
    let from = ["train", "--set", "model.from=hf:runs/a"];
    phalanx(dir, &[&from]).refused(&["usual fix: model.from=run:runs/a"]);
}
