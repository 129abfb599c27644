//! What a stage group keeps of a micro-batch is sent to another one, which keeps it for a while (BPipe, Kim et al.,
//! 2023).
//!
//! Everything goes that the backward will read and the forward has left: residuals, and the boundary values that came
//! in. Parameters, data and random keys stay. Unlike a message of the model, which is free when something later
//! arrives, a value that leaves must have left before its memory is used again: its release waits for the send.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_call::{Block, Lane, Message, Value};
use phalanx_ir::{DType, Role};

use super::{Action, Binder, BufferId, Category, Kind, Part, RankPlace, ScriptError, World};
use crate::key::BufferKey;
use crate::parked::ParkedMove;

/// The channels of what leaves and of what comes back; those below are of the model's values.
pub(super) const OUT: u32 = 2;
const BACK: u32 = 3;

/// What is done before a turn, in this order: room is made first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Free,
    Take,
    Give,
    Send,
    Leave,
    Return,
}

/// Inserts the moves of one stage group.
pub(super) struct Mover<'a> {
    world: &'a World<'a>,
    rank: RankPlace,
    /// Before which turn, which step, and which of several moves comes first; then the move.
    steps: BTreeMap<(usize, Step, usize), ParkedMove>,
}

impl<'a> Mover<'a> {
    pub(super) fn new(world: &'a World<'a>, rank: RankPlace) -> Self {
        let mut steps = BTreeMap::new();
        for (number, own) in world.moves.iter().enumerate() {
            // Channels deliver in order: micro-batches leave in the order of the list, and come back in their own.
            let mb = own.microbatch;
            let mut at = |turn, step, order| steps.insert((turn, step, order), *own);
            if own.from == rank.stage_group {
                at(own.sent, Step::Send, number);
                at(own.left, Step::Leave, number);
                at(own.returned, Step::Return, mb);
            }
            if own.to == rank.stage_group {
                at(own.taken, Step::Take, number);
                at(own.given, Step::Give, mb);
                at(own.freed, Step::Free, mb);
            }
        }
        Self { world, rank, steps }
    }

    /// Does what comes before a turn.
    pub(super) fn before(
        &mut self,
        turn: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        while let Some(next) = self.steps.first_entry().filter(|next| next.key().0 <= turn) {
            let ((_, step, _), own) = next.remove_entry();
            for (value, ty) in kept(self.world, &own) {
                self.act(step, own, value, ty, binder)?;
            }
        }
        Ok(())
    }

    /// Does what is left after the last turn.
    pub(super) fn finish(&mut self, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        self.before(usize::MAX, binder)
    }

    fn act(
        &self,
        step: Step,
        own: ParkedMove,
        value: Value,
        (dtype, bytes): (DType, usize),
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let parked = BufferKey::Parked(value.clone());
        match step {
            Step::Send => {
                let buffer = binder.sent(&value)?;
                binder.script.buffers[buffer.0].category = Category::Residuals;
                self.message(Lane::Park, (buffer, OUT, own.to), value, dtype, binder);
            }
            Step::Leave => {
                let buffer = binder.sent(&value)?;
                super::messages::release(&mut binder.script, buffer);
            }
            Step::Return => {
                let buffer = binder.returned(&value, bytes);
                self.message(Lane::Take, (buffer, BACK, own.to), value, dtype, binder);
            }
            Step::Take => {
                let buffer = binder.kept(parked, bytes);
                self.message(Lane::Take, (buffer, OUT, own.from), value, dtype, binder);
            }
            Step::Give => {
                let buffer = binder.kept(parked, bytes);
                self.message(Lane::Park, (buffer, BACK, own.from), value, dtype, binder);
            }
            Step::Free => {
                let buffer = binder.kept(parked, bytes);
                super::messages::release(&mut binder.script, buffer);
            }
        }
        Ok(())
    }

    /// All of a buffer, to or from the rank at the same place of another stage group, as the lane says.
    fn message(
        &self,
        lane: Lane,
        (buffer, channel, group): (BufferId, u32, usize),
        value: Value,
        dtype: DType,
        binder: &mut Binder<'_>,
    ) {
        let (script, sends) = (&mut binder.script, lane == Lane::Park);
        let len = script.buffers[buffer.0].bytes / dtype.size();
        let blocks = vec![Block { first: 0, stride: len, rows: 1, len }];
        let peer = self.world.stage_groups[group].ranks[self.rank.place];
        let messages = vec![Message { peer, channel, value, dtype, blocks }];
        // What arrives may reuse the memory of buffers that were released before, so it waits for these.
        let computed = |action: &Action| !sends && action.lane == Lane::Compute;
        let after = script.actions.iter().rposition(computed).into_iter().collect();
        let (verb, kind) = match sends {
            true => ("park", Kind::Send { buffer, messages }),
            false => ("take", Kind::Receive { buffer, messages }),
        };
        let label = format!("{verb} {}", script.name(buffer));
        script.actions.push(Action { label, lane, kind, after });
    }
}

/// What leaves: each value with its type and its bytes on a rank, in one order for both sides.
fn kept(world: &World<'_>, own: &ParkedMove) -> BTreeMap<Value, (DType, usize)> {
    let ParkedMove { microbatch, from, sent, returned, .. } = *own;
    let group = &world.stage_groups[from];
    let runs = |range: std::ops::Range<usize>| {
        let turns = group.turns[range].iter();
        turns.filter(move |turn| turn.microbatch == microbatch).map(|turn| {
            let segment = world.model.instances()[turn.instance].segment;
            (turn, group.compiled.program(segment, turn.part))
        })
    };
    let value =
        |instance, port: &str| Value { instance, port: port.into(), microbatch, again: false };
    let mut left = BTreeSet::new();
    for (turn, program) in runs(0..sent) {
        let made = program.outputs().iter();
        let made = made.filter(|port| matches!(port.role, Role::Residual | Role::Boundary));
        left.extend(made.map(|port| value(turn.instance, &port.name)));
        let came = program.inputs_with(Role::Boundary);
        left.extend(came.filter_map(|port| {
            let producer = world.wiring(from).producer(turn.instance, &port.name)?;
            Some(value(producer, &port.name))
        }));
    }
    // What a second forward makes again does not come back.
    let (mut again, mut found) = (BTreeSet::new(), BTreeMap::new());
    for (turn, program) in runs(returned..group.turns.len()) {
        for port in program.inputs() {
            let producer = match port.role {
                Role::Residual => Some(turn.instance),
                Role::Boundary => world.wiring(from).producer(turn.instance, &port.name),
                _ => None,
            };
            let Some(producer) = producer.filter(|producer| !again.contains(producer)) else {
                continue;
            };
            let value = value(producer, &port.name);
            if left.contains(&value) {
                let ty = program.ty(port.value);
                found.insert(value, (ty.dtype, ty.local_bytes(program.mesh())));
            }
        }
        if turn.part == Part::R {
            again.insert(turn.instance);
        }
    }
    found
}
