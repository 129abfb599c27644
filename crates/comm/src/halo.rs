//! What ranks send each other of their edges, as calls of a transport.

use phalanx_ir::{Halo, Mesh};

use crate::blocks::{Blocks, Strides};
use crate::call::CollectiveOp;

/// One direction along a sharded dim: all ranks send what lies at one edge of their blocks, and receive
/// beyond the other. Both lie in the operand with room around it, of the shape [`Halo::extended`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlannedEdge {
    /// The neighbours, as numbers in the group of the dim's axes.
    pub op: CollectiveOp<'static>,
    /// What is sent and received.
    pub blocks: Blocks,
    /// The first element that is sent.
    pub source: usize,
    /// The first element that is received into.
    pub target: usize,
}

impl PlannedEdge {
    /// The transfers along one dim. Blocks lie at `corner` of the room, lines above and columns before them,
    /// and have `len` elements along the dim.
    pub fn of(
        halo: &Halo,
        (mesh, rank): (&Mesh, usize),
        corner: [usize; 2],
        len: usize,
    ) -> Result<Vec<Self>, String> {
        let (n, shard) = (mesh.count(&halo.axes), mesh.shard(rank, &halo.axes));
        let (dim, room) = (halo.reach.dim, &halo.extended);
        let (before, after) = (halo.reach.before, halo.reach.after);
        let (channels, line) = (room[3], room[2] * room[3]);
        if before.max(after) > len {
            return Err(format!(
                "a rank has {len} rows of dim {dim}, and a window reads {} of its neighbour",
                before.max(after)
            ));
        }
        let (previous, next) = (shard.checked_sub(1), Some(shard + 1).filter(|&next| next < n));
        // What goes to the next rank lies before the end of the block, what goes to the previous one at
        // its start; both come to lie beyond the other end.
        let both =
            [(before, next, previous, len, 0), (after, previous, next, before, before + len)];
        let edge = |(count, to, from, source, target): (usize, Option<usize>, _, usize, usize)| {
            // Along the height: lines of the block's own columns. Along the width: columns of all lines.
            let (rows, len) = match dim {
                1 => (count, halo.slab[2] * channels),
                _ => (halo.slab[1], count * channels),
            };
            let place = |index: usize| match dim {
                1 => index * line + corner[1] * channels,
                _ => index * channels,
            };
            let strides = Strides { block: 0, outer: room[1] * line, row: line };
            Self {
                op: CollectiveOp::Permute { to, from },
                blocks: Blocks { outer: room[0], rows, len, source: strides, target: strides },
                source: place(source),
                target: place(target),
            }
        };
        Ok(both.into_iter().filter(|(count, ..)| *count > 0).map(edge).collect())
    }
}
