//! Fits a curve with a plain multi-layer perceptron and mean squared error.
//!
//! `cargo run --release -p phalanx --example mlp_regression`

use phalanx::ir::ops::UnaryKind;
use phalanx::models::Mlp;
use phalanx::{Optimizer, Report, Table, Trainer};

const SAMPLES: usize = 512;

fn main() -> Result<(), phalanx::Error> {
    run(600).map(|_| ())
}

/// Trains for some steps on z = sin(3x)·y, from points of the square [−1, 1]².
pub fn run(steps: usize) -> Result<Report, phalanx::Error> {
    let at = |i: usize, n: usize| 2.0 * ((i % n) as f32 + 0.5) / n as f32 - 1.0;
    let points: Vec<[f32; 2]> = (0..SAMPLES).map(|i| [at(i, 32), at(i / 32, 16)]).collect();
    let values = points.iter().map(|[x, y]| (3.0 * x).sin() * y).collect();

    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(2, [32, 32], 1) };
    let report = Trainer::new(model)
        .data(Table::new(SAMPLES).input("x", points.concat()).target("y", values))
        .optimizer(Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 })
        .lr(1e-2)
        .batch(64)
        .steps(steps)
        .on_step(|taken| {
            if taken.step % 100 == 0 {
                println!("step {:4}  mean squared error {:.6}", taken.step, taken.result.loss);
            }
        })
        .run()?;
    println!("mean squared error {:.6} → {:.6}", report.first_loss(), report.last_loss());
    Ok(report)
}
