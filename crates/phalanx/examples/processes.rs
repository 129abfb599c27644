//! Ranks as processes that the program starts itself, with the same losses as threads.
//!
//! `cargo run --release -p phalanx --example processes`
//!
//! The same program may be started by others: `phalanx launch -n 2 --exec target/release/examples/processes`,
//! `torchrun --no-python`, `srun`, or twice by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

use phalanx::ir::ops::UnaryKind;
use phalanx::models::Mlp;
use phalanx::{Ddp, Processes, RanksAs, Report, Table, Trainer};

const SAMPLES: usize = 256;

fn main() -> Result<(), phalanx::Error> {
    // This process ends here, with its ranks; each of those goes on with a report of its own.
    let report = run(200, Processes(2))?;
    if phalanx::is_first() {
        println!(
            "loss {:.6} → {:.6} on {}",
            report.first_loss(),
            report.last_loss(),
            report.layout
        );
    }
    Ok(())
}

/// Fits y = x² on two ranks, each of which sees a half of every batch.
pub fn run(steps: usize, ranks: RanksAs) -> Result<Report, phalanx::Error> {
    let x: Vec<f32> = (0..SAMPLES).map(|i| 2.0 * i as f32 / SAMPLES as f32 - 1.0).collect();
    let y = x.iter().map(|x| x * x).collect();
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [64, 64], 1) };
    Trainer::new(model)
        .data(Table::new(SAMPLES).input("x", x).target("y", y))
        .mesh("dp=2")
        .strategy(Ddp::default())
        .ranks(ranks)
        .batch(32)
        .lr(1e-2)
        .steps(steps)
        .threads(1)
        .run()
}
