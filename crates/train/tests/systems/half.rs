//! Half precision: a loss that is scaled, steps that overflow and change nothing, and the same bits in
//! every layout that adds in the same order.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_inspect::verify::verify_as;
use phalanx_models::hf::WeightTensor;
use phalanx_script::Part;
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{Session, StepResult, host};

use crate::bits::{Bits, params, trained};
use crate::support::{agrees, laid, llama, models, settings, t5};

const F16: [&str; 2] = ["precision.compute=f16", "precision.weights=f16"];

/// The results of some steps, and the weights after each.
fn steps(loaded: &Loaded, count: usize) -> Vec<(StepResult, Vec<u64>)> {
    let network = Network::new(loaded).unwrap();
    let own = settings(loaded, None);
    let mut session = Session::new(&models(loaded), own, &*network.start()).unwrap();
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let mut all = Vec::new();
    for _ in 0..count {
        let batch = loader.next_batch().unwrap();
        let result = with_step_data(batch, |data| session.step(data, 0.01)).unwrap();
        let params = session.params().unwrap();
        let bits = params.values().flat_map(|p| p.to_f64()).map(f64::to_bits).collect();
        all.push((result, bits));
    }
    all
}

/// DeepSpeed's `DynamicLossScaler`, line by line.
struct Scaler {
    scale: f64,
    iteration: i64,
    last_overflow: i64,
    hysteresis: i64,
}

impl Scaler {
    fn next(&mut self, overflow: bool, window: i64, shift: i64, least: f64) {
        if overflow {
            if shift == 1 || self.hysteresis == 1 {
                self.scale = (self.scale / 2.0).max(least);
            } else {
                self.hysteresis -= 1;
            }
            self.last_overflow = self.iteration;
        } else if (self.iteration - self.last_overflow) % window == 0 {
            self.hysteresis = shift;
            self.scale *= 2.0;
        }
        self.iteration += 1;
    }
}

/// A scale that is far too large overflows until it has fallen far enough; steps that overflow change
/// nothing, and the scale is DeepSpeed's.
#[test]
fn an_overflow_changes_nothing_and_the_scale_follows_its_rule() {
    for (hysteresis, zero) in [(1, "parallel.zero=0"), (2, "parallel.zero=3")] {
        let more = [
            format!("precision.hysteresis={hysteresis}"),
            "precision.initial_scale_power=30".to_owned(),
            "precision.loss_scale_window=3".to_owned(),
            "parallel.dp=2".to_owned(),
            zero.to_owned(),
        ];
        let more: Vec<&str> = F16.into_iter().chain(more.iter().map(String::as_str)).collect();
        let taken = steps(&llama(&more), 40);
        let mut expected =
            Scaler { scale: 2f64.powi(30), iteration: 0, last_overflow: -1, hysteresis };
        let (mut skipped, mut before) = (0, None);
        for (step, (result, bits)) in taken.iter().enumerate() {
            let scaling = result.scaling.unwrap();
            assert_eq!(scaling.loss_scale, expected.scale, "step {step}");
            skipped += u64::from(scaling.overflowed);
            assert_eq!(scaling.skipped, skipped, "step {step}");
            if let Some(before) = before {
                assert_eq!(bits == before, scaling.overflowed, "step {step}");
            }
            assert!(result.loss.is_finite(), "step {step}");
            assert_eq!(result.grad_norm.is_finite(), !scaling.overflowed, "step {step}");
            before = Some(bits);
            expected.next(scaling.overflowed, 3, hysteresis, 1.0);
        }
        assert!(skipped > 4 && skipped < 40, "{skipped} of 40 steps overflowed");
        assert!(taken[39].0.loss < taken[0].0.loss, "it learns");
    }
}

/// Ways to keep state that add gradients in the same order decide the same and have the same bits.
#[test]
fn layouts_that_add_alike_have_the_same_bits() {
    let run = |more: &[&str]| {
        // The norm, by which gradients are clipped, is summed in another order in each layout.
        let own = ["precision.initial_scale_power=24", "precision.loss_scale_window=4"];
        let all = [&F16[..], &own, &["parallel.dp=2", "optim.clip=none"], more].concat();
        let taken = steps(&llama(&all), 12);
        taken.into_iter().map(|(result, bits)| (result.scaling, bits)).collect::<Vec<_>>()
    };
    let expected = run(&["parallel.zero=0"]);
    assert!(expected.iter().any(|(scaling, _)| scaling.unwrap().overflowed));
    // (With ZeRO-3 a head goes forward and back in two runs; where it can do both in one, that one
    // rounds in its own way.)
    for zero in ["parallel.zero=1", "parallel.zero=2"] {
        assert!(run(&[zero]) == expected, "{zero}");
    }
}

