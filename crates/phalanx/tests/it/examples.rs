//! The examples run, and learn what they say.

use phalanx::{Category, Report};

/// Declares the examples as modules, and keeps their texts.
macro_rules! examples {
    ($($name:ident = $path:literal),*) => {
        $(
            #[allow(dead_code, unreachable_pub, reason = "the example's own main is not called")]
            #[path = $path]
            pub(crate) mod $name;
        )*
        const TEXTS: &[(&str, &str)] = &[$((stringify!($name), include_str!($path))),*];
    };
}
examples!(
    classifier = "../../examples/classifier.rs",
    custom_model = "../../examples/custom_model.rs",
    encoder_decoder = "../../examples/encoder_decoder.rs",
    own_loop = "../../examples/own_loop.rs",
    mlp_regression = "../../examples/mlp_regression.rs",
    processes = "../../examples/processes.rs",
    resume = "../../examples/resume.rs",
    ddp = "../../examples/ddp.rs",
    fsdp = "../../examples/fsdp.rs",
    zero = "../../examples/zero.rs",
    tensor_parallel = "../../examples/tensor_parallel.rs",
    layerwise = "../../examples/layerwise.rs",
    pipe = "../../examples/pipe.rs",
    three_d = "../../examples/three_d.rs"
);

// A plot for the documentation: longer than an example that is read.
#[allow(dead_code, unreachable_pub, reason = "the example's own main is not called")]
#[path = "../../examples/local_sgd.rs"]
mod local_sgd;

/// Single tokens tell nothing (ln 32 = 3.47), pairs leave 1.18.
#[test]
fn a_model_of_ones_own_learns_pairs() {
    let report = custom_model::run(120).unwrap();
    let last = report.last_loss();
    assert!(last > 1.1 && last < 1.8, "loss {last}");
}

/// Three stages, and what the encoder found on two of them: the source has pairs to learn here, too.
#[test]
fn an_encoder_and_a_decoder_learn_on_three_stages() {
    let report = encoder_decoder::run(60).unwrap();
    assert!(report.last_loss() < 0.85 * report.first_loss(), "{}", report.last_loss());
}

/// A guess is right for a third of the points; they were not trained on.
#[test]
fn a_classifier_on_two_by_two_ranks_knows_held_out_points() {
    let told = classifier::run(300).unwrap();
    assert_eq!((told.after_step, told.count), (300, 384));
    assert!(told.accuracy > Some(0.95), "{told:?}");
}

/// Two hundred updates of four micro-batches each; a constant would leave the variance, about 0.5.
#[test]
fn a_loop_of_ones_own_learns_a_wave() {
    let losses = own_loop::run(200).unwrap();
    assert_eq!(losses.len(), 200);
    assert!(losses[0] > 0.2 && losses[199] < 0.02, "{} → {}", losses[0], losses[199]);
}

/// Going on takes the steps that are left, with the loss that was reached; and then there are none.
#[test]
fn a_training_goes_on_from_its_checkpoint_on_other_ranks() {
    let folder = std::env::temp_dir().join(format!("resume-test-{}", std::process::id()));
    let whole = resume::run(60, "dp=1", &folder.join("whole")).unwrap();
    let first = resume::run(40, "dp=1", &folder).unwrap();
    let rest = resume::run(60, "dp=2", &folder).unwrap();
    let none = resume::run(60, "dp=2", &folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(first.losses, whole.losses[..40]);
    assert_eq!((rest.losses.len(), none.losses.len()), (20, 0));
    for (a, b) in rest.losses.iter().zip(&whole.losses[40..]) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} {b}");
    }
}

/// The variance of the values is E[sin²(3x)]·E[y²] ≈ 0.52 · 0.33: a constant would reach 0.17.
#[test]
fn a_perceptron_fits_a_curve() {
    let report = mlp_regression::run(300).unwrap();
    let last = report.last_loss();
    assert!(report.first_loss() > 0.1 && last < 0.02, "mean squared error {last}");
}

/// All layouts of an example train alike; what is told apart is memory and bytes.
fn train_alike(reports: &[Report]) {
    let losses = |report: &Report| report.losses.clone();
    let one = losses(&reports[0]);
    for report in reports {
        for (a, b) in one.iter().zip(losses(report)) {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{a} and {b} in {}", report.layout);
        }
    }
}

