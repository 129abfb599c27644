//! What a program moves between ranks, from its types alone: closed forms, before any rank starts.
//!
//! A transport counts what it really moves, where one rank touches another's memory; the two
//! numbers share no code. Bytes are those of the ring algorithms, which is how the transports move
//! data: of X bytes over n ranks each sends X(n−1)/n in a gather, a scatter or an all-to-all, and
//! twice that in an all-reduce. Tensors count with their padding.

use std::collections::BTreeMap;
use std::fmt;

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Exchange, Halo, Instr, Op, Program, TensorType};

/// The collectives of one kind over the same axes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Route {
    /// The op: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `permute`,
    /// `broadcast`, `reduce` or `send`.
    pub op: &'static str,
    /// The axes, in the order of the mesh.
    pub axes: Vec<Axis>,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}<{}>", self.op, names(&self.axes).join(","))
    }
}

/// The names of axes.
pub fn names(axes: &[Axis]) -> Vec<String> {
    axes.iter().map(ToString::to_string).collect()
}

/// How many calls a rank takes part in, and what it moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Calls.
    pub calls: u64,
    /// Bytes that the rank reads from others or writes to them.
    pub bytes: u64,
}

/// Rows that a rank gets from others in one run of a program: as many as a value of the step says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MovedRows {
    /// The collective.
    pub route: Route,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Bytes, if every region were full: what [`of_program`] counts.
    pub bound: u64,
    /// The extents of the dims that count regions.
    pub regions: Vec<usize>,
    /// The numbers of the regions that come from others, among all of those.
    pub from_others: Vec<usize>,
}

impl MovedRows {
    /// The bytes of a step in which the regions have so many rows, all of them in their order.
    pub fn bytes(&self, rows: &[u64]) -> u64 {
        self.from_others.iter().map(|&region| rows[region]).sum::<u64>() * self.row_bytes
    }
}

/// The rows that one rank gets from others in one run of a program, for each of its collectives.
pub fn rows_of_program(program: &Program, rank: usize) -> Vec<MovedRows> {
    program.instrs().iter().filter_map(|instr| rows_of_instr(program, instr, rank)).collect()
}

fn rows_of_instr(program: &Program, instr: &Instr, rank: usize) -> Option<MovedRows> {
    let Op::Collective(collective) = &instr.op else { return None };
    let CollectiveKind::AllToAll { from, .. } = collective.kind else { return None };
    let mesh = program.mesh();
    let [(route, Moved { bytes, .. })] = <[_; 1]>::try_from(of_instr(program, instr, rank)).ok()?;
    let (before, counts) = (program.ty(instr.inputs[0]), *instr.inputs.get(1)?);
    let after = program.ty(instr.outputs[0]);
    let regions = program.ty(counts).shape.len() - 1;
    let local = after.local_shape(mesh);
    let part = |ty: &TensorType, dim: usize| {
        let (shard, len) = (mesh.shard(rank, ty.layout.axes(dim)), ty.local_shape(mesh)[dim]);
        shard * len..(shard + 1) * len
    };
    let stays = part(before, from);
    let mut from_others = vec![0];
    for dim in 0..regions {
        let own = part(after, dim).filter(|at| dim != from || !stays.contains(at));
        let own: Vec<usize> = own.collect();
        let along = |major: usize| own.iter().map(move |at| major * after.shape[dim] + at);
        from_others = from_others.into_iter().flat_map(along).collect();
    }
    Some(MovedRows {
        route,
        row_bytes: (local[regions + 1..].iter().product::<usize>() * after.dtype.size()) as u64,
        bound: bytes,
        regions: after.shape[..regions].to_vec(),
        from_others,
    })
}

/// What one rank moves in one run of a program; of rows, as many as there is room for.
pub fn of_program(program: &Program, rank: usize) -> BTreeMap<Route, Moved> {
    let mut total = BTreeMap::new();
    for (route, moved) in program.instrs().iter().flat_map(|i| of_instr(program, i, rank)) {
        add(&mut total, route, moved);
    }
    total
}

