//! The stream to one other rank, and what all of a rank's streams share: the first failure.
//!
//! Streams are behind locks because a rank can be stopped from outside its endpoint: then the other
//! ranks must get the reason, and a data frame that is half written must be completed first.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::frame::{Frame, LINE, Phase, tail};
use super::region::Region;
use crate::communicator::Stop;
use crate::error::Failure;
use crate::sync::{Mutex, MutexGuard, Poll, TIMED};

/// A byte stream to another rank, which never blocks. This is all that the transport needs of what lies
/// below it: a socket, a connection, messages of an MPI library.
pub(crate) trait Stream: Read + Write + Send {
    /// Adds the stream to what is waited for, until it can be read, or also written.
    fn watch(&self, poll: &mut Poll, write: bool);
}

impl Stream for UnixStream {
    fn watch(&self, poll: &mut Poll, write: bool) {
        poll.add(self, write);
    }
}

/// The most bytes of one data frame, which is written and read by one system call if the stream has room: then the
/// other direction and other streams have their turn. Few large calls cost less than many small ones
/// (docs/communication.md). Other frames may have to wait for so many bytes, and so many may have to be filled
/// up when a rank stops.
const FRAME_BYTES: usize = 512 << 10;

/// The last byte of the tail behind data: they are what the sender gives; or it stopped, and they are not.
pub(super) const GOOD: u8 = 0;
const VOID: u8 = 1;

/// The longest tail of good data.
static TAIL: [u8; LINE] = [GOOD; LINE];

/// How long a rank that stops tries to send the reason to ranks that do not read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The same as a number of tries, where there is no clock.
const UNTIMED_TRIES: usize = 5;

/// What a rank's endpoint shares with its stoppers.
pub(super) struct Shared {
    pub(super) rank: usize,
    failure: Mutex<Option<Failure>>,
    /// By rank; none to itself.
    wires: Vec<Option<Mutex<Wire>>>,
}

impl Shared {
    pub(super) fn new(rank: usize, streams: Vec<Option<Box<dyn Stream>>>) -> Self {
        let wire = |stream: Option<Box<dyn Stream>>| stream.map(|s| Mutex::new(Wire::new(s)));
        let wires = streams.into_iter().map(wire).collect();
        Self { rank, failure: Mutex::new(None), wires }
    }

    /// How many ranks there are.
    pub(super) fn world(&self) -> usize {
        self.wires.len()
    }

    /// The stream to another rank.
    pub(super) fn wire(&self, rank: usize) -> Option<MutexGuard<'_, Wire>> {
        self.wires[rank].as_ref().map(lock)
    }

    /// The first failure, once there is one.
    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    /// Records a failure and reports it to the others; only the first one counts, and it is
    /// returned. `mismatch` gives, by rank, the mismatched call, with the numbers that the rank
    /// knows.
    pub(super) fn fail(
        &self,
        failure: Failure,
        mismatch: impl Fn(usize) -> Option<(u32, u64)>,
    ) -> Failure {
        let mut first = lock(&self.failure);
        if let Some(first) = &*first {
            return first.clone();
        }
        *first = Some(failure.clone());
        drop(first);
        for rank in 0..self.world() {
            if let Some(mut wire) = self.wire(rank) {
                let message = failure.message.to_string();
                wire.end(&Frame::Abort { rank: failure.rank, mismatch: mismatch(rank), message });
            }
        }
        self.flush(LAST_WORDS);
        failure
    }

    /// Writes everything that is left, for at most this time.
    pub(super) fn flush(&self, patience: Duration) {
        let (start, mut poll, mut tries) = (Instant::now(), Poll::default(), 0);
        loop {
            tries += 1;
            poll.clear();
            let mut left = false;
            for mut wire in (0..self.world()).filter_map(|rank| self.wire(rank)) {
                wire.write(&mut VecDeque::new(), &mut |_| {});
                if wire.has_control() {
                    wire.watch(&mut poll, true);
                    left = true;
                }
            }
            let over = if TIMED { start.elapsed() >= patience } else { tries == UNTIMED_TRIES };
            if !left || over {
                return;
            }
            poll.wait(patience.saturating_sub(start.elapsed()).min(Duration::from_millis(10)));
        }
    }
}

impl Stop for Shared {
    fn stop(&self, message: &str) -> Failure {
        self.fail(Failure { rank: self.rank, message: message.into() }, |_| None)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block that is being sent.
pub(super) struct Outgoing {
    /// The call's place in the list of this rank's calls.
    pub(super) call: u32,
    pub(super) group: u32,
    pub(super) sequence: u64,
    pub(super) phase: Phase,
    pub(super) region: Region,
    /// Extra bytes that follow the block, in tests of the counters.
    pub(super) extra: usize,
    /// How much has been written.
    pub(super) at: usize,
}

impl Outgoing {
    /// Takes in the next piece of the same result, if this is one that lies right behind it.
    pub(super) fn grow(&mut self, next: &Outgoing) -> bool {
        let same = (self.call, self.phase, self.extra) == (next.call, next.phase, next.extra);
        same && self.phase == Phase::Result && self.region.grow(&next.region)
    }

    fn left(&self) -> usize {
        self.region.bytes() + self.extra - self.at
    }
}

/// How much of a block was written.
pub(super) struct Written {
    pub(super) call: u32,
    pub(super) phase: Phase,
    pub(super) bytes: usize,
    /// Whether that was the last of it.
    pub(super) all: bool,
}

/// A stream and what is to be written to it.
pub(super) struct Wire {
    stream: Box<dyn Stream>,
    /// Frames that are being written; if a data frame is open, it is the last.
    control: Vec<u8>,
    /// How much of them has been written.
    written: usize,
    /// Bytes of the open data frame that are still to be written behind the frames: data, and the tail behind them.
    owed: usize,
    /// How many of them are the tail.
    tail: usize,
    /// Frames to write after that.
    next: Vec<u8>,
    /// Short rows that are written together.
    packed: Vec<u8>,
    /// Bytes of frames that were ever queued, started, and written.
    asked: u64,
    taken: u64,
    pub(super) flushed: u64,
    /// Nothing more is written: the last frame is queued, or the other end is closed.
    ended: bool,
}

/// What follows a block in tests of the counters.
static NOTHING: [u8; 64] = [0; 64];

impl Wire {
    fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            control: Vec::new(),
            written: 0,
            owed: 0,
            tail: 0,
            next: Vec::new(),
            packed: Vec::new(),
            asked: 0,
            taken: 0,
            flushed: 0,
            ended: false,
        }
    }

