//! FSDP: a unit per block is gathered when it is needed; keeping it saves bytes and costs memory.
//!
//! `cargo run --release -p phalanx --example fsdp`

use phalanx::data::MarkovCorpus;
use phalanx::models::Llama;
use phalanx::models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx::{Category, Fsdp, Report, Trainer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(40).map(|_| ())
}

/// Trains on 4 ranks: sharded over all, kept after the forward, and in two groups of two.
pub fn run(steps: usize) -> Result<Vec<Report>, Box<dyn std::error::Error>> {
    println!("                         shards    gathered  moved/step  loss");
    let mut reports = Vec::new();
    for (name, fsdp) in [
        ("full shard", Fsdp::default()),
        ("kept for backward", Fsdp { reshard_after_forward: false, ..Fsdp::default() }),
        ("hybrid, 2 groups of 2", Fsdp { shard: Some(2), ..Fsdp::default() }),
    ] {
        let report = train(fsdp, steps)?;
        let (shards, gathered) = (Category::Weights, Category::Communication);
        println!(
            "{name:<22} {:>8} {:>11} {:>11}  {:.6}",
            report.bytes(shards),
            report.bytes(gathered),
            report.moved,
            report.last_loss(),
        );
        reports.push(report);
    }
    Ok(reports)
}

fn train(fsdp: Fsdp, steps: usize) -> Result<Report, Box<dyn std::error::Error>> {
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
    Ok(trainer.mesh("dp=4").strategy(fsdp).batch(8).lr(1e-2).steps(steps).threads(1).run()?)
}
