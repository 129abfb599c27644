//! What one rank knows of another: what it sends to it, and how much it has read from it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::IoSliceMut;
use std::mem::take;

use super::calls::Outstanding;
use super::frame::{DATA_FRAME, Frame, Phase};
use super::region::PACKED;
use super::wire::{GOOD, Outgoing, Wire};
use crate::call::OpKind;
use crate::site::Site;

/// Bytes that are read at once if frames are expected, of which more than that may follow: data that are read
/// with them are copied once more. The buffer grows for a longer frame.
const FRAMES: usize = 4 << 10;

/// The other end of one stream.
#[derive(Default)]
pub(super) struct Link {
    /// Blocks that are to be sent, in this order.
    pub(super) blocks: VecDeque<Outgoing>,
    /// Frames of calls that are not written yet: the stream position after the frame, and the call.
    pub(super) marks: VecDeque<(u64, u32)>,
    /// What the other rank's numbers of groups mean here.
    pub(super) lanes: HashMap<u32, usize>,
    /// What its numbers of call sites mean here.
    pub(super) sites: HashMap<u32, Site>,
    /// The call sites that it knows already.
    pub(super) told: HashSet<u32>,
    pub(super) inbox: Inbox,
    /// Whether its end of the stream is closed.
    pub(super) gone: bool,
    /// The last call that both took part in.
    pub(super) last: Option<Last>,
}

/// A call that is over.
#[derive(Clone, Copy)]
pub(super) struct Last {
    pub(super) kind: OpKind,
    pub(super) lane: usize,
    pub(super) sequence: u64,
    pub(super) site: Site,
    /// Whether the other rank's part in it was seen here.
    pub(super) seen: bool,
}

/// Bytes that were read from a stream and not processed yet.
#[derive(Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// The call whose data come next, and how many bytes.
    open: Option<Open>,
    /// Data that have come before they can be stored.
    early: Vec<u8>,
}

/// A data frame that has not been read to its end.
#[derive(Clone, Copy)]
pub(super) struct Open {
    pub(super) to: Destination,
    pub(super) member: usize,
    pub(super) phase: Phase,
    pub(super) left: usize,
    /// Bytes of the tail behind the data that have not been read.
    pub(super) tail: usize,
}

/// Where data go.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    /// To a block of a call whose members have all started it.
    Call(u32),
    /// Aside, until all members of the call with this lane and number have started it.
    Aside(usize, u64),
}

/// The result of reading.
pub(super) enum ReadResult {
    /// A frame.
    Frame(Frame),
    /// Data, already stored in their block.
    Data,
    /// All data of a frame that go aside: the lane and the number of the call, the member, the data.
    Aside(usize, u64, usize, Vec<u8>),
    /// Nothing complete yet.
    Nothing,
    /// The end of the stream.
    End,
}

impl Inbox {
    /// The next data go to a block of a call.
    pub(super) fn expect(&mut self, open: Open) {
        self.open = Some(open);
    }

