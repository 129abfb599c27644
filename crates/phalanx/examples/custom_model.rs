//! Trains your own model: a token is predicted from the two before it, without attention.
//!
//! `cargo run --release -p phalanx --example custom_model`

use phalanx::data::MarkovCorpus;
use phalanx::ir::{Builder, DType, Init, IrError, Model};
use phalanx::models::Chain;
use phalanx::{Report, Trainer};

const VOCAB: usize = 32;
const WIDTH: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(300).map(|_| ())
}

/// Trains for some steps and prints how close the model came to the entropy of its source.
pub fn run(steps: usize) -> Result<Report, Box<dyn std::error::Error>> {
    let corpus = MarkovCorpus::new(0, VOCAB, 1 << 24)?;
    let floor = corpus.entropy_rate();
    let report = Trainer::of_model(trigram(DType::F32, 16, 32)?)
        .data(corpus)
        .batch(32) // two micro-batches of 16
        .rate(|step| 1e-2 * (step as f64 / 20.0).min(1.0))
        .steps(steps)
        .run()?;
    println!("loss {:.4}; the source's entropy is {floor:.4}", report.last_loss());
    Ok(report)
}

/// The model, in this element type and for micro-batches of this shape.
pub fn trigram(dtype: DType, batch: usize, seq: usize) -> Result<Model, IrError> {
    let b = Builder::new("trigram", dtype);
    let ids = b.data("ids", DType::I32, [batch, seq]);
    let present = b.param("present", [VOCAB, WIDTH]).embedding(ids);
    // The first token of a row has none before it.
    let past = b.param("past", [VOCAB, WIDTH]).embedding(ids).slice(1, 0, seq - 1);
    let none = b.constant(dtype, [batch, 1, WIDTH], 0.0);
    let h = present + b.concat(&[none, past], 1);
    let h = h.rms_norm(b.param("norm", [WIDTH]), 1e-5).matmul(b.param("up", [WIDTH, 4 * WIDTH]));
    let logits = h.gelu().matmul(b.param("head", [4 * WIDTH, VOCAB]));
    let losses = logits.cross_entropy(b.data("targets", DType::I32, [batch, seq]));
    b.loss("loss", losses.sum_all() * b.scalar("inv_tokens"));

    let mut chain = Chain::new("trigram");
    chain.once(b, |name| match name {
        "norm" => Init::Constant(1.0),
        _ => Init::Normal(0.1),
    })?;
    Ok(chain.finish())
}
