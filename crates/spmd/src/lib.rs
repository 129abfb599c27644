//! The partitioner: a program for one device becomes the same program on a mesh.
//!
//! [`partition()`] takes a joint graph (forward and backward in one program, every value replicated),
//! a mesh and annotations on any of its values, and gives every value its layout and the program its
//! collectives. Annotations decide first, propagation through the ops' rules next, and what both
//! leave open is chosen by estimated time under a memory bound. Forward instructions are decided;
//! a gradient inherits from the op it belongs to.
#![forbid(unsafe_code)]

mod annotate;
mod choose;
mod cost;
mod emit;
mod error;
mod inherit;
mod mask;
mod model;
mod net;
mod node_choices;
mod order;
mod packed;
mod padding;
mod partition;
mod pins;
mod plan;
mod propagate;
mod reshard;
mod sharing;
mod split;
pub mod strategies;

pub use annotate::{Annotations, Annotator};
pub use cost::Costs;
pub use error::{Conflict, SpmdError};
pub use model::Partition;
pub use partition::{partition, partition_by};
pub use sharing::{Gathering, Grouping, Keep, Kept, Reduction, Share, Sharing, UnitFacts};
pub use split::{AxisSplit, apply};
pub use strategies::Strategy;
