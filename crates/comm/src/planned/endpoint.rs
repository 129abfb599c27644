//! A rank's endpoint with what its traffic is counted under.

use std::collections::BTreeMap;

use phalanx_call::traffic::add;
use phalanx_call::{Block, Message, Moved, Route};
use phalanx_ir::ops::Collective;
use phalanx_ir::{Axis, DType, Instr, OpDef, Program};

use super::{PlacedCall, cut};
use crate::blocks::{Blocks, Strides};
use crate::call::{Call, CollectiveOp, OpKind};
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::group::{Group, GroupId};
use crate::site::Site;

/// A rank's endpoint to the others.
pub struct CountedEndpoint {
    /// The endpoint.
    pub comm: Box<dyn Communicator>,
    /// For each tag: the axes whose traffic is counted under it.
    counted: Vec<Vec<Axis>>,
}

/// Where in a program a call is made, and by which rank.
#[derive(Clone, Copy, Debug)]
pub struct CallSite<'a> {
    /// The program.
    pub program: &'a Program,
    /// The instruction.
    pub instr: &'a Instr,
    /// The rank's place in the program's mesh.
    pub rank: usize,
    /// The ranks of the mesh, as ranks of the world.
    pub ranks: &'a [usize],
}

impl CountedEndpoint {
    /// An endpoint that has counted nothing yet.
    pub fn new(comm: Box<dyn Communicator>) -> Self {
        Self { comm, counted: Vec::new() }
    }

    /// The call of the ranks along some axes.
    pub fn call(
        &mut self,
        at: CallSite<'_>,
        axes: &[Axis],
        op: CollectiveOp<'static>,
        dtype: DType,
        blocks: Blocks,
    ) -> Result<Call<'static>, CommError> {
        let CallSite { program, instr, rank, ranks } = at;
        let name = instr.op.name();
        let site = Site::named(&format!("{} {name} %{}", program.name, instr.outputs[0].0));
        let mesh = program.mesh();
        let members: Vec<usize> =
            mesh.group(rank, axes).into_iter().map(|place| ranks[place]).collect();
        let group = self.comm.group(&Group::new(members)?)?;
        // Traffic is counted by the axes that it goes over.
        let tag = self.tag(mesh.axes_of(mesh.mask(axes)));
        Ok(Call::new(group, op, dtype, blocks).at(site).tagged(tag))
    }

    /// The calls of a collective, one for each of its pieces.
    pub fn calls(
        &mut self,
        at: CallSite<'_>,
        collective: &Collective,
        axes: &[Axis],
        op: CollectiveOp<'static>,
        blocks: Blocks,
    ) -> Result<Vec<PlacedCall>, CommError> {
        let dtype = at.program.ty(at.instr.inputs[0]).dtype;
        Ok(cut(collective, self.call(at, axes, op, dtype, blocks)?))
    }

    /// The calls that send a buffer's messages, or receive them.
    pub fn messages(&mut self, messages: &[Message], sends: bool, label: &str) -> Vec<PlacedCall> {
        let (site, tag) = (Site::named(label), self.tag(vec![Axis::STAGES]));
        let mut calls = Vec::new();
        for message in messages {
            let Message { peer, channel, dtype, ref blocks, .. } = *message;
            let op = match sends {
                true => CollectiveOp::Send { to: peer, channel },
                false => CollectiveOp::Receive { from: peer, channel },
            };
            for block in blocks {
                let call = Call::new(GroupId::WORLD, op, dtype, rows(block));
                calls.push((block.first, call.at(site).tagged(tag)));
            }
        }
        calls
    }

    /// What this rank moved, by op and axes.
    pub fn moved(&self) -> BTreeMap<Route, Moved> {
        let mut total = BTreeMap::new();
        for (tag, kind, count) in self.comm.traffic().entries() {
            // The sender makes the call, and the receiver moves the bytes.
            let (op, calls) = match kind {
                OpKind::Receive => (OpKind::Send.name(), 0),
                // Of how many rows is a matter of the step.
                OpKind::AllToAllRagged => (OpKind::AllToAll.name(), count.calls),
                _ => (kind.name(), count.calls),
            };
            let route = Route { op, axes: self.counted[tag as usize].clone() };
            add(&mut total, route, Moved { calls, bytes: count.bytes });
        }
        total
    }

    /// The tag under which traffic over these axes is counted.
    fn tag(&mut self, axes: Vec<Axis>) -> u32 {
        let known = self.counted.iter().position(|counted| *counted == axes);
        known.unwrap_or_else(|| {
            self.counted.push(axes);
            self.counted.len() - 1
        }) as u32
    }
}

fn rows(block: &Block) -> Blocks {
    let Block { stride, rows, len, .. } = *block;
    let strides = Strides { block: 0, outer: rows * stride, row: stride };
    Blocks { outer: 1, rows, len, source: strides, target: strides }
}