    /// Queues a frame; it is written when `flushed` has reached the returned number.
    pub(super) fn push(&mut self, frame: &Frame) -> u64 {
        if !self.ended {
            let before = self.next.len();
            frame.write(&mut self.next);
            self.asked += (self.next.len() - before) as u64;
        }
        self.asked
    }

    /// Queues the last frame. An open data frame is filled with zeros, and declared void.
    fn end(&mut self, frame: &Frame) {
        if self.ended {
            return;
        }
        self.push(frame);
        if self.owed > 0 {
            self.control.resize(self.control.len() + self.owed - 1, 0);
            self.control.push(VOID);
            self.owed = 0;
        }
        self.control.append(&mut self.next);
        self.taken = self.asked;
        self.ended = true;
    }

    /// Adds the stream to what is waited for.
    pub(super) fn watch(&self, poll: &mut Poll, write: bool) {
        self.stream.watch(poll, write);
    }

    /// Whether frames are waiting to be written.
    pub(super) fn has_control(&self) -> bool {
        self.written < self.control.len() || !self.next.is_empty()
    }

    /// Whether there is something to write, frames or blocks.
    pub(super) fn has_work(&self, blocks: bool) -> bool {
        self.has_control() || (blocks && !self.ended)
    }

    /// Writes frames and data once, as much as the stream accepts, and then others have their turn; returns whether
    /// it accepted any.
    pub(super) fn write(
        &mut self,
        blocks: &mut VecDeque<Outgoing>,
        tell: &mut impl FnMut(Written),
    ) -> bool {
        if self.owed == 0 && self.written == self.control.len() && !self.open(blocks) {
            return false;
        }
        let Some(count) = self.write_once(blocks.front()) else { return false };
        let frames = count.min(self.control.len() - self.written);
        self.written += frames;
        if self.written == self.control.len() {
            self.flushed = self.taken;
        }
        if let Some(block) = blocks.front_mut().filter(|_| count > frames) {
            let before = self.owed.saturating_sub(self.tail);
            self.owed -= count - frames;
            let bytes = before - self.owed.saturating_sub(self.tail);
            block.at += bytes;
            let (call, phase, all) = (block.call, block.phase, self.owed == 0 && block.left() == 0);
            tell(Written { call, phase, bytes, all });
            if all {
                blocks.pop_front();
            }
        }
        true
    }

    /// Starts the next frames: those that wait, and a data frame of the first block.
    fn open(&mut self, blocks: &VecDeque<Outgoing>) -> bool {
        self.control.clear();
        self.written = 0;
        std::mem::swap(&mut self.control, &mut self.next);
        self.taken = self.asked;
        if let Some(block) = blocks.front().filter(|_| !self.ended) {
            let Outgoing { group, sequence, phase, .. } = *block;
            let bytes = block.left().min(FRAME_BYTES);
            Frame::Data { group, sequence, phase, bytes }.write(&mut self.control);
            self.tail = tail(bytes);
            self.owed = bytes + self.tail;
        }
        !self.control.is_empty()
    }

    /// One system call: frames, then data of the open frame; `None` if the stream accepts no more
    /// or is closed.
    fn write_once(&mut self, block: Option<&Outgoing>) -> Option<usize> {
        let frames = &self.control[self.written..];
        let left = self.owed.saturating_sub(self.tail);
        let data = match block.filter(|_| left > 0) {
            // SAFETY: the block is part of a call that has not ended: by the rules of `start` it is
            // readable and nothing writes it.
            Some(block) if block.at < block.region.bytes() => unsafe {
                block.region.next(block.at, left, &mut self.packed)
            },
            Some(block) => &NOTHING[block.at - block.region.bytes()..][..left],
            None => &[],
        };
        let tail = if data.len() == left { &TAIL[..self.owed.min(self.tail)] } else { &[] };
        let slices = [frames, data, tail].map(IoSlice::new);
        loop {
            match self.stream.write_vectored(&slices) {
                Ok(count) if count > 0 => return Some(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                // The other end is closed. Its last frames are still to be read, and give the
                // reason.
                Ok(_) | Err(_) => {
                    self.give_up();
                    return None;
                }
            }
        }
    }

    fn give_up(&mut self) {
        self.ended = true;
        self.control.clear();
        self.next.clear();
        (self.written, self.owed) = (0, 0);
    }

    /// Reads into the slices; nothing if there is nothing to read now. Zero bytes are the end.
    pub(super) fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> Option<usize> {
        loop {
            match self.stream.read_vectored(slices) {
                Ok(count) => return Some(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                // A broken connection counts as closed.
                Err(_) => return Some(0),
            }
        }
    }
}
