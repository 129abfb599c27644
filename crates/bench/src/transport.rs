//! How fast collectives are, compared with copying alone.
//!
//! All ranks meet at a barrier, then each times the call; the time of a round is that of the
//! slowest rank. The limit is the time in which all ranks, copying at once, would read and write as
//! many bytes as the call must read and write, each once. Buffers begin at a page and lie where a
//! rank's engine keeps its own: between processes in memory that all of them see.

use std::time::{Duration, Instant};

use phalanx_ir::DType;

use phalanx_comm::{
    Blocks, Call, CollectiveOp, Collectives, CommError, Communicator, Failure, GroupId, Launcher,
    OpKind, ReduceOp, run_ranks,
};
use phalanx_sys::Arena;

/// The sizes that are measured: bytes of the full tensor.
pub(crate) const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// The calls that are measured.
const OPS: [OpKind; 7] = [
    OpKind::AllReduce,
    OpKind::AllGather,
    OpKind::ReduceScatter,
    OpKind::AllToAll,
    OpKind::Permute,
    OpKind::Broadcast,
    OpKind::Reduce,
];

/// What a call is named where programs use it: blocks that go around a ring of ranks, or from and to
/// one rank after the other.
pub(crate) fn name(op: OpKind) -> &'static str {
    match op {
        OpKind::Permute => "turn",
        OpKind::Broadcast => "broadcast_block",
        OpKind::Reduce => "reduce_block",
        other => other.name(),
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    /// What was called.
    pub(crate) op: OpKind,
    /// Bytes of the full tensor: the result of `all_gather`, the input of the others; of calls that
    /// move a block, the bytes of that.
    pub(crate) bytes: usize,
    /// The median time of a call, in microseconds.
    pub(crate) median_us: f64,
    /// `bytes` divided by the median time, in GiB per second.
    pub(crate) gib_per_s: f64,
    /// The time of copying the same number of bytes, in microseconds: the median copy.
    pub(crate) copy_limit_us: f64,
    /// The fastest call, in microseconds, which other programs on the machine disturb least.
    pub(crate) best_us: f64,
    /// The time of copying the same number of bytes: the fastest copy.
    pub(crate) copy_limit_best_us: f64,
}

/// Measures every call at every size, between the ranks of a world.
pub(crate) fn collectives(launcher: &dyn Launcher, sizes: &[usize]) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::with_capacity(sizes.len() * OPS.len());
    for &bytes in sizes {
        for op in OPS {
            rows.push(measure(launcher, op, bytes)?);
        }
    }
    Ok(rows)
}

/// Measures one call at one size. Copies are timed in the same run, but not between the calls, whose
/// caches they would disturb.
fn measure(launcher: &dyn Launcher, op: OpKind, bytes: usize) -> Result<Row, Failure> {
    let (ranks, rounds) = (launcher.ranks(), rounds(bytes));
    let mut slowest = run_ranks(launcher, |endpoint| {
        let mut bench = Bench::new(endpoint, op, bytes, ranks)?;
        let mut own = vec![[Duration::ZERO; 2]; rounds];
        for round in 0..WARM_UP + rounds {
            let copied = bench.time_copy(endpoint)?;
            own[round.saturating_sub(WARM_UP)][1] = copied;
        }
        for round in 0..WARM_UP + rounds {
            let called = bench.time_call(endpoint)?;
            own[round.saturating_sub(WARM_UP)][0] = called;
        }
        // A round takes as long as on the slowest rank.
        let mut slowest: Vec<f64> = own.iter().flatten().map(Duration::as_secs_f64).collect();
        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Max, &mut slowest)?;
        Ok::<_, CommError>(slowest)
    })?;
    let slowest = slowest.pop().unwrap_or_default();
    let times = |which: usize| {
        slowest.iter().skip(which).step_by(2).map(|&seconds| Duration::from_secs_f64(seconds))
    };
    let (call_us, best_us) = median_and_best(times(0));
    let (copy_us, best_copy_us) = median_and_best(times(1));
    let share = touched(op, ranks) / 2.0;
    Ok(Row {
        op,
        bytes,
        median_us: call_us,
        gib_per_s: bytes as f64 / (1u64 << 30) as f64 / (call_us * 1e-6),
        copy_limit_us: copy_us * share,
        best_us,
        copy_limit_best_us: best_copy_us * share,
    })
}

const WARM_UP: usize = 3;

fn rounds(bytes: usize) -> usize {
    if bytes < 256 << 10 {
        2001
    } else if bytes < 2 << 20 {
        301
    } else {
        21
    }
}

/// In microseconds.
fn median_and_best(times: impl Iterator<Item = Duration>) -> (f64, f64) {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let us = |i: usize| times[i].as_secs_f64() * 1e6;
    (us(times.len() / 2), us(0))
}

/// Bytes that a rank must read and write, each once, divided by the bytes of the full tensor.
fn touched(op: OpKind, ranks: usize) -> f64 {
    let n = ranks as f64;
    match op {
        OpKind::ReduceScatter => 1.0 + 1.0 / n,
        OpKind::AllReduce => 3.0 - 1.0 / n,
        // The root reads a block of every rank.
        OpKind::Reduce => 1.0 + n,
        _ => 2.0,
    }
}