/// A pipeline sums micro-batches in the order of one rank. (Where all forwards come first, or a schedule cuts the backward,
/// the head goes forward and back in several runs, which round in their own way.)
#[test]
fn pipelines_have_the_bits_of_one_rank() {
    let run = |more: &[&str]| {
        let own = ["precision.initial_scale_power=24", "precision.loss_scale_window=4"];
        let cut = ["train.microbatches=4", "model.layers=4", "optim.clip=none"];
        let taken = steps(&llama(&[&F16[..], &own, &cut, more].concat()), 8);
        taken.into_iter().map(|(result, bits)| (result.scaling, bits)).collect::<Vec<_>>()
    };
    let expected = run(&[]);
    assert!(expected.iter().any(|(scaling, _)| scaling.unwrap().overflowed));
    for schedule in ["naive", "1f1b", "interleaved"] {
        let schedule = format!("parallel.schedule={schedule}");
        assert!(run(&["parallel.pp=2", &schedule]) == expected, "{schedule}");
    }
}

/// Overflows that are far from the largest number are decided alike in every layout: the same scales, bit by bit, the same
/// steps that change nothing.
#[test]
fn every_layout_decides_alike() {
    let own = ["precision.initial_scale_power=24", "precision.loss_scale_window=3"];
    for layout in [
        &["parallel.dp=2", "parallel.sync=dataparallel"][..],
        &["parallel.dp=2", "parallel.zero=3", "train.recompute=full"],
        &["parallel.tp=2", "parallel.sp=true", "parallel.stream=true"],
        &["parallel.tp=4", "parallel.tp_kind=2d", "parallel.stream=true"],
        &["parallel.tp=8", "parallel.tp_kind=3d"],
        &["parallel.cp=2", "parallel.cp_kind=ring"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.schedule=zb-h1"],
    ] {
        let more = ["model.init_std=0.1"];
        let loaded = llama(&[&F16[..], &own, &more, layout].concat());
        let found = verify_as(&loaded, settings(&loaded, None), 16, &*host::threads()).unwrap();
        assert_eq!(found.scale_flips, Some(0), "{layout:?}: {found:#?}");
        assert!(found.ok, "{layout:?}: {found:#?}");
    }
    let bf16 = llama(&["precision.compute=bf16", "parallel.dp=2"]);
    assert_eq!(agrees("bf16", &bf16, None).scale_flips, None);
}

/// Where no step is applied there is nothing to compare, and `verify` says so.
#[test]
fn a_scale_that_every_step_overflows_compares_nothing() {
    let loaded = llama(&[&F16[..], &["precision.initial_scale_power=40"]].concat());
    let error = verify_as(&loaded, settings(&loaded, None), 3, &*host::threads()).unwrap_err();
    let text = error.to_string();
    for part in ["none of 3 steps", "precision.initial_scale_power", "--steps"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(error.exit_code(), 1);
}

#[test]
fn f16_trains_on_many_ranks_like_on_one() {
    for layout in [
        &["parallel.dp=2", "parallel.zero=1"][..],
        &["parallel.tp=2", "parallel.sp=true"],
        &["parallel.cp=2"],
        &["parallel.pp=2", "train.microbatches=2"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.dp=2", "parallel.zero=3"],
    ] {
        for weights in ["precision.weights=f16", "precision.weights=f32"] {
            let sets = [&["precision.compute=f16", weights, "model.init_std=0.1"], layout].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
    }
}

/// A residual stream of f32 under 16-bit programs: layouts agree, and what many layers add is nearer to f64.
#[test]
fn a_wide_residual_stream_works_in_every_layout_and_rounds_less() {
    let wide = ["precision.compute=bf16", "precision.residual=f32", "model.init_std=0.1"];
    for layout in [
        &["parallel.dp=2", "parallel.zero=3"][..],
        &["parallel.tp=2", "parallel.sp=true", "train.recompute=full"],
        &["parallel.cp=2"],
        &["parallel.pp=2", "train.microbatches=2", "precision.weights=bf16"],
    ] {
        let sets = [&wide[..], layout].concat();
        agrees(&format!("{sets:?}"), &llama(&sets), None);
    }
    // Over several seeds: the error of one loss is a sum of many roundings, which may cancel.
    let far = |sets: &[&str]| -> f64 {
        let loss = |seed: u64, sets: &[&str]| {
            let seed = format!("run.seed={seed}");
            let deep = ["model.layers=16", "model.init_std=0.1", seed.as_str()];
            steps(&llama(&[&deep[..], sets].concat()), 1)[0].0.loss
        };
        let of = |seed| (loss(seed, sets) - loss(seed, &["precision.compute=f64"])).abs();
        (1..=8).map(of).sum()
    };
    let narrow = far(&["precision.compute=bf16"]);
    let wide = far(&["precision.compute=bf16", "precision.residual=f32"]);
    assert!(wide < 0.7 * narrow, "{wide:e} with f32, {narrow:e} with bf16");
}

/// A head that runs forward and backward at once never rounds its logits to 16 bits, because they do not leave it; where its
/// backward comes later, they are stored. In f32 nothing is rounded on the way: there all schedules have the same bits. In 16 bits they
/// fall into two sets, by how the head runs, and differ in nothing else.
#[test]
fn schedules_have_the_bits_of_how_their_head_runs() {
    let loaded = |compute: &str, schedule: &str| {
        let all = ["compute", "weights"].map(|what| format!("precision.{what}={compute}"));
        let schedule = format!("parallel.schedule={schedule}");
        let own = ["parallel.pp=2", "train.microbatches=4", "train.batch_size=8", &schedule];
        llama(&[&all.each_ref().map(String::as_str)[..], &own].concat())
    };
    let once = |loaded: &Loaded| {
        let laid = laid(loaded, None);
        let head = laid.lowered.model.instances().len() - 1;
        let groups = laid.lowered.stage_groups();
        let mut turns = groups.iter().flat_map(|group| group.turns);
        turns.any(|turn| turn.instance == head && turn.part == Part::FBW)
    };
    for compute in ["f32", "bf16", "f16"] {
        let mut found: BTreeMap<bool, Bits> = BTreeMap::new();
        for schedule in ["naive", "1f1b", "gpipe", "zb-h1", "zb-h2"] {
            let own = loaded(compute, schedule);
            let (at_once, bits) = (once(&own), params(&own, None, 3));
            assert_eq!(at_once, ["naive", "1f1b"].contains(&schedule));
            let known = found.entry(at_once).or_insert_with(|| bits.clone());
            assert!(*known == bits, "{compute}, {schedule}");
        }
        assert_eq!(found[&true] == found[&false], compute == "f32", "{compute}");
    }
}

/// Scores of a T5 hardly differ at its initial weights, so the gradient of its queries is a small difference of large numbers: in 16 bits
/// one rank already has a wrong one. Ranks that cut products round at other places. They are no farther from the gradient of f64
/// than one rank is, and in f64 they agree: what differs between layouts is rounding.
#[test]
fn layouts_of_a_t5_are_no_farther_from_the_truth_in_16_bits_than_one_rank() {
    let gradients = |compute: &str, layout: &[&str]| -> BTreeMap<String, Vec<f64>> {
        // Gradients of f16 are those of a scaled loss.
        let (power, scale) = if compute == "f16" { (10, 1024.0) } else { (16, 1.0) };
        let own = [
            format!("precision.compute={compute}"),
            format!("precision.initial_scale_power={power}"),
        ];
        let own = own.each_ref().map(String::as_str);
        let mut session = trained(&t5(&[&own[..], layout].concat()), None, 1);
        let queries = |(name, tensor): (String, WeightTensor)| {
            let values = || tensor.to_f64().iter().map(|x| x / scale).collect();
            name.ends_with(".q").then(|| (name.clone(), values()))
        };
        session.gradients().unwrap().into_iter().filter_map(queries).collect()
    };
    let far = |found: &BTreeMap<String, Vec<f64>>, truth: &BTreeMap<String, Vec<f64>>| {
        assert!(!truth.is_empty() && found.keys().eq(truth.keys()));
        let pairs = || found.values().flatten().zip(truth.values().flatten());
        let size: f64 = pairs().map(|(_, x)| x * x).sum();
        (pairs().map(|(a, x)| (a - x) * (a - x)).sum::<f64>() / size).sqrt()
    };
    let truth = gradients("f64", &[]);
    let layouts = [&["parallel.tp=2"][..], &["parallel.tp=4", "parallel.sp=true"]];
    for layout in layouts {
        assert!(far(&gradients("f64", layout), &truth) < 1e-9, "{layout:?}");
    }
    for compute in ["bf16", "f16"] {
        let one = gradients(compute, &[]);
        let alone = far(&one, &truth);
        for layout in layouts {
            let own = gradients(compute, layout);
            let (many, apart) = (far(&own, &truth), far(&own, &one));
            let told = format!(
                "{compute}, {layout:?}: {alone:.4} alone, {many:.4} here, {apart:.4} apart"
            );
            assert!(many < 1.5 * alone && apart > 0.2 * alone, "{told}");
        }
    }
}
