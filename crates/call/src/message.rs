//! Messages: what a rank of one stage group sends to a rank of another.

use std::sync::Arc;

use phalanx_ir::DType;

/// A value that an instance produces for a micro-batch: the same on every rank that has it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Value {
    /// The instance's number in the model.
    pub instance: usize,
    /// The port of its programs.
    pub port: Arc<str>,
    /// The micro-batch.
    pub microbatch: usize,
    /// Whether it comes from a second run of its forward.
    pub again: bool,
}

/// Elements of a buffer that go to, or come from, one other rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Messages to the same rank on one channel arrive in order; on different channels they do not
    /// wait for each other.
    pub channel: u32,
    /// The value that is sent.
    pub value: Value,
    /// The element type.
    pub dtype: DType,
    /// The elements, one call of the transport for each block.
    pub blocks: Vec<Block>,
}

impl Message {
    /// The bytes that are sent.
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
