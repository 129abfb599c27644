//! ZeRO: each stage keeps one more thing in shards, and trains the same.
//!
//! `cargo run --release -p phalanx --example zero`

use phalanx::data::MarkovCorpus;
use phalanx::models::Llama;
use phalanx::models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx::{Category, Report, Trainer, Zero};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(40).map(|_| ())
}

/// Trains on 4 ranks at every stage and prints what a rank holds.
pub fn run(steps: usize) -> Result<Vec<Report>, Box<dyn std::error::Error>> {
    println!("stage    weights  gradients  optimizer  moved/step  loss");
    let mut reports = Vec::new();
    for stage in 0..=3 {
        let report = train(Zero::stage(stage), steps)?;
        println!(
            "{stage}     {:>10} {:>10} {:>10} {:>11}  {:.6}",
            report.bytes(Category::Weights),
            report.bytes(Category::Gradients),
            report.bytes(Category::Optimizer),
            report.moved,
            report.last_loss(),
        );
        reports.push(report);
    }
    Ok(reports)
}

fn train(zero: Zero, steps: usize) -> Result<Report, Box<dyn std::error::Error>> {
    let model = Llama::new(LlamaSpec {
        layers: 4,
        width: 32,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        ffn: 64,
        vocab: 64,
        context: 32,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: false,
    });
    let trainer = Trainer::new(model).data(MarkovCorpus::new(0, 64, 1 << 20)?).seq_len(32);
    Ok(trainer.mesh("dp=4").strategy(zero).batch(8).lr(1e-2).steps(steps).threads(1).run()?)
}
