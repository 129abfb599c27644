//! Axes that must be split before anything is annotated, and strategies applied to a model.
//!
//! An axis that covers more than one factor of a dim is split: with two key heads on `tp = 4`,
//! `tp.0 = 2` shards the key heads and `tp.1 = 2` the query heads of each group. Strategies say
//! beforehand where they need a split; the mesh is split once, and a name such as `tp` then stands
//! for all its parts.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::{Mesh, Model, Program};

use crate::annotate::{Annotations, Annotator};
use crate::error::SpmdError;
use crate::strategies::Strategy;

/// A split of an axis: how many ranks its major part has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisSplit {
    /// The axis.
    pub axis: String,
    /// The ranks of the major part.
    pub major: usize,
}

/// Applies strategies to every segment of a model: the mesh with the splits that they need, and the
/// annotations of each distinct segment, in the order of [`Model::segments`].
pub fn apply(
    model: &Model,
    mesh: &Mesh,
    strategies: &[&dyn Strategy],
) -> Result<(Mesh, Vec<Annotations>), SpmdError> {
    let mesh = split(model.segments(), mesh, strategies)?;
    let mut strategies = strategies.to_vec();
    strategies.sort_by_key(|s| s.place());
    let annotate = |program: &Program| {
        let mut annotator = Annotator::new(program, &mesh)?;
        for strategy in &strategies {
            strategy.annotate(annotator.by(strategy.name()))?;
        }
        Ok(annotator.finish())
    };
    let annotations = model.segments().iter().map(annotate).collect::<Result<_, SpmdError>>()?;
    Ok((mesh, annotations))
}

/// The mesh with every split that strategies need in these segments.
fn split(
    segments: &[Program],
    mesh: &Mesh,
    strategies: &[&dyn Strategy],
) -> Result<Mesh, SpmdError> {
    let mut cuts: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for program in segments {
        for strategy in strategies {
            for AxisSplit { axis, major } in strategy.splits(program, mesh)? {
                cuts.entry(axis).or_default().insert(major);
            }
        }
    }
    let mut mesh = mesh.clone();
    for (axis, cuts) in cuts {
        let atoms = mesh.expand(&axis)?;
        let size = mesh.count(&atoms);
        let mut parts = Vec::new();
        let mut done = 1;
        for &cut in cuts.iter().filter(|&&cut| cut > 1 && cut < size).chain([&size]) {
            if !cut.is_multiple_of(done) {
                let cuts = cuts.iter().copied().collect();
                return Err(SpmdError::Splits { axis, size, cuts });
            }
            parts.push(cut / done);
            done = cut;
        }
        if parts.len() > 1 {
            mesh = mesh.split(&axis, &parts)?;
        }
    }
    Ok(mesh)
}
