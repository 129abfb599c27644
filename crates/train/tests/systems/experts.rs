//! Experts on ranks: the same tokens go to the same places, and everything agrees with one rank.

use phalanx_config::Loaded;
use phalanx_inspect::verify::CommRow;
use phalanx_spmd::strategies::{Ddp, ExpertParallel, Zero};

use crate::support::{agrees, laid, llama, on, shared, try_llama};

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

/// Experts 0 and 2 on the first of two ranks.
const DEALT: &str = "parallel.expert_placement=round-robin";

/// Experts on some of the data-parallel ranks, with every way to share the rest.
#[test]
fn experts_on_their_own_ranks_agree_with_one() {
    let all = "parallel.expert_exchange=all-to-all";
    for sets in [
        &["parallel.dp=2", "parallel.ep=2", all][..],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=all-gather"],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=1", "model.router=switch"],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=2", "train.microbatches=2", all],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=3", "train.recompute=full", all],
        &["parallel.dp=4", "parallel.ep=4", "parallel.fsdp=true", "parallel.dp_shard=2"],
        &["parallel.dp=4", "parallel.ep=2", "parallel.sync=dataparallel", all],
        &["parallel.dp=4", "parallel.ep=4", "parallel.expert_exchange=hierarchical"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "model.capacity=0", all],
        &["parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "parallel.sp=true", all],
        &[
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.tp=2",
            "parallel.sp=true",
            "parallel.expert_exchange=coordinated",
        ],
        &["parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "model.group=4", all],
        &["parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "parallel.cp_kind=ring"],
        &[
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.pp=2",
            "parallel.schedule=zb-v",
            "train.microbatches=2",
            "model.layers=4",
            all,
        ],
        &["parallel.dp=2", "parallel.ep=2", "optim.kind=lamb", "model.shared_experts=1", all],
        &["parallel.dp=2", "parallel.ep=2", "model.router=gshard", "model.jitter=0.1", all],
        &["parallel.tp=2", "parallel.sp=true", "model.router=gshard", "train.microbatches=2"],
        &["parallel.cp=2", "parallel.zero=1", "model.router=switch", "model.jitter=0.1"],
        &["parallel.dp=2", "parallel.ep=2", "model.router=noisy", "train.microbatches=2", all],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=weights"],
        &[
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.pp=2",
            "model.moe_every=1",
            "model.late_experts=6",
            "model.late_layers=1",
            "model.residual_experts=true",
            all,
        ],
        &[
            "parallel.dp=4",
            "parallel.ep=2",
            "parallel.expert_exchange=weights",
            "parallel.zero=3",
            "train.recompute=full",
        ],
        &[
            "parallel.dp=4",
            "parallel.ep=2",
            "parallel.comm_priority=lina",
            "parallel.bucket_mib=1",
            all,
        ],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=2", DEALT, all],
        &["parallel.dp=4", "parallel.ep=2", "model.capacity=0", "parallel.zero=3", DEALT, all],
        &["parallel.dp=2", "parallel.ep=2", "optim.kind=adafactor", "parallel.tp=2", DEALT],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=weights", DEALT],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=weights", "model.capacity=0"],
        &[
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.pp=2",
            "model.capacity=0",
            "model.router=gshard",
            "parallel.expert_exchange=all-gather",
            DEALT,
        ],
        &["parallel.cp=2", "model.router=noisy", "model.group=4", "train.recompute=full"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "model.expert_dropout=0.4", all],
    ] {
        agrees(&format!("{sets:?}"), &mixture(sets), None);
    }
}

/// Rows of experts packed one behind the other, with every way to meet and to share the rest. Experts are chosen
/// by few tokens or by many; with `gshard` some choices do not stand.
#[test]
fn packed_rows_agree_with_one_rank_in_every_layout() {
    let exchange = |name: &str| format!("parallel.expert_exchange={name}");
    let [all, gather, steps, apart] =
        ["all-to-all", "all-gather", "hierarchical", "coordinated"].map(exchange);
    let ep = ["parallel.dp=2", "parallel.ep=2"];
    for (ranks, sets) in [
        (&["parallel.dp=2"][..], &["parallel.zero=3", "model.group=4", "train.microbatches=2"][..]),
        (&["parallel.tp=2"], &["parallel.sp=true", "model.router=gshard"]),
        (&["parallel.cp=2"], &["parallel.cp_kind=ring", "model.group=4", "model.top_k=3"]),
        (
            &["parallel.pp=2"],
            &["train.microbatches=2", "parallel.schedule=zb-h1", "model.moe_every=1"],
        ),
        (&["parallel.tp=4"], &["parallel.tp_kind=2d", "train.batch_size=32"]),
        (&ep, &[&all, "train.recompute=full"]),
        (&ep, &[&gather, "model.router=gshard", "train.microbatches=2"]),
        (&ep, &[&all, "parallel.tp=2", "parallel.sp=true", "model.group=4"]),
        (&ep, &[&apart, "parallel.tp=2", "parallel.sp=true", "model.top_k=1"]),
        (&ep, &[&all, "parallel.cp=2", "model.group=4", "model.router=switch"]),
        (
            &ep,
            &[
                &gather,
                "parallel.pp=2",
                "train.microbatches=2",
                "parallel.schedule=zb-v",
                "model.layers=4",
            ],
        ),
        (&["parallel.dp=4", "parallel.ep=2"], &[&all, "parallel.zero=3", "model.top_k=3"]),
        (&["parallel.dp=4", "parallel.ep=2"], &["parallel.fsdp=true", "optim.kind=lamb"]),
        (&["parallel.dp=4", "parallel.ep=4"], &[&steps, "parallel.zero=1"]),
        (&["parallel.dp=4", "parallel.ep=4"], &[&gather, "model.router=switch"]),
    ] {
        let sets = [ranks, sets, &["model.capacity=0"]].concat();
        agrees(&format!("{sets:?}"), &mixture(&sets), None);
    }
}

