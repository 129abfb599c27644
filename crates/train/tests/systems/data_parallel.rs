//! DataParallel: one rank updates for all, with the bits of DDP, and pays for it.

use phalanx_script::Category;
use phalanx_spmd::strategies::{AllGatherKv, DataParallel, Ddp, Megatron};

use crate::bits::params;
use crate::support::{agrees, gpt, is_gather, is_reduce, laid, llama, on, shared};

#[test]
fn one_rank_updates_for_all() {
    let own = || shared(DataParallel::default());
    for sets in [&["train.microbatches=2"][..], &["optim.kind=sgd"], &["optim.kind=lamb"]] {
        agrees("llama", &llama(sets), Some(on("dp=4", [own()])));
        agrees("gpt2", &gpt(sets), Some(on("dp=2 tp=2", [own(), shared(Megatron::default())])));
    }
    let context = [own(), shared(AllGatherKv::default())];
    agrees("context", &llama(&[]), Some(on("dp=2 cp=2", context)));
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"];
    agrees("masters", &llama(&bf16), Some(on("dp=2", [own()])));
}

/// (N−1)Ψ gradients come in to the first rank and (N−1)Ψ weights go out, however many micro-batches
/// accumulate.
#[test]
fn all_that_moves_goes_through_one_rank() {
    for parts in ["train.microbatches=1", "train.microbatches=2"] {
        let laid = laid(&llama(&[parts]), Some(on("dp=4", [shared(DataParallel::default())])));
        let (bytes, units) = (laid.elements() * 8, laid.plan.units.len() as u64);
        let (collected, given) =
            (laid.moved("reduce", is_reduce), laid.moved("broadcast", is_gather));
        assert_eq!((collected.calls, collected.bytes), (units, 3 * bytes));
        // The others count what they get.
        assert_eq!((given.calls, given.bytes), (units, 0));
    }
}

/// (w+g+k)Ψ on the first rank, (w+g)Ψ on the others.
#[test]
fn others_keep_no_optimizer_state() {
    let laid = laid(&llama(&[]), Some(on("dp=2", [shared(DataParallel::default())])));
    let kept = |rank: usize| {
        let script = laid.lowered.plan(rank).unwrap().script;
        let of = |category: Category| {
            let buffers = script.buffers.iter().filter(|buffer| buffer.category == category);
            buffers.map(|buffer| buffer.bytes as u64).sum::<u64>()
        };
        [Category::Weights, Category::Gradients, Category::Optimizer].map(of)
    };
    let bytes = laid.elements() * 8;
    assert_eq!(kept(0), [bytes, bytes, 2 * bytes]);
    assert_eq!(kept(1), [bytes, bytes, 0]);
}

#[test]
fn it_has_the_bits_of_ddp() {
    for precision in [
        ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"],
        ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"],
    ] {
        // The norm adds up units, and DDP has other units.
        let loaded = llama(&[&precision[..], &["optim.clip=none"]].concat());
        let run = |data| params(&loaded, Some(on("dp=4", [data])), 3);
        let same = run(shared(Ddp::default())) == run(shared(DataParallel::default()));
        assert!(same, "{precision:?}");
    }
}
