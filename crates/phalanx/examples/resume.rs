//! Checkpoints: a training that goes on where it stopped, also on other ranks.
//!
//! `cargo run --release -p phalanx --example resume`
//!
//! Started again with the same folder, such a program goes on by itself: by hand, by torchrun or Slurm, or
//! by `phalanx launch -n 2 --exec`, which starts it again when a rank is lost.

use std::path::Path;

use phalanx::ir::ops::UnaryKind;
use phalanx::models::Mlp;
use phalanx::{Fsdp, Report, Table, Trainer};

const SAMPLES: usize = 256;

fn main() -> Result<(), phalanx::Error> {
    let folder = std::env::temp_dir().join(format!("resume-{}", std::process::id()));
    let first = run(60, "dp=1", &folder)?;
    // Here the process may have ended; any number of ranks goes on.
    let rest = run(200, "dp=2", &folder)?;
    println!(
        "{} steps on {}, then {} on {}: loss {:.6} → {:.6} → {:.6}",
        first.losses.len(),
        first.layout,
        rest.losses.len(),
        rest.layout,
        first.first_loss(),
        rest.first_loss(),
        rest.last_loss()
    );
    std::fs::remove_dir_all(&folder).ok();
    Ok(())
}

/// Fits y = x² until so many steps are taken in all, and saves every 20.
pub fn run(steps: usize, mesh: &str, folder: &Path) -> Result<Report, phalanx::Error> {
    let x: Vec<f32> = (0..SAMPLES).map(|i| 2.0 * i as f32 / SAMPLES as f32 - 1.0).collect();
    let y = x.iter().map(|x| x * x).collect();
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [64, 64], 1) };
    let trainer = Trainer::new(model).data(Table::new(SAMPLES).input("x", x).target("y", y));
    let trainer = trainer.mesh(mesh).strategy(Fsdp::default()).batch(32).lr(1e-2).threads(1);
    trainer.steps(steps).checkpoint_every(20, folder).resume("latest").run()
}
