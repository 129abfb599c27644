//! The systems, each a small file that annotates values and leaves the rest to the partitioner.
//!
//! A strategy speaks of its own axis alone, so strategies compose in any order. What two of them
//! want differently is an error that names both.

mod allgather_kv;
mod automatic;
mod data;
mod find;
mod megatron;
mod sequence;
mod ulysses;

use phalanx_ir::{Mesh, Program};

use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::Split;

pub use allgather_kv::AllGatherKv;
pub use automatic::Automatic;
pub use data::Data;
pub use megatron::Megatron;
pub use sequence::Sequence;
pub use ulysses::Ulysses;

/// A rule that annotates the values of a segment.
pub trait Strategy {
    /// The name, for messages.
    fn name(&self) -> &'static str;

    /// The splits of axes that it needs in a segment.
    fn splits(&self, _program: &Program, _mesh: &Mesh) -> Result<Vec<Split>, SpmdError> {
        Ok(Vec::new())
    }

    /// Annotates a segment.
    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError>;
}
