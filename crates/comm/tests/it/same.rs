//! The same calls have the same bits and the same traffic, whatever transport they go over.

use half::bf16;
use phalanx_comm::{
    Blocks, Call, CollectiveOp, Collectives, CommError, Communicator, Element, Group, Launcher,
    OpKind, Options, ReduceOp, Streams, Strides, Threads, Traffic, run_ranks,
};

use super::attached::Attached;

/// Random calls on each transport.
const CALLS: u64 = 1000;
pub(crate) const RANKS: usize = 4;

/// Numbers that are the same on every rank and transport.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        // A linear congruence, of which the upper bits are good enough.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }

    /// Some of the ranks, in any order.
    fn group(&mut self) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..RANKS).collect();
        for i in (1..RANKS).rev() {
            ranks.swap(i, self.below(i + 1));
        }
        ranks.truncate(1 + self.below(RANKS));
        ranks
    }

    /// A block, with gaps between its rows and between blocks.
    fn blocks(&mut self) -> Blocks {
        let (outer, rows, len) = (1 + self.below(3), 1 + self.below(4), self.below(90));
        let mut strides = || {
            let row = len + self.below(3);
            let outer_stride = rows * row + self.below(3);
            Strides { block: outer * outer_stride + self.below(3), outer: outer_stride, row }
        };
        let (source, target) = (strides(), strides());
        Blocks { outer, rows, len, source, target }
    }
}

/// A value for every seed, of very different sizes, so that the order of a sum shows in its bits.
trait Value: Element {
    fn from_seed(seed: usize) -> Self;
}

fn number(seed: usize) -> f64 {
    let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((seed >> 40) as f64 - 8e6) * 2f64.powi((seed >> 33 & 15) as i32 - 20)
}

impl Value for f64 {
    fn from_seed(seed: usize) -> Self {
        number(seed)
    }
}

impl Value for f32 {
    fn from_seed(seed: usize) -> Self {
        number(seed) as f32
    }
}

impl Value for bf16 {
    fn from_seed(seed: usize) -> Self {
        bf16::from_f64(number(seed))
    }
}

impl Value for i32 {
    fn from_seed(seed: usize) -> Self {
        number(seed) as i32
    }
}

/// What a rank sees of all calls: the bytes that each one left, and what was counted.
pub(crate) type Seen = (Vec<Vec<u8>>, Traffic);

/// Does random call `number`, if this rank is in its group.
fn one_call(endpoint: &mut dyn Communicator, number: u64) -> Result<Option<Vec<u8>>, CommError> {
    let mut dice = Dice(number.wrapping_mul(0xD134_2543_DE82_EF95));
    let dtype = dice.below(4);
    match dtype {
        0 => typed_call::<f64>(endpoint, &mut dice, number),
        1 => typed_call::<f32>(endpoint, &mut dice, number),
        2 => typed_call::<bf16>(endpoint, &mut dice, number),
        _ => typed_call::<i32>(endpoint, &mut dice, number),
    }
}

