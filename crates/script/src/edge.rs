//! What ranks send each other when a value passes from one stage group of a pipeline to another.
//!
//! Each stage group has its own mesh, and the value has its own layout on each. An edge is the list
//! of messages between the two: every receiver gets each element of its block exactly once, from
//! one of the ranks that hold it. Where meshes and layouts are the same, that is one whole block
//! from every rank to the one at its position. Where a replicated value meets a sharded one, every
//! replica sends its own slice, and there are no special cases.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_ir::{DType, ElementRun, Mesh, TensorType};

use crate::error::ScriptError;

/// One message of an edge: which elements of the sender's block go where in the receiver's. Where
/// both are the same rank it is a copy on that rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EdgePiece {
    /// The global rank that sends.
    pub from: usize,
    /// The global rank that receives.
    pub to: usize,
    /// The elements, in the order of both blocks' memory.
    pub stretches: Vec<Stretch>,
}

/// Elements that lie together in both blocks, in numbers of elements from the blocks' starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// The first one in the sender's block.
    pub source: usize,
    /// The first one in the receiver's block.
    pub target: usize,
    /// How many.
    pub len: usize,
}

impl EdgePiece {
    /// How many elements the message has.
    pub fn elements(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.len).sum()
    }
}

/// The messages that turn a value of type `a` on one mesh into type `b` on another, ordered by
/// receiver and then by sender. The position in `ranks_a` and `ranks_b` is the rank's number in its
/// mesh, and the entry its number in the world; a rank may be in both.
///
/// Of the ranks that hold the same elements, a receiver prefers itself, then the one at its own
/// position, then the one that sends least. Padding is not sent, except inside a block that both
/// sides hold in the same form, which is sent as one stretch.
pub fn edge(
    a: &TensorType,
    mesh_a: &Mesh,
    ranks_a: &[usize],
    b: &TensorType,
    mesh_b: &Mesh,
    ranks_b: &[usize],
) -> Result<Vec<EdgePiece>, ScriptError> {
    let whole = |ty: &TensorType, mesh: &Mesh| {
        let block = 0..ty.local_shape(mesh).iter().product();
        vec![block; mesh.ranks()]
    };
    let parts = [&whole(a, mesh_a)[..], &whole(b, mesh_b)];
    edge_of_parts((a, mesh_a, ranks_a), (b, mesh_b, ranks_b), parts)
}

/// One end of an edge: a type, a mesh, and the numbers of its ranks in the world.
type EdgeEnd<'a> = (&'a TensorType, &'a Mesh, &'a [usize]);

/// The same where each rank of either mesh has only a part of its block's elements. Ranks that have the same block have
/// the same part of it, or different elements, and together all of them.
pub(crate) fn edge_of_parts(
    (a, mesh_a, ranks_a): EdgeEnd<'_>,
    (b, mesh_b, ranks_b): EdgeEnd<'_>,
    [parts_a, parts_b]: [&[Range<usize>]; 2],
) -> Result<Vec<EdgePiece>, ScriptError> {
    let (from, to) = (Side::new(a, mesh_a, ranks_a)?, Side::new(b, mesh_b, ranks_b)?);
    if (a.dtype, &a.shape) != (b.dtype, &b.shape) {
        let what = format!("{a} is sent, but {b} is expected");
        let help = "both ends of an edge have the same element type and global shape";
        return Err(ScriptError::Edge { what, help: help.to_owned() });
    }
    let (senders, receivers) = (from.blocks(), to.blocks());
    let mut wanted = Vec::new();
    for receiver in &receivers {
        for sender in &senders {
            let stretches = sender.stretches_to(receiver);
            for (part, holders) in sender.parts(parts_a) {
                for &to in &receiver.positions {
                    let stretches = within(&stretches, [&part, &parts_b[to]]);
                    if !stretches.is_empty() {
                        wanted.push(Wanted { to, holders: holders.clone(), stretches });
                    }
                }
            }
        }
    }
    Ok(choose_senders(wanted, ranks_a, ranks_b))
}

/// Bytes that messages of this element type move from one rank to another.
pub fn bytes(pieces: &[EdgePiece], dtype: DType) -> usize {
    let moved = pieces.iter().filter(|piece| piece.from != piece.to);
    moved.map(EdgePiece::elements).sum::<usize>() * dtype.size()
}

/// One end of an edge.
struct Side<'a> {
    ty: &'a TensorType,
    mesh: &'a Mesh,
}

