//! The network that classifies images: what its runs say of themselves.

use serde_json::Value;

use crate::command::phalanx;

fn steps(settings: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let sets: Vec<&str> = settings.iter().flat_map(|set| ["--set", set]).collect();
    let done = phalanx(dir.path(), &[&["train", "--preset", "mnist-cnn", "--json"], &sets]).ok();
    assert!(done.err.contains(" images in ") && !done.err.contains("tokens"), "{}", done.err);
    let lines = done.json();
    let summary = &lines.last().unwrap()["summary"];
    assert!(summary["images"].is_u64() && summary.get("tokens").is_none(), "{summary}");
    lines
}

/// Before the first update all replicas are alike: how many images are right does not depend on who looks at
/// them, nor on what runs after the step.
#[test]
fn the_first_step_is_as_often_right_in_every_layout() {
    let small =
        ["train.steps=2", "train.batch_size=32", "train.eval_every=2", "train.eval_batches=1"];
    let first = |more: &[&str]| {
        let lines = steps(&[&small[..], more].concat());
        let (step, seen) = (&lines[0], lines.iter().find(|line| line["event"] == "eval").unwrap());
        assert!(seen["val_accuracy"].is_number(), "{seen}");
        (step["accuracy"].as_f64().unwrap(), step["loss"].as_f64().unwrap())
    };
    let (right, loss) = first(&[]);
    let local = ["parallel.dp=2", "parallel.sync=local-sgd"];
    for more in [
        &local[..],
        &[&local[..], &["run.ranks=processes", "train.microbatches=2"]].concat(),
        &["parallel.dp=2", "parallel.sync=average", "parallel.sync_every=0"],
        &["parallel.tp=2", "parallel.sp=true"],
        &["run.checkpoint_every=1"],
    ] {
        let (there, found) = first(more);
        assert!((found - loss).abs() < 1e-5 * loss, "{more:?}");
        assert_eq!(there, right, "{more:?}");
    }
}

/// Drawn digits are learned in fewer than half of the preset's steps: the whole of it takes half a minute on two cores.
#[test]
fn digits_are_learned() {
    let lines = steps(&["train.steps=80", "train.eval_every=80", "train.eval_batches=20"]);
    let right = lines.last().unwrap()["summary"]["val_accuracy"].as_f64().unwrap();
    assert!(right >= 0.97, "{right}");
}