fn typed_call<T: Value>(
    endpoint: &mut dyn Communicator,
    dice: &mut Dice,
    number: u64,
) -> Result<Option<Vec<u8>>, CommError> {
    let ranks = dice.group();
    let n = ranks.len();
    let kind = OpKind::ALL[dice.below(OpKind::ALL.len())];
    let reduction = [ReduceOp::Sum, ReduceOp::Max][dice.below(2)];
    let (root, shift, mut blocks) = (dice.below(n), dice.below(n), dice.blocks());
    let accumulate = dice.below(2) == 1;
    let rows: Vec<usize> = (0..n * n).map(|_| dice.below(1000)).collect();
    let rows = &rows;
    // Large enough for blocks to go in several pieces, now and then.
    blocks.len *= if dice.below(50) == 0 { 300 } else { 1 };
    let Some(me) = ranks.iter().position(|&rank| rank == endpoint.rank()) else { return Ok(None) };
    let cell = blocks.len.max(1);
    // How many elements of each row of a block go from one member to another.
    let some = |from: usize, to: usize| {
        let row = move |row: usize| (rows[from * n + to] + row) % (blocks.len + 1);
        (0..blocks.outer * blocks.rows * blocks.len.min(1)).map(row)
    };
    let gives: Vec<usize> = (0..n).flat_map(|to| some(me, to)).collect();
    let takes: Vec<usize> = (0..n).flat_map(|from| some(from, me)).collect();
    let op = match kind {
        OpKind::AllReduce => CollectiveOp::AllReduce(reduction),
        OpKind::AllGather => CollectiveOp::AllGather,
        OpKind::ReduceScatter => CollectiveOp::ReduceScatter(reduction),
        OpKind::AllToAll => CollectiveOp::AllToAll,
        OpKind::AllToAllRagged => {
            CollectiveOp::AllToAllRagged { cell, unit: 1, send: &gives, receive: &takes }
        }
        OpKind::Broadcast => CollectiveOp::Broadcast { root },
        OpKind::Reduce => CollectiveOp::Reduce { root, reduction },
        OpKind::Gather => CollectiveOp::Gather { root },
        OpKind::Scatter => CollectiveOp::Scatter { root },
        OpKind::Permute => {
            CollectiveOp::Permute { to: Some((me + shift) % n), from: Some((me + n - shift) % n) }
        }
        OpKind::Send | OpKind::Receive if n < 2 || me > 1 => return Ok(None),
        OpKind::Send | OpKind::Receive if me == 0 => {
            CollectiveOp::Send { to: 1, channel: root as u32 }
        }
        OpKind::Send | OpKind::Receive => CollectiveOp::Receive { from: 0, channel: root as u32 },
        OpKind::Barrier => CollectiveOp::Barrier,
    };
    // Rows that became longer than their strides, and all_reduce, lie densely.
    let dense = blocks.len > 90 || kind == OpKind::AllReduce;
    let blocks = if dense { Blocks::contiguous(blocks.count()) } else { blocks };
    let group = endpoint.group(&Group::new(ranks)?)?;
    let mut call = Call::new(group, op, T::DTYPE, blocks).tagged(number as u32 % 3);
    call.accumulate = accumulate && op.reduction().is_some();
    let (given, got) = call.elements(n, me).unwrap();
    let value = |from: usize| move |i: usize| T::from_seed(from + 31 * i + 7919 * number as usize);
    let send: Vec<T> = (0..given).map(value(1000 * me)).collect();
    // Alike on all members, as what an all_reduce adds to must be.
    let mut receive: Vec<T> = (0..got).map(value(17)).collect();
    match number % 2 {
        0 => endpoint.run(&call, &send, &mut receive)?,
        _ => run_in_arena(endpoint, &call, &send, &mut receive)?,
    }
    Ok(Some(bytemuck::cast_slice(&receive).to_vec()))
}

/// Does a call on copies of the buffers in memory that other ranks see, if the endpoint has such
/// memory.
fn run_in_arena<T: Value>(
    endpoint: &mut dyn Communicator,
    call: &Call<'_>,
    send: &[T],
    receive: &mut [T],
) -> Result<(), CommError> {
    let (given, got) = (size_of_val(send), size_of_val(receive));
    let Some(mut arena) = endpoint.arena(given.next_multiple_of(64) + got)? else {
        return endpoint.run(call, send, receive);
    };
    let (first, second) = arena.as_mut_slice().split_at_mut(given.next_multiple_of(64));
    let (first, second) = (&mut first[..given], &mut second[..got]);
    first.copy_from_slice(bytemuck::cast_slice(send));
    second.copy_from_slice(bytemuck::cast_slice(receive));
    endpoint.run::<T>(call, bytemuck::cast_slice(first), bytemuck::cast_slice_mut(second))?;
    receive.copy_from_slice(bytemuck::cast_slice(second));
    Ok(())
}

/// What the local ranks of a launcher see.
pub(crate) fn all_calls(launcher: &dyn Launcher) -> Vec<Seen> {
    let seen = run_ranks(launcher, |endpoint| {
        let mut results = Vec::new();
        for number in 0..CALLS {
            results.extend(one_call(endpoint, number)?);
        }
        Ok::<_, CommError>((results, endpoint.traffic().clone()))
    });
    seen.unwrap()
}

/// All of what a rank has seen, in one number.
pub(crate) fn digest((results, traffic): &Seen) -> u64 {
    let counted = format!("{traffic:?}");
    let bytes = results.iter().flatten().chain(counted.as_bytes());
    bytes.fold(results.len() as u64, |digest, &byte| {
        (digest.rotate_left(5) ^ u64::from(byte)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    })
}

#[test]
fn random_calls_have_the_same_bits_and_traffic_on_every_transport() {
    let threads = all_calls(&Threads::new(RANKS));
    let attached = Attached { ranks: RANKS, options: Options::default() };
    for (name, others) in
        [("streams", all_calls(&Streams::new(RANKS))), ("shared memory", all_calls(&attached))]
    {
        for (rank, (threads, other)) in threads.iter().zip(others).enumerate() {
            assert!(threads.0.len() > CALLS as usize / 3, "rank {rank} did {}", threads.0.len());
            let differs = threads.0.iter().zip(&other.0).position(|(one, other)| one != other);
            assert_eq!((differs, threads.0.len()), (None, other.0.len()), "{name}, rank {rank}");
            assert_eq!(threads.1, other.1, "{name}, rank {rank}");
        }
    }
}