impl<'a> Side<'a> {
    fn new(ty: &'a TensorType, mesh: &'a Mesh, ranks: &[usize]) -> Result<Self, ScriptError> {
        ty.check(mesh)?;
        let refuse =
            |what: String, help: &str| Err(ScriptError::Edge { what, help: help.to_owned() });
        if !ty.layout.partial().is_empty() {
            return refuse(
                format!("{ty} is a partial sum"),
                "a boundary value is never partial: reduce it before it leaves its stage group",
            );
        }
        if ty.pending {
            return refuse(format!("{ty} is still pending"), "wait for its collective first");
        }
        if ranks.len() != mesh.ranks() {
            return refuse(
                format!(
                    "got {} ranks for the mesh ({mesh}), which has {}",
                    ranks.len(),
                    mesh.ranks()
                ),
                "give one global rank for each rank of the mesh, in its order",
            );
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => refuse(
                format!("rank {} is twice in the mesh ({mesh}): {ranks:?}", pair[0]),
                "give every rank of a mesh a different global rank",
            ),
            None => Ok(Self { ty, mesh }),
        }
    }

    /// The different blocks of the value: together they hold each element once.
    fn blocks(&self) -> Vec<Holding> {
        let size = self.ty.local_shape(self.mesh).iter().product();
        let mut holders: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for position in 0..self.mesh.ranks() {
            let dims = self.ty.layout.dims().iter();
            let shards = dims.map(|dim| self.mesh.shard(position, &dim.axes)).collect();
            holders.entry(shards).or_default().push(position);
        }
        let block = |positions: Vec<usize>| {
            let mut elements = self.ty.local_runs(self.mesh, positions[0]);
            elements.retain(|stretch| stretch.len > 0);
            Holding { positions, elements, size }
        };
        holders.into_values().map(block).collect()
    }
}

/// A block that some ranks of a mesh all hold.
struct Holding {
    /// Their positions in the mesh.
    positions: Vec<usize>,
    /// The elements, in increasing order both in memory and in the whole value.
    elements: Vec<ElementRun>,
    /// How many elements the block has, with its padding.
    size: usize,
}

impl Holding {
    /// The different parts of the block, each with the positions of the ranks that have it.
    fn parts(&self, parts: &[Range<usize>]) -> Vec<(Range<usize>, Vec<usize>)> {
        let mut found: Vec<(Range<usize>, Vec<usize>)> = Vec::new();
        for &position in &self.positions {
            match found.iter_mut().find(|(part, _)| *part == parts[position]) {
                Some((_, holders)) => holders.push(position),
                None => found.push((parts[position].clone(), vec![position])),
            }
        }
        found
    }

    /// The elements that both blocks hold.
    fn stretches_to(&self, other: &Holding) -> Vec<Stretch> {
        if !self.elements.is_empty() && (self.size, &self.elements) == (other.size, &other.elements)
        {
            // One copy of a whole block is cheaper than several around its padding.
            return vec![Stretch { source: 0, target: 0, len: self.size }];
        }
        let mut stretches = Vec::new();
        let (mut i, mut j) = (0, 0);
        while let (Some(ours), Some(theirs)) = (self.elements.get(i), other.elements.get(j)) {
            let (our_end, their_end) = (ours.global + ours.len, theirs.global + theirs.len);
            let (start, end) = (ours.global.max(theirs.global), our_end.min(their_end));
            if start < end {
                let source = ours.local + (start - ours.global);
                let target = theirs.local + (start - theirs.global);
                push(&mut stretches, Stretch { source, target, len: end - start });
            }
            if our_end <= their_end { i += 1 } else { j += 1 }
        }
        stretches
    }
}

/// What of these stretches lies in a part of the sender's block, and in one of the receiver's.
fn within(stretches: &[Stretch], [from, to]: [&Range<usize>; 2]) -> Vec<Stretch> {
    let cut = |stretch: &Stretch| {
        let Stretch { source, target, len } = *stretch;
        let skip = from.start.saturating_sub(source).max(to.start.saturating_sub(target));
        let end = from.end.saturating_sub(source).min(to.end.saturating_sub(target)).min(len);
        let cut = || Stretch { source: source + skip, target: target + skip, len: end - skip };
        (skip < end).then(cut)
    };
    stretches.iter().filter_map(cut).collect()
}

