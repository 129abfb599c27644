//! How a value gets from the stage group that produces it to the ranks that read it.
//!
//! Where ranks of the reading stage group hold copies of the same block, as those of a
//! tensor-parallel group do, each of them receives a slice of it, and they gather the slices
//! (Megatron's scatter/gather: Narayanan et al., 2021). So the value crosses between stage groups
//! once, however many ranks read it; with t of them each link carries 1/t of the bytes. Whether a
//! block is sliced, and along which dim, is chosen by the bytes that are moved, for any two meshes.

use phalanx_call::Message;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, Mesh, Model, Order, Port, Program, Role, TensorType};

use super::ScriptError;
use super::links::{Direction, Link, Point};
use crate::edge::{EdgePiece, bytes, edge};
use crate::library::{Library, Placed};
use crate::message::blocks;
use crate::schedule::ScheduledRun;
use crate::stage_group::StageGroup;

/// How values cross between stage groups; each link gets the index of its crossing. Values of the
/// same types share a crossing, for all micro-batches.
pub(super) fn crossings(
    model: &Model,
    stage_groups: &[StageGroup<'_>],
    library: &Library,
    links: &mut [Link],
) -> Result<Vec<Crossing>, ScriptError> {
    let mut known: Vec<Ends<'_>> = Vec::new();
    let mut found = Vec::new();
    for link in links {
        let ends = Ends {
            stage_groups: [link.from.stage_group, link.to.stage_group],
            types: types(model, stage_groups, link)?,
        };
        link.crossing = match known.iter().position(|other| *other == ends) {
            Some(same) => same,
            None => {
                let [from, to] = ends.stage_groups.map(|stage_group| &stage_groups[stage_group]);
                let [made, read] = ends.types;
                found.push(crossing(library, (made, from), (read, to))?);
                known.push(ends);
                known.len() - 1
            }
        };
    }
    Ok(found)
}

/// Where a value is produced and where it is read: the stage groups, and the types that it has
/// there.
#[derive(PartialEq)]
struct Ends<'a> {
    stage_groups: [usize; 2],
    types: [&'a TensorType; 2],
}

/// The types in which a value is produced and read.
fn types<'a>(
    model: &Model,
    stage_groups: &[StageGroup<'a>],
    link: &Link,
) -> Result<[&'a TensorType; 2], ScriptError> {
    let program = |at: Point, turn: ScheduledRun| -> &'a Program {
        let instance = &model.instances()[turn.instance];
        stage_groups[at.stage_group].compiled.program(instance.segment, turn.part)
    };
    let made = stage_groups[link.from.stage_group].turns[link.from.turn];
    let (giver, reader) = (program(link.from, made), program(link.to, link.reader));
    // Who hands a value on has only read it; who adds to a cotangent only writes it.
    let named = |port: &&Port| *port.name == *link.value.port;
    let made = giver.outputs().iter().chain(giver.inputs()).find(named);
    let read = reader.inputs().iter().chain(reader.outputs()).find(named);
    match (made, read) {
        (Some(made), Some(read)) => Ok([giver.ty(made.value), reader.ty(read.value)]),
        _ => Err(ScriptError::Schedule(format!(
            "`{}` of `{}` has no producer or no reader",
            link.value.port,
            model.instances()[link.value.instance].name
        ))),
    }
}

/// The messages of a value, and the type in which it arrives.
#[derive(Debug)]
pub(super) struct Crossing {
    /// The type in which it arrives: that of its reader, or slices of it.
    pub(super) arrives: TensorType,
    /// Bytes of it that arrive on a rank, with their padding.
    pub(super) bytes: usize,
    /// Gathers the slices, if it arrives in slices.
    pub(super) gather: Option<Placed>,
    /// Which elements go from which rank to which.
    pieces: Vec<EdgePiece>,
}

