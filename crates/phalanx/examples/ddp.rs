//! Distributed data parallelism: more ranks, the same losses, and the number of bytes that the
//! formula gives.
//!
//! `cargo run --release -p phalanx --example ddp`

use phalanx::ir::ops::UnaryKind;
use phalanx::models::Mlp;
use phalanx::{Ddp, Report, Table, Trainer};

const SAMPLES: usize = 256;

fn main() -> Result<(), phalanx::Error> {
    run(200).map(|_| ())
}

/// Fits y = x² on 1, 2 and 4 ranks, each of which sees a part of every batch.
pub fn run(steps: usize) -> Result<Vec<Report>, phalanx::Error> {
    let mut reports: Vec<Report> = Vec::new();
    for ranks in [1, 2, 4] {
        let report = fit(ranks, steps)?;
        let parameters: usize = report.params.iter().map(|p| p.elements()).sum();
        println!(
            "{ranks} ranks  loss {:.6} → {:.6}  {} bytes moved in a step; 2·Ψ·(N−1) floats are {}, gaps of units not counted",
            report.first_loss(),
            report.last_loss(),
            report.moved,
            2 * parameters * (ranks - 1) * size_of::<f32>(),
        );
        reports.push(report);
    }
    Ok(reports)
}

fn fit(ranks: usize, steps: usize) -> Result<Report, phalanx::Error> {
    let x: Vec<f32> = (0..SAMPLES).map(|i| 2.0 * i as f32 / SAMPLES as f32 - 1.0).collect();
    let y = x.iter().map(|x| x * x).collect();
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [64, 64], 1) };
    Trainer::new(model)
        .data(Table::new(SAMPLES).input("x", x).target("y", y))
        .mesh(&format!("dp={ranks}"))
        // Small buckets, so that even this model has several: the first is reduced while the
        // backward of the first layers still runs.
        .strategy(Ddp { bucket_mib: 0.01, first_bucket_mib: 0.001, ..Ddp::default() })
        .batch(32)
        .lr(1e-2)
        .clip(None)
        .steps(steps)
        .threads(1)
        .run()
}
