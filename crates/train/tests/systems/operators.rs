//! A convolutional network whose operators are divided each in its own way: by height with rows of
//! neighbours, by channels, by features; uneven too.

use phalanx_config::{Config, Loaded, Sources};

use crate::support::{agrees, laid};

fn cnn(sets: &[&str]) -> Loaded {
    let f64 = ["precision.compute=f64", "precision.weights=f64", "precision.grads=f64"];
    let small = [
        "optim.kind=sgd",
        "train.batch_size=2",
        "train.steps=2",
        "train.eval_every=0",
        "run.threads=1",
    ];
    let all = f64.iter().chain(&small).chain(sets);
    let sources = all.fold(Sources::default().preset("mnist-cnn"), |s, set| s.set(*set));
    Config::load(&sources).unwrap_or_else(|error| panic!("{error}"))
}

/// Two fully connected layers by their features; the rest is whole, or divided by height.
const FEATURES: &str = "parallel.tp_plan=[\"fc1.* columns\", \"fc2.weight rows\"]";

/// Heights, features, both and channels on one to five ranks, which divide neither 28 rows nor 32 channels nor
/// 128 features evenly.
#[test]
fn each_division_trains_like_one_rank() {
    agrees("one rank", &cnn(&[]), None);
    for ranks in 2..=5 {
        let tp = format!("parallel.tp={ranks}");
        for how in [&["parallel.sp=true"][..], &[FEATURES], &["parallel.sp=true", FEATURES], &[]] {
            let sets = [&[tp.as_str()][..], how].concat();
            agrees(&sets.join(" "), &cnn(&sets), None);
        }
    }
    let shared = ["parallel.tp=2", "parallel.sp=true", "parallel.dp=2", "parallel.zero=3"];
    agrees("heights and shards", &cnn(&shared), None);
}

/// The first rank has one neighbour and gets one row of it: of images of 1 and of 32 channels in the
/// forward and again in the backward, and of gradients of 64 channels.
#[test]
fn a_row_of_each_neighbour_is_moved() {
    for tp in ["parallel.tp=2", "parallel.tp=4", "parallel.tp=5"] {
        let laid = laid(&cnn(&[tp, "parallel.sp=true"]), None);
        let moved = laid.moved("permute", |_| true);
        assert_eq!((moved.calls, moved.bytes), (10, 2 * 28 * (33 + 97) * 8), "{tp}");
    }
}
