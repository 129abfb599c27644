//! A convolutional network whose operators are divided each in its own way: by height with rows of
//! neighbours, by channels, by features; uneven too.

use phalanx_config::{Config, Loaded, Sources};

use crate::support::{agrees, laid};

fn cnn(sets: &[&str]) -> Loaded {
    let f64 = ["precision.compute=f64", "precision.weights=f64", "precision.grads=f64"];
    let small = ["train.batch_size=4", "train.steps=2", "train.eval_every=0", "run.threads=1"];
    let all = f64.iter().chain(&small).chain(sets);
    let sources = all.fold(Sources::default().preset("mnist-cnn"), |s, set| s.set(*set));
    Config::load(&sources).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn each_division_trains_like_one_rank() {
    let both = "parallel.tp_plan=[\"fc1.* columns\", \"fc2.weight rows\"]";
    for sets in [
        &["parallel.tp=5", "parallel.sp=true"][..],
        &["parallel.tp=3", "parallel.sp=true", both],
        &["parallel.tp=3"],
        &["parallel.tp=2", "parallel.sp=true", "parallel.dp=2", "parallel.zero=3"],
    ] {
        agrees(&sets.join(" "), &cnn(sets), None);
    }
}

/// The first rank has one neighbour and gets one row of it: of images of 1 and of 32 channels in the
/// forward and again in the backward, and of gradients of 64 channels.
#[test]
fn a_row_of_each_neighbour_is_moved() {
    for tp in ["parallel.tp=2", "parallel.tp=4", "parallel.tp=5"] {
        let laid = laid(&cnn(&[tp, "parallel.sp=true"]), None);
        let moved = laid.moved("permute", |_| true);
        assert_eq!((moved.calls, moved.bytes), (10, 4 * 28 * (33 + 97) * 8), "{tp}");
    }
}
