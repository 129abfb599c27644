//! What is only seen from inside of a shared world. Not beside its code, which the test of random
//! schedules compiles with primitives that work only under its scheduler.

use std::os::fd::AsRawFd;
use std::time::Duration;

use phalanx_ir::DType;

use crate::blocking::Collectives;
use crate::blocks::Blocks;
use crate::call::{Call, CollectiveOp, ReduceOp};
use crate::communicator::Communicator;
use crate::group::GroupId;
use crate::threads::{ArenaLife, Options, SharedWorld};

const ROOM: usize = 2 << 20;

fn world(ranks: usize) -> (SharedWorld, Vec<Box<dyn Communicator>>) {
    let options = Options { timeout: Duration::from_secs(60), ..Options::default() };
    let world = SharedWorld::with_room(ranks, &options, ROOM).unwrap();
    let fd = world.fd().as_raw_fd();
    let attach = |rank| SharedWorld::attach(fd, rank, options.clone()).unwrap().endpoint;
    let endpoints = (0..ranks).map(attach).collect();
    (world, endpoints)
}

/// A process that dies while it copies goes on saying that it touches memory.
#[test]
fn a_rank_that_died_while_touching_memory_is_not_waited_for() {
    for told in [true, false] {
        let (world, mut endpoints) = world(2);
        world.plant_touching(1);
        let dead = endpoints.pop();
        if told {
            world.ended(1, Some("signal: 9"));
        } else {
            drop(dead);
        }
        endpoints[0].abort("no more");
        let expected = match told {
            true => "rank 1 failed: signal: 9; it has finished no call yet",
            false => "rank 0 failed: no more",
        };
        assert_eq!(world.failure().unwrap().to_string(), expected);
    }
}

/// A process that is stopped while it copies may go on any time later; its memory stays.
#[test]
fn a_rank_that_is_stopped_while_touching_memory_is_not_waited_for_long() {
    let (world, mut endpoints) = world(2);
    world.plant_touching(1);
    endpoints[0].abort("no more");
    assert_eq!(world.failure().unwrap().to_string(), "rank 0 failed: no more");
}

/// What one process leaves in its arena, another one finds there.
#[test]
fn an_arena_is_taken_over_as_it_was_left() {
    const BYTES: usize = 100_000;
    let options = |arena| Options { arena, ..Options::default() };
    let first = SharedWorld::with_room(2, &options(ArenaLife::Kept), ROOM).unwrap();
    let fd = first.fd().as_raw_fd();
    for rank in 0..2 {
        let mut local = SharedWorld::attach(fd, rank, options(ArenaLife::Kept)).unwrap();
        let mut arena = local.endpoint.arena(BYTES).unwrap().unwrap();
        arena.as_mut_slice().fill(rank as u8 + 7);
        // A process that has failed leaves in good order, too.
        local.endpoint.abort("no more");
    }
    let holder = SharedWorld::attach(fd, 0, options(ArenaLife::Kept));
    assert!(holder.err().unwrap().to_string().contains("start a new world"));
    let next = SharedWorld::renew(fd, 2, &options(ArenaLife::TakenOver)).unwrap();
    assert_eq!(next.failure(), None);
    let fd = next.fd().as_raw_fd();
    let attach = |rank, arena| SharedWorld::attach(fd, rank, options(arena)).unwrap().endpoint;
    let mut endpoints = [0, 1].map(|rank| attach(rank, ArenaLife::TakenOver));
    let wrong = endpoints[0].arena(BYTES + 1).unwrap_err().to_string();
    assert!(wrong.contains("the arena that is to be taken over has 100000 bytes"), "{wrong}");
    for (rank, endpoint) in endpoints.iter_mut().enumerate() {
        let mut arena = endpoint.arena(BYTES).unwrap().unwrap();
        assert!(arena.as_mut_slice().iter().all(|&byte| byte == rank as u8 + 7));
    }
    let held = SharedWorld::renew(fd, 2, &Options::default()).err().unwrap().to_string();
    assert!(held.contains("the process of rank 0 still lives"), "{held}");
    drop(endpoints);
    let other = SharedWorld::renew(fd, 3, &Options::default()).err().unwrap().to_string();
    assert!(other.contains("it has 2 ranks, not 3"), "{other}");
    // A new arena begins with zeros, whatever was there.
    let next = SharedWorld::renew(fd, 2, &Options::default()).unwrap();
    let fresh = SharedWorld::attach(next.fd().as_raw_fd(), 0, Options::default());
    let mut arena = fresh.unwrap().endpoint.arena(BYTES).unwrap().unwrap();
    assert!(arena.as_mut_slice().iter().all(|&byte| byte == 0));
}

/// Together the calls need more room than there is, so that later ones wait for earlier ones.
#[test]
fn staged_calls_wait_for_room() {
    const COUNT: usize = 150_000;
    let (_world, endpoints) = world(2);
    let work = |mut endpoint: Box<dyn Communicator>| {
        let op = CollectiveOp::AllReduce(ReduceOp::Sum);
        let call = Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(COUNT));
        let send = vec![endpoint.rank() as f32 + 1.0; COUNT];
        let mut receive = vec![vec![0f32; COUNT]; 8];
        let handles: Vec<_> = (receive.iter_mut())
            .map(|receive| {
                let (send, receive) = (send.as_ptr().cast(), receive.as_mut_ptr().cast());
                // SAFETY: the lists live, untouched, until all calls were waited for.
                unsafe { endpoint.start(&call, send, receive) }.unwrap()
            })
            .collect();
        handles.into_iter().for_each(|handle| endpoint.wait(handle).unwrap());
        assert!(receive.iter().flatten().all(|&x| x == 3.0));
    };
    std::thread::scope(|scope| {
        endpoints.into_iter().for_each(|endpoint| drop(scope.spawn(move || work(endpoint))));
    });
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let (_world, mut endpoints) = world(1);
    let error = endpoints[0].arena(ROOM + 1).unwrap_err().to_string();
    assert!(error.contains("has 2097152 bytes, of which 2097152 in one piece"), "{error}");
    let mut values = vec![1f32; ROOM];
    let sum = endpoints[0].all_reduce(GroupId::WORLD, ReduceOp::Sum, &mut values);
    let error = sum.unwrap_err().to_string();
    assert!(error.contains("8388608 bytes there does not fit into the 2097152"), "{error}");
    assert!(error.contains("Communicator::arena"), "{error}");
}

/// A full shelf is an error with its size, not a crash.
#[test]
fn too_many_groups_are_refused() {
    let options = Options { depth: 4096, ..Options::default() };
    let world = SharedWorld::with_room(2, &options, ROOM).unwrap();
    let mut local = SharedWorld::attach(world.fd().as_raw_fd(), 0, options).unwrap();
    let send = |channel| CollectiveOp::Receive { from: 1, channel };
    let error = (0..64).find_map(|channel| {
        let blocks = Blocks::contiguous(0);
        let call = Call::new(GroupId::WORLD, send(channel), DType::F32, blocks);
        let (none, nothing) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: the call has no elements.
        unsafe { local.endpoint.start(&call, none, nothing) }.err()
    });
    let error = error.unwrap().to_string();
    assert!(error.contains("2097152 bytes for its groups and names are full"), "{error}");
    assert!(error.contains("1->0 (channel"), "{error}");
    // The reason has room elsewhere.
    let later = local.endpoint.barrier(GroupId::WORLD).unwrap_err().to_string();
    assert_eq!(later, format!("stopped because rank 0 failed: {error}"));
}
