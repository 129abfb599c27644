//! Progress without waiting: reads and writes streams, and advances calls.

use std::ops::Range;

use super::calls::Stage;
use super::endpoint::Endpoint;
use super::frame::{Frame, NONE, Phase, tail};
use super::lane::Announced;
use super::link::{Destination, Last, Open, ReadResult};
use super::region::Region;
use super::wire::{Outgoing, Written};
use crate::call::{OpKind, ReduceOp};
use crate::error::{CommError, Failure};
use crate::group::Group;
use crate::kernel::{self, Combine, Meter};
use crate::matching::GroupCall;
use crate::site::Site;

impl Endpoint {
    /// Makes as much progress as possible; returns whether there was any.
    pub(super) fn advance(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.links.len() {
            moved |= self.write(peer);
            moved |= self.read(peer)?;
        }
        let mut i = 0;
        while i < self.order.len() {
            let index = self.order[i];
            moved |= self.advance_call(index)?;
            if self.calls[index as usize].stage == Stage::Done {
                self.order.remove(i);
            } else {
                i += 1;
            }
        }
        Ok(moved)
    }

    /// Writes to a stream once.
    pub(super) fn write(&mut self, peer: usize) -> bool {
        let (link, calls) = (&mut self.links[peer], &mut self.calls);
        let Some(mut wire) = self.shared.wire(peer) else { return false };
        let mut tell = |written: Written| {
            let call = &mut calls[written.call as usize];
            call.unwritten -= usize::from(written.all);
            match written.phase {
                Phase::Given => call.count_sent(written.bytes),
                Phase::Result => call.bytes += written.bytes as u64,
            }
        };
        let moved = wire.write(&mut link.blocks, &mut tell);
        while let Some(&(mark, call)) = link.marks.front()
            && mark <= wire.flushed
        {
            link.marks.pop_front();
            calls[call as usize].unwritten -= 1;
        }
        moved
    }

    /// Reads frames, and data once: then the other direction, other streams and reductions of what has come have
    /// their turn.
    fn read(&mut self, peer: usize) -> Result<bool, CommError> {
        let mut moved = false;
        while !self.links[peer].gone {
            let link = &mut self.links[peer];
            let Some(mut wire) = self.shared.wire(peer) else { return Ok(moved) };
            let came = link.inbox.read(&mut wire, &mut self.calls);
            drop(wire);
            match came.map_err(|problem| self.broken(peer, problem))? {
                ReadResult::Frame(frame) => self.handle(peer, frame)?,
                ReadResult::Data => return Ok(true),
                ReadResult::Aside(lane, sequence, member, block) => {
                    self.take_aside(peer, (lane, sequence), member, block)?;
                    return Ok(true);
                }
                ReadResult::Nothing => return Ok(moved),
                ReadResult::End => self.links[peer].gone = true,
            }
            moved = true;
        }
        Ok(moved)
    }

    /// The error of a stream with invalid contents.
    fn broken(&self, peer: usize, problem: &str) -> CommError {
        let what = format!("the stream from rank {peer} to rank {}", self.shared.rank);
        CommError::System { what, error: problem.to_string() }
    }

    fn handle(&mut self, peer: usize, frame: Frame) -> Result<(), CommError> {
        match frame {
            Frame::Group { number, channel, ranks } => {
                let group = Group::new(ranks)?;
                let lane = self.lane_for(&group, channel)?;
                self.links[peer].lanes.insert(number, lane);
            }
            Frame::Site { number, name } => {
                self.links[peer].sites.insert(number, Site::named(&name));
            }
            Frame::Call { group, sequence, header, site, counts } => {
                let site = self.links[peer].sites.get(&site).copied().unwrap_or_default();
                let (lane, member) = self.known(peer, group)?;
                let announced = Announced { header, site, counts, block: Vec::new() };
                match self.lanes[lane].find(sequence) {
                    Some(call) => {
                        self.calls[call as usize].announce(member, announced);
                        // If it was the last one, the data behind it go to their place.
                        self.advance_call(call)?;
                    }
                    None => self.lanes[lane].keep(member, sequence, announced),
                }
            }
            Frame::Data { group, sequence, phase, bytes } => {
                let (lane, member) = self.known(peer, group)?;
                let call = self.lanes[lane].find(sequence);
                let waits = call.is_none_or(|call| self.calls[call as usize].keeps(member, phase));
                let left = call.map(|call| self.calls[call as usize].left(member, phase));
                let to = match call {
                    Some(call) if !waits && left >= Some(bytes) => Destination::Call(call),
                    _ if waits && bytes <= SMALL => Destination::Aside(lane, sequence),
                    _ => return Err(self.broken(peer, "it sent unexpected data")),
                };
                self.links[peer].inbox.expect(Open {
                    to,
                    member,
                    phase,
                    left: bytes,
                    tail: tail(bytes),
                });
            }
            Frame::Abort { rank, mismatch, message } => {
                let mismatch = mismatch.and_then(|(group, sequence)| {
                    Some((*self.links[peer].lanes.get(&group)?, sequence))
                });
                self.stopped_by(Failure { rank, message: message.into() }, mismatch);
            }
        }
        Ok(())
    }

