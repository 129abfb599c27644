//! `all_reduce` between two threads and between two processes, in turns: `cargo bench -p phalanx-comm`.
//!
//! Ranks meet at a barrier, then each times one call; the time of a call is that of the slower rank,
//! and a number is the median over the calls of a run. Buffers begin at a page, as an engine's do.
//! Processes keep them in shared memory, or in memory of their own: then they are staged. Runs
//! alternate, and the table shows the median
//! over the runs. The number of rounds may be given as an argument.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::time::Instant;

use phalanx_comm::{
    Collectives, CommError, Communicator, GroupId, Options, ReduceOp, SharedWorld, Threads,
    run_ranks,
};
use phalanx_sys::Arena;

const RANKS: usize = 2;
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];
const KINDS: [&str; 3] = ["threads", "processes", "staged"];
const WARM_UP: usize = 3;

fn main() {
    if let Ok(told) = std::env::var("PHALANX_BENCH_RANK") {
        return as_rank(&told);
    }
    let rounds = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(5);
    println!(
        "{:>10} {:>12} {:>12} {:>12}  (µs, {rounds} rounds)",
        "bytes", KINDS[0], KINDS[1], KINDS[2]
    );
    for bytes in SIZES {
        let mut times = [const { Vec::<f64>::new() }; KINDS.len()];
        for _ in 0..rounds {
            for (kind, times) in KINDS.into_iter().zip(&mut times) {
                times.push(if kind == "threads" { threads(bytes) } else { processes(kind, bytes) });
            }
        }
        let [threads, processes, staged] = times.map(median);
        println!("{bytes:>10} {threads:>12.2} {processes:>12.2} {staged:>12.2}");
    }
}

fn options() -> Options {
    Options { bind: true, ..Options::default() }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn threads(bytes: usize) -> f64 {
    let launcher = Threads { ranks: RANKS, options: options() };
    let medians = run_ranks(&launcher, |endpoint| measure(endpoint, Arena::new(bytes).unwrap()));
    medians.unwrap()[0]
}

/// Starts this program again for each rank; the first says what it measured.
fn processes(kind: &str, bytes: usize) -> f64 {
    let world = SharedWorld::create(RANKS, &options()).unwrap();
    let start = |rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let fd = world.fd().as_raw_fd();
        command.env("PHALANX_BENCH_RANK", format!("{rank} {fd} {kind} {bytes}"));
        world.pass_to(&mut command);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..RANKS).map(start).collect();
    let said = children.into_iter().map(|child| child.wait_with_output().unwrap().stdout);
    let said: Vec<String> = said.map(|bytes| String::from_utf8(bytes).unwrap()).collect();
    said[0].trim().parse().unwrap()
}

fn as_rank(told: &str) {
    let words: Vec<&str> = told.split(' ').collect();
    let [rank, fd, bytes] = [words[0], words[1], words[3]].map(|word| word.parse().unwrap());
    let mut local = SharedWorld::attach(fd as i32, rank, options()).unwrap();
    phalanx_sys::bind_thread(&local.cores);
    let endpoint = local.endpoint.as_mut();
    let arena = match words[2] {
        "staged" => Arena::new(bytes).unwrap(),
        _ => endpoint.arena(bytes).unwrap().unwrap(),
    };
    println!("{}", measure(endpoint, arena).unwrap());
}

/// The median time of a call in microseconds, of the slower rank.
fn measure(endpoint: &mut dyn Communicator, mut arena: Arena) -> Result<f64, CommError> {
    let values: &mut [f32] = bytemuck::cast_slice_mut(arena.as_mut_slice());
    let rounds = match size_of_val(values) {
        0..0x40000 => 2001,
        0x40000..0x200000 => 301,
        _ => 21,
    };
    // First touch.
    values.fill(0.0);
    let mut times = vec![0f64; rounds];
    for round in 0..WARM_UP + rounds {
        endpoint.barrier(GroupId::WORLD)?;
        let start = Instant::now();
        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, values)?;
        times[round.saturating_sub(WARM_UP)] = start.elapsed().as_secs_f64() * 1e6;
    }
    endpoint.all_reduce(GroupId::WORLD, ReduceOp::Max, &mut times)?;
    Ok(median(times))
}
