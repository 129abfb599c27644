//! That the core property can fail on ranks that are threads: an endpoint between the engine and the
//! others does something else than it is asked to, and random cases find it within the stated number.

use std::sync::Arc;

use phalanx_call::MemoryKind;
use phalanx_comm::{
    Algorithm, Busy, Call, CollectiveOp, CommError, Communicator, Group, GroupId, Handle, Launcher,
    OpKind, ReduceOp, Stop, Threads, Traffic,
};
use phalanx_cpu::CpuEngine;
use phalanx_testing::RingBug;
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::{on_threads, ring_with_bug};
use phalanx_testing::threads::Ranks;

/// An endpoint that takes maxima for sums, or moves nothing, in calls of one kind.
struct Wrong {
    inner: Box<dyn Communicator>,
    kind: OpKind,
    memory: MemoryKind,
}

impl Wrong {
    /// The same call over the same memory with another op; every rank changes it alike.
    fn changed<'a>(&self, call: &Call<'a>) -> Call<'a> {
        let op = match call.op {
            op if op.kind() != self.kind => op,
            CollectiveOp::AllReduce(_) => CollectiveOp::AllReduce(ReduceOp::Max),
            CollectiveOp::ReduceScatter(_) => CollectiveOp::ReduceScatter(ReduceOp::Max),
            CollectiveOp::Permute { .. } => CollectiveOp::Permute { to: None, from: None },
            op => op,
        };
        Call { op, ..*call }
    }
}

impl Communicator for Wrong {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn memory(&self) -> MemoryKind {
        self.memory
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        self.inner.group(group)
    }

    fn members(&self, id: GroupId) -> &Group {
        self.inner.members(id)
    }

    fn algorithm(&self, call: &Call<'_>) -> Algorithm {
        self.inner.algorithm(call)
    }

    unsafe fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        let call = self.changed(call);
        // SAFETY: the changed call reads and writes no other elements than the one that the caller
        // vouches for.
        unsafe { self.inner.start(&call, send, receive) }
    }

    fn wait(&mut self, handle: Handle) -> Result<(), CommError> {
        self.inner.wait(handle)
    }

    fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        self.inner.test(handle)
    }

    fn progress(&mut self) -> Result<(), CommError> {
        self.inner.progress()
    }

    fn traffic(&self) -> &Traffic {
        self.inner.traffic()
    }

    fn reset_traffic(&mut self) {
        self.inner.reset_traffic();
    }

    fn busy(&self) -> Busy {
        self.inner.busy()
    }

    fn abort(&mut self, message: &str) {
        self.inner.abort(message);
    }

    fn stopper(&self) -> Arc<dyn Stop> {
        self.inner.stopper()
    }
}

#[test]
fn calls_that_do_something_else_are_found() {
    for (kind, within) in
        [(OpKind::AllReduce, 10), (OpKind::ReduceScatter, 10), (OpKind::Permute, 20)]
    {
        let mut ranks = Ranks::new(|inner: Box<dyn Communicator>| {
            let memory = MemoryKind::HOST;
            CpuEngine::on_rank(1, Box::new(Wrong { inner, kind, memory })).unwrap()
        });
        let found = try_seeds(0..within, Chooser::Random, |trial| {
            on_threads(&trial.whole, &trial.parts, trial.seed, &mut ranks)
        });
        let found = found.expect_err(&format!("{kind} is not found in {within} cases"));
        println!("{kind}: case {}, {} instructions", found.after + 1, found.ops());
        assert!(found.ops() <= 3, "{kind}: {found}");
    }
}

/// Every bug in a ring of keys is found.
#[test]
fn bugs_of_rings_are_found() {
    for bug in RingBug::ALL {
        let mut ranks =
            Ranks::new(|endpoint: Box<dyn Communicator>| CpuEngine::on_rank(1, endpoint).unwrap());
        let found = try_seeds(0..RING_SEEDS, Chooser::Partitioner, |trial| {
            ring_with_bug(&trial.whole, &trial.parts, trial.seed, &mut ranks, bug)
        });
        let found = found.expect_err(&format!("{bug:?} is not found"));
        println!("{bug:?}: case {}, {} instructions", found.after + 1, found.ops());
        assert!(found.ops() <= 12, "{bug:?}: {found}");
    }
}

/// Some of so many cases have a ring.
const RING_SEEDS: u64 = 30;

#[test]
fn a_transport_of_other_memory_is_refused() {
    let inner = Threads::new(1).launch().unwrap().remove(0).endpoint;
    let (kind, memory) = (OpKind::Barrier, MemoryKind::named("remote"));
    let refused = CpuEngine::on_rank(1, Box::new(Wrong { inner, kind, memory }));
    let error = refused.err().unwrap().to_string();
    for part in ["rank 0", "remote memory", "host memory"] {
        assert!(error.contains(part), "{error}");
    }
}
