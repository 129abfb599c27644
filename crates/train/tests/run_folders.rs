//! A run's folder is its own, complete, and refused with a remedy where it cannot be.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

use std::fs;

use phalanx_config::{Config, Loaded, Sources};
use phalanx_train::metrics::{LoadPlot, LossPlot};
use phalanx_train::rundir::RunDir;

fn loaded(root: &std::path::Path, name: &str) -> Loaded {
    let sources = Sources::default().set(format!("run.dir={}", root.display()));
    Config::load(&sources.set(format!("run.name={name}"))).unwrap()
}

#[test]
fn a_run_leaves_its_configuration_metrics_and_picture() {
    let root = tempfile::tempdir().unwrap();
    let loaded = loaded(&root.path().join("deep/runs"), "first");
    let mut run = RunDir::create(&loaded).unwrap();
    run.append(r#"{"step":1}"#).unwrap();
    run.append(r#"{"step":2}"#).unwrap();
    run.write_plots(&LossPlot::default(), &LoadPlot::default()).unwrap();
    let read = |name: &str| fs::read_to_string(run.path().join(name)).unwrap();
    assert_eq!(read("metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
    assert!(read("loss.svg").starts_with("<svg"));
    let again = Config::load(&Sources::default().file(run.path().join("config.toml"))).unwrap();
    assert_eq!(again.config, loaded.config);
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 3, "no temporary file is left");
    assert_eq!(run.weights(), run.path().join("model.safetensors"));
}

#[test]
fn no_run_writes_into_the_folder_of_another() {
    let root = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..3)
        .map(|_| RunDir::create(&loaded(root.path(), "same")).unwrap())
        .map(|run| run.path().file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["same", "same-2", "same-3"]);
}

#[test]
fn a_nameless_run_is_called_after_the_time_and_the_preset() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDir::create(&loaded(root.path(), "none")).unwrap();
    let name = run.path().file_name().unwrap().to_string_lossy().into_owned();
    let (date, rest) = name.split_once('-').unwrap();
    assert!(date.len() == 8 && date.starts_with("20"), "{name}");
    assert!(rest.ends_with("-default"), "{name}");
}

#[test]
fn a_folder_that_cannot_be_made_is_refused_with_a_remedy() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let error = RunDir::create(&loaded(&file, "x")).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    let first = format!("error: cannot create the folder {}", file.display());
    assert!(text.starts_with(&first), "{text}");
    assert!(text.contains("(--set)") && text.contains("usual fix: move the file"), "{text}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "in the way");
}

#[test]
fn a_folder_that_vanishes_is_a_failure_that_names_the_file() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDir::create(&loaded(root.path(), "x")).unwrap();
    fs::remove_dir_all(run.path()).unwrap();
    let error = run.write_plots(&LossPlot::default(), &LoadPlot::default()).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("loss.svg"), "{error}");
}
