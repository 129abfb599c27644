//! 2D tensor parallelism (Optimus: Xu et al., 2021) and 2.5D (Tesseract: Wang et al., 2021): ranks
//! form a square of q × q, and every weight and every activation is cut in both directions.
//!
//! A rank in row i and column j of the square holds the batch's i-th part of the width's j-th part
//! of each activation, and block (i, j) of each weight. A product gathers its input along the row
//! (over columns) and the weight along the column (over rows), as SUMMA does, so its result lies
//! like its input. Streams (`passes/src/stream`) do that block by block. Only two kinds of annotations are needed: a weight's columns are sharded by
//! columns of ranks, and its rows are *stored* by rows of ranks, that is, read whole. The gradients'
//! reductions follow.
//!
//! The table of embeddings is cut like the head, with which it may be tied: words by columns of
//! ranks, width by rows; so logits are never moved. Gains and biases lie like the last dim of the
//! values that they meet, and are stored over rows too where that needs no padding. With fewer key
//! heads than columns, ranks that share a key head store parts of its weights.
//!
//! Depth: d squares, each with its part of the batch and the same weights, whose gradients are
//! summed over the squares.

use phalanx_ir::{Axis, Mesh, Program, ValueId};

use super::parts::{
    Use, cuts, data, floor_root, heads_for, heads_in, shard_heads, shard_over, sides, store_even,
    store_over, streamed, used, whole_root,
};
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Shards weights and activations over a square of ranks, or over several squares.
#[derive(Clone, Debug)]
pub struct Optimus {
    /// The axis of all these ranks: depth × q × q, columns fastest.
    pub axis: String,
    /// How many squares there are: 1 is Optimus, more is Tesseract.
    pub depth: usize,
    /// Whether products go block by block, as in the papers, or whole rows of blocks are gathered first.
    pub stream: bool,
}

impl Default for Optimus {
    fn default() -> Self {
        Self { axis: "tp".to_owned(), depth: 1, stream: false }
    }
}

impl Optimus {
    /// The side of the square.
    fn side(&self, program: &Program, mesh: &Mesh) -> Result<usize, SpmdError> {
        let (degree, depth) = (mesh.degree(&self.axis), self.depth.max(1));
        let side = whole_root(degree / depth, 2).filter(|q| q * q * depth == degree);
        side.ok_or_else(|| SpmdError::Strategy {
            segment: program.name.clone(),
            what: format!(
                "{}: the {degree} ranks of `{}` are not {depth} square(s) of ranks\n  \
                 nearest that work: {} ranks",
                self.name(),
                self.axis,
                near(degree, depth)
            ),
        })
    }
}

/// The next numbers of ranks below and above that form squares.
fn near(degree: usize, depth: usize) -> String {
    let root = floor_root(degree / depth, 2);
    let ranks = [root, root + 1].into_iter().filter(|&q| q > 0).map(|q| q * q * depth);
    ranks.map(|n| n.to_string()).collect::<Vec<_>>().join(" or ")
}

/// The ranks of the squares, by direction.
pub(super) struct Square {
    /// The squares.
    pub(super) depth: Vec<Axis>,
    pub(super) rows: Vec<Axis>,
    pub(super) columns: Vec<Axis>,
}

impl Strategy for Optimus {
    fn name(&self) -> &'static str {
        match self.depth {
            0 | 1 => "2D tensor parallelism",
            _ => "2.5D tensor parallelism",
        }
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let (q, depth) = (self.side(program, mesh)?, self.depth.max(1));
        // Where columns outnumber key heads, their major part shares them.
        Ok(cuts(program, &self.axis, &[depth, depth * q], (depth * q, q)))
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
        let q = self.side(program, mesh)?;
        heads_for(ctx, &self.axis, q)?;
        let [depth, rows, columns] = sides(mesh, &self.axis, [self.depth.max(1), q, q]);
        let square = Square { depth, rows, columns };
        for value in data(program) {
            square.batch(ctx, value)?;
        }
        for value in ctx.boundaries() {
            square.stream(ctx, value)?;
        }
        for param in ctx.params() {
            square.param(ctx, param.value)?;
        }
        Ok(())
    }
}

impl Square {
    /// Samples are divided among squares, and then among the rows of each.
    pub(super) fn batch(&self, ctx: &mut Annotator<'_>, value: ValueId) -> Result<(), SpmdError> {
        shard_over(ctx, value, 0, &self.depth)?;
        shard_over(ctx, value, 0, &self.rows)
    }

    /// A value between products: its batch over rows, its width over columns.
    pub(super) fn stream(&self, ctx: &mut Annotator<'_>, value: ValueId) -> Result<(), SpmdError> {
        self.batch(ctx, value)?;
        shard_over(ctx, value, ctx.program().ty(value).shape.len() - 1, &self.columns)
    }

    pub(super) fn param(&self, ctx: &mut Annotator<'_>, param: ValueId) -> Result<(), SpmdError> {
        let program = ctx.program();
        for axis in &self.depth {
            ctx.replicate(param, axis.name())?;
        }
        match used(program, param) {
            Use::Product { rows, columns, out } => {
                let [_, keys] = heads_in(program, Some(out));
                let rest = shard_heads(ctx, param, columns, &self.columns, keys)?;
                store_over(ctx, param, rows, &self.rows)?;
                store_over(ctx, param, rows, &rest)
            }
            Use::Table { .. } => {
                shard_over(ctx, param, 0, &self.columns)?;
                store_over(ctx, param, 1, &self.rows)
            }
            Use::Matrix => {
                shard_over(ctx, param, program.ty(param).shape.len() - 1, &self.columns)?;
                store_even(ctx, param, 0, &self.rows, None)
            }
            Use::Vector { out } => {
                let [heads, keys] = heads_in(program, out);
                let rest = shard_heads(ctx, param, 0, &self.columns, keys)?;
                store_even(ctx, param, 0, &self.rows, heads)?;
                store_even(ctx, param, 0, &rest, heads)
            }
        }
    }
}
