//! Sends and receives around the turns of a stage group.
//!
//! What a turn produces for another stage group is sent at once. What a turn needs from another
//! stage group is requested one turn earlier, so that it arrives while that turn runs. If it
//! arrives in slices, they are gathered right before the turn: an earlier collective would wait for
//! a message.

use std::ops::Range;

use phalanx_call::{Block, Message, Value};
use phalanx_ir::DType;

use super::links::Link;
use super::{Action, Binder, BufferId, Kind, Lane, Run, ScriptError, View, World, Write, programs};
use crate::action::Script;
use crate::key::BufferKey;
use crate::library::Placed;

/// How many turns before it is needed a value is requested.
const AHEAD: usize = 1;

/// Inserts the messages of one stage group.
pub(super) struct Messenger<'a> {
    world: &'a World<'a>,
    rank: usize,
    /// What this stage group receives, in the order in which it is needed.
    incoming: &'a [Link],
    /// What it sends, in the order in which it is produced.
    outgoing: &'a [Link],
    asked: usize,
    /// Values that were requested in slices and are not gathered yet.
    slices: Vec<Slices<'a>>,
    /// Buffers that receivers may still read, and the turn after which they no longer do.
    lent: Vec<(Option<usize>, BufferId)>,
}

impl<'a> Messenger<'a> {
    pub(super) fn new(world: &'a World<'a>, stage_group: usize, rank: usize) -> Self {
        let (incoming, outgoing) =
            (&world.links.incoming[stage_group], &world.links.outgoing[stage_group]);
        let (slices, lent) = (Vec::new(), Vec::new());
        Self { world, rank, incoming, outgoing, asked: 0, slices, lent }
    }

    /// Requests what this turn and the next one need.
    pub(super) fn before(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        while let Some(link) = self.incoming.get(self.asked).filter(|l| l.by <= turn + AHEAD) {
            let crossing = &self.world.links.crossings[link.crossing];
            let buffer = receive(self.world, link, self.rank, binder)?;
            if let Some(gather) = &crossing.gather {
                let (turn, value) = (link.to.turn, &link.value);
                self.slices.push(Slices { turn, value, buffer, gather });
            }
            self.asked += 1;
        }
        for slices in self.slices.extract_if(.., |slices| slices.turn == turn) {
            slices.gather(binder);
        }
        Ok(())
    }

    /// Sends what the turn produced, and releases buffers whose values have arrived by now.
    pub(super) fn after(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        while let Some((link, rest)) = self.outgoing.split_first() {
            if link.from.turn > turn {
                break;
            }
            self.outgoing = rest;
            let buffer = binder.sent(&link.held)?;
            let crossing = &self.world.links.crossings[link.crossing];
            let messages = crossing.messages(link, self.rank, true);
            let label = format!("send {}", binder.script.names.value(&link.value));
            let kind = Kind::Send { buffer, messages };
            binder.script.actions.push(Action { label, lane: Lane::Send, kind, after: vec![] });
            self.lent.push((link.settled, buffer));
        }
        let over = |settled: &Option<usize>| settled.is_some_and(|last| last <= turn);
        let ended = self.lent.extract_if(.., |(settled, _)| over(settled));
        ended.for_each(|(_, buffer)| release(&mut binder.script, buffer));
        Ok(())
    }

    /// After the last turn: what the next script reads is gathered, if it came in slices.
    pub(super) fn after_last(&mut self, binder: &mut Binder<'_>) {
        std::mem::take(&mut self.slices).into_iter().for_each(|slices| slices.gather(binder));
    }

    /// At the end of a script everything has arrived: its sends have ended.
    pub(super) fn finish(self, script: &mut Script) {
        self.lent.into_iter().for_each(|(_, buffer)| release(script, buffer));
    }
}

/// Requests a value, or this rank's slice of it.
fn receive(
    world: &World<'_>,
    link: &Link,
    rank: usize,
    binder: &mut Binder<'_>,
) -> Result<BufferId, ScriptError> {
    let crossing = &world.links.crossings[link.crossing];
    let key = match crossing.gather {
        None => BufferKey::Value(link.value.clone()),
        Some(_) => BufferKey::Slice(link.value.clone()),
    };
    let buffer = binder.received(key, crossing.bytes);
    let messages = crossing.messages(link, rank, false);
    clear_rest(world, &mut binder.script, buffer, crossing.arrives.dtype, &messages)?;
    // It may reuse the memory of buffers that were released before, so it waits for these.
    let computed = |action: &Action| action.lane == Lane::Compute;
    let after = binder.script.actions.iter().rposition(computed).into_iter().collect();
    let label = format!("receive {}", binder.script.name(buffer));
    let kind = Kind::Receive { buffer, messages };
    binder.script.actions.push(Action { label, lane: Lane::Receive, kind, after });
    Ok(buffer)
}

/// A rank's slice of a value; other ranks have the other slices.
struct Slices<'a> {
    /// The turn that reads the value.
    turn: usize,
    /// The value.
    value: &'a Value,
    /// The slice's buffer.
    buffer: BufferId,
    gather: &'a Placed,
}

impl Slices<'_> {
    /// Gathers the value from its slices.
    fn gather(self, binder: &mut Binder<'_>) {
        let program = &self.gather.program;
        let bytes = program.ty(program.outputs()[0].value).local_bytes(program.mesh());
        let whole = binder.received(BufferKey::Value(self.value.clone()), bytes);
        let view = |buffer| View { buffer, offset: 0 };
        let script = &mut binder.script;
        let run = Run {
            program: script.program(self.gather.clone()),
            inputs: vec![view(self.buffer)],
            outputs: vec![(view(whole), Write::Overwrite)],
            contributes: vec![],
        };
        let label = format!("gather {}", script.names.value(self.value));
        let kind = Kind::Gather(run);
        script.actions.push(Action { label, lane: Lane::Gather, kind, after: vec![] });
    }
}

/// Sets the bytes that no message fills to zero: padding is not sent.
fn clear_rest(
    world: &World<'_>,
    script: &mut Script,
    buffer: BufferId,
    dtype: DType,
    messages: &[Message],
) -> Result<(), ScriptError> {
    let gaps = gaps(script.buffers[buffer.0].bytes, dtype, messages);
    if !gaps.is_empty() {
        let label = format!("clear {}", script.name(buffer));
        programs::clear(world, script, &label, buffer, dtype, &gaps)?;
    }
    Ok(())
}

/// The bytes of a buffer of this size that no message fills.
pub(super) fn gaps(bytes: usize, dtype: DType, messages: &[Message]) -> Vec<Range<usize>> {
    let rows = |b: &Block| {
        let Block { first, stride, rows, len } = *b;
        (0..rows).map(move |row| first + row * stride..first + row * stride + len)
    };
    let mut brought: Vec<Range<usize>> =
        messages.iter().flat_map(|m| m.blocks.iter().flat_map(rows)).collect();
    brought.sort_by_key(|range| range.start);
    let elements = bytes / dtype.size();
    let starts = [0].into_iter().chain(brought.iter().map(|range| range.end));
    let ends = brought.iter().map(|range| range.start).chain([elements]);
    let gaps = starts.zip(ends).filter(|(start, end)| start < end);
    gaps.map(|(start, end)| start * dtype.size()..end * dtype.size()).collect()
}

pub(super) fn release(script: &mut Script, buffer: BufferId) {
    let label = format!("free {}", script.name(buffer));
    let kind = Kind::Release { buffer };
    script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
}
