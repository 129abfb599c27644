//! Distributed data parallelism: when gradients are summed, how much is sent, and what nobody uses.

use std::sync::Arc;

use phalanx_ir::{Builder, DType, Init};
use phalanx_models::Chain;
use phalanx_script::{HappensBefore, Lane};
use phalanx_session::{Field, Models, Parallel, Session, Settings, StepData, initial};
use phalanx_spmd::strategies::{Ddp, Zero};

use crate::support::{agrees, gpt, is_reduce, laid, llama, on, settings, shared};

/// Buckets so small that there are several.
fn small_buckets() -> Ddp {
    Ddp { bucket_mib: 8.0 / 1024.0, first_bucket_mib: 4.0 / 1024.0, ..Ddp::default() }
}

#[test]
fn the_first_reduction_is_issued_before_the_last_backward() {
    let laid = laid(&llama(&[]), Some(on("dp=2", [shared(small_buckets())])));
    let actions = &laid.script().actions;
    let backward = |label: &str| label.contains("BW");
    let last = actions.iter().rposition(|a| backward(&a.label)).unwrap();
    let first = actions.iter().position(is_reduce).unwrap();
    assert!(first < last, "{} after {}", actions[first].label, actions[last].label);
    // Nor does the backward wait for it: the reduction has a lane of its own.
    assert_eq!(actions[first].lane, Lane::Reduce);
    let order = HappensBefore::of(laid.script()).unwrap();
    assert!(!order.before(first, last));
    // Buckets go in their order, which is the same on all ranks.
    let labels: Vec<&str> =
        actions.iter().filter(|a| is_reduce(a)).map(|a| a.label.as_str()).collect();
    let expected: Vec<String> =
        (0..laid.plan.units.len()).map(|i| format!("reduce bucket.{i}")).collect();
    assert_eq!(labels, expected);
    assert!(labels.len() > 3, "{labels:?}");
}

#[test]
fn nothing_is_sent_while_micro_batches_accumulate() {
    let mut volumes = Vec::new();
    for parts in [1, 2, 4] {
        let loaded = llama(&[&format!("train.microbatches={parts}")]);
        let laid = laid(&loaded, Some(on("dp=2", [shared(small_buckets())])));
        let moved = laid.moved("all_reduce", is_reduce);
        // Each rank sends 2Ψ(N−1)/N elements of 8 bytes.
        assert_eq!(moved.bytes, 2 * laid.elements() / 2 * 8);
        assert_eq!(moved.calls, laid.plan.units.len() as u64);
        volumes.push(moved);
        let actions = &laid.script().actions;
        let first = actions.iter().position(is_reduce).unwrap();
        let others = actions[first..].iter().filter(|a| a.label.contains("BW mb "));
        let last = format!("mb {}", parts - 1);
        assert!(others.into_iter().all(|a| a.label.ends_with(&last)));
    }
    assert!(volumes.iter().all(|v| *v == volumes[0]), "{volumes:?}");
}

#[test]
fn data_parallel_ranks_do_what_one_rank_does() {
    for parts in ["train.microbatches=1", "train.microbatches=2"] {
        agrees("llama", &llama(&[parts]), Some(on("dp=4", [shared(small_buckets())])));
        agrees("gpt2", &gpt(&[parts]), Some(on("dp=4", [shared(Ddp::default())])));
    }
}

/// A parameter that no gradient reaches: the step works, and it stays as it is, decay or not.
#[test]
fn a_parameter_that_nobody_uses_stays_as_it_is() {
    for read in [true, false] {
        unused(read);
    }
}

fn unused(read: bool) {
    let model = {
        let b = Builder::new("line", DType::F64);
        let x = b.data("x", DType::F32, [4, 3]).cast(DType::F64);
        let unused = b.param("unused", [5, 3]);
        if read {
            // The loss does not depend on it all the same.
            b.probe("twice", unused.scale(2.0));
        }
        let y = x.matmul(b.param("w", [3, 2]));
        let target = b.data("y", DType::F32, [4, 2]).cast(DType::F64);
        b.loss("loss", y.squared_error(target) * b.scalar("inv_tokens"));
        let mut chain = Chain::new("line");
        chain.once(b, |_| Init::Normal(0.5)).unwrap();
        chain.finish()
    };
    let models = Models::trained(model);
    let layouts: [Parallel; 5] = [
        Parallel::default(),
        on("dp=2", [shared(Ddp::default())]),
        on("dp=2", [shared(Zero::stage(1))]),
        on("dp=2", [shared(Zero::stage(2))]),
        on("dp=2", [shared(Zero::stage(3))]),
    ];
    let (xs, ys): (Vec<f32>, Vec<f32>) =
        ((0..12).map(|i| i as f32 / 7.0).collect(), (0..8).map(|i| 1.0 - i as f32).collect());
    let fields = [("x", Field::F32(&xs)), ("y", Field::F32(&ys))];
    let data = StepData { fields: &fields, count: 8, first_sample: 0, scalars: &[] };
    let mut trained = Vec::new();
    for parallel in layouts {
        let what = format!("{parallel:?}");
        let settings = Settings { parallel, ..settings(&llama(&["optim.weight_decay=0.5"]), None) };
        let mut session = Session::new(&models, settings, &initial(3)).unwrap();
        let before = session.params().unwrap();
        let losses: Vec<f64> = (0..3).map(|_| session.step(&data, 0.1).unwrap().loss).collect();
        let after = session.params().unwrap();
        let planned = session.memory().peaks.clone();
        assert_eq!(session.observe().unwrap()[0].peaks, planned, "{what}");
        assert!(before.contains_key("unused"), "{what}");
        assert_eq!(before["unused"], after["unused"], "{what}");
        assert_ne!(before["w"], after["w"], "{what}");
        assert!(losses[2] < losses[0], "{what}: {losses:?}");
        trained.push((what, after["w"].to_f64()));
    }
    let (_, one) = trained[0].clone();
    for (what, many) in &trained[1..] {
        for (a, b) in one.iter().zip(many) {
            assert!((a - b).abs() < 1e-12, "{what}: {a} and {b}");
        }
    }
}

/// Two strategies that both say how gradients are summed are refused, with both names.
#[test]
fn two_systems_for_the_same_thing_are_refused() {
    let parallel = on("dp=2", [shared(Ddp::default()), Arc::new(Zero::stage(1))]);
    let loaded = llama(&[]);
    let models = crate::support::models(&loaded);
    let error = phalanx_session::Lowered::new(&models, settings(&loaded, Some(parallel)));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("`DDP` and `ZeRO-1`") && error.contains("keep one"), "{error}");
}
