//! The trainer: its numbers against a closed form, its refusals.

use phalanx::ir::ops::UnaryKind;
use phalanx::models::Mlp;
use phalanx::{Optimizer, Table, Trainer};

fn line() -> Mlp {
    Mlp { inputs: 1, hidden: vec![], outputs: 1, activation: UnaryKind::Relu }
}

/// y = 3x − 1 at the four points ±1, ±2: a linear model finds it, by plain gradient descent.
fn table() -> Table {
    let x = vec![-2.0, -1.0, 1.0, 2.0];
    let y = x.iter().map(|x| 3.0 * x - 1.0).collect();
    Table::new(4).input("x", x).target("y", y)
}

#[test]
fn a_line_is_found_and_every_step_is_told() {
    let mut told = Vec::new();
    let report = Trainer::new(line())
        .data(table())
        .optimizer(Optimizer::sgd(0.0))
        .lr(0.1)
        .clip(None)
        .batch(4)
        .steps(100)
        .on_step(|taken| told.push(taken.step))
        .run()
        .unwrap();
    assert_eq!(told, (1..=100).collect::<Vec<_>>());
    let value = |name: &str| report.params[name].to_f64()[0];
    let (weight, bias) = (value("layers.0.weight"), value("layers.0.bias"));
    assert!((weight - 3.0).abs() < 1e-4 && (bias + 1.0).abs() < 1e-4, "{weight}, {bias}");
}

/// The gradient of the mean of (wx + b − y)² at the first step, by hand.
#[test]
fn one_step_of_descent_is_its_formula() {
    let start = Trainer::new(line()).data(table()).batch(4).steps(0).run().unwrap();
    let value = |report: &phalanx::Report, name: &str| report.params[name].to_f64()[0];
    let (w, b) = (value(&start, "layers.0.weight"), value(&start, "layers.0.bias"));
    let (mut dw, mut db) = (0.0, 0.0);
    for x in [-2.0, -1.0, 1.0, 2.0] {
        let error = w * x + b - (3.0 * x - 1.0);
        dw += 2.0 * error * x / 4.0;
        db += 2.0 * error / 4.0;
    }
    for parts in [1, 2] {
        let after = Trainer::new(line())
            .data(table())
            .optimizer(Optimizer::sgd(0.0))
            .lr(0.1)
            .clip(None)
            .batch(4)
            .microbatches(parts)
            .steps(1)
            .run()
            .unwrap();
        assert!((value(&after, "layers.0.weight") - (w - 0.1 * dw)).abs() < 1e-6);
        assert!((value(&after, "layers.0.bias") - (b - 0.1 * db)).abs() < 1e-6);
    }
}

#[test]
fn what_cannot_work_is_refused_with_a_remedy() {
    let told = |trainer: Trainer<'_>| trainer.run().unwrap_err().to_string();
    assert!(told(Trainer::new(line())).contains("Trainer::data"));
    let uneven = Trainer::new(line()).data(table()).batch(3).microbatches(2);
    assert!(told(uneven).contains("2 micro-batches"));
    let ragged = Table::new(4).target("y", vec![0.0; 3]);
    assert!(told(Trainer::new(line()).data(ragged)).contains("column `y` has 3 values"));
    let diverging = Trainer::new(line())
        .data(table())
        .optimizer(Optimizer::sgd(0.0))
        .clip(None)
        .batch(4)
        .lr(1e20);
    let error = diverging.run().unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("at step"), "{error}");
}

#[test]
fn weights_are_saved_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("line.safetensors");
    let report = Trainer::new(line()).data(table()).batch(4).steps(1).run().unwrap();
    report.save(&path).unwrap();
    let read = phalanx::models::hf::load_params(&path).unwrap();
    assert_eq!(read.tensors, report.params);
}
