//! Layer-wise model parallelism in its simplest form: two layers on two ranks, one works at a time.
//!
//! `cargo run --release -p phalanx --example layerwise`

use phalanx::models::Mlp;
use phalanx::{NamedSchedule, Optimizer, Report, Table, Trainer};

const SAMPLES: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(200).map(|_| ())
}

/// Trains Linear(10, 50), Linear(50, 10) on one rank, and with a layer on each of two.
pub fn run(steps: usize) -> Result<[Report; 2], Box<dyn std::error::Error>> {
    let [one, two] = [fit("pp=1", steps)?, fit("pp=2", steps)?];
    for report in [&one, &two] {
        let Report { layout, moved, .. } = report;
        println!(
            "mean squared error {:.4} → {:.4}  {moved:>5} bytes moved in a step  {layout}",
            report.first_loss(),
            report.last_loss(),
        );
    }
    if two.last_loss() >= 0.9 * two.first_loss() {
        return Err("the error does not fall".into());
    }
    // The layers do the same work in the same order: every bit must be equal.
    if one.losses != two.losses {
        return Err("two ranks do not compute the same as one".into());
    }
    Ok([one, two])
}

fn fit(mesh: &str, steps: usize) -> Result<Report, phalanx::Error> {
    // Ten waves; the model learns the difference between each wave and the next.
    let wave = |i: usize| ((i / 10 * (i % 10 + 1)) as f32 * 0.7).sin();
    let x: Vec<f32> = (0..10 * SAMPLES).map(wave).collect();
    let next = |i: usize| i / 10 * 10 + (i + 1) % 10;
    let y = (0..10 * SAMPLES).map(|i| x[i] - x[next(i)]).collect();
    let model = Mlp { activation: None, ..Mlp::regression(10, [50], 10) };
    Trainer::new(model)
        .data(Table::new(SAMPLES).input("x", x).target("y", y))
        .mesh(mesh)
        .schedule(NamedSchedule::Naive) // forward and backward, while the other rank waits
        .optimizer(Optimizer::sgd(0.0))
        .lr(0.01)
        .clip(None)
        .batch(SAMPLES)
        .steps(steps)
        .threads(1)
        .run()
}
