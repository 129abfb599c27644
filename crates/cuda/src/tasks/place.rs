//! Where the operands of a running task lie.

use phalanx_call::{Slot, Tier};
use phalanx_engine::{Args, Span};

use crate::device::Stream;
use crate::libraries::Address;

/// A place that is known when a program runs: bytes from the start of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) slot: Slot,
    pub(crate) offset: usize,
}

impl Place {
    /// So many bytes further on.
    pub(crate) fn add(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// One run of a program: the stream that it is issued on, and its memory.
pub(crate) struct Run<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) args: Args<'a>,
    /// The first address of the arena.
    pub(crate) base: Address,
    /// Where kernels report bad ids.
    pub(crate) fault: Address,
    /// The library's workspace.
    pub(crate) workspace: (Address, usize),
}

impl Run<'_> {
    /// The address of a place.
    pub(crate) fn address(&self, place: Place) -> Address {
        let span = match place.slot {
            Slot::Input(i) => self.args.inputs[i],
            Slot::Output(o) => self.args.outputs[o].span,
            Slot::Workspace(offset) => {
                let Span { offset: start, .. } = self.args.workspace;
                Span { offset: start + offset, ..self.args.workspace }
            }
            Slot::Unused => unreachable!("an operand of a task has memory"),
        };
        debug_assert_eq!(span.tier, Tier::Device, "programs work in the GPU's memory");
        self.base + (span.offset + place.offset) as Address
    }

    /// Whether a value is added to what its output holds.
    pub(crate) fn adds(&self, slot: Slot) -> bool {
        matches!(slot, Slot::Output(o) if self.args.outputs[o].add)
    }
}