/// Four exchanges for each layer with experts, micro-batch and step, of as many rows as there are: at most
/// experts · places for each group; what a rank keeps it does not send. Mixture has one such layer, a batch of 8
/// samples of 8 tokens and width 16; 3 places for each of 4 experts; verify takes two steps in f64.
#[test]
fn an_exchange_moves_what_the_formula_says() {
    let rows = |sets: &[&str]| -> Vec<CommRow> {
        let found = agrees(&format!("{sets:?}"), &mixture(sets), None);
        found.comm.into_iter().filter(|row| row.op == "all_to_all").collect()
    };
    let bytes: u64 = (2 * 4) * (4 * 3) * 8 * 16 * 8;
    // The axes and calls of each, its bytes, and those of full places.
    let moved = |sets: &[&str], full: &[(&str, u64, u64)]| -> Vec<u64> {
        let found = rows(sets);
        let seen = found.iter().map(|row| (row.axes.join(","), row.count));
        let told: Vec<(String, u64)> =
            full.iter().map(|(axes, count, _)| ((*axes).to_owned(), *count)).collect();
        assert_eq!(seen.collect::<Vec<_>>(), told, "{sets:?}");
        for (row, (_, _, most)) in found.iter().zip(full) {
            // Of 16 choices 12 have places, and few experts are left with an empty one.
            assert!(row.bytes_measured <= *most, "{sets:?}: {row:?}, {most}");
            assert!(row.bytes_measured * 2 > *most, "{sets:?}: {row:?}, {most}");
            assert!(row.bytes_measured.is_multiple_of(4 * 16 * 8), "{sets:?}: {row:?}");
        }
        found.iter().map(|row| row.bytes_measured).collect()
    };
    let all = "parallel.expert_exchange=all-to-all";
    let two = moved(&["parallel.dp=2", "parallel.ep=2", all], &[("dp", 8 * 2, bytes / 2)]);
    moved(&["parallel.dp=4", "parallel.ep=2", all], &[("dp.1", 8 * 4, bytes / 2)]);
    moved(&["parallel.dp=4", "parallel.ep=4", all], &[("dp", 8 * 4, bytes * 3 / 4)]);
    // In two steps: half of everything each time, to one rank instead of to three.
    let steps = ["parallel.dp=4", "parallel.ep=4", "parallel.expert_exchange=hierarchical"];
    moved(&steps, &[("dp.0", 8 * 4, bytes / 2), ("dp.1", 8 * 4, bytes / 2)]);
    // Two ranks of tp have the same rows: both send all of them, or each a half.
    let twice = ["parallel.dp=2", "parallel.ep=2", "parallel.tp=2"];
    let both = moved(&[&twice[..], &[all]].concat(), &[("dp", 8 * 4, bytes)]);
    let coordinated = [&twice[..], &["parallel.expert_exchange=coordinated"]].concat();
    let halves = moved(&coordinated, &[("dp", 8 * 4, bytes / 2)]);
    assert_eq!((both, halves), (vec![2 * two[0]], two));
}

/// What moves depends on how many rows there are, and not on the room for them.
#[test]
fn rows_that_are_not_there_do_not_travel() {
    let ep = ["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=all-to-all"];
    let bytes = |sets: &[&str]| -> u64 {
        let found = agrees(&format!("{sets:?}"), &mixture(&[&ep, sets].concat()), None);
        let rows = found.comm.iter().filter(|row| row.op == "all_to_all");
        rows.map(|row| row.bytes_measured).sum()
    };
    // With a place for every token at every expert there are twice as many places as choices.
    let all = bytes(&["model.capacity=2"]);
    assert!(all <= 2 * 4 * (8 * 8 * 2) * 16 * 8, "{all}");
    assert!(bytes(&["model.capacity=0.5"]) < all);
    // The first of two ranks gets most rows, and each of its own stays.
    for zipf in ["model.router_bias_zipf=1", "model.router_bias_zipf=4"] {
        bytes(&["model.capacity=0", "parallel.expert_slack=0", zipf]);
        bytes(&["model.capacity=1.25", zipf, "parallel.tp=2", "parallel.sp=true"]);
    }
}

