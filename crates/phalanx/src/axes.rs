//! Which axes of a mesh are used, and by what.

use phalanx_ir::{Axis, Mesh, Model};
use phalanx_session::{Parallel, Replicas};

use crate::mistake::Mistake;

/// Refuses a strategy whose axis no mesh has, and an axis of several ranks that nothing uses.
pub(crate) fn check_axes(parallel: &Parallel, model: &Model) -> Result<(), Mistake> {
    let meshes = match &parallel.pipeline.meshes[..] {
        [] => std::slice::from_ref(&parallel.mesh),
        meshes => meshes,
    };
    for strategy in &parallel.strategies {
        for axis in strategy.axes().unwrap_or_default() {
            if !meshes.iter().any(|mesh| has(mesh, axis)) {
                let texts: Vec<String> = meshes.iter().map(Mesh::to_string).collect();
                let (axis, mesh) = (axis.to_owned(), texts.join("; "));
                return Err(Mistake::NoAxis { strategy: strategy.name(), axis, mesh });
            }
        }
    }
    let mut unused = meshes.iter().flat_map(Mesh::axes).filter(|(axis, size)| {
        *size > 1 && *axis != Axis::STAGES && !is_used(parallel, model, axis.name())
    });
    match unused.next() {
        None => Ok(()),
        Some((axis, size)) => Err(Mistake::UnusedAxis { axis: axis.name().to_owned(), size }),
    }
}

fn has(mesh: &Mesh, axis: &str) -> bool {
    mesh.axes().any(|(own, _)| is_part(own.name(), axis))
}

/// Whether a name is that of an axis, or of a part of it: `tp.0` is a part of `tp`.
fn is_part(name: &str, axis: &str) -> bool {
    name.strip_prefix(axis).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether a strategy or an annotation of the model names an axis. A strategy that does not say
/// what it uses, or a search, may use any.
fn is_used(parallel: &Parallel, model: &Model, axis: &str) -> bool {
    let strategies = parallel.strategies.iter().map(|strategy| strategy.axes());
    let by_strategy = |axes: Option<Vec<&str>>| {
        axes.is_none_or(|axes| axes.iter().any(|own| is_part(axis, own) || is_part(own, axis)))
    };
    let notes = model.segments().iter().flat_map(|program| program.notes());
    let letter = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let by_note = |layout: &str| {
        layout.split(|c| !letter(c)).any(|word| is_part(word, axis) || is_part(axis, word))
    };
    let apart = parallel.replicas.is_some() && axis == Replicas::AXIS;
    parallel.search
        || apart
        || strategies.into_iter().any(by_strategy)
        || notes.into_iter().any(|(_, layout)| by_note(layout))
}
