//! What one rank knows of another: what it sends to it, and how much it has read from it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::IoSliceMut;

use super::calls::Outstanding;
use super::frame::{DATA_FRAME, Frame, Phase};
use super::wire::{Outgoing, Wire};
use crate::call::OpKind;
use crate::site::Site;

/// Bytes of frames that are read at once; the buffer grows for a longer frame.
const ROOM: usize = 16 << 10;

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
    /// Where extra bytes are discarded.
    waste: [u8; 32],
}

/// A data frame that has not been read to its end.
#[derive(Clone, Copy)]
pub(super) struct Open {
    pub(super) call: u32,
    pub(super) member: usize,
    pub(super) phase: Phase,
    pub(super) left: usize,
}

/// The result of reading.
pub(super) enum ReadResult {
    /// A frame.
    Frame(Frame),
    /// Data, already stored in their block.
    Data,
    /// Nothing complete yet.
    Nothing,
    /// The end of the stream.
    End,
}

impl Inbox {
    /// The next data go to a block of a call.
    pub(super) fn expect(&mut self, open: Open) {
        self.open = Some(open).filter(|open| open.left > 0);
    }

    /// Reads one frame, or some data; fails if the stream is invalid.
    pub(super) fn read(
        &mut self,
        wire: &mut Wire,
        calls: &mut [Outstanding],
    ) -> Result<ReadResult, &'static str> {
        if let Some(open) = self.open {
            return Ok(self.read_data(open, wire, calls));
        }
        if let Some((frame, len)) = Frame::read(&self.bytes[self.start..self.end])? {
            self.start += len;
            return Ok(ReadResult::Frame(frame));
        }
        self.make_room();
        let room = &mut [IoSliceMut::new(&mut self.bytes[self.end..])];
        match wire.read(room) {
            None => Ok(ReadResult::Nothing),
            Some(0) => Ok(ReadResult::End),
            Some(count) => {
                self.end += count;
                self.read(wire, calls)
            }
        }
    }

    /// Takes data from what was read before, or reads it directly into its block.
    fn read_data(&mut self, open: Open, wire: &mut Wire, calls: &mut [Outstanding]) -> ReadResult {
        let call = &mut calls[open.call as usize];
        let incoming = *call.incoming(open.member, open.phase);
        let Some(region) = incoming.region else { return ReadResult::Nothing };
        let (at, block_left) = (incoming.at, region.bytes().saturating_sub(incoming.at));
        let held = &self.bytes[self.start..self.end];
        let count = if !held.is_empty() {
            let wanted = if block_left > 0 { block_left } else { incoming.left() };
            let count = held.len().min(open.left).min(wanted);
            if block_left > 0 {
                // SAFETY: the block is part of a call that has not ended: by the rules of `start`
                // it may be written, and nothing else touches it.
                unsafe { region.put(at, &held[..count]) };
            }
            self.start += count;
            count
        } else {
            let mut slices = Vec::with_capacity(8);
            if block_left > 0 {
                // SAFETY: as above; and it is initialised.
                unsafe { region.scatter(at, open.left.min(block_left), &mut slices) };
            } else {
                let count = open.left.min(self.waste.len());
                slices.push(IoSliceMut::new(&mut self.waste[..count]));
            }
            // The frame behind comes with the same system call, but nothing of the data behind that: these
            // would be copied once more.
            let data: usize = slices.iter().map(|slice| slice.len()).sum();
            if data == open.left {
                slices.push(IoSliceMut::new(&mut self.bytes[..DATA_FRAME]));
            }
            let count = match wire.read(&mut slices) {
                None => return ReadResult::Nothing,
                Some(0) => return ReadResult::End,
                Some(count) => count,
            };
            (self.start, self.end) = (0, count.saturating_sub(data));
            count.min(data)
        };
        call.count_read(open.member, open.phase, count);
        self.expect(Open { left: open.left - count, ..open });
        ReadResult::Data
    }

    /// Moves the rest of a frame to the front, and enlarges the buffer if that fills it.
    fn make_room(&mut self) {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.end * 2 > self.bytes.len() || self.bytes.is_empty() {
            self.bytes.resize((2 * self.bytes.len()).max(ROOM), 0);
        }
    }
}
