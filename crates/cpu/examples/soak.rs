//! Tests the core property for a given time, with new seeds: random programs on random meshes with
//! random annotations, on ranks that are threads and on simulated ones.
//!
//! ```sh
//! cargo run --release -p phalanx-cpu --example soak -- --minutes 30
//! ```
//!
//! A failure is made smaller and printed with its seed, and the command exits with 1. `--from SEED`
//! starts at a seed instead of one from the clock.
#![allow(clippy::unwrap_used, reason = "what fails here should stop")]

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx_comm::Communicator;
use phalanx_cpu::CpuEngine;
use phalanx_testing::cases::{Chooser, Found, try_seeds};
use phalanx_testing::checks::{on_simulated_ranks, on_threads};
use phalanx_testing::threads::Ranks;

/// How many seeds are tried before the clock is checked again.
const BATCH: u64 = 50;
/// The time between two progress messages.
const TOLD: Duration = Duration::from_secs(15);

fn main() -> ExitCode {
    let Some((minutes, from)) = arguments() else {
        eprintln!("usage: soak [--minutes N] [--from SEED]");
        return ExitCode::from(2);
    };
    println!("{minutes} minutes from seed {from} on");
    match soak(Duration::from_secs_f64(60.0 * minutes), from) {
        Ok(cases) => {
            println!("{cases} cases passed");
            ExitCode::SUCCESS
        }
        Err(found) => {
            println!("{found}");
            ExitCode::FAILURE
        }
    }
}

/// The minutes and the first seed.
fn arguments() -> Option<(f64, u64)> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    // Seeds from the clock in large steps, so that two runs share no seeds; short enough to type.
    let (mut minutes, mut from) = (10.0, clock.as_secs() % 10_000_000 * 100_000);
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next()?;
        match name.as_str() {
            "--minutes" => minutes = value.parse().ok().filter(|m| (0.0..1e6).contains(m))?,
            "--from" => from = value.parse().ok()?,
            _ => return None,
        }
    }
    Some((minutes, from))
}

/// Tries cases until the time is over; returns how many passed.
fn soak(time: Duration, from: u64) -> Result<usize, Box<Found>> {
    let ranks = |threads| {
        Ranks::new(move |endpoint: Box<dyn Communicator>| {
            CpuEngine::on_rank(threads, endpoint).unwrap()
        })
    };
    let mut crews = [ranks(1), ranks(2)];
    let (start, mut told, mut cases, mut next) = (Instant::now(), Instant::now(), 0, from);
    while start.elapsed() < time {
        for chooser in [Chooser::Random, Chooser::Partitioner] {
            let tally = try_seeds(next..next + BATCH, chooser, |trial| {
                let crew = &mut crews[trial.seed as usize % 2];
                on_threads(&trial.whole, &trial.parts, trial.seed, crew)?;
                on_simulated_ranks(&trial.whole, &trial.parts, trial.seed)
            })?;
            cases += tally.ran;
        }
        next += BATCH;
        if told.elapsed() >= TOLD {
            told = Instant::now();
            println!("{:>6.0} s: {cases} cases, next seed {next}", start.elapsed().as_secs_f64());
        }
    }
    Ok(cases)
}
