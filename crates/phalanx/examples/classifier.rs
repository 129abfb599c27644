//! Classifies points of three spirals, on dp 2 · tp 2, and tells the accuracy on held-out points.
//!
//! `cargo run --release -p phalanx --example classifier`

use phalanx::{Ddp, Evaluation, Megatron, Mlp, Optimizer, Table, Trainer, UnaryKind};

const CLASSES: usize = 3;
const POINTS: usize = 384;

fn main() -> Result<(), phalanx::Error> {
    run(400).map(|_| ())
}

/// Trains for some steps, and evaluates on points between those that were trained on.
pub fn run(steps: usize) -> Result<Evaluation, phalanx::Error> {
    let model = Mlp {
        activation: Some(UnaryKind::Tanh),
        ..Mlp::classifier(2, [64, 64], CLASSES) // logits of three classes, and cross-entropy
    };
    let mut training = Trainer::new(model)
        .data(spirals(0.0))
        .optimizer(Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 })
        .lr(1e-2)
        .batch(128)
        .mesh("dp=2 tp=2")
        .strategy(Ddp::default())
        .strategy(Megatron::default())
        .evaluate_every(100, spirals(0.5))
        .on_evaluate(|told| println!("step {:4}  loss {:.4}", told.after_step, told.loss))
        .build()?;
    training.fit(steps)?;
    let told = training.evaluate(spirals(0.5))?;
    println!("{}", training.layout());
    println!("accuracy {:.1}% of {}", 100.0 * told.accuracy.unwrap_or(0.0), told.count);

    // The class of one point: its largest logit.
    let answer = training.predict(&Table::new(1).input("x", vec![0.2, 0.4]))?;
    println!("logits of (0.2, 0.4): {:.2?}", answer["prediction"].to_f32());
    Ok(told)
}

/// Points along the arms of three spirals, a class each; `shift` moves them along their arm.
fn spirals(shift: f32) -> Table {
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for i in 0..POINTS {
        let (class, along) =
            (i % CLASSES, ((i / CLASSES) as f32 + shift) / (POINTS / CLASSES) as f32);
        let angle = 4.0 * along + 2.0 * std::f32::consts::PI * class as f32 / CLASSES as f32;
        let radius = 0.1 + 0.9 * along;
        x.extend([radius * angle.cos(), radius * angle.sin()]);
        y.push(class as i32);
    }
    Table::new(POINTS).input("x", x).labels("y", y)
}
