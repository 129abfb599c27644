//! Rows and columns of the matrices inside a packed unit, for updates that keep one number for each of
//! them instead of one for each element (Adafactor; Shazeer and Stern, 2018).
//!
//! The last two dims of a parameter are its rows and columns; a vector is a matrix of one column. Ranks
//! hold any part of a unit: tiles that tensor parallelism cut, and ranges of them. An element knows its
//! row and column in the whole parameter all the same, so sums over rows and columns are exact in every
//! layout, and what is kept of them is the same on every rank.

use std::ops::Range;

use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// One parameter of a unit as matrices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixPlace {
    /// Where it begins in a block.
    pub begin: usize,
    /// The extents of its tile in a block; at least two dims, the last ones rows and columns.
    pub tile: Vec<usize>,
    /// The extents of the whole parameter. Elements beyond them are padding.
    pub sizes: Vec<usize>,
    /// By dim: how far the tile moves with one step along each dim of the grid of blocks.
    pub moves: Vec<Vec<usize>>,
}

impl MatrixPlace {
    fn end(&self) -> usize {
        self.begin + self.tile.iter().product::<usize>()
    }

    /// How many matrices, rows of one and columns of one.
    fn extents(&self) -> [usize; 3] {
        let (matrices, last) = self.sizes.split_at(self.sizes.len() - 2);
        [matrices.iter().product(), last[0], last[1]]
    }
}

/// Where the matrices of a unit lie. Elements between and after them belong to none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Factors {
    /// The parameters, in the order of their places.
    pub members: Vec<MatrixPlace>,
    /// Elements of a block: ranks may hold different blocks of a unit, all packed in the same way.
    pub block: usize,
    /// Blocks are numbered along a grid of these extents, the last dim fastest.
    pub grid: Vec<usize>,
}

/// A single matrix: its rows and columns among those of all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixSpan {
    /// Its rows.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
}

/// Neighbouring elements of one row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RowRun {
    /// Which elements of those that were asked for.
    pub elements: Range<usize>,
    /// The row, among those of all matrices.
    pub row: usize,
    /// The first element's column, among those of all matrices.
    pub column: usize,
}

impl Factors {
    /// The matrices in their order.
    pub fn matrices(&self) -> impl Iterator<Item = MatrixSpan> {
        let extents = self.members.iter().map(MatrixPlace::extents);
        let each = extents
            .flat_map(|[matrices, rows, columns]| (0..matrices).map(move |_| (rows, columns)));
        each.scan((0, 0), |(row, column), (rows, columns)| {
            let span = MatrixSpan { rows: *row..*row + rows, columns: *column..*column + columns };
            (*row, *column) = (span.rows.end, span.columns.end);
            Some(span)
        })
    }

    /// How many rows and columns there are in all.
    pub fn totals(&self) -> [usize; 2] {
        let each = self.members.iter().map(MatrixPlace::extents);
        each.fold([0, 0], |[r, c], [matrices, rows, columns]| {
            [r + matrices * rows, c + matrices * columns]
        })
    }

    /// The rows among the elements `first..first + count` of the whole unit, in the order of elements.
    pub fn runs(&self, first: usize, count: usize) -> Vec<RowRun> {
        let mut offsets = vec![[0, 0]];
        for member in &self.members {
            let ([matrices, rows, columns], [r, c]) =
                (member.extents(), offsets[offsets.len() - 1]);
            offsets.push([r + matrices * rows, c + matrices * columns]);
        }
        let (mut found, mut at) = (Vec::new(), 0);
        while at < count {
            let (place, same) = self.at(first + at);
            let end = count.min(at + same);
            if let Some((member, row, column)) = place {
                let [rows, columns] = offsets[member];
                found.push(RowRun { elements: at..end, row: rows + row, column: columns + column });
            }
            at = end;
        }
        found
    }

    /// The parameter, row and column of an element of the whole unit, and how many elements from it on are
    /// its neighbours in that row, or also padding.
    fn at(&self, element: usize) -> (Option<(usize, usize, usize)>, usize) {
        let (number, at) = (element / self.block, element % self.block);
        let next = self.members.partition_point(|member| member.end() <= at);
        let member = match self.members.get(next) {
            Some(member) if member.begin <= at => member,
            Some(member) => return (None, member.begin - at),
            None => return (None, self.block - at),
        };
        let mut step = number;
        let mut steps = vec![0; self.grid.len()];
        for (own, &size) in steps.iter_mut().zip(&self.grid).rev() {
            (*own, step) = (step % size, step / size);
        }
        let mut rest = at - member.begin;
        let mut places = vec![0; member.tile.len()];
        for (dim, &size) in member.tile.iter().enumerate().rev() {
            let moved: usize =
                member.moves[dim].iter().zip(&steps).map(|(by, step)| by * step).sum();
            (places[dim], rest) = (moved + rest % size, rest / size);
        }
        let last = member.tile.len() - 1;
        let across = member.tile[last] - (at - member.begin) % member.tile[last];
        if places.iter().zip(&member.sizes).any(|(place, size)| place >= size) {
            return (None, across);
        }
        let flat = |dims: usize| {
            let dims = places[..dims].iter().zip(&member.sizes);
            dims.fold(0, |flat, (place, size)| flat * size + place)
        };
        let column = flat(last - 1) * member.sizes[last] + places[last];
        (Some((next, flat(last), column)), across.min(member.sizes[last] - places[last]))
    }