/// What one rank moves for one instruction of a program, as far as others take part in it.
pub fn of_instr(program: &Program, instr: &Instr, rank: usize) -> Vec<(Route, Moved)> {
    let mesh = program.mesh();
    let route = |op, axes: &[Axis]| Route { op, axes: mesh.axes_of(mesh.mask(axes)) };
    if let Op::Collective(collective) = &instr.op {
        let moved = of_collective(program, instr, collective, rank);
        return moved.into_iter().map(|(op, axes, moved)| (route(op, &axes), moved)).collect();
    }
    let numbers = Exchange::of(program, instr).map(|exchange| {
        let n = mesh.count(&exchange.axes) as u64;
        let bytes = (exchange.elements() * exchange.dtype.size()) as u64 * (n - 1);
        (route("all_gather", &exchange.axes), Moved { calls: 1, bytes })
    });
    let halos = Halo::of(program, instr).into_iter().map(|halo| {
        // A call in each direction in which anything is read.
        let calls = u64::from(halo.reach.before > 0) + u64::from(halo.reach.after > 0);
        let bytes = halo.received(mesh, rank) as u64;
        (route("permute", &halo.axes), Moved { calls, bytes })
    });
    numbers.into_iter().chain(halos).collect()
}

/// Adds what was moved to the totals.
pub fn add(total: &mut BTreeMap<Route, Moved>, route: Route, moved: Moved) {
    let row = total.entry(route).or_default();
    row.calls += moved.calls;
    row.bytes += moved.bytes;
}

