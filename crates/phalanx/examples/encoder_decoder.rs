//! An encoder and a decoder on a pipeline of three stages: what the encoder found goes from stage to stage, because
//! every block of the decoder reads it.
//!
//! `cargo run --release -p phalanx --example encoder_decoder`

use phalanx::data::MarkovCorpus;
use phalanx::{Report, T5, T5Spec, Trainer};

const VOCAB: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let report = run(200)?;
    println!("loss {:.3} → {:.3}", report.first_loss(), report.last_loss());
    Ok(())
}

/// The encoder reads the first 8 tokens of each sample, and the decoder continues it.
pub fn run(steps: usize) -> Result<Report, Box<dyn std::error::Error>> {
    let report = Trainer::new(T5::new(T5Spec::new(2, 32, 4, 64, VOCAB)))
        .data(MarkovCorpus::new(0, VOCAB, 1 << 24)?)
        .mesh("pp=3")
        .seq_len(16)
        .batch(32)
        .microbatches(4)
        .rate(|step| 3e-3 * (step as f64 / 20.0).min(1.0))
        .steps(steps)
        .threads(1)
        .run()?;
    Ok(report)
}