    /// Fails unless the operand is a flat value of such blocks.
    fn check(&self, unit: &TensorType) -> Result<(), String> {
        let Self { members, block, grid } = self;
        if members.is_empty() {
            return Err("there are no members".to_owned());
        }
        let mut last = 0;
        for MatrixPlace { begin, tile, sizes, moves } in members {
            let dims = tile.len();
            if dims < 2 || [sizes.len(), moves.len()] != [dims; 2] {
                return Err(format!("a tile {tile:?} of {sizes:?} has no rows and columns"));
            }
            if moves.iter().any(|by| by.len() != grid.len()) {
                return Err(format!("a grid {grid:?} moves tiles along {moves:?}"));
            }
            let overlaps = || format!("the tile {tile:?} at {begin} is empty, or overlaps another");
            let elements = super::product(tile).filter(|&n| n > 0 && *begin >= last);
            last = elements.and_then(|n| begin.checked_add(n)).ok_or_else(overlaps)?;
            if super::product(sizes).is_none() {
                return Err(format!("{sizes:?} has too many elements"));
            }
        }
        if last > *block {
            return Err(format!("the last member ends at {last} of a block of {block}"));
        }
        let blocks = super::product(grid).ok_or("a grid of too many blocks")?;
        match unit.shape[..] {
            [elements] if Some(elements) == blocks.checked_mul(*block) => Ok(()),
            _ => Err(format!("{unit} is not a unit of {blocks} blocks of {block} elements")),
        }
    }

    fn attrs(&self) -> Attrs {
        let of = |list: fn(&MatrixPlace) -> Vec<usize>| -> Vec<usize> {
            self.members.iter().flat_map(list).collect()
        };
        Attrs::new()
            .list("begins", &of(|m| vec![m.begin]))
            .list("dims", &of(|m| vec![m.tile.len()]))
            .list("tiles", &of(|m| m.tile.clone()))
            .list("sizes", &of(|m| m.sizes.clone()))
            .list("moves", &of(|m| m.moves.concat()))
            .list("grid", &self.grid)
            .with("block", self.block)
    }

    pub(super) fn read(attrs: &mut AttrReader) -> Result<Self, String> {
        let begins: Vec<usize> = attrs.take_list("begins")?;
        let dims: Vec<usize> = attrs.take_list("dims")?;
        let mut tiles = Lists::new(attrs, "tiles")?;
        let mut sizes = Lists::new(attrs, "sizes")?;
        let mut moves = Lists::new(attrs, "moves")?;
        let grid: Vec<usize> = attrs.take_list("grid")?;
        if begins.len() != dims.len() {
            return Err(format!("{} members begin, and {} have dims", begins.len(), dims.len()));
        }
        let mut members = Vec::new();
        for (begin, dims) in begins.into_iter().zip(dims) {
            let (tile, sizes) = (tiles.next(dims)?, sizes.next(dims)?);
            let moves = (0..dims).map(|_| moves.next(grid.len())).collect::<Result<_, _>>()?;
            members.push(MatrixPlace { begin, tile, sizes, moves });
        }
        [tiles, sizes, moves].iter().try_for_each(Lists::is_used)?;
        let block = attrs.take("block")?;
        if block == 0 {
            return Err("a block must have at least one element".to_owned());
        }
        Ok(Self { members, block, grid })
    }
}

/// Lists that lie one after the other in an attribute.
struct Lists {
    name: &'static str,
    all: Vec<usize>,
    at: usize,
}

impl Lists {
    fn new(attrs: &mut AttrReader, name: &'static str) -> Result<Self, String> {
        Ok(Self { name, all: attrs.take_list(name)?, at: 0 })
    }

    fn next(&mut self, count: usize) -> Result<Vec<usize>, String> {
        let end = self.at.checked_add(count);
        let own = end.and_then(|end| self.all.get(self.at..end));
        let own = own.ok_or_else(|| format!("`{}` is too short", self.name))?.to_vec();
        self.at += count;
        Ok(own)
    }

    fn is_used(&self) -> Result<(), String> {
        match self.at == self.all.len() {
            true => Ok(()),
            false => Err(format!("`{}` is too long", self.name)),
        }
    }
}

/// The means of squares of each row, and of each column, of the matrices of a unit, as two vectors in the
/// unit's accumulator type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FactorMeans {
    /// Where the matrices lie.
    pub factors: Factors,
}

