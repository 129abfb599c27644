//! Stage groups: the ranks of a pipeline that hold the same stages of a model.
//!
//! Each has its own mesh, on which its programs run, and a list of turns. Training on one mesh is a
//! pipeline of one stage group.

use std::sync::Arc;

use phalanx_ir::{Axis, Mesh};
use phalanx_spmd::Sharing;

use crate::build::Compiled;
use crate::error::ScriptError;
use crate::schedule::ScheduledRun;

/// Ranks that hold the same stages, and what they do in a step.
#[derive(Clone, Copy, Debug)]
pub struct StageGroup<'a> {
    /// The programs of the model's segments on this mesh.
    pub compiled: &'a Compiled,
    /// The order of their runs.
    pub turns: &'a [ScheduledRun],
    /// The mesh.
    pub mesh: &'a Mesh,
    /// How its ranks share what they hold.
    pub sharing: &'a Sharing,
    /// The ranks, in the order of the mesh.
    pub ranks: &'a [usize],
}

/// The mesh of several stage groups: their mesh with one more axis along which the groups lie. If
/// their meshes differ, all their ranks lie along that one axis. Also gives the ranks, in the order
/// of that mesh.
pub(crate) fn together(
    stage_groups: &[&StageGroup<'_>],
) -> Result<(Mesh, Arc<[usize]>), ScriptError> {
    let ranks: Arc<[usize]> = stage_groups.iter().flat_map(|d| d.ranks.iter().copied()).collect();
    let stages = Axis::STAGES;
    let alike = stage_groups.iter().all(|d| d.mesh == stage_groups[0].mesh);
    let mesh = match alike {
        true => {
            let own: Vec<(Axis, usize)> = stage_groups[0].mesh.axes().collect();
            let own = own.iter().map(|(axis, size)| (axis.name(), *size));
            Mesh::new([(stages.name(), stage_groups.len())].into_iter().chain(own))?
        }
        false => Mesh::new([(stages.name(), ranks.len())])?,
    };
    Ok((mesh, ranks))
}
