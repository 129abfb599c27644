//! A call of this rank from its start to its end.

use std::ops::Range;

use super::frame::Phase;
use super::lane::Announced;
use super::plan::Plan;
use super::progress::SMALL;
use super::region::Region;
use crate::blocks::Strides;
use crate::call::{Call, CollectiveOp, OpKind};
use crate::header::Header;
use crate::kernel::Place;
use crate::matching::Called;
use crate::ragged::{cells_end, totals};
use crate::site::Site;
use crate::sync::WORTH_WAKING;

/// What a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// All members to start it.
    Arrive,
    /// Its data to come and to go.
    Move,
    /// Nothing: it has ended, and its handle was not waited for yet.
    Done,
    /// The place in the list of calls is free.
    Free,
}

/// Blocks are reduced in pieces of at least so many bytes: several fit a core's cache.
const PIECE: usize = 128 << 10;

/// A piece ends at a multiple of this, which every element type divides.
const GRAIN: usize = 4 << 10;

/// A block that is received.
#[derive(Clone, Copy, Default)]
pub(super) struct Incoming {
    pub(super) region: Option<Region>,
    /// Extra bytes that follow the block, in tests of the counters.
    pub(super) extra: usize,
    /// How much has been read, and how much of that is known to be good.
    pub(super) at: usize,
    good: usize,
}

impl Incoming {
    fn new(region: Option<Region>, extra: usize) -> Self {
        let region = region.filter(|region| region.bytes() > 0);
        Self { region, extra: region.map_or(0, |_| extra), at: 0, good: 0 }
    }

    /// How much is still to come.
    pub(super) fn left(&self) -> usize {
        self.region.map_or(0, |region| region.bytes()) + self.extra - self.at
    }
}

/// A call that was started and not waited for yet.
pub(super) struct Outstanding {
    /// The lane (group or channel) in which it is numbered.
    pub(super) lane: usize,
    pub(super) sequence: u64,
    pub(super) stage: Stage,
    pub(super) tag: u32,
    me: usize,
    send: *const u8,
    receive: *mut u8,
    source: Strides,
    target: Strides,
    /// For ragged calls: where the cells of all blocks end, as in a plan, and the bytes of a cell.
    ends: Vec<usize>,
    cell: usize,
    /// For each member: what it called, and whether that is known yet.
    announced: Vec<(Announced, bool)>,
    /// How many members have not announced the call yet.
    pub(super) silent: usize,
    /// For each member: the block that it sends, and its reduced part.
    given: Vec<Incoming>,
    results: Vec<Incoming>,
    /// Blocks that have not been read to their end.
    pub(super) unread: usize,
    pub(super) unread_results: usize,
    /// Frames and blocks that have not been written to their end.
    pub(super) unwritten: usize,
    /// Bytes of given blocks that have been written.
    sent: usize,
    /// Bytes of this rank's reduced block that are done.
    reduced: usize,
    /// Blocks to be reduced, from every member except this rank. Stored as words, so that every
    /// element type is aligned.
    staging: Vec<u64>,
    /// Bytes counted so far.
    pub(super) bytes: u64,
}

impl Outstanding {
    /// A call of a group of `n` in which this rank has place `me`. `extra` bytes follow one of the
    /// blocks, in tests of the counters. Memory for staging is taken from `spare`.
    pub(super) fn new(
        call: &Call<'_>,
        (lane, sequence): (usize, u64),
        (n, me): (usize, usize),
        (send, receive): (*const u8, *mut u8),
        extra: usize,
        spare: &mut Vec<u64>,
    ) -> Self {
        let (mut counts, mut ends, mut cut) = (Vec::new(), Vec::new(), 0);
        if let CollectiveOp::AllToAllRagged { cell, unit, send, receive } = call.op {
            let size = call.dtype.size();
            counts.extend(totals(send, n).chain(totals(receive, n)));
            ends.extend(cells_end(send, n, unit * size).chain(cells_end(receive, n, unit * size)));
            cut = cell * size;
        }
        let own =
            Announced { header: Header::of(call), site: call.site, counts, block: Vec::new() };
        let (header, site) = (Header::nothing(), Site::default());
        let unknown = Announced { header, site, counts: Vec::new(), block: Vec::new() };
        let mut announced = vec![(unknown, false); n];
        announced[me] = (own, true);
        let mut call = Self {
            lane,
            sequence,
            stage: Stage::Arrive,
            tag: call.tag,
            me,
            send,
            receive,
            source: call.blocks.source,
            target: call.blocks.target,
            ends,
            cell: cut,
            announced,
            silent: n - 1,
            given: Vec::with_capacity(n),
            results: Vec::with_capacity(n),
            unread: 0,
            unread_results: 0,
            unwritten: 0,
            sent: 0,
            reduced: 0,
            staging: Vec::new(),
            bytes: 0,
        };
        call.expect_blocks(extra, spare);
        call
    }

