//! Combinations of systems, each beside one rank, where ranks are processes, and where they are on two hosts.
//!
//! The whole matrix runs on threads (`train/tests/systems/composition.rs`). Here a sample of it, in the words that users write, must be
//! equal to one rank, and move and keep what it does on threads. `PHALANX_COMPOSITION` is the seed of the sample, or `all`.

use std::path::Path;

use serde_json::Value;

use crate::chaos::Dice;
use crate::command::{Done, phalanx};
use crate::namespaces;
use crate::processes::{TINY, sets};

/// What may be chosen of each kind, with how many ranks it multiplies by.
const CHOICES: [&[(&str, usize)]; 6] = [
    &[
        ("", 1),
        ("parallel.dp=2", 2),
        ("parallel.dp=2 parallel.zero=1", 2),
        ("parallel.dp=2 parallel.zero=2", 2),
        ("parallel.dp=2 parallel.zero=3", 2),
        ("parallel.dp=2 parallel.fsdp=true", 2),
        ("parallel.dp=2 parallel.sync=dataparallel", 2),
        ("parallel.dp=2 parallel.sync=local-sgd parallel.sync_every=2", 2),
    ],
    &[
        ("", 1),
        ("parallel.tp=2", 2),
        ("parallel.tp=2 parallel.sp=true", 2),
        ("parallel.cp=2 parallel.cp_kind=ulysses", 2),
        ("parallel.cp=2 parallel.cp_kind=ring", 2),
        ("parallel.cp=2 parallel.cp_kind=rsa", 2),
        ("parallel.cp=2 parallel.cp_kind=allgather parallel.cp_order=zigzag", 2),
        ("parallel.tp=4 parallel.tp_kind=2d parallel.stream=true", 4),
    ],
    &[
        ("", 1),
        ("parallel.pp=2 parallel.schedule=gpipe", 2),
        ("parallel.pp=2 parallel.schedule=1f1b", 2),
        ("parallel.pp=2 parallel.schedule=zb-h1", 2),
        ("parallel.pp=2 parallel.schedule=interleaved", 2),
    ],
    &[("", 1), ("train.recompute=full", 1)],
    &[("", 1), ("optim.kind=lamb", 1)],
    &[("", 1), ("precision.compute=bf16 precision.weights=bf16 precision.grads=f32", 1)],
];

/// The ranks of two hosts with two each.
const RANKS: usize = 4;

/// All combinations on four ranks.
fn combinations() -> Vec<String> {
    let mut all = vec![(String::new(), 1)];
    for choices in CHOICES {
        let with = |(keys, ranks): &(String, usize)| {
            let (keys, ranks) = (keys.clone(), *ranks);
            choices.iter().map(move |(more, by)| (format!("{keys} {more}"), ranks * by))
        };
        all = all.iter().flat_map(with).collect();
    }
    all.into_iter().filter(|(_, ranks)| *ranks == RANKS).map(|(keys, _)| keys).collect()
}

/// The sample that is asked for, of this many; another one for each place.
fn drawn(place: u64, count: usize) -> Vec<String> {
    let (all, asked) = (combinations(), std::env::var("PHALANX_COMPOSITION"));
    let seed: u64 = match asked.as_deref() {
        Ok("all" | "new") => return all,
        Ok(seed) => seed.parse().expect("PHALANX_COMPOSITION is `all`, `new` or a seed"),
        Err(_) => 0,
    };
    let mut dice = Dice((2 * seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ place);
    (0..count).map(|_| all[dice.roll(all.len())].clone()).collect()
}

/// Whether a combination ran; what it moved and kept is what it does on threads. One that is refused is refused in both ways.
fn compose(dir: &Path, launch: &[&str], keys: &str) -> bool {
    let keys = format!("model.layers=4 train.microbatches=4 {keys}");
    let verify =
        |before: &[&str]| phalanx(dir, &[before, &["verify", "--steps", "2"], TINY, &sets(&keys)]);
    let (there, threads) = (verify(launch), verify(&[]));
    assert_eq!(there.code, threads.code, "{keys}: {} {}", there.err, threads.err);
    if there.code == 2 {
        return false;
    }
    let found = |done: Done| -> Value { done.ok().json().remove(0) };
    let (there, threads) = (found(there), found(threads));
    assert_eq!(there["ok"], true, "{keys}: {there}");
    for part in ["comm", "memory"] {
        assert_eq!(there[part], threads[part], "{keys}: {part}");
    }
    true
}

/// Runs a sample, most of which must not be refused.
fn compose_all(dir: &Path, launch: &[&str], drawn: &[String]) {
    let ran = drawn.iter().filter(|keys| compose(dir, launch, keys)).count();
    println!("{ran} of {} combinations ran", drawn.len());
    assert!(2 * ran > drawn.len(), "{ran} of {} ran", drawn.len());
}

#[test]
fn systems_compose_on_processes() {
    let dir = tempfile::tempdir().unwrap();
    compose_all(dir.path(), &["launch", "-n", "4", "--"], &drawn(1, 4));
}

#[test]
fn systems_compose_on_two_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let _cable = namespaces::prepare(dir.path(), RANKS / 2);
    let launch = ["launch", "-n", "4", "--hosts", "hosts", "--rsh", "./rsh", "--"];
    compose_all(dir.path(), &launch, &drawn(2, 4));
}
