//! The same bits twice, and the same bits on every replica.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_script::StateKind;
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{Parallel, Session, StatePiece, StateRange};
use phalanx_spmd::strategies::{Ddp, Megatron, Sequence, Ulysses, Zero};

use crate::support::{gpt, llama, models, on, settings, shared};

/// Parameters as the bits of their elements.
pub(crate) type Bits = BTreeMap<String, Vec<u64>>;

/// A session after some steps.
pub(crate) fn trained(loaded: &Loaded, parallel: Option<Parallel>, steps: usize) -> Session {
    let network = Network::new(loaded).unwrap();
    let settings = settings(loaded, parallel);
    let mut session = Session::new(&models(loaded), settings, &*network.start()).unwrap();
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    for _ in 0..steps {
        let batch = loader.next_batch().unwrap();
        with_step_data(batch, |data| session.step(data, 0.01)).unwrap();
    }
    session
}

/// The parameters after some steps.
pub(crate) fn params(loaded: &Loaded, parallel: Option<Parallel>, steps: usize) -> Bits {
    bits(trained(loaded, parallel, steps).params().unwrap())
}

fn bits(params: BTreeMap<String, phalanx_models::hf::WeightTensor>) -> Bits {
    let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect();
    params.into_iter().map(|(name, tensor)| (name, bits(tensor.to_f64()))).collect()
}

#[test]
fn the_same_configuration_gives_the_same_bits_twice() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"];
    for sets in [f32, bf16] {
        for threads in ["run.threads=1", "run.threads=2"] {
            let loaded = llama(&[&sets[..], &[threads]].concat());
            let run = || {
                let strategies = [
                    shared(Zero::stage(3)),
                    shared(Megatron::default()),
                    shared(Sequence::default()),
                    shared(Ulysses::default()),
                ];
                params(&loaded, Some(on("dp=2 cp=2 tp=2", strategies)), 3)
            };
            assert_eq!(run(), run(), "{sets:?}, {threads}");
        }
    }
}

/// Stages of pipelines in both directions are on two stage groups each, which hold the same bits after every step.
#[test]
fn replicas_of_a_stage_are_bitwise_identical() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    let chimera = ["parallel.schedule=chimera", "parallel.concat=doubling"];
    let layouts: [&[&str]; 3] = [&chimera, &["parallel.schedule=dualpipe"], &chimera[..1]];
    for (layout, m) in layouts.into_iter().zip(["8", "8", "4"]) {
        let m = format!("train.microbatches={m}");
        let sets = ["model.layers=4", "parallel.pp=4", "train.batch_size=16", &m];
        let loaded = llama(&[&f32[..], &sets, layout].concat());
        for steps in 1..=3 {
            let mut session = trained(&loaded, None, steps);
            let mut twice = 0;
            for param in 0..session.parameters().len() {
                let elements = 0..session.parameters()[param].elements();
                let range = StateRange { param, kind: StateKind::Weights, elements };
                let mut holders = session.held(&range).unwrap();
                holders.retain(|held| !held.is_empty());
                twice += usize::from(holders.len() == 2);
                assert!(holders.windows(2).all(|pair| pair[0] == pair[1]), "{layout:?}, {steps}");
            }
            assert_eq!(twice, session.parameters().len(), "each is on two stage groups");
        }
    }
}

/// After some steps all ranks that hold the same part of the weights hold the same bits of it.
#[test]
fn replicas_are_bitwise_identical() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    for loaded in [llama(&f32), gpt(&f32)] {
        for data in [shared(Ddp::default()), shared(Zero::stage(1)), shared(Zero::stage(2))] {
            let strategies = [data, shared(Megatron::default()), shared(Sequence::default())];
            let parallel = on("dp=4 tp=2", strategies);
            let mesh = parallel.mesh.clone();
            let mut session = trained(&loaded, Some(parallel), 4);
            let mut own: Vec<Vec<(usize, StatePiece)>> = vec![Vec::new(); mesh.ranks()];
            for param in 0..session.parameters().len() {
                let elements = 0..session.parameters()[param].elements();
                let range = StateRange { param, kind: StateKind::Weights, elements };
                for (own, held) in own.iter_mut().zip(session.held(&range).unwrap()) {
                    own.extend(held.into_iter().map(|piece| (param, piece)));
                }
            }
            let dp = mesh.expand("dp").unwrap();
            for rank in 0..own.len() {
                for other in mesh.group(rank, &dp) {
                    assert_eq!(own[rank], own[other], "ranks {rank} and {other}");
                }
            }
            assert_ne!(own[0], own[1], "ranks along tp hold different parts");
        }
    }
}

/// Blocks are made of a program before it is cut into parts: what is computed again has the bits of what would have been kept.
#[test]
fn what_comes_block_by_block_again_has_the_same_bits() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"];
    for layout in [
        &["parallel.tp=4", "parallel.tp_kind=2d", "parallel.stream=true"][..],
        &["parallel.tp=8", "parallel.tp_kind=3d", "parallel.stream=true"],
        &["parallel.tp=2", "parallel.sp=true", "parallel.stream=true"],
        &["parallel.cp=4", "parallel.cp_kind=ring"],
        &["parallel.cp=2", "parallel.cp_kind=rsa"],
    ] {
        for precision in [&f32, &bf16] {
            let run = |recompute: &str| {
                let more = [recompute, "model.dropout=0.1"];
                params(&gpt(&[layout, &precision[..], &more].concat()), None, 3)
            };
            let same = run("train.recompute=none") == run("train.recompute=full");
            assert!(same, "{layout:?} {precision:?}");
        }
    }
}
