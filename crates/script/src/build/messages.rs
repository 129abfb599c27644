//! Sends and receives around the turns of a device.
//!
//! What a turn gives to another device is sent at once. What a turn needs from another device is asked
//! for one turn earlier, so that it arrives while that one runs. If it arrives in slices, they are
//! gathered right before the turn: any earlier, and what the ranks do together would wait for a message.

use std::ops::Range;

use phalanx_call::{Block, Message};
use phalanx_ir::{DType, Model, Program};

use super::crossing::{Crossing, Crossings};
use super::links::{Link, links};
use super::{Action, Binder, BufferId, Kind, Lane, Run, ScriptError, View, Write, programs};
use crate::action::Script;
use crate::device::Device;

/// How many turns before its own a value is asked for.
const AHEAD: usize = 1;

/// Inserts the messages of one device.
pub(super) struct Messenger<'a> {
    rank: usize,
    /// What this device gets, in the order in which it is needed.
    incoming: Vec<Link>,
    /// What it gives, in the order in which it is made.
    outgoing: Vec<Link>,
    asked: usize,
    crossings: Crossings<'a>,
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
        let crossings = Crossings::new(model, devices);
        Ok(Self { rank, incoming, outgoing, asked: 0, crossings, slices, lent })
    }

    /// Asks for what the turn needs, and the one after it.
    pub(super) fn before(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        while let Some(link) = self.incoming.get(self.asked).filter(|l| l.to.turn <= turn + AHEAD) {
            let crossing = self.crossings.of(link)?;
            let buffer = receive(link, &crossing, self.rank, binder)?;
            if let Some(gather) = crossing.gather.clone() {
                let (turn, name) = (link.to.turn, link.buffer.clone());
                self.slices.push(Slices { turn, name, buffer, gather });
            }
            self.asked += 1;
        }
        for slices in self.slices.extract_if(.., |slices| slices.turn == turn) {
            slices.gather(binder);
        }
        Ok(())
    }

    /// Sends what the turn made, and ends the lives of what has arrived by now.
    pub(super) fn after(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        for link in self.outgoing.iter().filter(|link| link.from.turn == turn) {
            let buffer = binder.sent(&link.buffer)?;
            let messages = self.crossings.of(link)?.messages(link, self.rank, true);
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
}

/// Asks for a value, or for this rank's slice of it.
fn receive(
    link: &Link,
    crossing: &Crossing,
    rank: usize,
    binder: &mut Binder<'_>,
) -> Result<BufferId, ScriptError> {
    let name = match crossing.gather {
        None => link.buffer.clone(),
        Some(_) => format!("{}/slice", link.buffer),
    };
    let buffer = binder.received(&name, crossing.bytes);
    let messages = crossing.messages(link, rank, false);
    clear_rest(&mut binder.script, buffer, crossing.arrives.dtype, &messages)?;
    // It may take the memory of whatever ended before, so it waits for that.
    let computed = |action: &Action| action.lane == Lane::Compute;
    let after = binder.script.actions.iter().rposition(computed).into_iter().collect();
    let (label, kind) = (format!("receive {name}"), Kind::Receive { buffer, messages });
    binder.script.actions.push(Action { label, lane: Lane::Receive, kind, after });
    Ok(buffer)
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
