//! Strided blocks, in place, and adding to what is there.

use phalanx_ir::DType;

use super::data::{Sample, folded, reduced, values};
use super::{Case, Transport, expect, must_run};
use phalanx_comm::Blocks;
use phalanx_comm::Collectives;
use phalanx_comm::Communicator;
use phalanx_comm::GroupId;
use phalanx_comm::{Call, CollectiveOp, ReduceOp};

pub(super) const CASES: &[Case] = &[
    ("gathering and scattering along any dim", dims),
    ("all-to-all between any two dims", between_dims),
    ("in place", in_place),
    ("a block that is in its place already", own_block),
    ("adding to what is there", accumulate),
];

const SUM: ReduceOp = ReduceOp::Sum;

fn world(op: CollectiveOp<'_>, dtype: DType, blocks: Blocks) -> Call<'_> {
    Call::new(GroupId::WORLD, op, dtype, blocks)
}

/// A row-major tensor cut along a dim: `part` of `n`.
fn cut<T: Copy>(data: &[T], shape: &[usize], dim: usize, n: usize, part: usize) -> Vec<T> {
    let inner: usize = shape[dim + 1..].iter().product();
    let (size, len) = (shape[dim], shape[dim] / n);
    let rows = data.iter().enumerate();
    let kept = rows.filter(|(i, _)| (i / inner % size) / len.max(1) == part);
    kept.map(|(_, value)| *value).collect()
}

/// Row-major tensors joined along a dim.
fn join<T: Copy>(parts: &[Vec<T>], outer: usize) -> Vec<T> {
    let len = parts[0].len() / outer;
    (0..outer).flat_map(|o| parts.iter().flat_map(move |p| p[o * len..][..len].to_vec())).collect()
}

fn dims(transport: &mut dyn Transport) -> Result<(), String> {
    for ranks in [1, 2, 3, 5] {
        must_run(transport, ranks, &|endpoint| {
            for [outer, mid, inner] in [[1, 4, 3], [5, 2, 7], [3, 1, 70], [4, 3, 1]] {
                along_dim::<f32>(endpoint, ranks, [outer, mid, inner])?;
                along_dim::<f64>(endpoint, ranks, [outer, mid, inner])?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn along_dim<T: Sample>(
    endpoint: &mut dyn Communicator,
    n: usize,
    [outer, mid, inner]: [usize; 3],
) -> Result<(), String> {
    let (me, count) = (endpoint.rank(), outer * mid * inner);
    let mut got = values::<T>(99, n * count);
    let call = world(CollectiveOp::AllGather, T::DTYPE, Blocks::gather(n, outer, mid, inner));
    endpoint.run(&call, &values::<T>(me, count), &mut got).map_err(|e| e.to_string())?;
    let parts: Vec<Vec<T>> = (0..n).map(|rank| values(rank, count)).collect();
    expect("all_gather along a dim", &got, &join(&parts, outer))?;

    let call =
        world(CollectiveOp::ReduceScatter(SUM), T::DTYPE, Blocks::scatter(n, outer, mid, inner));
    let mut got = values::<T>(99, count);
    endpoint.run(&call, &values::<T>(me, n * count), &mut got).map_err(|e| e.to_string())?;
    let ranks: Vec<usize> = (0..n).collect();
    let whole = reduced::<T>(&ranks, n * count, SUM);
    let want = cut(&whole, &[outer, n * mid, inner], 1, n, me);
    expect("reduce_scatter along a dim", &got, &want)
}

fn between_dims(transport: &mut dyn Transport) -> Result<(), String> {
    for n in [1, 2, 4] {
        must_run(transport, n, &|endpoint| {
            let me = endpoint.rank();
            let shape = [2, 4, 3, 4, 5];
            for (from, to) in [(1, 3), (3, 1), (0, 1), (4, 3), (2, 1), (1, 3), (0, 3)] {
                let blocks = Blocks::all_to_all(n, &shape, from, to).ok_or("refused")?;
                let count = shape.iter().product();
                let mut got = values::<f32>(99, count);
                let call = world(CollectiveOp::AllToAll, DType::F32, blocks);
                let send = values::<f32>(me, count);
                endpoint.run(&call, &send, &mut got).map_err(|e| e.to_string())?;
                // Whole again along `from`, then cut along `to`.
                let parts: Vec<Vec<f32>> = (0..n).map(|rank| values(rank, count)).collect();
                let whole = join(&parts, shape[..from].iter().product());
                let mut whole_shape = shape;
                whole_shape[from] *= n;
                let want = cut(&whole, &whole_shape, to, n, me);
                expect(&format!("all_to_all {from} to {to}"), &got, &want)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn in_place(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 5, &|endpoint| {
        let (me, ranks) = (endpoint.rank(), [0, 1, 2, 3, 4]);
        for count in [1, 4, 333] {
            let sums = reduced::<f32>(&ranks, count, SUM);
            let blocks = Blocks::contiguous(count);
            let mut buffer = values::<f32>(me, count);
            let call = world(CollectiveOp::Reduce { root: 3, reduction: SUM }, DType::F32, blocks);
            endpoint.run_in_place(&call, &mut buffer).map_err(|e| e.to_string())?;
            let want = if me == 3 { sums } else { values(me, count) };
            expect("reduce in place", &buffer, &want)?;
            let mut buffer = values::<f32>(me, count);
            endpoint.broadcast(GroupId::WORLD, 2, &mut buffer).map_err(|e| e.to_string())?;
            expect("broadcast in place", &buffer, &values(2, count))?;
        }
        Ok(())
    })
}

fn own_block(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 4, &|endpoint| {
        let (me, n, count) = (endpoint.rank(), 4, 77);
        let mut whole = values::<f32>(99, n * count);
        whole[me * count..][..count].copy_from_slice(&values::<f32>(me, count));
        let call = world(CollectiveOp::AllGather, DType::F32, Blocks::contiguous(count));
        let base: *mut f32 = whole.as_mut_ptr();
        // SAFETY: the own block lies inside the buffer, which lives until the call is over and is
        // not touched meanwhile.
        let handle = unsafe { endpoint.start(&call, base.add(me * count).cast(), base.cast()) };
        handle.and_then(|handle| endpoint.wait(handle)).map_err(|e| e.to_string())?;
        let want: Vec<f32> = (0..n).flat_map(|rank| values::<f32>(rank, count)).collect();
        expect("all_gather in place", &whole, &want)?;

        let mut whole = values::<f32>(me, n * count);
        let call = world(CollectiveOp::ReduceScatter(SUM), DType::F32, Blocks::contiguous(count));
        let base: *mut f32 = whole.as_mut_ptr();
        // SAFETY: as above.
        let handle = unsafe { endpoint.start(&call, base.cast(), base.add(me * count).cast()) };
        handle.and_then(|handle| endpoint.wait(handle)).map_err(|e| e.to_string())?;
        let sums = reduced::<f32>(&[0, 1, 2, 3], n * count, SUM);
        let part = me * count..(me + 1) * count;
        expect("reduce_scatter in place", &whole[part.clone()], &sums[part])
    })
}

fn accumulate(transport: &mut dyn Transport) -> Result<(), String> {
    for n in [1, 3, 4] {
        must_run(transport, n, &|endpoint| {
            accumulate_as::<f32>(endpoint, n)?;
            accumulate_as::<half::bf16>(endpoint, n)
        })?;
    }
    Ok(())
}

/// Small whole numbers, of which every order gives the same sum in every type; so a naive sum of
/// the old and the new values is exact.
fn accumulate_as<T: Sample>(endpoint: &mut dyn Communicator, n: usize) -> Result<(), String> {
    let (me, count) = (endpoint.rank(), 130);
    let ranks: Vec<usize> = (0..n).collect();
    let held = values::<T>(1000, count);
    let small = |seed: usize, count: usize| -> Vec<T> {
        (0..count).map(|i| T::from_small((seed * 7 + i) as i32 % 13 - 6)).collect()
    };
    let all: Vec<Vec<T>> = ranks.iter().map(|&rank| small(rank, n * count)).collect();
    let sums = folded(&all, SUM);
    let call =
        world(CollectiveOp::ReduceScatter(SUM), T::DTYPE, Blocks::contiguous(count)).accumulating();
    let mut got = small(1000 + me, count);
    endpoint.run(&call, &all[me], &mut got).map_err(|e| e.to_string())?;
    let part = sums[me * count..][..count].to_vec();
    expect("reduce_scatter added", &got, &folded(&[small(1000 + me, count), part], SUM))?;

    let call =
        world(CollectiveOp::AllReduce(SUM), T::DTYPE, Blocks::contiguous(n * count)).accumulating();
    let mut got = small(5, n * count);
    endpoint.run(&call, &all[me], &mut got).map_err(|e| e.to_string())?;
    expect("all_reduce added", &got, &folded(&[small(5, n * count), sums], SUM))?;

    let root = CollectiveOp::Reduce { root: 0, reduction: ReduceOp::Max };
    let call = world(root, T::DTYPE, Blocks::contiguous(count)).accumulating();
    let mut got = held.clone();
    endpoint.run(&call, &values::<T>(me, count), &mut got).map_err(|e| e.to_string())?;
    let best = reduced::<T>(&ranks, count, ReduceOp::Max);
    let want = if me == 0 { folded(&[held.clone(), best], ReduceOp::Max) } else { held };
    expect("reduce max added", &got, &want)
}
