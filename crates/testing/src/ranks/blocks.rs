//! What a rank holds of a value: a dense block, cut, joined and placed by the value's layout.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::{Axis, Mesh, TensorType};
use phalanx_reference::RefTensor;

/// A dense array of numbers, whatever their element type.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Block {
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<f64>,
}

impl Block {
    /// One of the `n` parts that a dim is cut into.
    pub(super) fn cut(&self, dim: usize, n: usize, place: usize) -> Result<Self, String> {
        let mut shape = self.shape.clone();
        if !shape[dim].is_multiple_of(n) {
            return Err(format!("dim {dim} of {shape:?} can't be cut into {n}"));
        }
        shape[dim] /= n;
        let data = indices(&shape).map(|mut index| {
            index[dim] += place * shape[dim];
            self.data[offset(&self.shape, &index)]
        });
        Ok(Self { data: data.collect(), shape })
    }

    /// The same with, at each index along a dim, what lies at another one.
    pub(super) fn picked(&self, dim: usize, from: impl Fn(usize) -> usize) -> Self {
        let places: Vec<usize> = (0..self.shape[dim]).map(from).collect();
        let data = indices(&self.shape).map(|mut index| {
            index[dim] = places[index[dim]];
            self.data[offset(&self.shape, &index)]
        });
        Self { data: data.collect(), shape: self.shape.clone() }
    }

    /// Zeros of the same shape.
    pub(super) fn zeros(&self) -> Self {
        Self { data: vec![0.0; self.data.len()], shape: self.shape.clone() }
    }

    /// Blocks of one shape, one after the other along a dim.
    pub(super) fn concat<'a>(parts: impl Iterator<Item = &'a Self>, dim: usize) -> Self {
        let parts: Vec<&Self> = parts.collect();
        let mut shape = parts[0].shape.clone();
        let each = shape[dim];
        shape[dim] = each * parts.len();
        let data = indices(&shape).map(|mut index| {
            let part = parts[index[dim] / each];
            index[dim] %= each;
            part.data[offset(&part.shape, &index)]
        });
        Self { data: data.collect(), shape }
    }
}

/// Every multi-index of a shape, row-major.
pub(super) fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    let count: usize = shape.iter().product();
    (0..count).map(move |mut flat| {
        let mut index = vec![0; shape.len()];
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            *i = flat % n;
            flat /= n;
        }
        index
    })
}

pub(super) fn offset(shape: &[usize], index: &[usize]) -> usize {
    shape.iter().zip(index).fold(0, |at, (n, i)| at * n + i)
}

/// The global index of a local one, of a block that may have come from another rank.
pub(super) fn global(ty: &TensorType, mesh: &Mesh, rank: usize, index: &[usize]) -> Vec<usize> {
    let dims = ty.layout.dims().iter().zip(ty.padded()).zip(index);
    dims.map(|((sharding, &padded), &local)| {
        let shards = mesh.count(&sharding.axes);
        let shard = (mesh.shard(rank, &sharding.axes) + sharding.turn) % shards;
        sharding.order.global(local, shard, shards, padded)
    })
    .collect()
}

pub(super) fn is_valid(ty: &TensorType, index: &[usize]) -> bool {
    index.iter().zip(&ty.shape).all(|(i, n)| i < n)
}

/// A rank's block of a whole tensor; padding is not a number.
pub(super) fn scatter(tensor: &RefTensor, ty: &TensorType, mesh: &Mesh, rank: usize) -> Block {
    assert_eq!(tensor.shape(), ty.shape);
    let (shape, all) = (ty.local_shape(mesh), tensor.values());
    // Of a partial sum the first rank has all.
    let has = ty.layout.partial().iter().all(|&a| mesh.coordinate(rank, a) == 0);
    let data = indices(&shape).map(|index| {
        let at = global(ty, mesh, rank, &index);
        match (is_valid(ty, &at), has) {
            (false, _) => f64::NAN,
            (true, false) => 0.0,
            (true, true) => all[offset(&ty.shape, &at)],
        }
    });
    Block { data: data.collect(), shape }
}

/// The whole tensor; replicas must agree.
pub(super) fn gather(ty: &TensorType, mesh: &Mesh, blocks: &[Block]) -> Result<RefTensor, String> {
    let sharing: BTreeSet<Axis> = ty.layout.all_axes().collect();
    let mut copies: BTreeMap<Vec<usize>, Vec<f64>> = BTreeMap::new();
    for (rank, block) in blocks.iter().enumerate() {
        let replica: Vec<usize> = (mesh.axes())
            .filter(|(axis, _)| !sharing.contains(axis))
            .map(|(axis, _)| mesh.coordinate(rank, axis))
            .collect();
        let whole = copies.entry(replica).or_insert_with(|| vec![0.0; ty.elements()]);
        for index in indices(&block.shape) {
            let at = global(ty, mesh, rank, &index);
            if is_valid(ty, &at) {
                whole[offset(&ty.shape, &at)] += block.data[offset(&block.shape, &index)];
            }
        }
    }
    let mut copies = copies.into_values();
    let first = copies.next().ok_or("a mesh has ranks")?;
    for other in copies {
        let same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * a.abs().max(1.0);
        if !first.iter().zip(&other).all(same) {
            return Err(format!("replicas of {ty} differ"));
        }
    }
    RefTensor::new(ty.dtype, &ty.shape, &first).map_err(|e| e.to_string())
}
