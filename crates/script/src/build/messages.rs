//! Sends and receives around the turns of a device.
//!
//! What a turn gives to another device is sent at once. What a turn needs from another device is asked
//! for one turn earlier, so that it arrives while that one runs. If it arrives in slices, they are
//! gathered right before the turn: any earlier, and what the ranks do together would wait for a message.

use std::ops::Range;

use phalanx_ir::{DType, Model, Program, TensorType};

use super::crossing::{Crossing, crossing};
use super::links::{Direction, Link, links};
use super::{Action, Binder, BufferId, Kind, Lane, Run, ScriptError, View, Write, programs};
use crate::action::Script;
use crate::device::Device;
use crate::edge::Piece;
use crate::message::{Block, Message};

/// How many turns before its own a value is asked for.
const AHEAD: usize = 1;

/// Inserts the messages of one device.
pub(super) struct Messenger<'a> {
    model: &'a Model,
    devices: &'a [Device<'a>],
    rank: usize,
    /// What this device gets, in the order in which it is needed.
    incoming: Vec<Link>,
    /// What it gives, in the order in which it is made.
    outgoing: Vec<Link>,
    asked: usize,
    /// What was asked for in slices and is not put together yet.
    slices: Vec<Slices>,
    /// Buffers that others may still be reading, and the turn after which they do not.
    lent: Vec<(Option<usize>, BufferId)>,
}

impl<'a> Messenger<'a> {
    pub(super) fn new(
        model: &'a Model,
        devices: &'a [Device<'a>],
        device: usize,
        rank: usize,
    ) -> Result<Self, ScriptError> {
        let all = links(model, devices)?;
        let of = |own: fn(&Link) -> usize| -> Vec<Link> {
            all.iter().filter(|link| own(link) == device).cloned().collect()
        };
        let (mut incoming, mut outgoing) = (of(|l| l.to.device), of(|l| l.from.device));
        incoming.sort_by(|a, b| (a.to, &a.port).cmp(&(b.to, &b.port)));
        outgoing.sort_by(|a, b| (a.from, &a.port).cmp(&(b.from, &b.port)));
        let (slices, lent) = (Vec::new(), Vec::new());
        Ok(Self { model, devices, rank, incoming, outgoing, asked: 0, slices, lent })
    }

    /// Asks for what the turn needs, and the one after it.
    pub(super) fn before(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        while let Some(link) = self.incoming.get(self.asked).filter(|l| l.to.turn <= turn + AHEAD) {
            let crossing = self.crossing(link)?;
            let buffer = self.receive(link, &crossing, binder)?;
            if let Some(gather) = crossing.gather {
                self.slices.push(Slices {
                    turn: link.to.turn,
                    name: link.buffer.clone(),
                    buffer,
                    gather,
                });
            }
            self.asked += 1;
        }
        for slices in self.slices.extract_if(.., |slices| slices.turn == turn) {
            slices.gather(binder);
        }
        Ok(())
    }

    /// Asks for a value, or for this rank's slice of it.
    fn receive(
        &self,
        link: &Link,
        crossing: &Crossing,
        binder: &mut Binder<'_>,
    ) -> Result<BufferId, ScriptError> {
        let bytes = crossing.arrives.local_bytes(self.devices[link.to.device].mesh);
        let name = match crossing.gather {
            None => link.buffer.clone(),
            Some(_) => format!("{}/slice", link.buffer),
        };
        let buffer = binder.received(&name, bytes);
        let messages = self.messages(link, crossing, false);
        clear_rest(&mut binder.script, buffer, crossing.arrives.dtype, &messages)?;
        // It may take the memory of whatever ended before, so it waits for that.
        let computed = |action: &Action| action.lane == Lane::Compute;
        let after = binder.script.actions.iter().rposition(computed).into_iter().collect();
        let (label, kind) = (format!("receive {name}"), Kind::Receive { buffer, messages });
        binder.script.actions.push(Action { label, lane: Lane::Receive, kind, after });
        Ok(buffer)
    }

    /// Sends what the turn made, and ends the lives of what has arrived by now.
    pub(super) fn after(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        for link in self.outgoing.iter().filter(|link| link.from.turn == turn) {
            let buffer = binder.sent(&link.buffer)?;
            let messages = self.messages(link, &self.crossing(link)?, true);
            let label = format!("send {}", link.buffer);
            let kind = Kind::Send { buffer, messages };
            binder.script.actions.push(Action { label, lane: Lane::Send, kind, after: vec![] });
            self.lent.push((link.settled, buffer));
        }
        let over = |settled: &Option<usize>| settled.is_some_and(|last| last <= turn);
        let ended = self.lent.extract_if(.., |(settled, _)| over(settled));
        ended.for_each(|(_, buffer)| release(&mut binder.script, buffer));
        Ok(())
    }

    /// After something that all ranks do together, everything has arrived.
    pub(super) fn finish(self, script: &mut Script) {
        self.lent.into_iter().for_each(|(_, buffer)| release(script, buffer));
    }

    /// The types in which a value is made and read.
    fn types(&self, link: &Link) -> Result<(&TensorType, &TensorType), ScriptError> {
        let program = |device: usize, turn: usize| -> &'a Program {
            let Device { compiled, turns, .. } = self.devices[device];
            let instance = &self.model.instances()[turns[turn].instance];
            compiled.program(instance.segment, turns[turn].part)
        };
        let (giver, reader) =
            (program(link.from.device, link.from.turn), program(link.to.device, link.to.turn));
        let made = giver.outputs().iter().find(|p| p.name == link.port);
        let read = reader.inputs().iter().find(|p| p.name == link.port);
        match (made, read) {
            (Some(made), Some(read)) => Ok((giver.ty(made.value), reader.ty(read.value))),
            _ => Err(ScriptError::Schedule(format!("`{}` has no giver or reader", link.buffer))),
        }
    }

    /// The way of a value.
    fn crossing(&self, link: &Link) -> Result<Crossing, ScriptError> {
        let (made, read) = self.types(link)?;
        let (from, to) = (&self.devices[link.from.device], &self.devices[link.to.device]);
        crossing((made, from), (read, to))
    }

    /// This rank's messages of a link.
    fn messages(&self, link: &Link, crossing: &Crossing, sending: bool) -> Vec<Message> {
        let own = |piece: &&Piece| self.rank == if sending { piece.from } else { piece.to };
        let message = |piece: &Piece| Message {
            peer: if sending { piece.to } else { piece.from },
            channel: match link.direction {
                Direction::Forward => 0,
                Direction::Backward => 1,
            },
            dtype: crossing.arrives.dtype,
            blocks: blocks(piece, sending),
        };
        crossing.pieces.iter().filter(own).map(message).collect()
    }
}