    /// Takes a block that came before all members had started the call.
    fn take_aside(
        &mut self,
        peer: usize,
        (lane, sequence): (usize, u64),
        member: usize,
        block: Vec<u8>,
    ) -> Result<(), CommError> {
        let taken = match self.lanes[lane].find(sequence) {
            Some(call) => self.calls[call as usize].take_block(member, block),
            None => self.lanes[lane].early(member, sequence).map(|call| call.block = block),
        };
        taken.ok_or_else(|| self.broken(peer, "it sent unexpected data"))
    }

    /// The group for another rank's number, and that rank's place there.
    fn known(&self, peer: usize, number: u32) -> Result<(usize, usize), CommError> {
        let lane = self.links[peer].lanes.get(&number).copied();
        let place = |lane: usize| Some((lane, self.lanes[lane].group.index_of(peer)?));
        lane.and_then(place)
            .ok_or_else(|| self.broken(peer, "it did not name the group before its call"))
    }

    fn advance_call(&mut self, index: u32) -> Result<bool, CommError> {
        let call = &self.calls[index as usize];
        match call.stage {
            Stage::Arrive if call.silent == 0 => {
                let lane = &self.lanes[call.lane];
                let sequence = call.sequence;
                let meeting = GroupCall { group: &lane.group, name: &lane.name, sequence };
                if let Err(error) = meeting.check(call) {
                    self.mismatch = Some((call.lane, sequence));
                    return Err(error);
                }
                // After a failure nothing is sent any more.
                if self.shared.failure().is_some() {
                    return Ok(false);
                }
                let (lane, early) = (call.lane, self.calls[index as usize].store_early());
                if let Err(member) = early {
                    let peer = self.lanes[lane].group.ranks()[member];
                    return Err(self.broken(peer, "it sent unexpected data"));
                }
                self.give(index);
                Ok(true)
            }
            Stage::Move => match call.ready() {
                Some(piece) => {
                    self.reduce(index, piece);
                    Ok(true)
                }
                None if call.unread + call.unread_results + call.unwritten == 0 => {
                    self.end(index);
                    Ok(true)
                }
                None => Ok(false),
            },
            _ => Ok(false),
        }
    }

    /// All have arrived: sends this rank's blocks, and copies its own block.
    fn give(&mut self, index: u32) {
        let call = &mut self.calls[index as usize];
        call.stage = Stage::Move;
        let plan = call.plan();
        if let (Some(from), Some(to), false) =
            (plan.given(plan.me), plan.taken(plan.me), plan.reduces())
        {
            let [outer, rows, len] = plan.header.shape;
            let shape = [outer, rows, len * plan.header.dtype.size()];
            // SAFETY: by the rules of `start` both blocks are this call's, and they do not overlap
            // unless they are the same, which those of a ragged call are not.
            unsafe {
                match plan.header.kind {
                    OpKind::AllToAllRagged => from.copy_to(&to),
                    _ => kernel::copy(shape, from.place, to.place, &mut Meter::default()),
                }
            }
        }
        let (n, me, kind) = (plan.n, plan.me, plan.header.kind);
        let planted = self.planted(kind);
        for member in (1..n).map(|step| (me + step) % n) {
            let plan = self.calls[index as usize].plan();
            let extra = if plan.gives_more(me, member) { planted } else { 0 };
            // What is small went with the call.
            if let Some(region) = plan.given(member).filter(|region| !is_small(region, extra)) {
                self.send(index, member, Phase::Given, region, extra);
            }
        }
    }

    /// Queues a block for a member after those already queued.
    fn send(&mut self, index: u32, member: usize, phase: Phase, region: Region, extra: usize) {
        if region.bytes() == 0 {
            return;
        }
        let call = &mut self.calls[index as usize];
        let (group, sequence) = (call.lane as u32, call.sequence);
        let peer = self.lanes[call.lane].group.ranks()[member];
        let block = Outgoing { call: index, group, sequence, phase, region, extra, at: 0 };
        let blocks = &mut self.links[peer].blocks;
        if !blocks.back_mut().is_some_and(|last| last.grow(&block)) {
            call.unwritten += 1;
            blocks.push_back(block);
        }
    }

