//! Experts on ranks: the same tokens go to the same places, and everything agrees with one rank.

use phalanx_config::Loaded;

use crate::support::{agrees, llama, try_llama};

/// Four experts of which a token takes two, in the second of two layers, with drops and all losses.
fn mixture(sets: &[&str]) -> Loaded {
    let own = [
        "model.experts=4",
        "model.expert_ffn=6",
        "model.moe_every=2",
        "model.capacity=0.75",
        "model.z_loss=0.01",
        "model.aux_loss=0.1",
    ];
    llama(&[&own, sets].concat())
}

/// Each layout with another way to choose, to place and to balance.
#[test]
fn experts_agree_with_one_rank_in_every_layout() {
    for sets in [
        &["parallel.dp=2"][..],
        &["parallel.dp=4", "parallel.zero=3", "model.aux_scope=group", "model.group=4"],
        &["parallel.tp=2", "model.capacity=0", "model.shared_experts=2"],
        &["parallel.tp=2", "parallel.sp=true", "model.router=switch", "model.capacity=1.25"],
        &["parallel.cp=2", "model.group=4"],
        &["parallel.cp=2", "parallel.cp_kind=ring", "model.aux_scope=group"],
        &[
            "parallel.pp=2",
            "train.microbatches=2",
            "parallel.schedule=zb-h1",
            "model.residual_experts=true",
        ],
        &["parallel.dp=2", "train.microbatches=2", "train.recompute=full", "model.moe_every=1"],
    ] {
        agrees(&format!("{sets:?}"), &mixture(sets), None);
    }
}

#[test]
fn what_cannot_work_is_refused_with_what_would() {
    for (sets, reason) in [
        (&["model.experts=4", "model.top_k=5"][..], "model.top_k = 4"),
        (&["model.experts=4", "model.group=3"], "model.group = 2 or 4"),
        (&["model.experts=4", "model.router=expert-choice"], "looks ahead"),
        (&["model.experts=4", "model.router=switch", "model.top_k=2"], "model.top_k = 1"),
        (&["model.experts=4", "model.moe_every=3"], "model.moe_every = 2"),
        (&["model.capacity=2"], "model.experts = 8"),
    ] {
        let text = match try_llama(sets) {
            Ok(_) => panic!("{sets:?} was accepted"),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(reason), "{sets:?}: {text}");
    }
}
