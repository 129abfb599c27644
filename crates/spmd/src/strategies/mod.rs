//! The systems, each a small file that annotates values and leaves the rest to the partitioner.
//!
//! A strategy annotates only its own axis, so strategies compose in any order. If two of them
//! contradict each other, the error names both.

mod allgather_kv;
mod automatic;
mod cube;
mod data;
mod data_parallel;
mod ddp;
mod experts;
mod find;
mod fsdp;
mod gspmd;
mod megatron;
mod optimus;
mod parts;
mod ring;
mod rsa;
mod sequence;
mod tensor_plan;
mod ulysses;
mod weight_update;
mod zero;

use phalanx_ir::{Axis, Mesh, Model, Program};

use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::Sharing;
use crate::split::AxisSplit;

pub use allgather_kv::AllGatherKv;
pub use automatic::Automatic;
pub use cube::Cube;
pub use data::BatchParallel;
pub use data_parallel::DataParallel;
pub use ddp::Ddp;
pub use experts::{ExpertExchange, ExpertParallel, two_factors};
pub use fsdp::Fsdp;
pub use gspmd::Gspmd;
pub use megatron::{Megatron, heads_fit};
pub use optimus::Optimus;
pub use parts::{floor_root, whole_root};
pub use ring::Ring;
pub use rsa::RingSelfAttention;
pub use sequence::Sequence;
pub use tensor_plan::{Cut, TensorPlan};
pub use ulysses::Ulysses;
pub use weight_update::WeightUpdateSharding;
pub use zero::Zero;

/// What a strategy annotates; axes of earlier variants are major.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Precedence {
    /// Experts, which have some of the ranks that samples have.
    Experts,
    /// Samples.
    Batch,
    /// Positions.
    Context,
    /// Parameters.
    Weights,
    /// Values between the products of split parameters.
    Stream,
}

/// A rule that annotates the values of a segment.
pub trait Strategy {
    /// The name, for messages.
    fn name(&self) -> &'static str;

    /// The axes of the mesh that it divides work over; `None` if it does not say. A caller can then
    /// refuse a mesh that lacks one of them.
    fn axes(&self) -> Option<Vec<&str>> {
        None
    }

    /// The splits of axes that it needs in a segment.
    fn splits(&self, _program: &Program, _mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        Ok(Vec::new())
    }

    /// If several strategies shard one dim, the axes of the lower place are major, independent of
    /// the order of the strategies: experts, batch, then context, then weights, then the stream. A strategy
    /// that annotates other things than samples must say so here.
    fn place(&self) -> Precedence {
        Precedence::Batch
    }

    /// Refuses a model that it does not fit, before any segment is annotated.
    fn check(&self, _model: &Model) -> Result<(), SpmdError> {
        Ok(())
    }

    /// Annotates a segment.
    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError>;

    /// The axes over which keys and values, and operands of products, come block by block instead of
    /// being gathered; the mesh has its splits.
    fn streams(&self, _mesh: &Mesh) -> Vec<Axis> {
        Vec::new()
    }

    /// Says how ranks that hold the same parameters share them; the mesh has its splits.
    fn share(&self, _mesh: &Mesh, _sharing: &mut Sharing) -> Result<(), SpmdError> {
        Ok(())
    }
}

/// The parts of these axes that the mesh has and that hold more than one rank, in order.
fn present(mesh: &Mesh, axes: &[&str]) -> Vec<Axis> {
    let atoms = axes.iter().flat_map(|axis| mesh.find(axis));
    atoms.filter(|&atom| mesh.count(&[atom]) > 1).collect()
}