/// A unit with each element divided by the numbers of its row and of its column; zero outside matrices.
///
/// Operands are the unit, the rows' and the columns' numbers in its accumulator type, and a scalar by which
/// the unit is multiplied. One more scalar may follow, `go`: where it is 0 the result is zero, whatever the
/// unit holds. The result has the accumulator type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FactorDirection {
    /// Where the matrices lie.
    pub factors: Factors,
}

impl OpDef for FactorMeans {
    fn name(&self) -> &'static str {
        "factor_means"
    }

    fn attrs(&self) -> Attrs {
        self.factors.attrs()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        self.factors.check(ins[0])?;
        let dtype = ins[0].dtype.accumulator();
        Ok(self.factors.totals().map(|count| (dtype, vec![count])).to_vec())
    }

    /// As for the sum of all squares: shards give a partial sum, and a partial sum is refused.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("x -> r, c", ins, outs).whole("r").whole("c")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "use square and sum where a gradient is needed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn gives_units(&self) -> bool {
        false
    }
}

impl OpDef for FactorDirection {
    fn name(&self) -> &'static str {
        "factor_direction"
    }

    fn attrs(&self) -> Attrs {
        self.factors.attrs()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        if !(4..=5).contains(&ins.len()) {
            return Err(format!("takes 4 or 5 operands, got {}", ins.len()));
        }
        self.factors.check(ins[0])?;
        let (dtype, [rows, columns]) = (ins[0].dtype.accumulator(), self.factors.totals());
        super::shape_is("the rows' numbers", ins[1], &[rows])?;
        super::shape_is("the columns' numbers", ins[2], &[columns])?;
        for scalar in &ins[3..] {
            super::shape_is("a scalar", scalar, &[])?;
        }
        for own in &ins[1..] {
            super::dtype_is("an operand besides the unit", own, dtype)?;
        }
        Ok(vec![(dtype, ins[0].shape.clone())])
    }

    /// Every rank needs the numbers of all rows and columns.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("x, r, c, , -> x", ins, outs).whole("r").whole("c")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "updates end a step; use div where a gradient is needed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Two blocks: a matrix of 3 × 5 whose columns are cut (3 and 2, one of padding), and a vector of 3
    /// whose rows are (2 and 1), with gaps.
    fn factors() -> Factors {
        let matrix = MatrixPlace {
            begin: 1,
            tile: vec![3, 3],
            sizes: vec![3, 5],
            moves: vec![vec![0], vec![3]],
        };
        let vector = MatrixPlace {
            begin: 12,
            tile: vec![2, 1],
            sizes: vec![3, 1],
            moves: vec![vec![2], vec![0]],
        };
        Factors { members: vec![matrix, vector], block: 16, grid: vec![2] }
    }

    #[test]
    fn every_element_of_every_matrix_is_found_once() {
        let factors = factors();
        assert_eq!(factors.totals(), [6, 6]);
        let spans: Vec<MatrixSpan> = factors.matrices().collect();
        let span = |rows, columns| MatrixSpan { rows, columns };
        assert_eq!(spans, [span(0..3, 0..5), span(3..6, 5..6)]);
        let mut seen: Vec<(usize, usize)> = Vec::new();
        // In any ranges: whole, and in shards that cut rows.
        for cuts in [vec![0, 32], vec![0, 5, 17, 32]] {
            seen.clear();
            for cut in cuts.windows(2) {
                for RowRun { elements, row, column } in factors.runs(cut[0], cut[1] - cut[0]) {
                    seen.extend(elements.enumerate().map(|(i, _)| (row, column + i)));
                }
            }
            seen.sort_unstable();
            let matrix = (0..3).flat_map(|row| (0..5).map(move |column| (row, column)));
            let vector = (3..6).map(|row| (row, 5));
            assert_eq!(seen, matrix.chain(vector).collect::<Vec<_>>(), "{cuts:?}");
        }
    }

    #[test]
    fn the_second_block_holds_the_last_columns() {
        let run = |elements, row, column| RowRun { elements, row, column };
        assert_eq!(
            factors().runs(16, 16),
            [run(1..3, 0, 3), run(4..6, 1, 3), run(7..9, 2, 3), run(12..13, 5, 5)]
        );
    }

    #[test]
    fn factors_that_mean_nothing_are_refused() {
        let check = |change: fn(&mut Factors)| {
            let mut factors = factors();
            change(&mut factors);
            FactorMeans { factors }.infer(&[&TensorType::unit(DType::F32, 32)]).is_ok()
        };
        assert!(check(|_| {}));
        assert!(!check(|f| f.members.clear()), "no members");
        assert!(!check(|f| f.members[1].begin = 9), "one lies over another");
        assert!(!check(|f| f.members[1].begin = 15), "ends behind its block");
        assert!(!check(|f| f.members[0].tile = vec![9]), "no rows and columns");
        assert!(!check(|f| f.members[0].tile = vec![3, 0]), "nothing");
        assert!(!check(|f| f.members[0].moves[0] = vec![]), "a grid of other dims");
        assert!(!check(|f| f.grid = vec![3]), "a block that is not there");
    }
}
