//! Stages whose meshes differ: what passes between two tensor ranks and four.

use phalanx_inspect::verify::verify_as;
use phalanx_pipeline::{NamedSchedule, Part, Placement, Schedule, Turn};
use phalanx_script::{Kind, Message};
use phalanx_session::host;
use phalanx_session::{Lowered, Parallel, Pipeline, PipelineOrder, SharedStrategy};
use phalanx_spmd::strategies::{Megatron, Sequence};

use crate::support::{agrees, gpt, llama, models, on, settings, shared};

const MICROBATCHES: u64 = 4;
const SETS: [&str; 3] = ["model.layers=4", "train.microbatches=4", "model.kv_heads=4"];
/// Bytes of one boundary value: two sequences of eight positions, 16 wide, in f64.
const VALUE: u64 = 2 * 8 * 16 * 8;
/// Each verification takes as many steps.
const STEPS: u64 = 2;

/// A pipeline over these meshes, one after the other.
fn pipeline(meshes: &[&str], named: NamedSchedule, sequence: bool) -> Parallel {
    let mut strategies: Vec<SharedStrategy> = vec![shared(Megatron::default())];
    strategies.extend(sequence.then(|| shared(Sequence::default())));
    let meshes = meshes.iter().map(|mesh| mesh.parse().unwrap()).collect();
    let pipeline = Pipeline { order: PipelineOrder::Named(named), meshes, ..Pipeline::default() };
    Parallel { strategies, pipeline, ..Parallel::default() }
}

#[test]
fn two_tensor_ranks_and_four_do_what_one_rank_does() {
    for meshes in [["tp=2", "tp=4"], ["tp=4", "tp=2"]] {
        for named in [
            NamedSchedule::OneFOneB,
            NamedSchedule::ZbH1,
            NamedSchedule::ZbV,
            NamedSchedule::VHalf,
            NamedSchedule::BreadthFirst,
        ] {
            for sequence in [false, true] {
                let what = format!("{meshes:?}, {named}, sequence parallelism {sequence}");
                let parallel = pipeline(&meshes, named, sequence);
                let found = agrees(&what, &llama(&SETS), Some(parallel));
                let sent = found.comm.iter().find(|row| row.op == "send").unwrap();
                assert_eq!(sent.bytes_predicted, sent.bytes_measured, "{what}");
                // Looped chunks cross three times, those of a V twice (the middle ones are neighbours),
                // and back again. A crossing moves the value once, however many ranks hold it: in
                // the parts of its sequence, or in slices that its readers gather.
                let crossings = match named {
                    NamedSchedule::BreadthFirst => 3,
                    named if named.is_vee() => 2,
                    _ => 1,
                };
                let expected = STEPS * MICROBATCHES * crossings * 2 * VALUE;
                assert_eq!(sent.bytes_measured, expected, "{what}");
            }
        }
    }
}

#[test]
fn three_stages_of_three_shapes_do_what_one_rank_does() {
    for sequence in [false, true] {
        let parallel = pipeline(&["tp=1", "tp=4", "tp=2"], NamedSchedule::OneFOneB, sequence);
        let what = format!("sequence parallelism {sequence}");
        let sets = [&SETS[..], &["train.recompute=full"]].concat();
        let found = agrees(&what, &llama(&sets), Some(parallel));
        let sent = found.comm.iter().find(|row| row.op == "send").unwrap();
        assert_eq!(sent.bytes_measured, STEPS * MICROBATCHES * 4 * VALUE, "{what}");
    }
}

