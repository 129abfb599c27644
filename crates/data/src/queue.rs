//! A queue between two threads that never allocates after its creation.
//!
//! The standard channels allocate when a thread first waits, which may be at any time; this one
//! waits on a condition variable, which does not.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Holds up to a fixed number of items; once it is closed, no item is added.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    closed: bool,
}

impl<T> Queue<T> {
    /// A queue with room for `room` items; the caller never puts in more.
    pub(crate) fn new(room: usize) -> Self {
        let state = State { items: VecDeque::with_capacity(room), closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds an item, without waiting; once closed, items are dropped.
    pub(crate) fn push(&self, item: T) {
        let mut state = self.lock();
        if !state.closed {
            state.items.push_back(item);
            self.changed.notify_one();
        }
    }

    /// Takes the oldest item, waiting for one; `None` when closed and empty.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state| state.items.is_empty() && !state.closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.items.pop_front()
    }

    /// Closes the queue and wakes all waiting threads; items inside can still be taken.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Closes the queue and drops its items.
    pub(crate) fn abandon(&self) {
        let left = std::mem::take(&mut self.lock().items);
        self.close();
        drop(left);
    }

    /// No code that can panic runs under the lock, so even a poisoned lock has valid contents.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
