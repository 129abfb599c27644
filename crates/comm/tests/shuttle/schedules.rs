//! Small programs of ranks, each run under thousands of schedules.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use phalanx_ir::DType;
use phalanx_sys::Arena;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

use crate::blocking::Collectives;
use crate::blocks::Blocks;
use crate::call::{Call, CollectiveOp, ReduceOp};
use crate::communicator::{Communicator, Handle};
use crate::error::CommError;
use crate::group::{Group, GroupId};
use crate::launch::{Launcher, LocalRank};
use crate::pipe;
use crate::streams::Streams;
use crate::threads::{Options, SharedWorld, Threads, Waiting};

/// Schedules per program and scheduler.
const SCHEDULES: usize = 1500;

/// Bytes for the data of each rank where ranks are attached to shared memory, as processes are.
const ROOM: usize = 2 << 20;

/// Runs a program on ranks that sleep and on ranks that spin, which see all memory or each its own
/// view of shared memory, and on ranks that share no memory, under many schedules.
fn check(ranks: usize, program: fn(&mut dyn Communicator)) {
    for waiting in [Waiting::Park, Waiting::Spin] {
        let options = Options { waiting, depth: 2, ..Options::default() };
        let threads = Threads { ranks, options: options.clone() };
        schedule(program, move || threads.launch().unwrap());
        schedule(program, move || attached(ranks, &options).1);
    }
    for room in pipe::ROOMS {
        let pair = move || pipe::pair(room);
        schedule(program, move || Streams::new(ranks).over(pair).unwrap());
    }
}

/// Ranks with their own views of shared memory.
fn attached(ranks: usize, options: &Options) -> (SharedWorld, Vec<LocalRank>) {
    let world = SharedWorld::with_room(ranks, options, ROOM).unwrap();
    let fd = world.fd().as_raw_fd();
    let attach = |rank| SharedWorld::attach(fd, rank, options.clone()).unwrap();
    let locals = (0..ranks).map(attach).collect();
    (world, locals)
}

