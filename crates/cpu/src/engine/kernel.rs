//! A compiled program: its calls in order, with barriers where workers must synchronise.

use std::sync::Arc;

use phalanx_call::Slots;

use crate::tasks::{self, Outstanding, Share, Task, Transfer};

/// A compiled program.
pub struct Kernel {
    pub(super) name: Arc<str>,
    pub(super) calls: Vec<Call>,
    /// For each value: collectives that one call starts and another waits for.
    pub(super) handles: Vec<Outstanding>,
    pub(super) slots: Slots,
    pub(super) instrs: usize,
}

impl Kernel {
    /// A kernel that is one task.
    pub(super) fn of(name: &str, task: Box<dyn Task>) -> Self {
        Self {
            name: name.into(),
            calls: vec![Call { task, op: "", instr: 0, barrier: false }],
            handles: Vec::new(),
            slots: Slots::default(),
            instrs: 0,
        }
    }

    /// The one call of the kernel, if that is a collective.
    pub(super) fn transfer(&self) -> Option<&Transfer> {
        match self.calls.as_slice() {
            [call] => call.task.transfer(),
            _ => None,
        }
    }
}

/// A task and its place in the program.
pub(super) struct Call {
    pub(super) task: Box<dyn Task>,
    /// The op's name; none where the kernel has no instruction.
    pub(super) op: &'static str,
    /// The instruction it belongs to; copies to outputs belong to the end.
    pub(super) instr: usize,
    /// Whether all workers must have finished what comes before.
    pub(super) barrier: bool,
}

/// A call needs a barrier before it if some worker touches what another one touched since the
/// last barrier, and one of both writes.
pub(super) fn place_barriers(calls: &mut [Call], workers: usize) {
    if workers == 1 {
        return;
    }
    let shares = |task: &dyn Task| -> Vec<Vec<tasks::Access>> {
        (0..workers).map(|worker| task.accesses(Share { worker, workers })).collect()
    };
    let mut since: Vec<Vec<Vec<tasks::Access>>> = Vec::new();
    for call in calls {
        let own = shares(&*call.task);
        let conflict = since.iter().any(|earlier| {
            (0..workers).any(|a| {
                (0..workers)
                    .filter(|&b| b != a)
                    .any(|b| earlier[a].iter().any(|x| own[b].iter().any(|y| x.conflicts(y))))
            })
        });
        if conflict {
            call.barrier = true;
            since.clear();
        }
        since.push(own);
    }
}
