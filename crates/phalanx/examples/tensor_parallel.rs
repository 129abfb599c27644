//! Tensor, sequence and context parallelism, and all with ZeRO: the same losses, other memory.
//!
//! `cargo run --release -p phalanx --example tensor_parallel`

use phalanx::data::MarkovCorpus;
use phalanx::models::Llama;
use phalanx::models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx::{Category, Megatron, Report, Sequence, Trainer, Ulysses, Zero};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(40).map(|_| ())
}

/// Trains the same model in four layouts.
pub fn run(steps: usize) -> Result<Vec<Report>, Box<dyn std::error::Error>> {
    let megatron = Megatron::default;
    let reports = vec![
        trainer()?.steps(steps).run()?,
        trainer()?.steps(steps).mesh("tp=2").strategy(megatron()).run()?,
        trainer()?
            .steps(steps)
            .mesh("tp=2")
            .strategy(megatron())
            .strategy(Sequence::default())
            .run()?,
        trainer()?
            .steps(steps)
            .mesh("dp=2 cp=2 tp=2")
            .strategy(Zero::stage(3))
            .strategy(megatron())
            .strategy(Ulysses::default())
            .run()?,
    ];
    for report in &reports {
        let (weights, kept) = (Category::Weights, Category::Residuals);
        let (loss, moved) = (report.last_loss(), report.moved);
        let (weights, kept) = (report.bytes(weights), report.bytes(kept));
        println!(
            "loss {loss:.6}  weights {weights:>6}  kept {kept:>7}  moved {moved:>8}  {}",
            report.layout
        );
    }
    Ok(reports)
}

fn trainer() -> Result<Trainer<'static>, Box<dyn std::error::Error>> {
    let rope = RopeSpec { theta: 10_000.0, scaling: RopeScaling::None };
    let (width, head_dim, ffn) = (32, 8, 64);
    let (layers, heads, kv_heads, vocab, context) = (4, 4, 2, 64, 32);
    let (norm_eps, tied) = (1e-5, false);
    #[rustfmt::skip]
    let model = Llama::new(LlamaSpec {
        layers, width, heads, kv_heads, head_dim, ffn, vocab, context, norm_eps, rope, tied,
    });
    let trainer = Trainer::new(model).data(MarkovCorpus::new(0, vocab, 1 << 20)?);
    Ok(trainer.seq_len(32).batch(8).lr(1e-2).threads(1))
}
