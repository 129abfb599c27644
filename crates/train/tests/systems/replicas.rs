//! Replicas that train by themselves: beside one rank for each and a host that takes the mean; and what
//! averages move, against the closed form.

use phalanx_config::Loaded;
use phalanx_inspect::verify::{Verified, verify_as};
use phalanx_session::host;

use crate::bits::trained;
use crate::support::{gpt, laid, llama, settings};

const STEPS: usize = 5;

fn checked(what: &str, loaded: &Loaded) -> Verified {
    let found = verify_as(loaded, settings(loaded, None), STEPS, &*host::threads());
    let found = found.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(found.ok, "{what}: {found:#?}");
    found
}

/// Two replicas that train by themselves for five steps, with these settings.
fn apart(sets: &[&str]) -> Vec<String> {
    let own = ["parallel.dp=2", "train.steps=5", "parallel.sync=local-sgd"];
    own.iter().chain(sets).map(|set| (*set).to_owned()).collect()
}

fn sets(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

#[test]
fn replicas_do_what_one_rank_for_each_does() {
    for rule in [
        &["parallel.sync_every=1"][..],
        &["parallel.sync_every=2"],
        &["parallel.sync_every=2", "parallel.sync_momentum=keep"],
        &["parallel.sync_every=3", "parallel.sync_warmup=2"],
        &["parallel.sync_every=0"],
        &["parallel.sync_every=0", "parallel.sync=average"],
        &["parallel.sync_every=2", "parallel.sync=average", "optim.kind=sgd", "optim.momentum=0.9"],
    ] {
        let found = checked(&format!("{rule:?}"), &llama(&sets(&apart(rule))));
        assert!(found.reference.contains("one rank for each replica"), "{}", found.reference);
    }
}

/// A replica may be any layout of ranks, with its own shards and its own pipeline.
#[test]
fn replicas_have_any_layout_inside() {
    for inside in [
        &["parallel.tp=2"][..],
        &["parallel.tp=2", "parallel.sp=true"],
        &["parallel.cp=2"],
        &["parallel.cp=2", "parallel.cp_kind=allgather", "parallel.zero=1"],
        &["parallel.cp=2", "parallel.zero=2"],
        &["parallel.cp=2", "parallel.zero=3"],
        &["parallel.pp=2", "train.microbatches=2"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.tp=2", "parallel.schedule=zb-h1"],
        // What is measured for a schedule, or for even stages, is measured on one rank, which averages with nobody.
        &["parallel.pp=2", "train.microbatches=2", "parallel.schedule=zb-auto"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.split=measured"],
        &["parallel.tp=4", "parallel.tp_kind=2d", "parallel.stream=true"],
        &["parallel.cp=2", "parallel.cp_kind=ring"],
        &["parallel.dp=4", "parallel.order=dp-tp-cp-pp"],
        &[
            "precision.compute=bf16",
            "precision.weights=bf16",
            "precision.grads=f32",
            "parallel.tp=2",
        ],
    ] {
        let all = [&["parallel.sync_every=2"], inside].concat();
        checked(&format!("{inside:?}"), &llama(&sets(&apart(&all))));
    }
    let tied =
        ["parallel.sync_every=2", "parallel.pp=2", "train.microbatches=2", "model.dropout=0.1"];
    checked("a tied head in a pipeline, with dropout", &gpt(&sets(&apart(&tied))));
}

/// An average moves 2Ψ(N−1)/N elements on each rank, for weights and each state that is averaged with
/// them; T steps with an average every H take ⌈T/H⌉ of them, and nothing else is moved between replicas.
#[test]
fn what_is_moved_falls_with_the_steps_between_averages() {
    for (replicas, momentum, kinds) in [(2, "average", 3), (4, "average", 3), (2, "keep", 1)] {
        for every in [1, 2, 3, 5] {
            let more = [
                format!("parallel.dp={replicas}"),
                format!("parallel.sync_every={every}"),
                format!("parallel.sync_momentum={momentum}"),
            ];
            let more: Vec<&str> = more.iter().map(String::as_str).collect();
            let loaded = llama(&sets(&apart(&more)));
            let psi = laid(&loaded, None).elements();
            let found = checked(&format!("{more:?}"), &loaded);
            let averages = STEPS.div_ceil(every) as u64;
            let rows: Vec<(&str, &[String], u64)> = (found.comm.iter())
                .map(|row| (row.op, &row.axes[..], row.bytes_measured))
                .collect();
            // Over all ranks, of 8 bytes each.
            let bytes = averages * kinds * 2 * psi * (replicas - 1) * 8;
            assert_eq!(rows, [("all_reduce", &["dp".to_owned()][..], bytes)], "{more:?}");
        }
    }
}

/// With an average after every step, plain gradient descent is that of data parallelism.
#[test]
fn an_average_after_every_step_is_one_gradient() {
    let plain = ["optim.kind=sgd", "optim.clip=none", "parallel.dp=2", "train.microbatches=2"];
    let run = |sync: &str| {
        let loaded = llama(&[&plain[..], &[sync]].concat());
        trained(&loaded, None, 4).params().unwrap()
    };
    let (together, averaged) = (run("parallel.sync=ddp"), run("parallel.sync=average"));
    for (name, expected) in together {
        let pairs = expected.to_f64().into_iter().zip(averaged[&name].to_f64());
        let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12, "{name} is off by {off:e}");
    }
}