/// A rank's slice of a value that others have the rest of.
struct Slices {
    /// The turn that reads the value.
    turn: usize,
    /// The value's buffer.
    name: String,
    /// The slice's buffer.
    buffer: BufferId,
    gather: Program,
}

impl Slices {
    /// Puts the value together.
    fn gather(self, binder: &mut Binder<'_>) {
        let ty = self.gather.ty(self.gather.outputs()[0].value);
        let whole = binder.received(&self.name, ty.local_bytes(self.gather.mesh()));
        let view = |buffer| View { buffer, offset: 0 };
        let script = &mut binder.script;
        let run = Run {
            program: script.program(&self.gather),
            inputs: vec![view(self.buffer)],
            outputs: vec![(view(whole), Write::Overwrite)],
            contributes: vec![],
        };
        let (label, kind) = (format!("gather {}", self.name), Kind::Gather(run));
        script.actions.push(Action { label, lane: Lane::Gather, kind, after: vec![] });
    }
}

/// Sets what no message brings to zero: padding, which is not sent.
fn clear_rest(
    script: &mut Script,
    buffer: BufferId,
    dtype: DType,
    messages: &[Message],
) -> Result<(), ScriptError> {
    let rows = |b: &Block| {
        let Block { first, stride, rows, len } = *b;
        (0..rows).map(move |row| first + row * stride..first + row * stride + len)
    };
    let mut brought: Vec<Range<usize>> =
        messages.iter().flat_map(|m| m.blocks.iter().flat_map(rows)).collect();
    brought.sort_by_key(|range| range.start);
    let elements = script.buffers[buffer.0].bytes / dtype.size();
    let starts = [0].into_iter().chain(brought.iter().map(|range| range.end));
    let ends = brought.iter().map(|range| range.start).chain([elements]);
    let gaps = starts.zip(ends).filter(|(start, end)| start < end);
    let gaps: Vec<Range<usize>> =
        gaps.map(|(start, end)| start * dtype.size()..end * dtype.size()).collect();
    if !gaps.is_empty() {
        let label = format!("clear {}", script.buffers[buffer.0].name);
        programs::clear(script, &label, buffer, dtype, &gaps)?;
    }
    Ok(())
}

fn release(script: &mut Script, buffer: BufferId) {
    let label = format!("free {}", script.buffers[buffer.0].name);
    let kind = Kind::Release { buffer };
    script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
}