    /// Reads one frame, or some data; fails if the stream is invalid.
    pub(super) fn read(
        &mut self,
        wire: &mut Wire,
        calls: &mut [Outstanding],
    ) -> Result<ReadResult, &'static str> {
        if let Some(open) = self.open {
            if open.left == 0 {
                return Ok(self.read_end(open, wire, calls));
            }
            let result = match open.to {
                Destination::Call(call) => self.read_data(open, &mut calls[call as usize], wire),
                Destination::Aside(..) => self.read_aside(open, wire),
            };
            return Ok(match self.open {
                // The tail behind data often comes with them.
                Some(open) if open.left == 0 && self.start < self.end => {
                    self.read_end(open, wire, calls)
                }
                _ => result,
            });
        }
        if let Some((frame, len)) = Frame::read(&self.bytes[self.start..self.end])? {
            self.start += len;
            return Ok(ReadResult::Frame(frame));
        }
        match self.fill(FRAMES, wire) {
            Some(result) => Ok(result),
            None => self.read(wire, calls),
        }
    }

    /// Reads behind what was read before, at most this much at once; returns a result if there is nothing.
    fn fill(&mut self, most: usize, wire: &mut Wire) -> Option<ReadResult> {
        self.make_room(most);
        let end = self.bytes.len().min(self.end + most);
        match wire.read(&mut [IoSliceMut::new(&mut self.bytes[self.end..end])]) {
            None => Some(ReadResult::Nothing),
            Some(0) => Some(ReadResult::End),
            Some(count) => {
                self.end += count;
                None
            }
        }
    }

    /// Reads data that cannot be stored yet.
    fn read_aside(&mut self, open: Open, wire: &mut Wire) -> ReadResult {
        if self.start == self.end
            && let Some(result) = self.fill(PACKED, wire)
        {
            return result;
        }
        let count = open.left.min(self.end - self.start);
        self.early.extend_from_slice(&self.bytes[self.start..][..count]);
        self.start += count;
        self.open = Some(Open { left: open.left - count, ..open });
        ReadResult::Data
    }

    /// Reads the tail behind the data of a frame. Void data are not used; the reason follows.
    fn read_end(&mut self, open: Open, wire: &mut Wire, calls: &mut [Outstanding]) -> ReadResult {
        if self.start == self.end
            && let Some(result) = self.fill(FRAMES, wire)
        {
            return result;
        }
        let count = open.tail.min(self.end - self.start);
        self.start += count;
        if count < open.tail {
            self.open = Some(Open { tail: open.tail - count, ..open });
            return ReadResult::Data;
        }
        let good = self.bytes[self.start - 1] == GOOD;
        self.open = None;
        let early = take(&mut self.early);
        match open.to {
            _ if !good => {}
            Destination::Call(call) => calls[call as usize].confirm(open.member, open.phase),
            Destination::Aside(lane, sequence) => {
                return ReadResult::Aside(lane, sequence, open.member, early);
            }
        }
        ReadResult::Data
    }

    /// Takes data from what was read before, or reads it directly into its block.
    fn read_data(&mut self, open: Open, call: &mut Outstanding, wire: &mut Wire) -> ReadResult {
        let incoming = *call.incoming(open.member, open.phase);
        let Some(region) = incoming.region else { return ReadResult::Nothing };
        let (at, wanted) = (incoming.at, open.left.min(region.bytes().saturating_sub(incoming.at)));
        if self.start == self.end {
            // SAFETY: the block is part of a call that has not ended: by the rules of `start` it is
            // initialised, may be written, and nothing else touches it.
            let place = unsafe { (wanted > 0).then(|| region.next_mut(at, wanted)) }.flatten();
            match place {
                Some(place) => return self.read_into(place, open, call, wire),
                // In short rows, or behind the block: through the buffer.
                None => {
                    if let Some(result) = self.fill(PACKED, wire) {
                        return result;
                    }
                }
            }
        }
        let held = &self.bytes[self.start..self.end];
        let count = held.len().min(if wanted > 0 { wanted } else { open.left });
        if wanted > 0 {
            // SAFETY: as above.
            unsafe { region.put(at, &held[..count]) };
        }
        self.start += count;
        self.took(open, call, count);
        ReadResult::Data
    }

    /// Reads data to where they belong, with the tail and the frame behind them, but nothing of the data behind
    /// that: these would be copied once more.
    fn read_into(
        &mut self,
        place: &mut [u8],
        open: Open,
        call: &mut Outstanding,
        wire: &mut Wire,
    ) -> ReadResult {
        let data = place.len();
        let frame = if data == open.left { open.tail + DATA_FRAME } else { 0 };
        let frame = frame.min(self.bytes.len());
        let mut slices = [IoSliceMut::new(place), IoSliceMut::new(&mut self.bytes[..frame])];
        let count = match wire.read(&mut slices) {
            None => return ReadResult::Nothing,
            Some(0) => return ReadResult::End,
            Some(count) => count,
        };
        (self.start, self.end) = (0, count.saturating_sub(data));
        self.took(open, call, count.min(data));
        ReadResult::Data
    }

    fn took(&mut self, open: Open, call: &mut Outstanding, count: usize) {
        call.incoming(open.member, open.phase).at += count;
        self.open = Some(Open { left: open.left - count, ..open });
    }

    /// Moves what is left to the front, and enlarges the buffer if there is not room for so much.
    fn make_room(&mut self, wanted: usize) {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.bytes.len() < self.end + wanted {
            self.bytes.resize((2 * self.end).max(self.end + wanted), 0);
        }
    }
}
