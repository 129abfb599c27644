//! The examples run, and learn what they say.

#[allow(dead_code, unreachable_pub, reason = "the example's own main is not called")]
#[path = "../../examples/custom_model.rs"]
mod custom_model;
#[allow(dead_code, unreachable_pub, reason = "the example's own main is not called")]
#[path = "../../examples/mlp_regression.rs"]
mod mlp_regression;

/// Single tokens tell nothing (ln 32 = 3.47), pairs leave 1.18.
#[test]
fn a_model_of_ones_own_learns_pairs() {
    let report = custom_model::run(120).unwrap();
    let last = report.last_loss();
    assert!(last > 1.1 && last < 1.8, "loss {last}");
}

/// The variance of the values is E[sin²(3x)]·E[y²] ≈ 0.52 · 0.33: a constant would reach 0.17.
#[test]
fn a_perceptron_fits_a_curve() {
    let report = mlp_regression::run(300).unwrap();
    let last = report.last_loss();
    assert!(report.first_loss() > 0.1 && last < 0.02, "mean squared error {last}");
}

#[test]
fn examples_are_short() {
    for text in [
        include_str!("../../examples/custom_model.rs"),
        include_str!("../../examples/mlp_regression.rs"),
    ] {
        let lines = text.lines().count();
        assert!(lines < 60, "{lines} lines");
    }
}