/// One rank's memory, and what it does with it.
struct Bench {
    op: OpKind,
    /// One call, or one for each root: these take turns, as blocks do in a stream.
    calls: Vec<Call<'static>>,
    round: usize,
    send: Buffer,
    receive: Buffer,
}

impl Bench {
    fn new(
        endpoint: &mut dyn Communicator,
        op: OpKind,
        bytes: usize,
        ranks: usize,
    ) -> Result<Self, CommError> {
        let full = bytes / size_of::<f32>();
        let part = full / ranks;
        let own = endpoint.rank();
        let (to, from) = (Some((own + ranks - 1) % ranks), Some((own + 1) % ranks));
        let (ops, block) = match op {
            OpKind::AllGather => (vec![CollectiveOp::AllGather], part),
            OpKind::ReduceScatter => (vec![CollectiveOp::ReduceScatter(ReduceOp::Sum)], part),
            OpKind::AllToAll => (vec![CollectiveOp::AllToAll], part),
            OpKind::Permute => (vec![CollectiveOp::Permute { to, from }], full),
            OpKind::Broadcast => {
                ((0..ranks).map(|root| CollectiveOp::Broadcast { root }).collect(), full)
            }
            OpKind::Reduce => {
                let reduce = |root| CollectiveOp::Reduce { root, reduction: ReduceOp::Sum };
                ((0..ranks).map(reduce).collect(), full)
            }
            _ => (vec![CollectiveOp::AllReduce(ReduceOp::Sum)], full),
        };
        let call = |op| Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(block));
        let calls = ops.into_iter().map(call).collect();
        // Ones everywhere, except in the buffer that is summed in place many times, which must stay
        // small.
        let value = if op == OpKind::AllReduce { 0.0 } else { 1.0 };
        let (send, receive) =
            (Buffer::new(endpoint, full, value)?, Buffer::new(endpoint, full, value)?);
        Ok(Self { op, calls, round: 0, send, receive })
    }

    fn time_copy(&mut self, endpoint: &mut dyn Communicator) -> Result<Duration, CommError> {
        endpoint.barrier(GroupId::WORLD)?;
        let start = Instant::now();
        self.receive.values().copy_from_slice(self.send.values());
        Ok(start.elapsed())
    }

    fn time_call(&mut self, endpoint: &mut dyn Communicator) -> Result<Duration, CommError> {
        endpoint.barrier(GroupId::WORLD)?;
        let call = &self.calls[self.round % self.calls.len()];
        let is_root = call.op.root() == Some(endpoint.rank());
        self.round += 1;
        let (send, receive) = (self.send.values(), self.receive.values());
        let start = Instant::now();
        match self.op {
            OpKind::AllReduce => endpoint.run_in_place(call, send)?,
            // Only the root has a block to send, or gets one.
            OpKind::Broadcast if !is_root => endpoint.run(call, &[], receive)?,
            OpKind::Broadcast => endpoint.run_in_place(call, send)?,
            OpKind::Reduce if !is_root => endpoint.run(call, send, &mut [])?,
            _ => endpoint.run(call, send, receive)?,
        }
        Ok(start.elapsed())
    }
}

/// Values in memory that calls need not copy first, from the beginning of a page.
struct Buffer(Arena);

impl Buffer {
    fn new(endpoint: &mut dyn Communicator, count: usize, value: f32) -> Result<Self, CommError> {
        let bytes = count * size_of::<f32>();
        let arena = match endpoint.arena(bytes)? {
            Some(arena) => arena,
            None => Arena::new(bytes).map_err(|error| CommError::System {
                what: "memory for the tensors of a benchmark".to_owned(),
                error: error.to_string(),
            })?,
        };
        let mut buffer = Self(arena);
        buffer.values().fill(value);
        Ok(buffer)
    }

    fn values(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.0.as_mut_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_comm::Threads;

    #[test]
    fn rows_are_complete_and_consistent() {
        let sizes = [4 << 10, 64 << 10];
        let rows = collectives(&Threads::new(2), &sizes).unwrap();
        assert_eq!(rows.len(), 14);
        for row in rows {
            let gib = row.bytes as f64 / (1u64 << 30) as f64;
            assert!((row.gib_per_s * row.median_us * 1e-6 / gib - 1.0).abs() < 1e-9, "{row:?}");
            assert!(row.copy_limit_us > 0.0, "{row:?}");
        }
        // The formulas of the contract at two ranks: X, 3X/4 and 5X/4; a block is copied, or two are
        // read and one is written.
        assert_eq!([OpKind::Permute, OpKind::Broadcast].map(|op| touched(op, 2)), [2.0; 2]);
        assert_eq!(touched(OpKind::Reduce, 2), 3.0);
        assert_eq!(touched(OpKind::AllGather, 2), 2.0);
        assert_eq!(touched(OpKind::ReduceScatter, 2), 1.5);
        assert_eq!(touched(OpKind::AllReduce, 2), 2.5);
    }
}