/// What a collective moves, if other ranks take part.
fn of_collective(
    program: &Program,
    instr: &Instr,
    collective: &Collective,
    rank: usize,
) -> Option<(&'static str, Vec<Axis>, Moved)> {
    let mesh = program.mesh();
    let n = mesh.count(&collective.axes);
    let (before, after) = (program.ty(instr.inputs[0]), program.ty(instr.outputs[0]));
    let (given, got) = (before.local_bytes(mesh), after.local_bytes(mesh));
    let part = |whole: usize| whole / n * (n - 1);
    let (op, axes, bytes) = match &collective.kind {
        CollectiveKind::Done
        | CollectiveKind::Shard { .. }
        | CollectiveKind::ToPartial
        | CollectiveKind::TakeBlock { .. }
        | CollectiveKind::PutBlock { .. } => return None,
        CollectiveKind::AllGather { .. } => ("all_gather", collective.axes.clone(), part(got)),
        CollectiveKind::ReduceScatter { .. } => {
            ("reduce_scatter", collective.axes.clone(), part(given))
        }
        CollectiveKind::AllToAll { .. } => ("all_to_all", collective.axes.clone(), part(given)),
        CollectiveKind::AllReduce => {
            // Every rank sums its part of each piece, and the parts may differ by one element.
            let (size, index) = (before.dtype.size(), mesh.shard(rank, &collective.axes));
            let own = |elements: usize| elements * (index + 1) / n - elements * index / n;
            let sums: usize = collective.cuts(given / size).map(|piece| own(piece.len())).sum();
            ("all_reduce", collective.axes.clone(), 2 * (n - 1) * sums * size)
        }
        CollectiveKind::Permute { dim } => {
            let [giving, getting] = collective.permute_sides(before.layout.axes(*dim));
            let stays = mesh.shard(rank, &giving) == mesh.shard(rank, &getting);
            ("permute", giving, if stays { 0 } else { given })
        }
        CollectiveKind::Turn { .. } => ("permute", collective.axes.clone(), given),
        // What the others get, and what the one rank gets from the others.
        CollectiveKind::BroadcastBlock { block, .. } => {
            let gives = mesh.shard(rank, &collective.axes) == *block;
            ("broadcast", collective.axes.clone(), if gives { 0 } else { got })
        }
        CollectiveKind::ReduceBlock { block, .. } => {
            let gets = mesh.shard(rank, &collective.axes) == *block;
            ("reduce", collective.axes.clone(), if gets { (n - 1) * given } else { 0 })
        }
    };
    let calls = collective.pieces as u64;
    (n > 1).then_some((op, axes, Moved { calls, bytes: bytes as u64 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_ir::text;

    #[test]
    fn ring_volumes_of_each_collective() {
        let program = text::parse(
            "mesh dp=2 tp=4
program t {
  x: boundary f32[8,12]{0:dp 1:tp}
  y: boundary f32[8,12]{P:tp}
  %1 = all_gather<tp>(x, dim=1) : f32[8,12]{0:dp}
  %2 = all_reduce<tp>(y) : f32[8,12]
  %3 = reduce_scatter<tp>(y, dim=0) : f32[8,12]{0:tp}
  %4 = all_to_all<tp>(x, from=1, to=0) : f32[8,12]{0:dp,tp}
  %5 = shard<dp>(%2, dim=0) : f32[8,12]{0:dp}
  return a: probe %1
  return b: probe %2
  return c: probe %3
  return d: probe %4
  return e: probe %5
}",
        )
        .unwrap();
        let got: Vec<(&str, u64, u64)> = (of_program(&program, 3).into_iter())
            .map(|(route, moved)| (route.op, moved.calls, moved.bytes))
            .collect();
        let expected = [
            ("all_gather", 1, 4 * 12 * 4 * 3 / 4),
            ("all_reduce", 1, 2 * 8 * 12 * 4 * 3 / 4),
            ("all_to_all", 1, 4 * 3 * 4 * 3 / 4),
            ("reduce_scatter", 1, 8 * 12 * 4 * 3 / 4),
        ];
        assert_eq!(got, expected);
    }

    /// One rank gives a block to each of the others, or gets one from each.
    #[test]
    fn blocks_go_out_from_one_rank_and_come_in_to_it() {
        let program = text::parse(
            "mesh dp=4 tp=2
program t {
  w: state f32[*64]{*:tp,dp}
  g: gradient f32[*16]{*:tp P:dp}
  %1 = broadcast_block<dp>(w, dim=0, block=0) : f32[*16]{*:tp}
  %2 = reduce_block<dp>(g, dim=0, block=0) : f32[*64]{*:tp,dp}
  return a: state %1
  return b: gradient %2
}",
        )
        .unwrap();
        let bytes = |rank| {
            let moved = of_program(&program, rank);
            moved.iter().map(|(route, moved)| (route.op, moved.bytes)).collect::<Vec<_>>()
        };
        let (gives, gets) =
            ([("broadcast", 0), ("reduce", 3 * 32)], [("broadcast", 32), ("reduce", 0)]);
        for rank in 0..8 {
            let dp = Axis::new("dp").unwrap();
            let first = program.mesh().coordinate(rank, dp) == 0;
            assert_eq!(bytes(rank), if first { gives } else { gets });
        }
    }

    /// Of rows, those that other ranks have for this one's regions.
    #[test]
    fn rows_are_counted_where_they_come_from_others() {
        let program = text::parse(
            "mesh dp=2
program t {
  x: boundary f32[4,2,6,8]{1:dp}
  c: boundary i32[4,2,3]
  %1 = all_to_all<dp>(x, c, from=1, to=0) : f32[4,2,6,8]{0:dp}
  return a: probe %1
}",
        )
        .unwrap();
        let [rows] = <[MovedRows; 1]>::try_from(rows_of_program(&program, 1)).unwrap();
        // The second rank keeps regions 2 and 3 of the first dim, and has the second ones of the other.
        assert_eq!((&rows.from_others[..], &rows.regions[..]), (&[4, 6][..], &[4, 2][..]));
        assert_eq!((rows.row_bytes, rows.bound), (32, 2 * 6 * 8 * 4));
        assert_eq!(rows.bytes(&[9, 9, 9, 9, 5, 9, 1, 9]), 6 * 32);
        assert_eq!(of_program(&program, 1)[&rows.route], Moved { calls: 1, bytes: rows.bound });
    }

    #[test]
    fn uneven_parts_add_up() {
        let text = "mesh dp=3
program t {
  x: gradient f64[7]{P:dp}
  %1 = all_reduce<dp>(x) : f64[7]
  return g: gradient %1
}";
        let program = text::parse(text).unwrap();
        let bytes = |rank| of_program(&program, rank).values().map(|m| m.bytes).sum::<u64>();
        assert_eq!((0..3).map(bytes).sum::<u64>(), 2 * 2 * 7 * 8);
        assert!(bytes(0) < bytes(2));
    }

    /// The same bytes in several calls; of an all-reduce each rank sums its part of every piece.
    #[test]
    fn pieces_are_calls() {
        let program = text::parse(
            "mesh dp=4
program t {
  u: state f32[*40]{*:dp}
  g: gradient f32[*40]{P:dp}
  %1 = all_gather<dp>(u, dim=0, pieces=3) : f32[*40]
  %2 = reduce_scatter<dp>(g, dim=0, pieces=4) : f32[*40]{*:dp}
  %3 = all_reduce<dp>(g, pieces=6) : f32[*40]
  return a: state %1
  return b: gradient %2
  return c: gradient %3
}",
        )
        .unwrap();
        let mut sums = 0;
        for rank in 0..4 {
            let got: Vec<(&str, u64, u64)> = (of_program(&program, rank).into_iter())
                .map(|(route, moved)| (route.op, moved.calls, moved.bytes))
                .collect();
            assert_eq!(got[0], ("all_gather", 3, 30 * 4));
            assert_eq!(got[2], ("reduce_scatter", 4, 30 * 4));
            assert_eq!(got[1].1, 6);
            sums += got[1].2;
        }
        // Over all ranks twice 3/4 of 4 · 40 elements, however they are cut.
        assert_eq!(sums, 2 * 3 * 40 * 4);
    }
}
