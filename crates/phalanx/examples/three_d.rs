//! Three dimensions at once: replicas, split tensors and stages, and the losses of one rank.
//!
//! `cargo run --release -p phalanx --example three_d`

use phalanx::data::MarkovCorpus;
use phalanx::models::Llama;
use phalanx::models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx::{Category, Megatron, NamedSchedule, Report, Sequence, Trainer, Zero};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(30).map(|_| ())
}

/// Trains the same model on one rank, and on 2 × 2 × 2 with two schedules.
pub fn run(steps: usize) -> Result<Vec<Report>, Box<dyn std::error::Error>> {
    let three_d = |order: NamedSchedule| {
        let trainer = trainer()?.steps(steps).mesh("dp=2 pp=2 tp=2").schedule(order);
        let strategies = trainer.strategy(Megatron::default()).strategy(Sequence::default());
        Ok::<_, Box<dyn std::error::Error>>(strategies.strategy(Zero::stage(1)).run()?)
    };
    let one = trainer()?.steps(steps).run()?;
    let reports = vec![one, three_d(NamedSchedule::OneFOneB)?, three_d(NamedSchedule::ZbH1)?];
    for report in &reports {
        let (loss, moved) = (report.last_loss(), report.moved);
        let [weights, kept] = [Category::Weights, Category::Residuals].map(|c| report.bytes(c));
        println!(
            "loss {loss:.6}  weights {weights:>6}  kept {kept:>7}  moved {moved:>7}  {}",
            report.layout
        );
        if loss >= report.first_loss() || (loss - reports[0].last_loss()).abs() > 1e-3 * loss {
            return Err(format!("{} does not train like one rank", report.layout).into());
        }
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
    Ok(trainer.seq_len(32).batch(16).microbatches(4).lr(1e-2).threads(1))
}
