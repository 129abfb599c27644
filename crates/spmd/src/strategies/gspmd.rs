//! GSPMD's finalised 2-D recipe for transformers (Xu et al., 2021): ranks form a grid of u rows and v
//! columns, and every weight and every activation is cut in both directions.
//!
//! Rows divide the batch and columns the width of every activation, as in 2D tensor parallelism
//! ([`Optimus`](super::Optimus)), and weights are *stored* in parts over rows, that is, read whole. What differs
//! is the second of two products in a row: its input is already divided by columns along the dim that it sums over,
//! so its weight is read by rows of the matrix, and the sum is scattered into the width. A pair of products therefore
//! gathers its input once and scatters its result once, as Megatron's sequence parallelism does, along the width.
//! The grid need not be a square.
//!
//! A layer of weights W sends 3(W/v)(u−1)/u elements over rows (gathered in the forward and in the backward,
//! gradients scattered), and over columns 10·bsh/u·(v−1)/v (two gathers and two scatters in each direction, and the
//! inputs of first products once more for the gradients of weights). Memory: 1/(uv) of weights and of activations.

use phalanx_ir::{Axis, Mesh, Program, ValueId};

use super::megatron::Columns;
use super::optimus::Square;
use super::parts::{Use, cuts, data, heads_for, shard_over, sides, store_over, streamed, used};
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Shards weights and activations over a grid of ranks.
#[derive(Clone, Debug)]
pub struct Gspmd {
    /// The axis of all these ranks: rows × columns, columns fastest.
    pub axis: String,
    /// How many rows the grid has: parts of the batch.
    pub rows: usize,
    /// Whether products go block by block, or operands are gathered first.
    pub stream: bool,
}

impl Default for Gspmd {
    fn default() -> Self {
        Self { axis: "tp".to_owned(), rows: 2, stream: false }
    }
}

impl Gspmd {
    /// The rows of the grid that these ranks form where nobody says how many: the largest divisor that is
    /// not above the root.
    pub fn usual_rows(ranks: usize) -> usize {
        let root = super::floor_root(ranks, 2);
        (1..=root.max(1))
            .rev()
            .find(|&rows| ranks.is_multiple_of(rows))
            .expect("one divides every number")
    }

    /// Rows and columns of the grid.
    fn grid(&self, program: &Program, mesh: &Mesh) -> Result<[usize; 2], SpmdError> {
        let (degree, rows) = (mesh.degree(&self.axis), self.rows);
        if rows > 0 && degree.is_multiple_of(rows) {
            return Ok([rows, degree / rows]);
        }
        let fits = |rows: &usize| degree.is_multiple_of(*rows);
        let below = (1..=degree.min(rows)).rev().find(fits);
        let near = below.into_iter().chain((rows + 1..=degree).find(fits));
        let near: Vec<String> = near.map(|rows| rows.to_string()).collect();
        Err(SpmdError::Strategy {
            segment: program.name.clone(),
            what: format!(
                "{}: the {degree} ranks of `{}` do not form {rows} equal rows\n  \
                 nearest that work: {} rows",
                self.name(),
                self.axis,
                near.join(" or ")
            ),
        })
    }
}

impl Strategy for Gspmd {
    fn name(&self) -> &'static str {
        "GSPMD's 2-D recipe"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let [rows, columns] = self.grid(program, mesh)?;
        Ok(cuts(program, &self.axis, &[rows], (rows, columns)))
    }

    fn place(&self) -> Precedence {
        Precedence::Weights
    }

    fn streams(&self, mesh: &Mesh) -> Vec<Axis> {
        streamed(self.stream, mesh, &self.axis)
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if ctx.degree(&self.axis) == 1 {
            return Ok(());
        }
        let (program, mesh) = (ctx.program(), ctx.mesh());
        let [u, v] = self.grid(program, mesh)?;
        heads_for(ctx, &self.axis, v)?;
        let [rows, columns] = sides(mesh, &self.axis, [u, v]);
        let grid = Square { depth: vec![], rows, columns };
        for value in data(program) {
            grid.batch(ctx, value)?;
        }
        for value in ctx.boundaries() {
            grid.stream(ctx, value)?;
        }
        let pairs = Columns::of(program);
        for param in ctx.params() {
            self.param(ctx, param.value, &grid, &pairs)?;
        }
        Ok(())
    }
}

impl Gspmd {
    /// Second weights are read by rows; all others lie as on a square.
    fn param(
        &self,
        ctx: &mut Annotator<'_>,
        param: ValueId,
        grid: &Square,
        pairs: &Columns,
    ) -> Result<(), SpmdError> {
        match used(ctx.program(), param) {
            Use::Product { rows, columns, out } if pairs.is_second(param, rows) => {
                shard_over(ctx, param, rows, &grid.columns)?;
                store_over(ctx, param, columns, &grid.rows)?;
                grid.stream(ctx, out)
            }
            _ => grid.param(ctx, param),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_grids_are_as_square_as_they_can_be() {
        let rows = [1, 2, 3, 4, 6, 7, 8, 12, 16].map(Gspmd::usual_rows);
        assert_eq!(rows, [1, 1, 1, 2, 2, 1, 2, 3, 4]);
    }
}
