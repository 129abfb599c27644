//! Streams for random schedules: two short queues of bytes, over which threads are switched.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;

use shuttle::sync::{Mutex, MutexGuard};

use crate::streams::Stream;
use crate::sync::Poll;

/// Bytes that a queue holds: no whole number of frames, so that they come in pieces; or more than all
/// frames of a program, so that a rank's words are with one rank and not yet with another.
pub(crate) const ROOMS: [usize; 2] = [80, 8192];

/// One end of a stream.
pub(crate) struct Pipe {
    from: Arc<Mutex<Queue>>,
    to: Arc<Mutex<Queue>>,
    room: usize,
}

#[derive(Default)]
struct Queue {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// Both ends of a new stream with this much room each way.
pub(crate) fn pair(room: usize) -> io::Result<(Pipe, Pipe)> {
    let (one, other) = (Arc::<Mutex<Queue>>::default(), Arc::<Mutex<Queue>>::default());
    Ok((Pipe { from: one.clone(), to: other.clone(), room }, Pipe { from: other, to: one, room }))
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap()
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut queue = lock(&self.from);
        if queue.bytes.is_empty() && !queue.closed {
            return Err(ErrorKind::WouldBlock.into());
        }
        queue.bytes.read(into)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut queue = lock(&self.to);
        let count = bytes.len().min(self.room - queue.bytes.len());
        match count {
            _ if queue.closed => Err(ErrorKind::BrokenPipe.into()),
            0 => Err(ErrorKind::WouldBlock.into()),
            _ => queue.bytes.write(&bytes[..count]),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for Pipe {
    /// The scheduler alone decides who runs.
    fn watch(&self, _poll: &mut Poll, _write: bool) {}
}

impl Drop for Pipe {
    fn drop(&mut self) {
        lock(&self.from).closed = true;
        lock(&self.to).closed = true;
    }
}
