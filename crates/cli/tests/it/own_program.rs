//! A program of a user's own that uses the library, started by `phalanx launch --exec`: this one.

use std::process::Command;

use phalanx::{Ddp, Mlp, RanksAs, Table, Trainer};

/// Trains on two ranks, and gives all losses bit by bit.
fn losses(ranks: Option<RanksAs>) -> String {
    let x: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let y = x.iter().map(|x| x * x).collect();
    let trainer = Trainer::new(Mlp::regression(1, [16], 1))
        .data(Table::new(64).input("x", x).target("y", y))
        .mesh("dp=2")
        .strategy(Ddp::default())
        .batch(16)
        .steps(20)
        .threads(1);
    let trainer = match ranks {
        Some(ranks) => trainer.ranks(ranks),
        None => trainer,
    };
    let trainer = match std::env::var_os("PHALANX_TEST_FOLDER") {
        Some(folder) => trainer.checkpoint_every(5, folder).resume("latest"),
        None => trainer,
    };
    let report = trainer.run().unwrap();
    report.losses.iter().map(|loss| format!("{:016x}", loss.to_bits())).collect()
}

/// The program: it does what its environment says.
#[test]
fn program() {
    if std::env::var_os("PHALANX_TEST_PROGRAM").is_some() {
        println!("\nlosses {}", losses(None));
    }
}

#[test]
fn a_program_of_ones_own_is_launched_and_has_the_losses_of_threads() {
    let mut launch = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    launch.args(["launch", "-n", "2", "--exec"]).arg(std::env::current_exe().unwrap());
    launch.args(["--exact", "own_program::program", "--nocapture", "--test-threads=1"]);
    let output = launch.env("PHALANX_TEST_PROGRAM", "1").output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    let expected = format!("losses {}", losses(Some(RanksAs::Threads)));
    assert_eq!(out.matches(&expected).count(), 2, "{out}");
}

/// A program that goes on from its own checkpoints is started again when a rank is lost.
#[test]
fn a_program_of_ones_own_goes_on_after_the_loss_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut launch = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    launch.args(["launch", "-n", "2", "--exec"]).arg(std::env::current_exe().unwrap());
    launch.args(["--exact", "own_program::program", "--nocapture", "--test-threads=1"]);
    launch.env("PHALANX_TEST_PROGRAM", "1").env("PHALANX_TEST_FOLDER", dir.path());
    let output = launch.env("PHALANX_FAULT", "kill rank=1 step=12 phase=F").output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{out}{err}");
    assert!(err.contains("going on from the checkpoint after step 5 (restart 1 of 10)"), "{err}");
    // Sixteen digits for each step: those after the fifth.
    let whole = losses(Some(RanksAs::Threads));
    assert_eq!(out.matches(&format!("losses {}", &whole[5 * 16..])).count(), 2, "{out}");
}