    /// Finds the memory for everything that will be received.
    fn expect_blocks(&mut self, extra: usize, spare: &mut Vec<u64>) {
        let (n, me, room) = (self.announced.len(), self.me, self.staged_bytes().div_ceil(8));
        if self.plan().reduces() {
            self.staging = std::mem::take(spare);
            self.staging.resize(self.staging.len().max(room * (n - 1)), 0);
        }
        let staging = self.staging.as_mut_ptr();
        for member in 0..n {
            let plan = self.plan();
            let extra = if plan.gives_more(member, me) { extra } else { 0 };
            let region = if member == me {
                None
            } else if plan.reduces() {
                let base = staging.wrapping_add(room * (member - usize::from(member > me)));
                Some(Region::flat(base.cast(), self.staged_bytes()))
            } else {
                plan.taken(member)
            };
            let result = (plan.sends_results() && member != me).then(|| plan.result(member));
            let (given, result) = (Incoming::new(region, extra), Incoming::new(result, 0));
            self.unread += usize::from(given.region.is_some());
            self.unread_results += usize::from(result.region.is_some());
            self.given.push(given);
            self.results.push(result);
        }
    }

    /// Bytes that one member sends to a reduction on this rank.
    fn staged_bytes(&self) -> usize {
        let plan = self.plan();
        plan.reduced_shape().iter().product::<usize>() * plan.header.dtype.size()
    }

    pub(super) fn header(&self) -> &Header {
        &self.announced[self.me].0.header
    }

    pub(super) fn site(&self) -> Site {
        self.announced[self.me].0.site
    }

    /// What this rank announces to the others about the call.
    pub(super) fn own(&self) -> &Announced {
        &self.announced[self.me].0
    }

