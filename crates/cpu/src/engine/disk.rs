//! The tier `Disk`: copies to it run on their own thread, while programs compute.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use phalanx_engine::{DiskStore, EngineError, Event};

/// The store, and the thread that writes to it. The thread is started with the first store.
#[derive(Default)]
pub(super) struct Disk {
    store: Option<Arc<dyn DiskStore>>,
    /// The copies that were not waited for yet.
    outstanding: Vec<Event>,
    thread: Option<Writer>,
}

struct Writer {
    jobs: Option<Sender<Job>>,
    ended: Arc<Ended>,
    thread: Option<JoinHandle<()>>,
}

/// One copy.
struct Job {
    event: Event,
    store: Arc<dyn DiskStore>,
    at: usize,
    from: *const u8,
    bytes: usize,
}

// SAFETY: the memory is only read, and only until the event of the copy is waited for: see
// `Disk::start`.
unsafe impl Send for Job {}

/// The copies that have ended and were not asked for yet.
#[derive(Default)]
struct Ended {
    copies: Mutex<Vec<(Event, Result<(), String>)>>,
    change: Condvar,
}

impl Disk {
    /// Sets what the tier is from now on; no copy is outstanding.
    pub(super) fn mount(&mut self, store: Option<Arc<dyn DiskStore>>) -> Result<(), EngineError> {
        if self.thread.is_none() && store.is_some() {
            self.thread = Some(Writer::new()?);
        }
        self.store = store;
        Ok(())
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// Until the event was waited for, or this is dropped, the bytes are initialised and nothing
    /// writes them.
    pub(super) unsafe fn start(
        &mut self,
        event: Event,
        from: *const u8,
        bytes: usize,
        at: usize,
    ) -> Result<(), EngineError> {
        let (Some(store), Some(Writer { jobs: Some(jobs), .. })) = (&self.store, &self.thread)
        else {
            return Err(failed("no store was mounted".to_owned()));
        };
        let job = Job { event, store: store.clone(), at, from, bytes };
        jobs.send(job).map_err(|_| failed("its thread has ended".to_owned()))?;
        self.outstanding.push(event);
        Ok(())
    }

    /// Waits for a copy, if the event belongs to one.
    pub(super) fn finish(&mut self, event: Event) -> Result<(), EngineError> {
        let Some(at) = self.outstanding.iter().position(|other| *other == event) else {
            return Ok(());
        };
        self.outstanding.swap_remove(at);
        let Some(writer) = &self.thread else { return Ok(()) };
        let mut copies = lock(&writer.ended.copies);
        loop {
            if let Some(at) = copies.iter().position(|(other, _)| *other == event) {
                return copies.swap_remove(at).1.map_err(failed);
            }
            copies = writer.ended.change.wait(copies).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether a copy has ended; true for events of other calls.
    pub(super) fn has_ended(&self, event: Event) -> bool {
        let ended =
            |writer: &Writer| lock(&writer.ended.copies).iter().any(|(other, _)| *other == event);
        !self.outstanding.contains(&event) || self.thread.as_ref().is_some_and(ended)
    }

    /// The copies that were not waited for yet.
    pub(super) fn outstanding(&self) -> &[Event] {
        &self.outstanding
    }
}

impl Writer {
    fn new() -> Result<Self, EngineError> {
        let (jobs, next): (Sender<Job>, Receiver<Job>) = channel();
        let ended = Arc::new(Ended::default());
        let own = ended.clone();
        let body = move || {
            for Job { event, store, at, from, bytes } in next {
                // SAFETY: by the rules of `start`, nothing writes these bytes before the event was
                // waited for, which needs the result below.
                let bytes = unsafe { std::slice::from_raw_parts(from, bytes) };
                let written = store.write(at, bytes);
                drop(store);
                lock(&own.copies).push((event, written));
                own.change.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name("disk".to_owned()).spawn(body);
        let thread =
            thread.map_err(|error| EngineError::Threads { threads: 1, why: error.to_string() })?;
        Ok(Self { jobs: Some(jobs), ended, thread: Some(thread) })
    }
}

/// The thread ends before the arenas that it reads.
impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn failed(why: String) -> EngineError {
    EngineError::Disk { why }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
