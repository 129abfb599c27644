//! The network that classifies images: what its runs say of themselves.

use std::fs;
use std::path::Path;

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
        &["parallel.tp=3", "parallel.sp=true", "run.ranks=processes"],
        &["parallel.dp=2", "parallel.tp=2", "run.ranks=processes"],
        &["run.checkpoint_every=1"],
    ] {
        let (there, found) = first(more);
        assert!((found - loss).abs() < 1e-5 * loss, "{more:?}");
        assert_eq!(there, right, "{more:?}");
    }
}

/// Heights on ranks, channels on ranks: from a checkpoint a run goes on with the same bits.
#[test]
fn a_run_of_images_goes_on_with_the_same_bits() {
    const BASE: [&str; 6] = [
        "train.batch_size=8",
        "train.eval_every=0",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "run.threads=1",
        "run.checkpoint_every=2",
    ];
    for layout in [
        &["parallel.tp=2", "parallel.sp=true"][..],
        &["parallel.tp=2", "parallel.dp=2", "parallel.zero=2"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = |words: &[&str], sets: &[&str]| {
            let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
            let done = phalanx(dir.path(), &[&["train", "--json"], words, &sets]).ok();
            let lines = done.json().into_iter().filter(|line| line.get("step").is_some());
            let seen = lines.map(|l| [&l["step"], &l["loss"], &l["accuracy"]].map(Value::clone));
            seen.collect::<Vec<_>>()
        };
        let start = |name: &str, steps: &str| {
            let own = [name, steps];
            run(&["--preset", "mnist-cnn"], &[&BASE[..], layout, &own].concat())
        };
        let whole = start("run.name=whole", "train.steps=4");
        start("run.name=a", "train.steps=2");
        let rest = run(&["--resume", "runs/a"], &["train.steps=4"]);
        assert_eq!(rest, whole[2..], "{layout:?}");
        let bytes = |name: &str| fs::read(dir.path().join("runs").join(name)).unwrap();
        assert!(bytes("a/model.safetensors") == bytes("whole/model.safetensors"), "{layout:?}");
    }
}

/// A file behind a header of big-endian numbers.
fn idx(kind: u32, dims: &[u32], bytes: usize) -> Vec<u8> {
    let numbers = std::iter::once(&kind).chain(dims).flat_map(|number| number.to_be_bytes());
    numbers.chain(std::iter::repeat_n(1, bytes)).collect()
}

/// A folder with the files of MNIST, of this many images of this size and with these labels.
fn mnist(folder: &Path, [train, held_out]: [u32; 2], side: u32, label: u8) {
    fs::create_dir_all(folder).unwrap();
    for (name, count) in [("train", train), ("t10k", held_out)] {
        let images = idx(0x803, &[count, side, side], (count * side * side) as usize);
        fs::write(folder.join(format!("{name}-images-idx3-ubyte")), images).unwrap();
        let mut labels = idx(0x801, &[count], 0);
        labels.extend(std::iter::repeat_n(label, count as usize));
        fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), labels).unwrap();
    }
}

/// The files of MNIST train; those that are missing, truncated or lie about their size, and images that the network
/// does not take, are refused with their numbers and with what works, before anything starts.
#[test]
fn files_of_images_train_or_are_refused_with_their_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let train = |folder: &str| {
        let path = format!("data.path={folder}");
        let sets =
            ["data.kind=idx", &path, "train.steps=1", "train.batch_size=2", "train.eval_every=0"];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        phalanx(dir, &[&["train", "--preset", "mnist-cnn", "--json"], &sets])
    };
    mnist(&dir.join("good"), [5, 3], 28, 9);
    let line = &train("good").ok().json()[0];
    assert!(line["accuracy"].is_number() && line["loss"].as_f64().unwrap() > 0.0, "{line}");

    train("nowhere").refused(&["nowhere/train-images-idx3-ubyte", "data.path", "usual fix"]);
    let bad = |name: &str, file: &str, bytes: &[u8]| {
        mnist(&dir.join(name), [5, 3], 28, 9);
        fs::write(dir.join(name).join(file), bytes).unwrap();
        train(name)
    };
    let (images, labels) = ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte");
    let fix = "fetch the file again";
    bad("header", images, &[0, 0, 8]).refused(&[images, "truncated: 3 bytes", fix]);
    let cut = idx(0x803, &[5, 28, 28], 5 * 784 - 1);
    bad("cut", images, &cut)
        .refused(&["says [5, 28, 28], which makes 3936 bytes, but it has 3935", fix]);
    let more = idx(0x803, &[5, 28, 28], 5 * 784 + 7);
    bad("more", images, &more).refused(&["but it has 3943", fix]);
    let huge = idx(0x803, &[u32::MAX; 3], 784);
    bad("huge", images, &huge).refused(&["4294967295", fix]);
    let gz = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0];
    bad("packed", images, &gz).refused(&["are 1f8b0800, expected 00000803", "unpack"]);
    bad("swapped", labels, &idx(0x803, &[3], 3)).refused(&["are 00000803, expected 00000801"]);
    bad("fewer", labels, &idx(0x801, &[2], 2)).refused(&[
        labels,
        "it has 2 labels",
        "has 3 images",
    ]);
    mnist(&dir.join("small"), [5, 3], 20, 9);
    train("small").refused(&["20 × 20 pixels", "the model takes 28 × 28 pixels", "usual fix"]);
    mnist(&dir.join("classes"), [5, 3], 28, 11);
    train("classes").refused(&["12 classes", "10 classes", "usual fix"]);
}

/// Drawn digits are learned in fewer than half of the preset's steps: the whole of it takes half a minute on two cores.
#[test]
fn digits_are_learned() {
    let lines = steps(&["train.steps=80", "train.eval_every=80", "train.eval_batches=20"]);
    let right = lines.last().unwrap()["summary"]["val_accuracy"].as_f64().unwrap();
    assert!(right >= 0.97, "{right}");
}
