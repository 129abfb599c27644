//! Pieces of memory, to tell whether two values may meet in it.

use phalanx_call::Slot;

/// Bytes of the workspace, or of an input or output.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece {
    /// From one byte to another.
    Workspace(usize, usize),
    Port(Slot),
}

impl Piece {
    /// The memory of a value; nothing if it has none.
    pub(crate) fn of(slot: Slot, bytes: usize) -> Option<Self> {
        match slot {
            Slot::Workspace(at) => Some(Piece::Workspace(at, at + bytes)),
            Slot::Input(_) | Slot::Output(_) => Some(Piece::Port(slot)),
            Slot::Unused => None,
        }
    }

    /// Whether some byte is in both.
    pub(crate) fn meets(self, other: Piece) -> bool {
        match (self, other) {
            (Piece::Workspace(a, b), Piece::Workspace(c, d)) => a < d && c < b,
            (Piece::Port(own), Piece::Port(other)) => own == other,
            _ => false,
        }
    }
}
