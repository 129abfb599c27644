//! Once warm, calls allocate nothing: neither blocking nor asynchronous ones, nor messages.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::os::fd::AsRawFd;

use phalanx_comm::{
    Blocks, Call, CollectiveOp, Collectives, CommError, Communicator, GroupId, Launcher, LocalRank,
    Options, ReduceOp, SharedWorld, Threads, Waiting, run_ranks,
};
use phalanx_ir::DType;
use phalanx_sys::{CountingAllocator, count_alloc};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn warm_calls_allocate_nothing() {
    for waiting in [Waiting::Spin, Waiting::Park] {
        let options = Options { waiting, ..Options::default() };
        let attached = Attached(options.clone());
        check(&format!("threads, {waiting:?}"), &Threads { ranks: 3, options });
        check(&format!("shared memory, {waiting:?}"), &attached);
    }
}

/// Ranks that see only shared memory of each other, so that every call is staged.
struct Attached(Options);

impl Launcher for Attached {
    fn ranks(&self) -> usize {
        3
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let world = SharedWorld::create(3, &self.0)?;
        let fd = world.fd().as_raw_fd();
        (0..3).map(|rank| SharedWorld::attach(fd, rank, self.0.clone())).collect()
    }
}

fn check(name: &str, launcher: &dyn Launcher) {
    let counted = run_ranks(launcher, |endpoint| {
        let mut buffers = Buffers::new();
        for _ in 0..50 {
            buffers.step(endpoint)?;
        }
        endpoint.barrier(GroupId::WORLD)?;
        let before = count_alloc::counts().allocations;
        for _ in 0..200 {
            buffers.step(endpoint)?;
        }
        // Nobody does anything else before all have counted.
        endpoint.barrier(GroupId::WORLD)?;
        let after = count_alloc::counts().allocations;
        endpoint.barrier(GroupId::WORLD)?;
        Ok::<_, CommError>(after - before)
    });
    assert_eq!(counted.unwrap(), [0, 0, 0], "{name}");
}

struct Buffers {
    send: Vec<f32>,
    receive: Vec<f32>,
    sums: [[f32; 40]; 4],
}

impl Buffers {
    fn new() -> Self {
        Self { send: vec![1.0; 90], receive: vec![0.0; 90], sums: [[1.0; 40]; 4] }
    }

    fn step(&mut self, endpoint: &mut dyn Communicator) -> Result<(), CommError> {
        let (me, world) = (endpoint.rank(), GroupId::WORLD);
        endpoint.all_gather(world, &self.send[..30], &mut self.receive)?;
        endpoint.all_to_all(world, &self.send, &mut self.receive)?;
        let counts = [2, 3, 4];
        let takes = [counts[me]; 3];
        let op = CollectiveOp::AllToAllRagged { cell: 20, unit: 5, send: &counts, receive: &takes };
        let ragged = Call::new(world, op, DType::F32, Blocks::contiguous(20)).tagged(2);
        endpoint.run(&ragged, &self.send, &mut self.receive)?;
        match me {
            0 => endpoint.send(world, 1, &self.send)?,
            1 => endpoint.receive(world, 0, &mut self.receive)?,
            _ => {}
        }
        let sum = Call::new(
            world,
            CollectiveOp::AllReduce(ReduceOp::Sum),
            DType::F32,
            Blocks::contiguous(40),
        );
        let handles = self.sums.each_mut().map(|sum_of| {
            let pointer = sum_of.as_mut_ptr().cast::<u8>();
            // SAFETY: the array lives longer than the endpoint's calls, and nobody touches it
            // before they are waited for.
            unsafe { endpoint.start(&sum, pointer, pointer) }
        });
        for handle in handles.into_iter().rev() {
            endpoint.wait(handle?)?;
        }
        self.sums = [[1.0; 40]; 4];
        Ok(())
    }
}
