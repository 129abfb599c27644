//! What pipelines that park micro-batches on other stage groups need.

use std::collections::BTreeSet;

use phalanx_error::{Error, Problem, Result};
use phalanx_ir::Role;
use phalanx_script::{ParkedMove, Part, StageGroup};

use crate::Lowered;

/// What a rank gives away goes to the rank at the same place of another stage group: both have the same mesh.
pub(crate) fn check(
    moves: &[ParkedMove],
    name: &str,
    alike: impl Fn(usize, usize) -> bool,
) -> Result<()> {
    let Some(own) = moves.iter().find(|own| !alike(own.from, own.to)) else { return Ok(()) };
    Err(Error::refused(
        Problem::new(format!("{name} cannot pair stage groups {} and {}", own.from, own.to))
            .because("their meshes differ, and each rank gives what it keeps to one other rank")
            .nearest("the same mesh for all stage groups, or parallel.schedule = \"1f1b\""),
    ))
}

impl Lowered {
    /// The most values that a stage group may keep of a micro-batch.
    pub(crate) fn kept_values(&self) -> usize {
        let kept = |group: &StageGroup<'_>| {
            let held: BTreeSet<usize> = group.turns.iter().map(|turn| turn.instance).collect();
            let values = |instance: usize| {
                let segment = self.model.instances()[instance].segment;
                let program = group.compiled.program(segment, Part::F);
                let came = program.inputs_with(Role::Boundary).count();
                program.outputs_with(Role::Residual).count() + came
            };
            held.into_iter().map(values).sum()
        };
        self.stage_groups().iter().map(kept).max().unwrap_or(0)
    }
}
