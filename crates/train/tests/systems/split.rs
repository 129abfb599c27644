//! Masters in halves, of which weights are the upper ones: the bits of whole masters in 2 bytes less, in every
//! layout, and through checkpoints.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use phalanx_checkpoint::{Checkpoint, FORMAT, FileSource, Manifest};
use phalanx_config::Loaded;
use phalanx_script::{Category, StateKind};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::{Prepared, Restored, SaveTargets, Session};

use crate::bits::{Bits, trained};
use crate::support::{agrees, laid, llama, models, settings, try_llama};

const NARROW: [&str; 4] = [
    "precision.compute=bf16",
    "precision.weights=bf16",
    "precision.grads=bf16",
    "run.checkpoint_every=1",
];

fn narrow(masters: &str, more: &[&str]) -> Loaded {
    let masters = format!("precision.masters={masters}");
    llama(&[&NARROW[..], &[masters.as_str()], more].concat())
}

/// Masters and optimizer state, as bits.
fn state(session: &mut Session) -> BTreeMap<String, Bits> {
    let params: Vec<(usize, String, usize)> = (session.parameters().iter().enumerate())
        .map(|(i, param)| (i, param.name.clone(), param.elements()))
        .collect();
    let kinds = [StateKind::Master, StateKind::Optimizer(0), StateKind::Optimizer(1)];
    let mut all = BTreeMap::new();
    for kind in kinds {
        let of = |(index, name, elements): &(usize, String, usize)| {
            let (dtype, bytes) = session.read(*index, kind, 0..*elements).unwrap();
            assert_eq!(dtype, phalanx_ir::DType::F32);
            let bits = bytes.as_chunks::<4>().0.iter();
            (name.clone(), bits.map(|b| u64::from(u32::from_ne_bytes(*b))).collect())
        };
        all.insert(kind.to_string(), params.iter().map(of).collect());
    }
    all
}

#[test]
fn halves_are_updated_as_whole_masters_are() {
    for (optimizer, more) in [
        ("adamw", "parallel.zero=0"),
        ("adamw", "parallel.zero=2"),
        ("adam", "parallel.zero=1"),
        ("adamw", "parallel.zero=3"),
    ] {
        let sets = [format!("optim.kind={optimizer}"), "parallel.dp=2".to_owned(), more.to_owned()];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let [whole, split] =
            ["whole", "split"].map(|masters| state(&mut trained(&narrow(masters, &sets), None, 1)));
        assert_eq!(whole, split, "{sets:?}");
    }
}

#[test]
fn every_layout_trains_halves_like_one_rank() {
    for layout in [
        &["optim.kind=sgd"][..],
        &["optim.kind=lion", "parallel.dp=2", "parallel.zero=1"],
        &["parallel.dp=2", "parallel.zero=2"],
        &["parallel.dp=2", "parallel.zero=3", "parallel.tp=2"],
        &["parallel.dp=2", "parallel.sync=dataparallel"],
        &["parallel.pp=2", "train.microbatches=2"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.schedule=pipedream-2bw"],
    ] {
        agrees(&format!("{layout:?}"), &narrow("split", layout), None);
    }
}

/// Of (2, 2, 12) bytes of a parameter, 2 are gone.
#[test]
fn halves_take_two_bytes_less() {
    let bytes = |masters| {
        let laid = laid(&narrow(masters, &[]), None);
        let buffers = laid.script().buffers.iter();
        let state = buffers.filter(|b| b.category == Category::Optimizer).map(|b| b.bytes as u64);
        (state.sum::<u64>(), laid.elements())
    };
    let ((whole, elements), (split, _)) = (bytes("whole"), bytes("split"));
    assert_eq!((whole, split), (12 * elements, 10 * elements));
}

/// A checkpoint of either kind goes on with the other one, in other layouts, with the same bits.
#[test]
fn checkpoints_of_halves_and_of_whole_masters_are_the_same() {
    let layouts = [
        &["parallel.dp=2", "parallel.zero=1"][..],
        &["parallel.tp=2"],
        &["parallel.pp=2", "train.microbatches=2"],
        &["parallel.dp=2", "parallel.zero=3"],
    ];
    let folder = tempfile::tempdir().unwrap();
    for (index, from) in ["whole", "split"].into_iter().enumerate() {
        for (number, layout) in layouts.iter().enumerate() {
            let saved = folder.path().join(format!("{from}-{number}"));
            let mut session = trained(&narrow(from, layout), None, 2);
            let expected = state(&mut session);
            let checkpoint = save(&mut session, &saved);
            checkpoint.check(|_| {}).unwrap();
            let into = ["split", "whole"][(index + number) % 2];
            let loaded = narrow(into, layouts[(number + 1) % layouts.len()]);
            let mut next = resumed(&loaded, &checkpoint);
            assert_eq!(state(&mut next), expected, "{from} in {layout:?} to {into}");
            // Weights are the masters, rounded.
            step(&mut next, &loaded);
        }
    }
}

/// Goes on from a checkpoint with the bits of a run that was never interrupted.
#[test]
fn a_run_with_halves_resumes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = narrow("split", &["parallel.dp=2", "parallel.zero=2"]);
    let mut session = trained(&loaded, None, 2);
    let checkpoint = save(&mut session, folder.path());
    let mut next = resumed(&loaded, &checkpoint);
    step(&mut session, &loaded);
    step(&mut next, &loaded);
    assert_eq!(state(&mut next), state(&mut session));
}

#[test]
fn what_cannot_be_split_is_refused() {
    for (more, said) in [
        (&["precision.weights=f32"][..], "precision.weights = f32"),
        (&["optim.kind=lamb"], "optim.kind = \"lamb\""),
        (&["parallel.dp=2", "parallel.sync=average"], "parallel.sync = \"average\""),
    ] {
        let sets = [&NARROW[..], &["precision.masters=split"], more].concat();
        let error = try_llama(&sets).unwrap_err().to_string();
        assert!(error.contains("precision.masters = \"split\" does not work with"), "{error}");
        assert!(error.contains(said), "{error}");
    }
}

fn step(session: &mut Session, loaded: &Loaded) {
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    with_step_data(loader.next_batch().unwrap(), |data| session.step(data, 0.01)).unwrap();
}

fn resumed(loaded: &Loaded, checkpoint: &Checkpoint) -> Session {
    let own = settings(loaded, None);
    let optimizer = own.optimizer;
    let prepared = Prepared::new(&models(loaded), own).unwrap();
    let restored = Restored::new(checkpoint, prepared.parameters(), &optimizer, 1).unwrap();
    prepared.resume(&restored, 2).unwrap()
}

fn save(session: &mut Session, folder: &Path) -> Checkpoint {
    std::fs::create_dir_all(folder).unwrap();
    session.save_now(SaveTargets { folder: Some(folder), copy: None }).unwrap();
    let files = session.saved().unwrap().disk;
    let sources = files.iter().map(|file| {
        let source = File::open(folder.join(&file.name)).unwrap();
        Box::new(source) as Box<dyn FileSource>
    });
    let sources = sources.collect();
    let manifest = Manifest {
        format: FORMAT,
        step: 2,
        samples: 0,
        seed: 0,
        corpus: String::new(),
        model: None,
        layout: String::new(),
        products: String::new(),
        scalars: BTreeMap::new(),
        records: Vec::new(),
        experts: None,
        kinds: BTreeMap::new(),
        files,
    };
    Checkpoint::over(folder, manifest, sources).unwrap()
}
