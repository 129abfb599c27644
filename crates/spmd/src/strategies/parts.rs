//! Parts of an axis: a square or a cube of ranks is one axis, divided into sides.

use phalanx_ir::{Axis, Mesh, Op, Program, Role, ValueId};

use super::find::{attentions, heads_of, readers};
use super::megatron::{enough_heads, shared};
use super::present;
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// The root of a number, if it is a whole one: `power` 2 or 3.
pub fn whole_root(number: usize, power: u32) -> Option<usize> {
    let root = floor_root(number, power);
    (root.checked_pow(power) == Some(number)).then_some(root)
}

/// The largest number whose power is at most this one.
pub fn floor_root(number: usize, power: u32) -> usize {
    let fits = |n: usize| n.checked_pow(power).is_some_and(|n| n <= number);
    let (mut low, mut high) = (0, 1 << (usize::BITS / power + 1));
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// The atoms of an axis, distributed to sides of these sizes, major to minor.
pub(super) fn sides<const N: usize>(mesh: &Mesh, axis: &str, sizes: [usize; N]) -> [Vec<Axis>; N] {
    let mut atoms = mesh.find(axis).into_iter().peekable();
    sizes.map(|size| {
        let mut side = Vec::new();
        while mesh.count(&side) < size {
            side.push(atoms.next().expect("the axis was split into these sides"));
        }
        side
    })
}

/// Where an axis is cut into sides: after each of these numbers of major ranks, and, where the ranks of the side that
/// divides heads outnumber key heads, after the part of that side that shares them. `before` is all that is major to it.
pub(super) fn cuts(
    program: &Program,
    axis: &str,
    majors: &[usize],
    (before, side): (usize, usize),
) -> Vec<AxisSplit> {
    let cut = |major: usize| AxisSplit { axis: axis.to_owned(), major };
    let heads = attentions(program).into_iter().map(|a| before * shared(a.kv_heads, side));
    majors.iter().copied().chain(heads).map(cut).collect()
}

/// Fails if the heads of some attention cannot be divided among the ranks of a side.
pub(super) fn heads_for(ctx: &Annotator<'_>, axis: &str, side: usize) -> Result<(), SpmdError> {
    let mut all = attentions(ctx.program()).into_iter();
    all.try_for_each(|found| enough_heads(ctx, axis, side, found.heads, found.kv_heads))
}

/// The parts of an axis over which operands come block by block, if that is asked for.
pub(super) fn streamed(stream: bool, mesh: &Mesh, axis: &str) -> Vec<Axis> {
    if stream { present(mesh, &[axis]) } else { vec![] }
}

/// What a parameter does in a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// A matrix that a value is multiplied by: its contracted dim, the other dim, the product.
    Product { rows: usize, columns: usize, out: ValueId },
    /// A table of rows that ids choose from, with its result.
    Table { out: ValueId },
    /// Any other matrix: it is added along its last dim.
    Matrix,
    /// A gain or a bias, with the result of the op that reads it.
    Vector { out: Option<ValueId> },
}

/// What a parameter does, by the first op that reads it.
pub(super) fn used(program: &Program, param: ValueId) -> Use {
    let reader = readers(program, param).next();
    if program.ty(param).shape.len() == 1 {
        return Use::Vector { out: reader.map(|instr| instr.outputs[0]) };
    }
    let Some(instr) = reader else { return Use::Matrix };
    let out = instr.outputs[0];
    match &instr.op {
        Op::Embedding(_) => Use::Table { out },
        Op::Matmul(m) if instr.inputs[1] == param && program.ty(param).shape.len() == 2 => {
            let letters = m.spec.letters();
            match letters[1].find(|c| !letters[2].contains(c)) {
                Some(rows) => Use::Product { rows, columns: 1 - rows, out },
                None => Use::Matrix,
            }
        }
        _ => Use::Matrix,
    }
}

/// Every value that a segment gets as data.
pub(super) fn data(program: &Program) -> Vec<ValueId> {
    program.inputs_with(Role::Data).map(|port| port.value).collect()
}

/// Shards a dim over a side; if it holds fewer key heads than the side has ranks, over the major
/// part of the side. The result is the rest of the side, over which the value is replicated.
pub(super) fn shard_heads(
    ctx: &mut Annotator<'_>,
    value: ValueId,
    dim: usize,
    side: &[Axis],
    key_heads: Option<usize>,
) -> Result<Vec<Axis>, SpmdError> {
    let (mut room, mut rest) = (key_heads.unwrap_or(usize::MAX), Vec::new());
    for &atom in side {
        let size = ctx.mesh().count(&[atom]);
        if room >= size {
            ctx.shard(value, dim, atom.name())?;
            room = room.div_ceil(size);
        } else {
            rest.push(atom);
        }
    }
    Ok(rest)
}

/// Stores a dim of a parameter over axes that read it whole, as far as that needs no padding;
/// over the other axes it is replicated. A dim of heads is cut between heads.
pub(super) fn store_even(
    ctx: &mut Annotator<'_>,
    param: ValueId,
    dim: usize,
    axes: &[Axis],
    heads: Option<usize>,
) -> Result<(), SpmdError> {
    for axis in axes {
        let size = heads.unwrap_or(ctx.program().ty(param).shape[dim]);
        let shards = ctx.shards(param, dim) * ctx.mesh().count(&[*axis]);
        match size.is_multiple_of(shards) {
            true => ctx.store(param, dim, axis.name())?,
            false => ctx.replicate(param, axis.name())?,
        }
    }
    Ok(())
}

/// Shards a dim of a value over several axes.
pub(super) fn shard_over(
    ctx: &mut Annotator<'_>,
    value: ValueId,
    dim: usize,
    axes: &[Axis],
) -> Result<(), SpmdError> {
    axes.iter().try_for_each(|axis| ctx.shard(value, dim, axis.name()))
}

/// The same where a parameter is stored; it is read whole.
pub(super) fn store_over(
    ctx: &mut Annotator<'_>,
    param: ValueId,
    dim: usize,
    axes: &[Axis],
) -> Result<(), SpmdError> {
    axes.iter().try_for_each(|axis| ctx.store(param, dim, axis.name()))
}

/// The heads of attention that a value becomes: of all operands, and of keys and values alone.
pub(super) fn heads_in(program: &Program, out: Option<ValueId>) -> [Option<usize>; 2] {
    let found = out.and_then(|out| heads_of(program, out));
    [found.map(|f| f.heads), found.filter(|f| f.keys).map(|f| f.heads)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_whole_or_none() {
        assert_eq!([1, 4, 9, 16].map(|n| whole_root(n, 2)), [1, 2, 3, 4].map(Some));
        assert_eq!([1, 8, 27, 64].map(|n| whole_root(n, 3)), [1, 2, 3, 4].map(Some));
        assert_eq!([2, 3, 8, 15].map(|n| whole_root(n, 2)), [None; 4]);
        assert_eq!([2, 4, 9, 63].map(|n| whole_root(n, 3)), [None; 4]);
        assert_eq!(floor_root(usize::MAX, 2), (1 << (usize::BITS / 2)) - 1);
    }

    #[test]
    fn an_axis_is_dealt_to_its_sides() {
        let mesh: Mesh = "dp=2 tp=16".parse().unwrap();
        let mesh = mesh.split("tp", &[4, 2, 2]).unwrap();
        let [rows, columns] = sides(&mesh, "tp", [4, 4]);
        assert_eq!((mesh.count(&rows), rows.len()), (4, 1));
        assert_eq!((mesh.count(&columns), columns.len()), (4, 2));
    }
}