impl Crossing {
    /// The messages with which a rank sends or receives a value of this crossing.
    pub(super) fn messages(&self, link: &Link, rank: usize, sending: bool) -> Vec<Message> {
        let own = |piece: &&EdgePiece| rank == if sending { piece.from } else { piece.to };
        let message = |piece: &EdgePiece| Message {
            peer: if sending { piece.to } else { piece.from },
            channel: match link.direction {
                Direction::Forward => 0,
                Direction::Backward => 1,
            },
            value: link.value.clone(),
            dtype: self.arrives.dtype,
            blocks: blocks(piece, sending),
        };
        self.pieces.iter().filter(own).map(message).collect()
    }
}

/// The crossing that moves the fewest bytes between ranks of the two stage groups; of equal ones
/// the one with the fewest stretches of elements, and the whole value before slices.
fn crossing(
    library: &Library,
    (made, from): (&TensorType, &StageGroup<'_>),
    (read, to): (&TensorType, &StageGroup<'_>),
) -> Result<Crossing, ScriptError> {
    let by = |arrives: &TensorType| edge(made, from.mesh, from.ranks, arrives, to.mesh, to.ranks);
    let new = |arrives: TensorType, gather: Option<Placed>, pieces: Vec<EdgePiece>| {
        let bytes = arrives.local_bytes(to.mesh);
        Crossing { arrives, bytes, gather, pieces }
    };
    let mut best = new(read.clone(), None, by(read)?);
    let copied = copied(read, to.mesh);
    for dim in 0..read.shape.len() {
        let Some(arrives) = sliced(read, dim, &copied, to.mesh) else { continue };
        let pieces = by(&arrives)?;
        if cost(&pieces, made) < cost(&best.pieces, made) {
            let gather = Some(library.placed(&gather(&arrives, dim, &copied, to.mesh)?));
            best = new(arrives, gather, pieces);
        }
    }
    Ok(best)
}

/// Bytes that cross, then how many stretches of elements they are.
fn cost(pieces: &[EdgePiece], ty: &TensorType) -> (usize, usize) {
    (bytes(pieces, ty.dtype), pieces.iter().map(|piece| piece.stretches.len()).sum())
}

/// The axes along which ranks hold copies.
fn copied(ty: &TensorType, mesh: &Mesh) -> Vec<Axis> {
    let axes = mesh.axes().filter(|&(_, size)| size > 1).map(|(axis, _)| axis);
    axes.filter(|axis| ty.layout.all_axes().all(|used| used != *axis)).collect()
}

/// A type with its blocks sliced along a dim, if possible: one slice for each copy.
fn sliced(ty: &TensorType, dim: usize, copied: &[Axis], mesh: &Mesh) -> Option<TensorType> {
    let sharding = &ty.layout.dims()[dim];
    // In other orders, the parts of a block would not lie together when they are gathered.
    let in_order = sharding.axes.is_empty() || sharding.order == Order::Block;
    if copied.is_empty() || !in_order {
        return None;
    }
    let axes = sharding.axes.iter().chain(copied).copied().collect();
    let cut = ty.layout.with_axes(dim, axes);
    let cut = cut.expect("axes along which ranks hold copies cut no dim of the value");
    let arrives = ty.with_layout(cut);
    arrives.check(mesh).is_ok().then_some(arrives)
}

fn gather(
    arrives: &TensorType,
    dim: usize,
    axes: &[Axis],
    mesh: &Mesh,
) -> Result<Program, ScriptError> {
    let b = Builder::on("gather", arrives.dtype, mesh.clone());
    let slice = b.input("slice", Role::Boundary, arrives.clone());
    let all = Collective::new(CollectiveKind::AllGather { dim }, axes.to_vec());
    b.port("whole", Role::Boundary, b.apply(all, &[slice]));
    Ok(b.finish()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_spmd::Sharing;

    use super::*;
    use crate::build::Compiled;

    static NOBODY: Sharing = Sharing::none();

    /// How a value of this type gets from one mesh to another, and the bytes that cross.
    fn between(a: (&str, &str), b: (&str, &str), first: usize) -> (String, usize) {
        let compiled = Compiled { phases: Vec::new() };
        let parse = |(ty, mesh): (&str, &str)| {
            let mesh: Mesh = mesh.parse().unwrap();
            (TensorType::parse(ty, &mesh).unwrap(), mesh)
        };
        let ((made, mesh_a), (read, mesh_b)) = (parse(a), parse(b));
        let ranks_a: Vec<usize> = (0..mesh_a.ranks()).collect();
        let ranks_b: Vec<usize> = (first..first + mesh_b.ranks()).collect();
        let stage_group = |mesh, ranks| StageGroup {
            compiled: &compiled,
            turns: &[],
            mesh,
            sharing: &NOBODY,
            ranks,
        };
        let (from, to) = (stage_group(&mesh_a, &ranks_a[..]), stage_group(&mesh_b, &ranks_b[..]));
        let library = Library::new(std::sync::Arc::new(phalanx_call::NoScratch));
        let found = crossing(&library, (&made, &from), (&read, &to)).unwrap();
        match &found.gather {
            None => assert_eq!(found.arrives, read),
            Some(gather) => {
                let gather = &gather.program;
                assert_eq!(gather.ty(gather.outputs()[0].value), &read);
            }
        }
        (found.arrives.to_string(), bytes(&found.pieces, made.dtype))
    }

    #[test]
    fn what_ranks_hold_alike_crosses_once() {
        let whole = |dims: [usize; 3]| dims.iter().product::<usize>() * 4;
        for (a, b, arrives, moved) in [
            // Along the first dim that divides: its slices lie in one piece.
            (("f32[4,8,5]", "tp=2"), ("f32[4,8,5]", "tp=4"), "f32[4,8,5]{0:tp}", whole([4, 8, 5])),
            (("f32[3,8,5]", "tp=2"), ("f32[3,8,5]", "tp=4"), "f32[3,8,5]{1:tp}", whole([3, 8, 5])),
            (("f32[4,8,5]", "tp=4"), ("f32[4,8,5]", "tp=2"), "f32[4,8,5]{0:tp}", whole([4, 8, 5])),
            // In addition to the dims that are sharded already.
            (
                ("f32[4,8,5]{0:dp}", "dp=2 tp=2"),
                ("f32[4,8,5]{0:dp}", "dp=2 tp=2"),
                "f32[4,8,5]{0:dp,tp}",
                whole([4, 8, 5]),
            ),
            // Parts of a zigzag would not lie together.
            (
                ("f32[3,8,6]{1:cp@zigzag}", "cp=2 tp=2"),
                ("f32[3,8,6]{1:cp@zigzag}", "cp=2 tp=2"),
                "f32[3,8,6]{1:cp@zigzag 2:tp}",
                whole([3, 8, 6]),
            ),
            // As the sender has it, instead of every part from every rank.
            (
                ("f32[4,8,5]{1:tp}", "tp=2"),
                ("f32[4,8,5]", "tp=2"),
                "f32[4,8,5]{1:tp}",
                whole([4, 8, 5]),
            ),
            // No dim divides: the whole value, to each of the two.
            (("f32[3,7,5]", "tp=2"), ("f32[3,7,5]", "tp=2"), "f32[3,7,5]", 2 * whole([3, 7, 5])),
            // No two ranks hold the same.
            (
                ("f32[4,8,5]{1:tp}", "tp=2"),
                ("f32[4,8,5]{1:tp}", "tp=4"),
                "f32[4,8,5]{1:tp}",
                whole([4, 8, 5]),
            ),
        ] {
            assert_eq!(between(a, b, 10), (arrives.to_owned(), moved), "{a:?} to {b:?}");
        }
    }

    #[test]
    fn what_a_rank_has_is_not_cut() {
        let ty = ("f32[4,8,5]", "tp=2");
        assert_eq!(between(ty, ty, 0), (ty.0.to_owned(), 0));
    }
}
