//! What the first worker does with each task: it times it, and between tasks takes transfers on that were started.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use phalanx_engine::{CallPart, PartKind};

use super::kernel::Call;
use crate::tasks::Context;

/// Where parts of a call are noted.
pub(super) struct Timing<'a> {
    /// From when times are counted, if they are noted.
    pub(super) origin: Option<Instant>,
    pub(super) parts: &'a Mutex<Vec<CallPart>>,
}

impl Timing<'_> {
    /// Runs a task, and takes on what was started before it.
    pub(super) fn run(&self, call: &Call, cx: &Context<'_>) {
        let (kind, product) = (call.task.kind(), call.task.is_matmul());
        let start = (product || self.origin.is_some()).then(Instant::now);
        call.task.run(cx);
        if let Some(start) = start {
            if product {
                cx.failure.add_product_time(start.elapsed().as_nanos() as u64);
            }
            self.note(call.op, kind, start);
        }
        // A task that communicates has just done so.
        if kind == PartKind::Computes && cx.comm.is_some() {
            let start = self.origin.map(|_| Instant::now());
            if let (true, Some(start)) = (cx.take_on(), start) {
                self.note("transfers", PartKind::TakesOn, start);
            }
        }
    }

    fn note(&self, name: &str, kind: PartKind, start: Instant) {
        // A kernel that is no program is told of as a whole.
        let Some(origin) = self.origin.filter(|_| !name.is_empty()) else { return };
        let started = start.saturating_duration_since(origin);
        let ended = origin.elapsed();
        let part = CallPart { name: name.to_owned(), started, ended, kind };
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(part);
    }
}
