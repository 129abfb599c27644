//! Messages: what a rank of one device sends to a rank of another.

use phalanx_ir::DType;

/// What of a buffer goes to, or comes from, one other rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Messages to the same rank on one channel arrive in order; on different channels they do not
    /// wait for each other.
    pub channel: u32,
    /// What travels, under the same name on both ends: `blocks.3/h@mb0`.
    pub value: String,
    /// The element type.
    pub dtype: DType,
    /// The elements, one call of the transport for each block.
    pub blocks: Vec<Block>,
}

impl Message {
    /// The bytes that travel.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|b| b.rows * b.len).sum::<usize>() * self.dtype.size()
    }
}

/// Elements of a buffer: rows of the same length, evenly spaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// The first element.
    pub first: usize,
    /// From one row's first element to the next one's.
    pub stride: usize,
    /// How many rows.
    pub rows: usize,
    /// Elements of a row.
    pub len: usize,
}