/// Stretches of the same length that are evenly spaced on both sides travel together.
fn blocks(piece: &Piece, sending: bool) -> Vec<Block> {
    let mut blocks: Vec<[Block; 2]> = Vec::new();
    for stretch in &piece.stretches {
        let (ends, len) = ([stretch.source, stretch.target], stretch.len);
        if let Some(sides) = blocks.last_mut().filter(|sides| sides[0].len == len) {
            let steps = [0, 1].map(|side| ends[side].checked_sub(last(&sides[side])));
            let even = (0..2).all(|side| match (sides[side].rows, steps[side]) {
                (1, Some(step)) => step >= len,
                (_, step) => step == Some(sides[side].stride),
            });
            if even {
                for (block, step) in sides.iter_mut().zip(steps) {
                    block.stride = step.unwrap_or(block.stride);
                    block.rows += 1;
                }
                continue;
            }
        }
        blocks.push(ends.map(|first| Block { first, stride: len, rows: 1, len }));
    }
    blocks.into_iter().map(|[source, target]| if sending { source } else { target }).collect()
}

/// The first element of a block's last row.
fn last(block: &Block) -> usize {
    block.first + (block.rows - 1) * block.stride
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_ir::random::Stream;

    use super::*;
    use crate::edge::Stretch;

    /// The elements of blocks, one after the other.
    fn elements(blocks: &[Block]) -> Vec<usize> {
        let row = |b: &Block, row: usize| {
            let first = b.first + row * b.stride;
            first..first + b.len
        };
        let rows = |b: &Block| (0..b.rows).map(|r| row(b, r)).collect::<Vec<_>>();
        blocks.iter().flat_map(rows).flatten().collect()
    }

    fn both(stretches: Vec<Stretch>) -> [Vec<Block>; 2] {
        let piece = Piece { from: 0, to: 1, stretches };
        [true, false].map(|sending| blocks(&piece, sending))
    }

    #[test]
    fn evenly_spaced_stretches_travel_as_one_block() {
        let stretch = |i: usize| Stretch { source: 3 + 20 * i, target: 10 * i, len: 10 };
        let [source, target] = both((0..4).map(stretch).collect());
        assert_eq!(source, [Block { first: 3, stride: 20, rows: 4, len: 10 }]);
        assert_eq!(target, [Block { first: 0, stride: 10, rows: 4, len: 10 }]);
        // Another spacing on either side, or another length, begins a new block.
        let more = [(83, 40, 10), (103, 60, 10), (123, 70, 5)];
        let more = more.map(|(source, target, len)| Stretch { source, target, len });
        let [source, target] = both((0..4).map(stretch).chain(more).collect());
        assert_eq!((source.len(), target.len()), (3, 3));
        assert_eq!((source[0].rows, source[1].rows, source[2].rows), (5, 1, 1));
        let one = both(vec![Stretch { source: 7, target: 9, len: 3 }]);
        assert_eq!(one, [7, 9].map(|first| vec![Block { first, stride: 3, rows: 1, len: 3 }]));
    }

    /// Both ends make the same calls, and these carry what the stretches say, in their order.
    #[test]
    fn blocks_hold_the_elements_of_their_stretches() {
        let stream = Stream::named(7, "blocks");
        let mut joined = 0;
        for case in 0..2000_u64 {
            let draw = |i: usize, below: u64| stream.below(case * 1000 + i as u64, below) as usize;
            let (mut source, mut target) = (draw(0, 9), draw(1, 9));
            let stretch = |i: usize| {
                let len = 1 + draw(4 * i + 2, 3);
                let stretch = Stretch { source, target, len };
                // Few different gaps, so that some follow each other evenly.
                source += len + draw(4 * i + 3, 2);
                target += len + draw(4 * i + 4, 2) * 4;
                stretch
            };
            let stretches: Vec<Stretch> = (1..2 + draw(999, 12)).map(stretch).collect();
            let of = |first: fn(&Stretch) -> usize| -> Vec<usize> {
                stretches.iter().flat_map(|r| first(r)..first(r) + r.len).collect()
            };
            let expected = [of(|r| r.source), of(|r| r.target)];
            let found = both(stretches.clone());
            assert_eq!([0, 1].map(|side| elements(&found[side])), expected, "case {case}");
            let calls = |side: usize| found[side].iter().map(|b| (b.rows, b.len));
            assert!(calls(0).eq(calls(1)), "case {case}");
            joined += stretches.len() - found[0].len();
        }
        assert!(joined > 2000, "{joined}");
    }
}