    /// Reduces a piece that all have given, in the order of the group, and sends the result if all need it.
    fn reduce(&mut self, index: u32, piece: Range<usize>) {
        let call = &self.calls[index as usize];
        let plan = call.plan();
        let (n, me, header, again) = (plan.n, plan.me, *plan.header, plan.sends_results());
        self.sources.clear();
        self.sources.extend((0..n).filter_map(|member| call.reduced_from(member)));
        let (mut shape, mut target) = (plan.reduced_shape(), plan.reduced_into());
        if plan.reduces_dense() {
            shape = [1, 1, piece.len() / header.dtype.size()];
            for place in self.sources.iter_mut().chain([&mut target]) {
                place.base = place.base.wrapping_add(piece.start);
            }
        }
        let combine = Combine {
            dtype: header.dtype,
            reduction: header.reduction.unwrap_or(ReduceOp::Sum),
            accumulate: header.accumulate,
            // No other rank shares these caches.
            stream: false,
        };
        let meter = &mut Meter::default();
        // SAFETY: by the rules of `start` the own blocks are this call's; the others' are staged
        // here, as large, and aligned to words. A piece lies inside its block.
        unsafe {
            kernel::reduce(combine, shape, &self.sources, &[target], &mut self.pointers, meter);
        }
        self.calls[index as usize].reduced_to(piece.end);
        if again {
            let result = Region::flat(target.base, piece.len());
            for member in (1..n).map(|step| (me + step) % n) {
                self.send(index, member, Phase::Result, result, 0);
            }
        }
    }

    /// Everything was received and sent.
    fn end(&mut self, index: u32) {
        let call = &mut self.calls[index as usize];
        call.finish(&mut self.spare);
        let lane = &mut self.lanes[call.lane];
        lane.open.retain(|&(_, open)| open != index);
        let (kind, site, sequence) = (call.header().kind, call.site(), call.sequence);
        if let Some(watch) = &self.options.watch {
            watch.ended(kind, &lane.name, sequence, site);
        }
        for (member, &rank) in lane.group.ranks().iter().enumerate() {
            let seen = call.hears_from(member);
            self.links[rank].last = Some(Last { kind, lane: call.lane, sequence, site, seen });
        }
    }

    /// Announces this rank's call to the members of its group.
    pub(super) fn announce(&mut self, index: u32) {
        let planted = self.planted(self.calls[index as usize].header().kind);
        let call = &mut self.calls[index as usize];
        let lane = &mut self.lanes[call.lane];
        let (number, site) = (call.lane as u32, call.site());
        for (member, &rank) in lane.group.ranks().iter().enumerate() {
            let link = &mut self.links[rank];
            let Some(mut wire) = self.shared.wire(rank) else { continue };
            let (own, plan) = (call.own(), call.plan());
            let extra = if plan.gives_more(plan.me, member) { planted } else { 0 };
            let small = plan.given(member).filter(|region| is_small(region, extra));
            let frame = Frame::Call {
                group: number,
                sequence: call.sequence,
                header: own.header,
                site: if site == Site::default() { NONE } else { site.id() },
                counts: own.counts.clone(),
            };
            if !std::mem::replace(&mut lane.named[member], true) {
                let ranks = lane.group.ranks().to_vec();
                wire.push(&Frame::Group { number, channel: lane.channel, ranks });
            }
            if site != Site::default() && link.told.insert(site.id()) {
                wire.push(&Frame::Site { number: site.id(), name: site.name().to_string() });
            }
            link.marks.push_back((wire.push(&frame), index));
            call.unwritten += 1;
            drop(wire);
            if let Some(region) = small {
                let (call, sequence, phase) = (index, call.sequence, Phase::Given);
                let block = Outgoing { call, group: number, sequence, phase, region, extra, at: 0 };
                link.blocks.push_back(block);
            }
            call.unwritten += usize::from(small.is_some());
        }
    }
}

/// The most bytes of a block that goes to a member right behind the call. The member may have to keep it until
/// all have started the call, so it must be small.
pub(super) const SMALL: usize = 64 << 10;

/// Whether a block goes together with its call. One without bytes goes nowhere.
fn is_small(region: &Region, extra: usize) -> bool {
    let bytes = region.bytes();
    bytes > 0 && bytes + extra <= SMALL
}
