//! Replicas that train by themselves and take the mean of their weights from time to time.

use phalanx_ir::{DType, Mesh};
use phalanx_session::{Parallel, Replicas};

use crate::mistake::Mistake;

/// When replicas take the mean of their weights, and of what else (Stich, 2019: local SGD).
///
/// Each replica takes steps on its share of the batch. A mean is also taken after the last step of
/// [`Trainer::steps`](crate::Trainer::steps), so what a run leaves is the mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalSgd {
    /// Steps from one mean to the next; 0: none before the last step.
    pub every: usize,
    /// The first steps, each of which ends with a mean.
    pub warmup: usize,
    /// Whether the optimizer's state is averaged too, or each replica keeps its own.
    pub average_state: bool,
}

impl Default for LocalSgd {
    fn default() -> Self {
        Self { every: 8, warmup: 0, average_state: true }
    }
}

impl LocalSgd {
    /// The replicas that lie along the axis `dp` of these ranks; none if there is one.
    pub(crate) fn on(
        self,
        parallel: &Parallel,
        steps: usize,
        compute: DType,
    ) -> Result<Option<Replicas>, Mistake> {
        if !parallel.pipeline.meshes.is_empty() {
            return Err(Mistake::Replicas { other: "a mesh for each stage" });
        }
        if compute == DType::F16 {
            return Err(Mistake::Replicas { other: "f16" });
        }
        let axis = Replicas::AXIS;
        if parallel.mesh.find(axis).is_empty() {
            let mesh = Mesh::to_string(&parallel.mesh);
            return Err(Mistake::NoAxis { strategy: "local SGD", axis: axis.to_owned(), mesh });
        }
        let count = parallel.mesh.degree(axis);
        let Self { every, warmup, average_state: states } = self;
        let (every, warmup, last) = (every as u64, warmup as u64, steps as u64);
        Ok((count > 1).then_some(Replicas { count, every, warmup, last, states }))
    }
}
