//! How long a collective over TCP takes, and how much of it happens while its ranks compute.
//!
//! Start it once for each rank, with the variables that `docs/processes.md` lists:
//!
//! ```sh
//! RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 stream_rates all_reduce 16384 21 50 busy
//! ```
//!
//! The arguments: the call, the KiB of the full tensor, how many rounds; then, for calls that overlap, the milliseconds
//! that a rank computes between starting the call and waiting for it, and whether its core is `busy` with that, or `idle`
//! because a device computes. Rank 0 prints the median over the rounds, of the slower rank of each.
#![allow(clippy::unwrap_used, reason = "a measurement that fails should stop")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_comm::{
    Blocks, Call, CollectiveOp, Collectives, CommError, Communicator, Environment, GroupId,
    Launcher, Membership, Options, Processes, ReduceOp,
};
use phalanx_ir::DType;
use phalanx_sys::Arena;

const WARM_UP: usize = 3;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<usize>().unwrap());
    let me = Environment::find(&|name| std::env::var(name).ok()).unwrap().unwrap();
    let job = Arc::new(Membership::meet(&me, Duration::from_secs(10)).unwrap());
    let mut local = Processes::new(job, Options::default()).launch().unwrap().remove(0);
    let compute =
        (Duration::from_millis(number(4) as u64), words.get(5).is_some_and(|w| w == "busy"));
    let times = measure(local.endpoint.as_mut(), &words[1], number(2) << 10, number(3), compute);
    if me.rank == 0 {
        let [median, best, start, wait] = times.unwrap();
        println!(
            "{} {} KiB: {median:.1} us, best {best:.1}; start {start:.1}, wait {wait:.1}",
            words[1],
            number(2)
        );
    }
}

/// The median and the best time of a round without its computing, and the medians of starting and of waiting, in µs.
fn measure(
    endpoint: &mut dyn Communicator,
    call: &str,
    bytes: usize,
    rounds: usize,
    compute: (Duration, bool),
) -> Result<[f64; 4], CommError> {
    let (full, ranks) = (bytes / 4, endpoint.world());
    let (op, block) = match call {
        "all_reduce" => (CollectiveOp::AllReduce(ReduceOp::Sum), full),
        "all_gather" => (CollectiveOp::AllGather, full / ranks),
        "reduce_scatter" => (CollectiveOp::ReduceScatter(ReduceOp::Sum), full / ranks),
        _ => (CollectiveOp::AllToAll, full / ranks),
    };
    let call = Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(block));
    let (mut send, mut receive) = (Arena::new(bytes).unwrap(), Arena::new(bytes).unwrap());
    send.as_mut_slice().fill(0);
    receive.as_mut_slice().fill(0);
    let from = send.as_mut_slice().as_mut_ptr();
    let into = match op {
        CollectiveOp::AllReduce(_) => from,
        _ => receive.as_mut_slice().as_mut_ptr(),
    };
    let mut times = vec![0f64; 3 * rounds];
    for round in 0..WARM_UP + rounds {
        endpoint.barrier(GroupId::WORLD)?;
        let start = Instant::now();
        // SAFETY: both buffers are as large as the call says, of this rank alone, and untouched until it has ended.
        let handle = unsafe { endpoint.start(&call, from, into)? };
        let started = start.elapsed();
        if !compute.0.is_zero() {
            endpoint.computes()?;
        }
        let computed = compute_for(compute);
        let waits = Instant::now();
        endpoint.wait(handle)?;
        let at = 3 * round.saturating_sub(WARM_UP);
        let all = start.elapsed().saturating_sub(computed);
        times[at..at + 3]
            .copy_from_slice(&[all, started, waits.elapsed()].map(|t| t.as_secs_f64() * 1e6));
    }
    endpoint.all_reduce(GroupId::WORLD, ReduceOp::Max, &mut times)?;
    let sorted = |which: usize| {
        let mut times: Vec<f64> = times.iter().copied().skip(which).step_by(3).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let (all, start, wait) = (sorted(0), sorted(1), sorted(2));
    Ok([all[rounds / 2], all[0], start[rounds / 2], wait[rounds / 2]])
}

/// Computes for so much of this thread's time, or sleeps as long as if a device did it; returns how long that should take.
fn compute_for((time, busy): (Duration, bool)) -> Duration {
    if !busy {
        std::thread::sleep(time);
        return time;
    }
    let start = phalanx_sys::thread_cpu_time();
    while phalanx_sys::thread_cpu_time().saturating_sub(start) < time {
        std::hint::spin_loop();
    }
    time
}