/// Two ranks exchange rows, and gather tokens only where there are more rows for each token than ranks.
#[test]
fn what_moves_less_is_chosen() {
    let exchanged = |own: &[&str]| {
        let loaded = mixture(&[&["parallel.dp=2", "parallel.ep=2"], own].concat());
        let found = agrees(&format!("{own:?}"), &loaded, None);
        found.comm.iter().any(|row| row.op == "all_to_all")
    };
    assert!(exchanged(&["model.capacity=0.5", "model.top_k=3"]));
    assert!(exchanged(&["model.capacity=1.25", "model.top_k=2"]));
    assert!(!exchanged(&["model.capacity=1.25", "model.top_k=3"]));
}

/// Every token goes to the same place as on one rank; a model without experts has no places.
#[test]
fn places_are_those_of_one_rank() {
    let sets = ["parallel.dp=2", "parallel.ep=2", "parallel.pp=2", "train.microbatches=2"];
    let found = agrees("places", &mixture(&sets), None);
    assert_eq!(found.routing_flips, Some(0));
    assert_eq!(agrees("dense", &llama(&["parallel.dp=2"]), None).routing_flips, None);
}

/// A rank keeps its experts alone, and ZeRO shards these over the ranks that have the same ones.
#[test]
fn ranks_keep_their_own_experts() {
    let loaded = mixture(&[]);
    let experts = 3 * 4 * 16 * 6;
    let kept = |mesh: &str, ranks: usize, sharing| {
        let laid = laid(&loaded, Some(on(mesh, [sharing, shared(ExpertParallel::over(ranks))])));
        let units = &laid.plan.units;
        let own: Vec<_> = units.iter().filter(|unit| !unit.blocks.is_empty()).collect();
        let elements: usize = own.iter().map(|unit| unit.elements).sum();
        let axes = |axes: Vec<phalanx_ir::Axis>| -> String {
            axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(",")
        };
        let summed = own[0].partial.iter().copied().collect();
        (elements, axes(summed), axes(own[0].facts.axes.clone()))
    };
    let ddp = || shared(Ddp::default());
    assert_eq!(kept("dp=2", 2, ddp()), (experts / 2, String::new(), String::new()));
    assert_eq!(kept("dp=4", 4, ddp()), (experts / 4, String::new(), String::new()));
    assert_eq!(kept("dp=4", 2, ddp()), (experts / 2, "dp.0".to_owned(), String::new()));
    let zero = shared(Zero::stage(3));
    assert_eq!(kept("dp=4", 2, zero), (experts / 2, "dp.0".to_owned(), "dp.0".to_owned()));
}

#[test]
fn what_cannot_work_is_refused_with_what_would() {
    for (sets, reason) in [
        (&["model.experts=4", "model.top_k=5"][..], "model.top_k = 4"),
        (&["model.experts=4", "model.group=3"], "model.group = 2 or 4"),
        (&["model.experts=4", "model.router=expert-choice"], "looks ahead"),
        (&["model.experts=4", "model.router=switch", "model.top_k=2"], "model.top_k = 1"),
        (&["model.experts=4", "model.moe_every=3"], "model.moe_every = 2"),
        (&["model.experts=4", "model.router=gshard", "model.top_k=1"], "model.top_k = 2"),
        (&["model.experts=4", "model.jitter=1"], "model.jitter = 0.01"),
        (&["model.expert_dropout=0.1"], "model.experts = 8"),
        (&["model.eval_capacity=2"], "model.experts = 8"),
        (&["model.expert_init=0.1"], "model.experts = 8"),
        (&["model.capacity=2"], "model.experts = 8"),
        (&["parallel.dp=2", "parallel.ep=2"], "model.experts = 8"),
        (&["model.experts=4", "parallel.ep=2"], "parallel.dp = 2"),
        (&["model.experts=4", "parallel.dp=3", "parallel.ep=3"], "parallel.ep = 2 or 4"),
        (&["model.experts=4", "parallel.expert_exchange=all-gather"], "parallel.ep = 2"),
        (
            &[
                "model.experts=4",
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.expert_exchange=hierarchical",
            ],
            "parallel.ep = 4",
        ),
        (
            &[
                "model.experts=4",
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.expert_exchange=coordinated",
            ],
            "parallel.tp = 2",
        ),
        (&["model.experts=4", "parallel.comm_priority=lina"], "parallel.ep = 2"),
        (&["model.experts=4", DEALT], "parallel.ep = 2"),
        (&["model.experts=4", "model.late_layers=1"], "model.late_experts = 8"),
        (&["model.experts=4", "model.late_experts=1"], "model.late_experts = 2"),
        (
            &["model.experts=4", "model.late_experts=6", "parallel.dp=4", "parallel.ep=4"],
            "parallel.ep = 3",
        ),
        (
            &["model.experts=4", "parallel.dp=2", "parallel.ep=2", "parallel.sync=average"],
            "exchange no tokens",
        ),
    ] {
        let text = match try_llama(sets) {
            Ok(_) => panic!("{sets:?} was accepted"),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(reason), "{sets:?}: {text}");
    }
}
