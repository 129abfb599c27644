//! A whole model on a mesh: the annotations of every segment, ready to partition its programs.

use phalanx_autodiff::Joint;
use phalanx_ir::{Axis, Mesh, Model};

use crate::annotate::Annotations;
use crate::cost::Costs;
use crate::error::SpmdError;
use crate::partition::partition;
use crate::sharing::Sharing;
use crate::split::apply;
use crate::strategies::Strategy;

/// The layouts of a model's values on a mesh.
#[derive(Clone, Debug)]
pub struct Partition {
    mesh: Mesh,
    annotations: Vec<Annotations>,
    sharing: Sharing,
    streams: Vec<Axis>,
    costs: Costs,
}

impl Partition {
    /// Applies strategies to every segment of a model.
    pub fn new(
        model: &Model,
        mesh: &Mesh,
        strategies: &[&dyn Strategy],
        costs: Costs,
    ) -> Result<Self, SpmdError> {
        for strategy in strategies {
            strategy.check(model)?;
        }
        let (mesh, annotations) = apply(model, mesh, strategies)?;
        let mut sharing = Sharing::none();
        for strategy in strategies {
            strategy.share(&mesh, &mut sharing)?;
        }
        let streams = strategies.iter().flat_map(|strategy| strategy.streams(&mesh)).collect();
        Ok(Self { mesh, annotations, sharing, streams, costs })
    }

    /// The mesh, with the splits that the strategies need.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How ranks that hold the same parameters share them.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// The axes over which keys and values come block by block instead of being gathered.
    pub fn streams(&self) -> &[Axis] {
        &self.streams
    }

    /// Partitions the joint graph of a segment.
    pub fn joint(&self, segment: usize, joint: &Joint) -> Result<Joint, SpmdError> {
        partition(joint, &self.mesh, &self.annotations[segment], &self.costs)
    }
}
