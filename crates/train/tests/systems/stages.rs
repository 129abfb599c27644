//! Stages whose meshes differ: what passes between two tensor ranks and four.

use phalanx_pipeline::{NamedSchedule, Part, Placement, Schedule, Turn};
use phalanx_script::{Action, BufferKey, Kind, Message, Script, check_together};
use phalanx_session::{Lowered, Parallel, Pipeline, PipelineOrder, SharedStrategy};
use phalanx_spmd::strategies::{DataParallel, Ddp, Fsdp, Megatron, Sequence, Zero};

use crate::planted::without;

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

/// Stages on these meshes, with a way to share what ranks hold.
fn sharing(meshes: &[&str], named: NamedSchedule, more: Vec<SharedStrategy>) -> Parallel {
    let own = pipeline(meshes, named, false);
    Parallel { strategies: [own.strategies, more].concat(), ..own }
}

/// The gradient of a table that both stages have crosses to the first one, and the sum comes back: once each, however
/// many ranks hold it, and without its padding.
#[test]
fn tied_weights_on_meshes_that_differ_do_what_one_rank_does() {
    let table = 29 * 16 * 8;
    for meshes in [["tp=2", "tp=4"], ["tp=4", "tp=2"], ["tp=1", "tp=4"], ["tp=4", "tp=1"]] {
        for named in [NamedSchedule::OneFOneB, NamedSchedule::ZbV, NamedSchedule::ZbH1] {
            let what = format!("{meshes:?}, {named}");
            let loaded = gpt(&["model.layers=4", "train.microbatches=4", "model.dropout=0.1"]);
            let found = agrees(&what, &loaded, Some(pipeline(&meshes, named, false)));
            let sent = found.comm.iter().find(|row| row.op == "send").unwrap();
            // In a V the first stage group has both ends of the model, and nothing is tied across.
            let (crossings, tied) = if named.is_vee() { (2, 0) } else { (1, 2 * table) };
            let expected = STEPS * (MICROBATCHES * crossings * 2 * VALUE + tied);
            assert_eq!(sent.bytes_measured, expected, "{what}");
        }
    }
}

/// The same where ranks share gradients and state within each stage, in shards or not.
#[test]
fn tied_weights_on_meshes_that_differ_may_lie_in_shards() {
    let zero = |stage| shared(Zero::stage(stage));
    let (one, two) = (["dp=2 tp=2", "dp=4 tp=1"], ["dp=2 tp=1", "dp=4 tp=2"]);
    for (meshes, named, more) in [
        (one, NamedSchedule::OneFOneB, vec![shared(Ddp::default())]),
        (two, NamedSchedule::ZbH1, vec![shared(Ddp::default())]),
        (one, NamedSchedule::OneFOneB, vec![zero(1)]),
        (two, NamedSchedule::GPipe, vec![zero(1)]),
        (one, NamedSchedule::GPipe, vec![zero(2)]),
        (two, NamedSchedule::OneFOneB, vec![zero(2)]),
        (one, NamedSchedule::ZbH1, vec![zero(3)]),
        (two, NamedSchedule::OneFOneB, vec![zero(3)]),
        (one, NamedSchedule::OneFOneB, vec![shared(Fsdp::default())]),
        (one, NamedSchedule::OneFOneB, vec![shared(DataParallel::default())]),
        (two, NamedSchedule::PipeDream2bw, vec![shared(Ddp::default())]),
        (one, NamedSchedule::PipeDream2bw, vec![zero(2)]),
    ] {
        let names: Vec<&str> = more.iter().map(|own| own.name()).collect();
        let what = format!("{meshes:?}, {named}, {names:?}");
        let sets = ["model.layers=4", "train.microbatches=4", "train.batch_size=16"];
        agrees(&what, &gpt(&sets), Some(sharing(&meshes, named, more)));
    }
}

/// Every action of such a sum is needed: without it a script contradicts itself or the other stage group.
#[test]
fn a_part_of_a_tied_sum_that_is_missing_is_found() {
    let loaded = gpt(&["model.layers=4", "train.microbatches=2"]);
    let parallel = pipeline(&["tp=1", "tp=2"], NamedSchedule::OneFOneB, false);
    let lowered = Lowered::new(&models(&loaded), settings(&loaded, Some(parallel))).unwrap();
    let scripts: Vec<Script> = (0..3).map(|rank| lowered.plan(rank).unwrap().script).collect();
    check_together(&scripts).unwrap();
    let mut tried = 0;
    for (rank, script) in scripts.iter().enumerate() {
        for (at, action) in script.actions.iter().enumerate() {
            let buffer = match &action.kind {
                Kind::Send { buffer, .. } | Kind::Receive { buffer, .. } => *buffer,
                Kind::Reduce { from, .. } => *from,
                _ => continue,
            };
            let mut tied = script.accumulators.iter().filter(|own| !own.brought.is_empty());
            if !tied.any(|own| own.buffer == buffer) {
                continue;
            }
            let mut planted = scripts.clone();
            planted[rank] = without(script, at);
            assert!(check_together(&planted).is_err(), "rank {rank}: {}", action.label);
            tried += 1;
        }
    }
    // The first stage receives, adds and sends; both ranks of the other one send and receive.
    assert_eq!(tried, 3 + 2 * 2);
    // A sum that is sent before it is one.
    let mut early = scripts[0].clone();
    let is = |action: &Action, key: fn(&BufferKey) -> bool| match &action.kind {
        Kind::Reduce { from, .. } => key(&scripts[0].buffers[from.0].key),
        Kind::Send { buffer, .. } => key(&scripts[0].buffers[buffer.0].key),
        _ => false,
    };
    let first = |key: fn(&BufferKey) -> bool| {
        early.actions.iter().position(|action| is(action, key)).unwrap()
    };
    let add = first(|key| matches!(key, BufferKey::Tied { .. }));
    let send = first(|key| matches!(key, BufferKey::State(_)));
    early.actions.swap(add, send);
    let said = phalanx_script::check(&early).unwrap_err().to_string();
    assert!(said.contains("was already sent to the stage groups that share it"), "{said}");
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