/// Adds a stretch; extends the one before it if it continues it in both blocks.
fn push(stretches: &mut Vec<Stretch>, new: Stretch) {
    match stretches.last_mut() {
        Some(last)
            if (last.source + last.len, last.target + last.len) == (new.source, new.target) =>
        {
            last.len += new.len;
        }
        _ => stretches.push(new),
    }
}

/// A piece whose sender is not chosen yet among the ranks that hold the elements.
struct Wanted {
    to: usize,
    holders: Vec<usize>,
    stretches: Vec<Stretch>,
}

fn choose_senders(all: Vec<Wanted>, ranks_a: &[usize], ranks_b: &[usize]) -> Vec<EdgePiece> {
    let mut loads = vec![0_usize; ranks_a.len()];
    let mut chosen: Vec<(usize, usize, Vec<Stretch>)> = Vec::new();
    let mut open = Vec::new();
    let sent = |stretches: &[Stretch]| stretches.iter().map(|stretch| stretch.len).sum::<usize>();
    // Pieces with a natural sender come first, then the largest, so that the rest balance the load.
    for wanted in all {
        let (to, holders) = (wanted.to, &wanted.holders);
        let itself = holders.iter().copied().find(|&from| ranks_a[from] == ranks_b[to]);
        match itself.or(holders.contains(&to).then_some(to)) {
            None => open.push(wanted),
            Some(from) => {
                // A piece that stays on its rank does not count as load.
                loads[from] += if itself.is_none() { sent(&wanted.stretches) } else { 0 };
                chosen.push((to, from, wanted.stretches));
            }
        }
    }
    open.sort_by_key(|wanted| (Reverse(sent(&wanted.stretches)), wanted.to));
    for Wanted { to, holders, stretches } in open {
        if let Some(&from) = holders.iter().min_by_key(|&&from| loads[from]) {
            loads[from] += sent(&stretches);
            chosen.push((to, from, stretches));
        }
    }
    chosen.sort_by_key(|&(to, from, _)| (to, from));
    let piece = |(to, from, stretches): (usize, usize, Vec<Stretch>)| EdgePiece {
        from: ranks_a[from],
        to: ranks_b[to],
        stretches,
    };
    chosen.into_iter().map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The edge between two types in text, from ranks 0, 1… to 10, 11….
    fn between(a: (&str, &str), b: (&str, &str)) -> Result<Vec<EdgePiece>, ScriptError> {
        let [(ty_a, mesh_a), (ty_b, mesh_b)] = [a, b].map(|(ty, mesh)| {
            let mesh: Mesh = mesh.parse().unwrap();
            (TensorType::parse(ty, &mesh).unwrap(), mesh)
        });
        let ranks_a: Vec<usize> = (0..mesh_a.ranks()).collect();
        let ranks_b: Vec<usize> = (10..10 + mesh_b.ranks()).collect();
        edge(&ty_a, &mesh_a, &ranks_a, &ty_b, &mesh_b, &ranks_b)
    }

    fn ways(pieces: &[EdgePiece]) -> Vec<(usize, usize)> {
        pieces.iter().map(|piece| (piece.from, piece.to)).collect()
    }

    #[test]
    fn equal_ends_send_whole_blocks_to_their_position() {
        let mesh = "dp=2 tp=2";
        for (ty, size) in [
            ("f32[4,6,8]{0:dp}", 96),
            ("f32[4,6,8]{0:dp 1:tp}", 48),
            ("f32[4,6,8]", 192),
            // Padding lies inside the block and goes along.
            ("f32[4,5~6,8]{0:dp 1:tp}", 48),
            ("f32[4,7~8,8]{1:tp,dp@zigzag}", 64),
            ("i32[]", 1),
        ] {
            let pieces = between((ty, mesh), (ty, mesh)).unwrap();
            let all = Stretch { source: 0, target: 0, len: size };
            let whole = |i| EdgePiece { from: i, to: 10 + i, stretches: vec![all] };
            assert_eq!(pieces, (0..4).map(whole).collect::<Vec<_>>(), "{ty}");
        }
        // A rank that holds only padding sends nothing.
        let pieces = between(("f32[3~4]{0:dp,tp}", mesh), ("f32[3~4]{0:dp,tp}", mesh)).unwrap();
        assert_eq!(ways(&pieces), [(0, 10), (1, 11), (2, 12)]);
    }

    #[test]
    fn two_tensor_ranks_to_four() {
        let pieces = between(("bf16[3,8,5]{1:tp}", "tp=2"), ("bf16[3,8,5]{1:tp}", "tp=4")).unwrap();
        assert_eq!(ways(&pieces), [(0, 10), (0, 11), (1, 12), (1, 13)]);
        assert!(pieces.iter().all(|piece| piece.elements() == 3 * 2 * 5));
        assert_eq!(bytes(&pieces, DType::Bf16), 3 * 8 * 5 * 2);
        // The second half of rank 1's rows, sequence by sequence.
        let stretch = |i: usize| Stretch { source: i * 20 + 10, target: i * 10, len: 10 };
        assert_eq!(pieces[3].stretches, [stretch(0), stretch(1), stretch(2)]);

        let pieces = between(("f32[3,8,5]", "tp=2"), ("f32[3,8,5]", "tp=4")).unwrap();
        assert_eq!(ways(&pieces), [(0, 10), (1, 11), (0, 12), (1, 13)]);
        assert!(pieces.iter().all(|p| p.stretches == [Stretch { source: 0, target: 0, len: 120 }]));
        // And back: two of the four are enough.
        let pieces = between(("f32[3,8,5]", "tp=4"), ("f32[3,8,5]", "tp=2")).unwrap();
        assert_eq!(ways(&pieces), [(0, 10), (1, 11)]);
    }

    /// Megatron's scatter: each of t replicas sends its own part, so a pair of ranks moves 1/t of
    /// the value. The gather is a collective of the receiving stage group.
    #[test]
    fn replicas_send_a_slice_each() {
        let pieces =
            between(("f32[2,8,5]", "dp=1 tp=4"), ("f32[2,8,5]{1:tp}", "dp=1 tp=4")).unwrap();
        assert_eq!(ways(&pieces), [(0, 10), (1, 11), (2, 12), (3, 13)]);
        assert!(pieces.iter().all(|piece| piece.elements() == 2 * 8 * 5 / 4));
        assert_eq!(bytes(&pieces, DType::F32), 2 * 8 * 5 * 4);
    }

    #[test]
    fn replicas_share_the_work() {
        // Each of the two replicas of either half serves two of the four that want it.
        let pieces =
            between(("f32[4,6]{0:dp}", "dp=2 tp=2"), ("f32[4,6]{0:dp}", "dp=2 tp=4")).unwrap();
        let sent =
            |rank| pieces.iter().filter(|p| p.from == rank).map(EdgePiece::elements).sum::<usize>();
        assert_eq!([0, 1, 2, 3].map(sent), [24; 4]);
        assert_eq!(pieces.len(), 8);
    }

    #[test]
    fn what_a_rank_has_it_does_not_send_for() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let ty = TensorType::parse("f32[4]", &mesh).unwrap();
        let pieces = edge(&ty, &mesh, &[3, 5], &ty, &mesh, &[5, 3]).unwrap();
        assert_eq!(ways(&pieces), [(5, 5), (3, 3)]);
        assert_eq!(bytes(&pieces, DType::F32), 0);
        let halves = TensorType::parse("f32[4]{0:tp}", &mesh).unwrap();
        let pieces = edge(&halves, &mesh, &[3, 5], &ty, &mesh, &[3, 5]).unwrap();
        assert_eq!(ways(&pieces), [(3, 3), (5, 3), (3, 5), (5, 5)]);
        assert_eq!(bytes(&pieces, DType::F32), 2 * 2 * 4);
    }

    #[test]
    fn what_cannot_be_sent_is_refused() {
        for (a, b, words) in [
            ("f32[4]{P:tp}", "f32[4]", "a boundary value is never partial"),
            ("f32[4]", "f32[4]{P:tp}", "a boundary value is never partial"),
            ("pending f32[4]", "f32[4]", "wait for its collective"),
            ("f32[4]", "f32[5]", "f32[4] is sent, but f32[5] is expected"),
            ("f32[4]", "bf16[4]", "f32[4] is sent, but bf16[4] is expected"),
            ("f32[5]{0:tp}", "f32[5]", "pad it"),
        ] {
            let error = between((a, "tp=2"), (b, "tp=2")).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let mesh: Mesh = "tp=2".parse().unwrap();
        let ty = TensorType::new(DType::F32, [4]);
        for (ranks, words) in [
            (&[0_usize][..], "got 1 ranks for the mesh (tp=2), which has 2"),
            (&[7, 7], "rank 7 is twice in the mesh"),
        ] {
            let error = edge(&ty, &mesh, &[0, 1], &ty, &mesh, ranks).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