/// Megatron's scatter/gather: of a value that t tensor ranks hold, each gets 1/t from the device before,
/// and has all of it when its turn begins.
#[test]
fn tensor_ranks_receive_slices_and_gather_them() {
    for (meshes, sizes) in [
        (["tp=2", "tp=4"], [2, 4]),
        (["tp=4", "tp=2"], [4, 2]),
        (["tp=2", "tp=2"], [2, 2]),
        (["dp=2 tp=2", "dp=2 tp=2"], [4, 4]),
    ] {
        let loaded = llama(&SETS);
        let parallel = pipeline(&meshes, NamedSchedule::OneFOneB, false);
        let lowered = Lowered::new(&models(&loaded), settings(&loaded, Some(parallel))).unwrap();
        for rank in 0..sizes[0] + sizes[1] {
            let script = lowered.plan(rank).unwrap().script;
            let part = VALUE as usize / sizes[usize::from(rank >= sizes[0])];
            let (mut received, mut gathered) = (0, 0);
            for action in &script.actions {
                match &action.kind {
                    Kind::Receive { messages, .. } => {
                        let bytes: usize = messages.iter().map(Message::bytes).sum();
                        assert_eq!(bytes, part, "{meshes:?}, rank {rank}: {}", action.label);
                        received += 1;
                    }
                    Kind::Gather(_) => gathered += 1,
                    _ => (),
                }
            }
            assert_eq!([received, gathered], [MICROBATCHES; 2], "{meshes:?}, rank {rank}");
        }
    }
}

/// A weight that two devices share has one gradient, whose parts must lie alike on both.
#[test]
fn tied_weights_across_meshes_that_differ_are_refused() {
    let loaded = gpt(&["model.layers=4", "train.microbatches=4"]);
    let alike = pipeline(&["tp=2", "tp=2"], NamedSchedule::OneFOneB, false);
    agrees("meshes that are alike", &loaded, Some(alike));
    let parallel = pipeline(&["tp=2", "tp=4"], NamedSchedule::OneFOneB, false);
    let told = verify_as(&loaded, settings(&loaded, Some(parallel)), 1, &*host::threads());
    let error = told.unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    for words in ["shared by stage groups on different meshes, (tp=2) and (tp=4)", "or untie it"] {
        assert!(error.to_string().contains(words), "`{words}` is not in: {error}");
    }
}

#[test]
fn the_layout_is_told_stage_by_stage() {
    let parallel = pipeline(&["tp=2", "tp=4"], NamedSchedule::ZbH1, true);
    let loaded = llama(&SETS);
    let lowered = Lowered::new(&models(&loaded), settings(&loaded, Some(parallel))).unwrap();
    let told = lowered.describe();
    assert!(told.starts_with("6 ranks, (tp 2) → (tp 4): "), "{told}");
    assert!(told.contains("zb-h1"), "{told}");
}

/// Four ranks share five positions: one has padding alone, which nobody sends.
#[test]
fn padding_of_what_is_received_is_zero() {
    for schedule in ["1f1b", "zb-v"] {
        let schedule = format!("parallel.schedule={schedule}");
        let loaded = llama(&[
            "model.layers=4",
            "model.kv_heads=4",
            "parallel.pp=2",
            "parallel.tp=4",
            "parallel.sp=true",
            "train.seq_len=5",
            "train.microbatches=2",
            &schedule,
        ]);
        agrees(&schedule, &loaded, None);
    }
}

/// A table may name versions of weights, which no run keeps yet.
#[test]
fn versions_of_weights_are_refused() {
    let turn = |part, version| Turn { part, microbatch: 0, chunk: 0, version };
    let list = vec![turn(Part::F, 1), turn(Part::BW, 1)];
    let two = Placement::looped(2, 1).unwrap();
    let schedule = Schedule::from_lists("own", 1, two, vec![list.clone(), list]).unwrap();
    let pipeline = Pipeline { order: schedule.into(), ..Pipeline::default() };
    let parallel = Parallel { pipeline, ..on("pp=2", []) };
    let loaded = llama(&[]);
    let told = Lowered::new(&models(&loaded), settings(&loaded, Some(parallel)));
    let told = told.err().unwrap().to_string();
    assert!(told.contains("F0 of stage group 0 uses another weight version"), "{told}");
}