fn schedule(
    program: fn(&mut dyn Communicator),
    launch: impl Fn() -> Vec<LocalRank> + Send + Sync + Clone + 'static,
) {
    let world = move || {
        let spawn =
            |mut local: LocalRank| shuttle::thread::spawn(move || program(local.endpoint.as_mut()));
        let threads: Vec<_> = launch().into_iter().map(spawn).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
    run(world);
}

fn run(world: impl Fn() + Send + Sync + Clone + 'static) {
    let mut config = Config::new();
    config.max_steps = shuttle::MaxSteps::FailAfter(200_000);
    Runner::new(RandomScheduler::new(SCHEDULES), config.clone()).run(world.clone());
    Runner::new(PctScheduler::new(3, SCHEDULES), config).run(world);
}

const SUM: ReduceOp = ReduceOp::Sum;

fn call(group: GroupId, op: CollectiveOp<'_>, count: usize) -> Call<'_> {
    Call::new(group, op, DType::F32, Blocks::contiguous(count))
}

/// Starts a call over slices that the program keeps until it is over.
fn start(
    endpoint: &mut dyn Communicator,
    call: &Call<'_>,
    send: &[f32],
    receive: &mut [f32],
) -> Handle {
    try_start(endpoint, call, send, receive).unwrap()
}

fn try_start(
    endpoint: &mut dyn Communicator,
    call: &Call<'_>,
    send: &[f32],
    receive: &mut [f32],
) -> Result<Handle, CommError> {
    // SAFETY: every program keeps both slices until it has waited for the handle or has aborted.
    unsafe { endpoint.start(call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) }
}

/// Buffers are reused as soon as a call returns: whoever still read them would see other values.
#[test]
fn buffers_are_free_when_a_call_returns() {
    check(3, |endpoint| {
        let me = endpoint.rank() as f32;
        for round in 0..4 {
            let mut sum = [me + round as f32; 4];
            endpoint.all_reduce(GroupId::WORLD, SUM, &mut sum).unwrap();
            assert_eq!(sum, [3.0 + 3.0 * round as f32; 4]);
            sum.fill(-1000.0);
            let mut own = [me * 10.0 + round as f32];
            let mut all = [0f32; 3];
            endpoint.all_gather(GroupId::WORLD, &own, &mut all).unwrap();
            own.fill(-1000.0);
            assert_eq!(all, [0.0, 10.0, 20.0].map(|x| x + round as f32));
            let mut root = [if me == 1.0 { 7.0 + round as f32 } else { 0.0 }];
            endpoint.broadcast(GroupId::WORLD, 1, &mut root).unwrap();
            assert_eq!(root, [7.0 + round as f32]);
            root.fill(-1000.0);
        }
    });
}

/// The same where buffers lie in memory that all ranks see, if there is such memory.
#[test]
fn buffers_in_an_arena_are_free_when_a_call_returns() {
    check(3, |endpoint| {
        let me = endpoint.rank() as f32;
        let mut arena = endpoint.arena(64).unwrap();
        let mut own = [0f32; 4];
        for round in 0..3 {
            let values = visible(&mut arena, &mut own);
            values.fill(me + round as f32);
            endpoint.all_reduce(GroupId::WORLD, SUM, values).unwrap();
            assert_eq!(*values, [3.0 + 3.0 * round as f32; 4]);
            values[0] = me * 10.0;
            let (own, all) = values.split_at_mut(1);
            endpoint.all_gather(GroupId::WORLD, own, all).unwrap();
            assert_eq!(*all, [0.0, 10.0, 20.0]);
        }
        endpoint.barrier(GroupId::WORLD).unwrap();
    });
}

/// Memory that other ranks read: an arena where there are such, or any memory.
fn visible<'a>(arena: &'a mut Option<Arena>, own: &'a mut [f32]) -> &'a mut [f32] {
    match arena {
        Some(arena) => bytemuck::cast_slice_mut(&mut arena.as_mut_slice()[..size_of_val(own)]),
        None => own,
    }
}

/// Waits in opposite orders over two groups, with more calls than slots.
#[test]
fn waits_in_any_order_end() {
    check(3, |endpoint| {
        let me = endpoint.rank();
        let back = endpoint.group(&Group::new([2, 1, 0]).unwrap()).unwrap();
        let send = [me as f32 + 1.0; 2];
        let mut receive = [[0f32; 2]; 6];
        let mut handles = Vec::new();
        for (i, receive) in receive.iter_mut().enumerate() {
            let group = if i % 2 == 0 { GroupId::WORLD } else { back };
            handles.push(start(
                endpoint,
                &call(group, CollectiveOp::AllReduce(SUM), 2),
                &send,
                receive,
            ));
        }
        if me != 1 {
            handles.reverse();
        }
        handles.into_iter().for_each(|handle| endpoint.wait(handle).unwrap());
        assert_eq!(receive, [[6.0; 2]; 6]);
    });
}

/// Receivers of a broadcast need nobody but the root, and yet must not run ahead of each other
/// further than there are slots.
#[test]
fn nobody_runs_too_far_ahead() {
    check(3, |endpoint| {
        let me = endpoint.rank();
        let send: [[f32; 1]; 7] = std::array::from_fn(|i| [i as f32 + 1.0]);
        let mut got = [[0f32; 1]; 7];
        let mut last = None;
        for (i, (send, got)) in send.iter().zip(&mut got).enumerate() {
            let broadcast = call(GroupId::WORLD, CollectiveOp::Broadcast { root: i % 3 }, 1);
            let handle = start(endpoint, &broadcast, send, got);
            // Rank 0 waits for the call before this one, the others for this one.
            if let Some(handle) = last.replace(handle).filter(|_| me == 0) {
                endpoint.wait(handle).unwrap();
            } else if me != 0 {
                endpoint.wait(last.take().unwrap()).unwrap();
            }
        }
        last.into_iter().for_each(|handle| endpoint.wait(handle).unwrap());
        assert_eq!(got, send);
    });
}

/// Messages in both directions, each end waiting for another one first.
#[test]
fn messages_cross() {
    check(2, |endpoint| {
        let (me, other) = (endpoint.rank(), 1 - endpoint.rank());
        for round in 0..3 {
            let (send, mut got) = ([me as f32 + round as f32], [0f32]);
            let out = call(GroupId::WORLD, CollectiveOp::Send { to: other, channel: 1 }, 1);
            let back = call(GroupId::WORLD, CollectiveOp::Receive { from: other, channel: 1 }, 1);
            let sent = start(endpoint, &out, &send, &mut []);
            let received = start(endpoint, &back, &[], &mut got);
            let (first, second) = if me == 0 { (sent, received) } else { (received, sent) };
            endpoint.wait(first).unwrap();
            endpoint.wait(second).unwrap();
            assert_eq!(got, [other as f32 + round as f32]);
        }
    });
}

/// What a rank has started goes on while it computes, and is not touched any more when it was waited for, or when the
/// rank has given up.
#[test]
fn calls_go_on_while_ranks_compute() {
    check(2, |endpoint| {
        let me = endpoint.rank();
        for round in 0..3 {
            let send = [[me as f32 + round as f32; 3], [me as f32; 3]];
            let mut sums = [[0f32; 3]; 2];
            let sum = call(GroupId::WORLD, CollectiveOp::AllReduce(SUM), 3);
            let [first, second] = &mut sums;
            let one = start(endpoint, &sum, &send[0], first);
            endpoint.computes().unwrap();
            let other = start(endpoint, &sum, &send[1], second);
            endpoint.computes().unwrap();
            // What is left goes on.
            endpoint.wait(one).unwrap();
            assert_eq!(sums[0], [1.0 + 2.0 * round as f32; 3]);
            endpoint.wait(other).unwrap();
            assert_eq!(sums[1], [1.0; 3]);
        }
        let (mut send, mut sum) = ([1f32; 3], [0f32; 3]);
        let handle = try_start(
            endpoint,
            &call(GroupId::WORLD, CollectiveOp::AllReduce(SUM), 3),
            &send,
            &mut sum,
        );
        let handle = handle.and_then(|handle| endpoint.computes().map(|()| handle));
        if me == 1 {
            endpoint.abort("no more");
            send.fill(-1000.0);
        }
        match handle.and_then(|handle| endpoint.wait(handle)) {
            // It ended before the rank gave up, or what that one gave has come with its call.
            Ok(()) => assert_eq!(sum, [2.0; 3]),
            Err(CommError::Aborted(failure)) => assert_eq!(&*failure.message, "no more"),
            Err(other) => assert!(is_closed(&other.to_string()), "{other:?}"),
        }
        assert!(sum.iter().all(|&x| x >= 0.0), "{sum:?}");
    });
}

/// All members of a call that does not match say so, and nothing has moved.
#[test]
fn mismatches_are_told_by_all() {
    check(3, |endpoint| {
        let mut count = vec![1f32; 2 + usize::from(endpoint.rank() == 1)];
        match endpoint.all_reduce(GroupId::WORLD, SUM, &mut count) {
            Err(CommError::Mismatch { .. }) => assert!(count.iter().all(|&x| x == 1.0)),
            other => panic!("{other:?}"),
        }
    });
}

/// A rank that gives up in the midst of a call has its memory to itself as soon as it has said so:
/// who still gets a result gets the right one.
#[test]
fn memory_of_a_rank_that_fails_is_left_alone() {
    check(3, |endpoint| {
        let me = endpoint.rank();
        let (mut arena, mut own) = (endpoint.arena(16).unwrap(), [0f32; 4]);
        let (send, all) = visible(&mut arena, &mut own).split_at_mut(1);
        send[0] = me as f32 + 1.0;
        let gather = call(GroupId::WORLD, CollectiveOp::AllGather, 1);
        let handle = try_start(endpoint, &gather, send, all);
        if me == 2 {
            endpoint.abort("no more");
            send.fill(-1000.0);
            assert!(endpoint.wait(handle.unwrap()).is_err());
            return;
        }
        let result = handle.and_then(|handle| endpoint.wait(handle));
        assert!(all.iter().all(|&x| x >= 0.0), "{all:?}");
        match result {
            // Over streams, what it gave may have come with its call.
            Ok(()) => assert_eq!(*all, [1.0, 2.0, 3.0]),
            Err(CommError::Aborted(failure)) => {
                assert_eq!((failure.rank, &*failure.message), (2, "no more"));
            }
            Err(other) => assert!(is_closed(&other.to_string()), "{other:?}"),
        }
    });
}

/// A rank that leaves with calls outstanding takes the sleepers with it.
#[test]
fn a_rank_that_leaves_wakes_the_others() {
    check(2, |endpoint| {
        let (send, mut receive) = ([1f32], [0f32]);
        let sum = call(GroupId::WORLD, CollectiveOp::AllReduce(SUM), 1);
        let handle = try_start(endpoint, &sum, &send, &mut receive);
        if endpoint.rank() == 0 {
            endpoint.abort("it left");
            return;
        }
        match handle.and_then(|handle| endpoint.wait(handle)).map_err(|error| error.to_string()) {
            // Over streams, what it gave may have come with its call.
            Ok(()) => assert_eq!(receive, [2.0]),
            Err(error) => {
                assert!(error.contains("rank 0 failed: it left") || is_closed(&error), "{error}");
            }
        }
    });
}

/// A rank whose process ends says nothing; whoever started it does.
#[test]
fn a_rank_that_is_killed_is_named() {
    let program = |mut local: LocalRank| {
        let endpoint = local.endpoint.as_mut();
        let (mut send, mut all) = ([endpoint.rank() as f32 + 1.0], [0f32; 3]);
        let gather = call(GroupId::WORLD, CollectiveOp::AllGather, 1);
        let handle = try_start(endpoint, &gather, &send, &mut all);
        if endpoint.rank() == 2 {
            // It may have posted, and nobody hears of it again.
            drop(handle);
            return Some(local);
        }
        let result = handle.and_then(|handle| endpoint.wait(handle));
        send.fill(-1000.0);
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("stopped because rank 2 failed: killed; it has"), "{error}");
        assert!(all.iter().all(|&x| x >= 0.0), "{all:?}");
        None
    };
    for waiting in [Waiting::Park, Waiting::Spin] {
        let options = Options { waiting, depth: 2, ..Options::default() };
        let world = move || {
            let (world, locals) = attached(3, &options);
            let spawn = |local| shuttle::thread::spawn(move || program(local));
            let threads: Vec<_> = locals.into_iter().map(spawn).collect();
            world.ended(2, Some("killed"));
            // The killed rank's endpoint is dropped after all have ended.
            drop(threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>());
        };
        run(world);
    }
}

/// Whether a rank has left without its last words, which a schedule that lets nobody else run keeps out of a
/// stream that is full.
fn is_closed(error: &str) -> bool {
    error.contains("has closed its stream")
}
