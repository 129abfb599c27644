//! Every call, over every type, at every number of ranks, in groups of any order.

use std::ops::Range;

use half::bf16;
use phalanx_ir::DType;

use super::data::{Sample, reduced, values};
use super::{Case, Transport, expect, must_run};
use phalanx_comm::Blocks;
use phalanx_comm::Collectives;
use phalanx_comm::Communicator;
use phalanx_comm::Site;
use phalanx_comm::{Call, CollectiveOp, ReduceOp};
use phalanx_comm::{Group, GroupId};

pub(super) const CASES: &[Case] = &[
    ("every call, type and number of ranks", every_call),
    ("groups in any order, at the same time", groups),
    ("ragged all-to-all", ragged),
];

/// Counts around the widths that kernels work in, and none at all.
const COUNTS: [usize; 6] = [0, 1, 7, 64, 129, 1000];

fn every_call(transport: &mut dyn Transport) -> Result<(), String> {
    for ranks in 1..=8 {
        must_run(transport, ranks, &|endpoint| {
            let group = Group::world(ranks);
            let on = &mut On { endpoint, group: GroupId::WORLD, ranks: group.ranks() };
            for count in COUNTS {
                on.all::<f64>(count)?;
                on.all::<f32>(count)?;
                on.all::<bf16>(count)?;
                on.all::<i32>(count)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn groups(transport: &mut dyn Transport) -> Result<(), String> {
    let lists: [&[usize]; 6] =
        [&[4, 1, 3], &[0, 2, 5], &[5, 4, 3, 2, 1, 0], &[1, 4], &[0, 3], &[2]];
    must_run(transport, 6, &|endpoint| {
        for list in lists {
            if !list.contains(&endpoint.rank()) {
                continue;
            }
            let group = Group::new(list).map_err(|error| error.to_string())?;
            let id = endpoint.group(&group).map_err(|error| error.to_string())?;
            let on = &mut On { endpoint, group: id, ranks: list };
            on.all::<f32>(100)?;
            on.all::<i32>(3)?;
        }
        Ok(())
    })
}

fn ragged(transport: &mut dyn Transport) -> Result<(), String> {
    // Regions `[2·n, 3, room, width]` of rank i, whose first dim goes to the ranks and whose second comes together there:
    // of region (j, g), this many rows of elements travel. Some are empty, some full.
    let rows = |i: usize, j: usize, g: usize, room: usize| (3 * i + 5 * j + 2 * g) % (room + 1);
    for (ranks, room, width) in [1, 2, 3, 6].map(|n| (n, 6, 3)).into_iter().chain([(3, 400, 64)]) {
        must_run(transport, ranks, &|endpoint| {
            let (me, cell) = (endpoint.rank(), room * width);
            let own = |i: usize, parts: Range<usize>| {
                let parts = parts.flat_map(|j| (0..3).map(move |g| (j, g)));
                parts.map(move |(j, g)| rows(i, j, g, room)).collect::<Vec<usize>>()
            };
            let send = own(me, 0..2 * ranks);
            let receive: Vec<usize> = (0..ranks).flat_map(|i| own(i, 2 * me..2 * me + 2)).collect();
            let (unit, send, receive) = (width, &send[..], &receive[..]);
            let op = CollectiveOp::AllToAllRagged { cell, unit, send, receive };
            let shape = [2 * ranks, 3, room, width];
            let blocks = Blocks::all_to_all(ranks, &shape, 1, 0).ok_or("no blocks")?;
            let call = Call::new(GroupId::WORLD, op, DType::F32, blocks);
            // What lies behind the rows is not a number, and must not be seen.
            let filled = |i: usize, j: usize, g: usize| {
                let end = rows(i, j, g, room) * width;
                let at = values::<f32>(100 * i + 10 * j + g, cell).into_iter().enumerate();
                at.map(move |(at, value)| if at < end { value } else { f32::NAN })
            };
            let regions = (0..2 * ranks).flat_map(|j| (0..3).map(move |g| (j, g)));
            let given: Vec<f32> = regions.flat_map(|(j, g)| filled(me, j, g)).collect();
            let mut got = vec![-7.0; given.len()];
            endpoint.run(&call, &given, &mut got).map_err(|error| error.to_string())?;
            let from = (0..ranks).flat_map(|i| (0..3).map(move |g| (i, g)));
            let mine = (2 * me..2 * me + 2).flat_map(|j| from.clone().map(move |(i, g)| (i, j, g)));
            let want = mine.flat_map(|(i, j, g)| filled(i, j, g));
            let want: Vec<f32> =
                want.map(|value| if value.is_nan() { -7.0 } else { value }).collect();
            expect("ragged", &got, &want)
        })?;
    }
    Ok(())
}

/// A group as one of its members sees it.
struct On<'a> {
    endpoint: &'a mut dyn Communicator,
    group: GroupId,
    ranks: &'a [usize],
}

impl On<'_> {
    /// Every call once, with its result compared with a naive one.
    fn all<T: Sample>(&mut self, count: usize) -> Result<(), String> {
        for reduction in [ReduceOp::Sum, ReduceOp::Max] {
            self.reductions::<T>(count, reduction)?;
        }
        self.copies::<T>(count)?;
        self.rooted::<T>(count)?;
        self.permute::<T>(count)?;
        self.endpoint.barrier(self.group).map_err(|error| error.to_string())
    }

    fn me(&self) -> usize {
        let rank = self.endpoint.rank();
        self.ranks.iter().position(|&other| other == rank).unwrap_or_default()
    }

    /// Does a call, receiving into `room` elements.
    fn call<T: Sample>(
        &mut self,
        op: CollectiveOp<'_>,
        count: usize,
        send: &[T],
        room: usize,
    ) -> Result<Vec<T>, String> {
        let call = Call::new(self.group, op, T::DTYPE, Blocks::contiguous(count));
        let mut receive = values::<T>(usize::MAX, room);
        let call = call.at(Site::named("conformance"));
        self.endpoint.run(&call, send, &mut receive).map_err(|error| error.to_string())?;
        Ok(receive)
    }

    fn reductions<T: Sample>(&mut self, count: usize, how: ReduceOp) -> Result<(), String> {
        let (me, n, rank) = (self.me(), self.ranks.len(), self.endpoint.rank());
        let want = reduced::<T>(self.ranks, count, how);
        let got =
            self.call(CollectiveOp::AllReduce(how), count, &values::<T>(rank, count), count)?;
        expect("all_reduce", &got, &want)?;
        let mut in_place = values::<T>(rank, count);
        let done = self.endpoint.all_reduce(self.group, how, &mut in_place);
        done.map_err(|error| error.to_string())?;
        expect("all_reduce in place", &in_place, &want)?;
        let want = reduced::<T>(self.ranks, n * count, how);
        let send = values::<T>(rank, n * count);
        let got = self.call(CollectiveOp::ReduceScatter(how), count, &send, count)?;
        expect("reduce_scatter", &got, &want[me * count..(me + 1) * count])
    }

    fn copies<T: Sample>(&mut self, count: usize) -> Result<(), String> {
        let (me, n, rank) = (self.me(), self.ranks.len(), self.endpoint.rank());
        let got =
            self.call(CollectiveOp::AllGather, count, &values::<T>(rank, count), n * count)?;
        let gathered: Vec<T> =
            self.ranks.iter().flat_map(|&other| values::<T>(other, count)).collect();
        expect("all_gather", &got, &gathered)?;
        let got =
            self.call(CollectiveOp::AllToAll, count, &values::<T>(rank, n * count), n * count)?;
        let block = |other: usize| values::<T>(other, n * count)[me * count..][..count].to_vec();
        let want: Vec<T> = self.ranks.iter().flat_map(|&other| block(other)).collect();
        expect("all_to_all", &got, &want)
    }

    fn rooted<T: Sample>(&mut self, count: usize) -> Result<(), String> {
        let (me, n, rank) = (self.me(), self.ranks.len(), self.endpoint.rank());
        for root in 0..n {
            let (is_root, holder) = (root == me, self.ranks[root]);
            let send = if is_root { values::<T>(rank, count) } else { Vec::new() };
            let got = self.call(CollectiveOp::Broadcast { root }, count, &send, count)?;
            expect("broadcast", &got, &values::<T>(holder, count))?;
            let room = |elements: usize| if is_root { elements } else { 0 };
            let (own, reduction) = (values::<T>(rank, count), ReduceOp::Sum);
            let got =
                self.call(CollectiveOp::Reduce { root, reduction }, count, &own, room(count))?;
            let want = reduced::<T>(self.ranks, count, reduction);
            expect("reduce", &got, &want[..room(count)])?;
            let got = self.call(CollectiveOp::Gather { root }, count, &own, room(n * count))?;
            let want: Vec<T> =
                self.ranks.iter().flat_map(|&other| values::<T>(other, count)).collect();
            expect("gather", &got, &want[..room(n * count)])?;
            let send = if is_root { values::<T>(rank, n * count) } else { Vec::new() };
            let got = self.call(CollectiveOp::Scatter { root }, count, &send, count)?;
            expect("scatter", &got, &values::<T>(holder, n * count)[me * count..][..count])?;
        }
        Ok(())
    }

    /// A shift by one, and a chain that is not a ring.
    fn permute<T: Sample>(&mut self, count: usize) -> Result<(), String> {
        let (me, n, rank) = (self.me(), self.ranks.len(), self.endpoint.rank());
        let ring = (Some((me + 1) % n), Some((me + n - 1) % n));
        let chain = ((me + 1 < n).then_some(me + 1), me.checked_sub(1));
        for (to, from) in [ring, chain] {
            let room = if from.is_some() { count } else { 0 };
            let got = self.call(
                CollectiveOp::Permute { to, from },
                count,
                &values::<T>(rank, count),
                room,
            )?;
            let want = from.map_or_else(Vec::new, |from| values::<T>(self.ranks[from], count));
            expect("permute", &got, &want)?;
        }
        Ok(())
    }
}
