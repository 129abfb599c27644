//! Progress while a rank computes.
//!
//! A rank that waits makes progress itself: nothing has to be woken for that. But what it has started before it computes
//! would stand still until it waits. So a rank that says that it computes lends its endpoint to a thread, which sleeps
//! until a stream can be read or written; with its next call the rank takes the endpoint back.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use phalanx_call::MemoryKind;
use phalanx_sys::Arena;

use super::endpoint::Endpoint;
use crate::call::Call;
use crate::communicator::{Busy, Communicator, Handle, Stop};
use crate::error::CommError;
use crate::group::{Group, GroupId};
use crate::sync::{AtomicBool, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, Poll, spawn};
use crate::traffic::Traffic;
use crate::volume::Algorithm;

/// How long the thread sleeps at most if no stream moves: a rank that leaves waits for it.
const REST: Duration = Duration::from_millis(10);

/// A rank's endpoint, which a thread drives while the rank computes.
pub(super) struct StreamRank {
    rank: usize,
    lent: Arc<Lent>,
    /// Started when the rank computes for the first time.
    thread: Option<JoinHandle<()>>,
    stopper: Arc<dyn Stop>,
    /// By number: the groups that this rank has named.
    groups: BTreeMap<usize, Group>,
    traffic: Traffic,
    /// The world of this rank alone that has its arenas, if they are to outlive it.
    kept: Option<Box<dyn Communicator>>,
}

/// What the rank and the thread share.
struct Lent {
    endpoint: Mutex<Endpoint>,
    /// Whether the rank wants its endpoint back.
    wanted: AtomicBool,
    /// Rung when the rank computes, and when it leaves.
    bell: Condvar,
}

impl StreamRank {
    pub(super) fn new(endpoint: Endpoint, kept: Option<Box<dyn Communicator>>) -> Self {
        let (rank, stopper) = (endpoint.shared.rank, endpoint.stopper());
        let groups = BTreeMap::from([(0, Group::world(endpoint.shared.world()))]);
        let (wanted, bell) = (AtomicBool::new(false), Condvar::new());
        let lent = Arc::new(Lent { endpoint: Mutex::new(endpoint), wanted, bell });
        Self { rank, lent, thread: None, stopper, groups, traffic: Traffic::default(), kept }
    }

    /// The endpoint, which the thread leaves alone from now on.
    fn take(&self) -> MutexGuard<'_, Endpoint> {
        let mut endpoint = self.lent.claim();
        endpoint.lent = false;
        endpoint
    }

    /// Does something with the endpoint while the rank computes: what moved before goes on moving after it, unless
    /// it failed.
    fn amid<R>(
        &self,
        act: impl FnOnce(&mut Endpoint) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let mut endpoint = self.lent.claim();
        let moved = std::mem::replace(&mut endpoint.lent, false);
        let result = act(&mut endpoint)?;
        if moved && endpoint.has_large() {
            endpoint.lent = true;
            drop(endpoint);
            self.lent.bell.notify_one();
        }
        Ok(result)
    }
}

impl Lent {
    fn lock(&self) -> MutexGuard<'_, Endpoint> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoint, as soon as the thread has ended what it does at the moment.
    fn claim(&self) -> MutexGuard<'_, Endpoint> {
        self.wanted.store(true, Ordering::SeqCst);
        let endpoint = self.lock();
        self.wanted.store(false, Ordering::SeqCst);
        endpoint
    }

    /// What the thread does until the rank leaves.
    fn drive(&self) {
        let mut poll = Poll::default();
        let mut endpoint = self.lock();
        while !endpoint.leaves {
            if self.wanted.load(Ordering::SeqCst) || !endpoint.lent {
                let woken = self.bell.wait(endpoint);
                endpoint = woken.unwrap_or_else(PoisonError::into_inner);
            } else if !endpoint.go_on() && endpoint.lent {
                poll.clear();
                endpoint.watch(&mut poll);
                drop(endpoint);
                poll.wait(REST);
                endpoint = self.lock();
            }
        }
    }
}

impl Communicator for StreamRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.groups[&0].len()
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::HOST
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        let lane = self.take().lane_for(group, None)?;
        self.groups.insert(lane, group.clone());
        Ok(GroupId(lane as u32))
    }

    fn members(&self, id: GroupId) -> &Group {
        &self.groups[&id.index()]
    }

    fn arena(&mut self, bytes: usize) -> Result<Option<Arena>, CommError> {
        self.kept.as_mut().map_or(Ok(None), |kept| kept.arena(bytes))
    }

    fn algorithm(&self, _call: &Call<'_>) -> Algorithm {
        Algorithm::Ring
    }

    unsafe fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        let handle = self.take().start(call, send, receive)?;
        self.traffic.reserve(call.tag);
        Ok(handle)
    }

    fn computes(&mut self) -> Result<(), CommError> {
        let mut endpoint = self.take();
        if !endpoint.has_large() {
            return Ok(());
        }
        endpoint.lent = true;
        drop(endpoint);
        if self.thread.is_none() {
            let lent = self.lent.clone();
            let thread = spawn(move || lent.drive()).map_err(|error| CommError::System {
                what: "a thread that makes progress".to_owned(),
                error: error.to_string(),
            })?;
            self.thread = Some(thread);
        }
        self.lent.bell.notify_one();
        Ok(())
    }

    fn wait(&mut self, handle: Handle) -> Result<(), CommError> {
        let (tag, kind, bytes) = self.amid(|endpoint| endpoint.wait(handle))?;
        self.traffic.add(tag, kind, 1, bytes);
        Ok(())
    }

    fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        self.amid(|endpoint| endpoint.test(handle))
    }

    fn progress(&mut self) -> Result<(), CommError> {
        self.amid(Endpoint::progress)
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn reset_traffic(&mut self) {
        self.traffic.clear();
    }

    fn busy(&self) -> Busy {
        self.take().busy()
    }

    fn abort(&mut self, message: &str) {
        self.take().abort(message);
    }

    fn stopper(&self) -> Arc<dyn Stop> {
        self.stopper.clone()
    }
}

impl Drop for StreamRank {
    fn drop(&mut self) {
        self.take().leaves = true;
        self.lent.bell.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, the rank leaves all the same.
            let _ = thread.join();
        }
    }
}