#[test]
fn ranks_of_ddp_train_alike_and_move_two_models_each() {
    let reports = ddp::run(20).unwrap();
    train_alike(&reports);
    let parameters: usize = reports[0].params.iter().map(|p| p.elements()).sum();
    for (ranks, report) in [1, 2, 4].into_iter().zip(&reports) {
        // Parameters begin at aligned places of their unit, and the loss is summed as well.
        let gradients = (2 * parameters * (ranks - 1) * 4) as u64;
        let most = gradients + gradients / 100;
        assert!((gradients..=most).contains(&report.moved), "{} of {most}", report.moved);
    }
}

#[test]
fn each_stage_of_zero_shards_one_thing_more() {
    let reports = zero::run(4).unwrap();
    train_alike(&reports);
    use Category::{Gradients, Optimizer, Weights};
    for (stage, report) in reports.iter().enumerate() {
        for (what, from) in [(Optimizer, 1), (Gradients, 2), (Weights, 3)] {
            let (all, own) = (reports[0].bytes(what), report.bytes(what));
            let shards = if stage >= from { 4 } else { 1 };
            // Units are padded to equal shards.
            let error = own as f64 * shards as f64 / all as f64;
            assert!((0.99..1.03).contains(&error), "stage {stage}, {what}: {own} of {all}");
        }
    }
}

#[test]
fn kept_units_save_bytes_and_cost_memory() {
    let reports = fsdp::run(4).unwrap();
    train_alike(&reports);
    let [full, kept, hybrid] = &reports[..] else { panic!("three layouts") };
    assert!(kept.moved < full.moved);
    let gathered = Category::Communication;
    assert!(kept.bytes(gathered) > full.bytes(gathered));
    assert!(hybrid.bytes(Category::Weights) > full.bytes(Category::Weights));
}

#[test]
fn tensor_parallel_ranks_hold_less_and_train_alike() {
    let reports = tensor_parallel::run(4).unwrap();
    train_alike(&reports);
    let [one, tp, sp, all] = &reports[..] else { panic!("four layouts") };
    let kept = Category::Residuals;
    assert!(one.bytes(kept) > tp.bytes(kept) && tp.bytes(kept) > sp.bytes(kept));
    assert!(all.bytes(Category::Weights) < tp.bytes(Category::Weights) / 3);
    assert!(all.layout.contains("8 ranks"), "{}", all.layout);
}

/// Hidden values one way and their gradients back, 64 × 50 floats each, beside two ranks' sums.
#[test]
fn layers_on_two_ranks_hand_over_what_is_between_them() {
    let [one, two] = layerwise::run(60).unwrap();
    assert_eq!(one.moved, 0);
    let between = 2 * 64 * 50 * 4;
    assert!((between..between + 100).contains(&two.moved), "{} bytes moved", two.moved);
    assert!(two.layout.ends_with("naive"), "{}", two.layout);
}

/// The first device keeps 8 micro-batches under GPipe and 2 under 1F1B.
#[test]
fn halves_of_a_model_keep_what_their_schedule_says() {
    let reports = pipe::run(20).unwrap();
    train_alike(&reports);
    let [_, gpipe, one_f_one_b] = &reports[..] else { panic!("three layouts") };
    let kept = Category::Residuals;
    let ratio = gpipe.bytes(kept) as f64 / one_f_one_b.bytes(kept) as f64;
    assert!((3.0..=4.0).contains(&ratio), "{ratio} times as much");
}

#[test]
fn three_dimensions_train_alike() {
    let reports = three_d::run(5).unwrap();
    train_alike(&reports);
    let [one, _, zb] = &reports[..] else { panic!("three layouts") };
    assert!(zb.bytes(Category::Weights) < one.bytes(Category::Weights) / 3);
    assert!(zb.layout.starts_with("8 ranks, pp 2 · dp 2 · tp 2"), "{}", zb.layout);
}

#[test]
fn examples_are_short() {
    for (name, text) in TEXTS {
        let lines = text.lines().count();
        assert!(lines < 60, "{name}: {lines} lines");
    }
}

/// A mean every H steps moves 1/H of the bytes, exactly, and least squares are found all the same.
#[test]
fn replicas_move_less_the_rarer_they_meet() {
    let found = local_sgd::convex(64).unwrap();
    for (i, bytes) in found.bytes.iter().enumerate() {
        assert_eq!(*bytes, found.bytes[0] / f64::from(1 << i), "H = {}", 1 << i);
    }
    let (best, worst) = (found.losses[0], found.losses.iter().copied().fold(0.0, f64::max));
    assert!(best > 0.0 && worst < 3.0 * best, "{:?}", found.losses);
    let drawn = local_sgd::picture(&found, &found);
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
}
