//! A training loop of your own: forward, backward and step, on two stages with two replicas each.
//!
//! `cargo run --release -p phalanx --example own_loop`

use phalanx::{Ddp, Mlp, NamedSchedule, Optimizer, Table, Trainer, UnaryKind};

const ROWS: usize = 16; // of a micro-batch
const PARTS: usize = 4; // micro-batches of a step

fn main() -> Result<(), phalanx::Error> {
    run(200).map(|_| ())
}

/// Takes some steps with a rate that halves whenever the loss stops falling; gives the losses.
pub fn run(steps: usize) -> Result<Vec<f64>, phalanx::Error> {
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [32, 32], 1) };
    let mut stepper = Trainer::new(model)
        .batch(PARTS * ROWS)
        .microbatches(PARTS)
        .optimizer(Optimizer::sgd(0.9))
        .mesh("dp=2 pp=2")
        .strategy(Ddp::default())
        .schedule(NamedSchedule::OneFOneB)
        .stepper()?;
    let (mut rate, mut best, mut losses) = (0.1, f64::INFINITY, Vec::new());
    for number in 0..steps * PARTS {
        let batch = wave(number);
        stepper.forward(&batch)?; // its loss with the present weights, should you need it
        stepper.backward()?;
        // Updates after every fourth micro-batch.
        if let Some(update) = stepper.step(rate)? {
            losses.push(update.loss);
            if losses.len() % 20 == 0 {
                println!("step {:4}  loss {:.5}  rate {rate}", losses.len(), update.loss);
                rate = if update.loss < best { rate } else { rate / 2.0 };
                best = best.min(update.loss);
            }
        }
    }
    let weight = stepper.training().param("layers.1.weight")?;
    println!("layers.1.weight, whole: {:?}", weight.shape);
    Ok(losses)
}

/// The micro-batch of this number: points of sin(3x).
fn wave(number: usize) -> Table {
    let at = |i: usize| ((number * ROWS + i) as f32 * 0.618).fract() * 2.0 - 1.0;
    let x: Vec<f32> = (0..ROWS).map(at).collect();
    let y = x.iter().map(|x| (3.0 * x).sin()).collect();
    Table::new(ROWS).input("x", x).target("y", y)
}