    pub(super) fn plan(&self) -> Plan<'_> {
        let Announced { header, .. } = &self.announced[self.me].0;
        Plan {
            header,
            n: self.announced.len(),
            me: self.me,
            send: self.send,
            receive: self.receive,
            source: self.source,
            target: self.target,
            ends: &self.ends,
            cell: self.cell,
        }
    }

    /// The bytes of this rank's block that can be reduced now, if there are any: of a dense block, whole
    /// pieces that have come from all members while they are still in a cache; of a strided one, all.
    pub(super) fn ready(&self) -> Option<Range<usize>> {
        let (plan, all) = (self.plan(), self.staged_bytes());
        if self.is_reduced() {
            return None;
        }
        let come = if self.unread == 0 {
            all
        } else if plan.reduces_dense() {
            let others = (0..self.given.len()).filter(|&member| member != self.me);
            others.map(|member| self.given[member].good).min().unwrap_or(all)
        } else {
            0
        };
        // In one exchange the result may take the place of what the other rank still has to get.
        let end = come.min(all).min(if plan.at_once() { self.sent } else { all });
        let end = if end < all { end / GRAIN * GRAIN } else { all };
        (end == all || end >= self.reduced + PIECE).then_some(self.reduced..end)
    }

    /// Notes that bytes of given blocks have left this rank.
    pub(super) fn count_sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    /// Notes that the bytes before this one are reduced. Where little of a dense block has come behind them, what
    /// comes next takes their place: it finds memory that is in a cache.
    pub(super) fn reduced_to(&mut self, end: usize) {
        self.reduced = end;
        if !self.plan().reduces_dense() {
            return;
        }
        let (me, room) = (self.me, self.staged_bytes().div_ceil(8));
        for (member, incoming) in self.given.iter_mut().enumerate() {
            let come = incoming.at.min(room * 8).saturating_sub(end);
            let Some(region) = incoming.region.as_mut().filter(|_| come < GRAIN) else { continue };
            let place = room * (member - usize::from(member > me));
            let first: *mut u8 = self.staging.as_mut_ptr().wrapping_add(place).cast();
            // SAFETY: what has come lies in the member's part of the staging memory, behind what is reduced.
            // Nothing else touches it meanwhile.
            unsafe { std::ptr::copy(region.place.base.wrapping_add(end), first, come) };
            // Byte `end` of the block is the first there now.
            region.place.base = first.wrapping_sub(end);
        }
    }

    /// Whether nothing is left to be reduced here.
    pub(super) fn is_reduced(&self) -> bool {
        !self.plan().reduces() || self.reduced == self.staged_bytes()
    }

    /// Where the block of a member that will be reduced lies.
    pub(super) fn reduced_from(&self, member: usize) -> Option<Place> {
        if member == self.me {
            return self.plan().given(member).map(|region| region.place);
        }
        let ([_, rows, len], size) = (self.plan().reduced_shape(), self.header().dtype.size());
        let (base, row) = (self.staged(member), len * size);
        Some(Place { base, outer: rows * row, row, foreign: false })
    }

    fn staged(&self, member: usize) -> *mut u8 {
        self.given[member].region.map_or(std::ptr::null_mut(), |region| region.place.base)
    }

    /// Notes what a member called.
    pub(super) fn announce(&mut self, member: usize, announced: Announced) {
        let known = &mut self.announced[member];
        self.silent -= usize::from(!known.1);
        *known = (announced, true);
    }

    /// Stores the blocks that came with the calls of members, now that all calls match. Fails with a
    /// member whose block is not as long as its call says.
    pub(super) fn store_early(&mut self) -> Result<(), usize> {
        for member in 0..self.announced.len() {
            let block = std::mem::take(&mut self.announced[member].0.block);
            if !block.is_empty() {
                self.store(member, &block).ok_or(member)?;
            }
        }
        Ok(())
    }

    /// Stores a block that a member gave early; nothing if it is not as long as the call says.
    fn store(&mut self, member: usize, block: &[u8]) -> Option<()> {
        let incoming = self.given[member];
        let region = incoming.region.filter(|_| incoming.left() == block.len())?;
        // SAFETY: the call has not ended: by the rules of `start` its blocks may be written, and
        // nothing else touches them.
        unsafe { region.put(0, &block[..region.bytes()]) };
        self.given[member].at += block.len();
        self.confirm(member, Phase::Given);
        Some(())
    }

    /// Whether what a member gives has to be kept aside: it is small, so it came right behind the member's
    /// call, and others have not started theirs. All else is sent when the sender has seen all calls match.
    pub(super) fn keeps(&self, member: usize, phase: Phase) -> bool {
        let Incoming { at, .. } = self.given[member];
        let small = self.given[member].left() + at <= SMALL;
        self.stage == Stage::Arrive && phase == Phase::Given && small
    }

    /// Whether it moves enough to be worth waking a thread.
    pub(super) fn is_large(&self) -> bool {
        let (plan, n) = (self.plan(), self.announced.len());
        let given = (0..n).filter(|&member| member != self.me).filter_map(|m| plan.given(m));
        let taken = self.given.iter().chain(&self.results).filter_map(|block| block.region);
        given.chain(taken).any(|region| region.bytes() > WORTH_WAKING)
    }

    /// Takes a block that came when some members had not started the call: keeps it until they have.
    /// Nothing if there is no such block.
    pub(super) fn take_block(&mut self, member: usize, block: Vec<u8>) -> Option<()> {
        match self.stage {
            Stage::Move => self.store(member, &block),
            Stage::Arrive if self.has_come(member) => {
                self.announced[member].0.block = block;
                Some(())
            }
            _ => None,
        }
    }

    /// Whether a member has started the call.
    pub(super) fn has_come(&self, member: usize) -> bool {
        self.announced[member].1
    }

    /// Whether everything from a member has arrived.
    pub(super) fn has_given(&self, member: usize) -> bool {
        let (given, result) = (&self.given[member], &self.results[member]);
        [given, result].iter().all(|block| block.left() == 0 && block.good == block.at)
    }

    /// Whether anything is received from a member.
    pub(super) fn hears_from(&self, member: usize) -> bool {
        self.given[member].region.is_some() || self.header().kind == OpKind::Barrier
    }

    /// How much of a block is still to come from a member.
    pub(super) fn left(&self, member: usize, phase: Phase) -> usize {
        match phase {
            Phase::Given => self.given[member].left(),
            Phase::Result => self.results[member].left(),
        }
    }

    /// Ends the call. Staged blocks are not needed any more: the next reduction may have their memory, as
    /// fresh memory would cost a page fault for every 4 KiB.
    pub(super) fn finish(&mut self, spare: &mut Vec<u64>) {
        self.stage = Stage::Done;
        let staging = std::mem::take(&mut self.staging);
        if staging.len() > spare.len() {
            *spare = staging;
        }
    }

    pub(super) fn incoming(&mut self, member: usize, phase: Phase) -> &mut Incoming {
        match phase {
            Phase::Given => &mut self.given[member],
            Phase::Result => &mut self.results[member],
        }
    }

    /// Notes that what was read of a block is good. Every byte is counted once between the two ranks: as
    /// with threads, by the rank that receives it, except that a result is counted by the rank that
    /// sends it.
    pub(super) fn confirm(&mut self, member: usize, phase: Phase) {
        let incoming = self.incoming(member, phase);
        let bytes = incoming.at - incoming.good;
        incoming.good = incoming.at;
        let all = usize::from(incoming.left() == 0);
        match phase {
            Phase::Given => {
                self.unread -= all;
                self.bytes += bytes as u64;
            }
            Phase::Result => self.unread_results -= all,
        }
    }
}

impl Called for Outstanding {
    fn header(&self, member: usize) -> &Header {
        &self.announced[member].0.header
    }

    fn site(&self, member: usize) -> Site {
        self.announced[member].0.site
    }

    fn ragged(&self, member: usize) -> (&[usize], &[usize]) {
        self.announced[member].0.counts.split_at(self.announced.len())
    }
}
