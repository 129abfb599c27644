//! 3D tensor parallelism (Bian et al., 2021): ranks form a cube of q × q × q, with sides i, j and l,
//! and each matrix is cut into q³ blocks.
//!
//! Between products the batch is divided over (i, j) and the width over l. The first of two products
//! gathers its input over j and its weight over i, and scatters the sum over l into the batch, so the
//! result has its batch over (i, l) and its width over j; the second does the same with j and l
//! exchanged, and the layout is back. Which product is first is found as in Megatron's tensor
//! parallelism.
//!
//! A weight is read in blocks over (j, l) and stored in parts of these over i, along the width of the
//! stream. The table of embeddings is a second weight (words over j, width over l), which is also how
//! a tied head reads it as a first one. Gains and biases lie like the last dim of the values that
//! they meet, and are stored over the other two sides too where that needs no padding.

use phalanx_ir::{Axis, Mesh, Op, Program, ValueId};

use super::find::readers;
use super::megatron::Columns;
use super::parts::{
    Use, cuts, data, floor_root, heads_for, heads_in, shard_heads, shard_over, sides, store_even,
    store_over, streamed, used, whole_root,
};
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Shards weights and activations over a cube of ranks.
#[derive(Clone, Debug)]
pub struct Cube {
    /// The axis of all these ranks: i × j × l, l fastest.
    pub axis: String,
    /// Whether products go block by block along the batch, or the batch is gathered first.
    pub stream: bool,
}

impl Default for Cube {
    fn default() -> Self {
        Self { axis: "tp".to_owned(), stream: false }
    }
}

impl Cube {
    /// The side of the cube.
    fn side(&self, program: &Program, mesh: &Mesh) -> Result<usize, SpmdError> {
        let degree = mesh.degree(&self.axis);
        whole_root(degree, 3).ok_or_else(|| {
            let below = floor_root(degree, 3);
            SpmdError::Strategy {
                segment: program.name.clone(),
                what: format!(
                    "{}: the {degree} ranks of `{}` are not a cube of ranks\n  \
                     nearest that work: {} or {} ranks",
                    self.name(),
                    self.axis,
                    below.pow(3),
                    (below + 1).pow(3)
                ),
            }
        })
    }
}

/// The sides of the cube.
struct Sides {
    i: Vec<Axis>,
    j: Vec<Axis>,
    l: Vec<Axis>,
}

impl Strategy for Cube {
    fn name(&self) -> &'static str {
        "3D tensor parallelism"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let q = self.side(program, mesh)?;
        Ok(cuts(program, &self.axis, &[q, q * q], (q, q)))
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
        let [i, j, l] = sides(mesh, &self.axis, [q; 3]);
        let cube = Sides { i, j, l };
        for value in data(program) {
            // Targets meet logits, which are the result of a first product.
            let first = readers(program, value).any(|r| matches!(r.op, Op::CrossEntropy(_)));
            cube.batch(ctx, value, if first { &cube.l } else { &cube.j })?;
        }
        for value in ctx.boundaries() {
            cube.stream(ctx, value)?;
        }
        let columns = Columns::of(program);
        for param in ctx.params() {
            cube.param(ctx, param.value, &columns)?;
        }
        Ok(())
    }
}

impl Sides {
    fn batch(
        &self,
        ctx: &mut Annotator<'_>,
        value: ValueId,
        minor: &[Axis],
    ) -> Result<(), SpmdError> {
        shard_over(ctx, value, 0, &self.i)?;
        shard_over(ctx, value, 0, minor)
    }

    /// A value between products: the batch over (i, j), the width over l.
    fn stream(&self, ctx: &mut Annotator<'_>, value: ValueId) -> Result<(), SpmdError> {
        self.batch(ctx, value, &self.j)?;
        shard_over(ctx, value, ctx.program().ty(value).shape.len() - 1, &self.l)
    }

    fn param(
        &self,
        ctx: &mut Annotator<'_>,
        param: ValueId,
        found: &Columns,
    ) -> Result<(), SpmdError> {
        let program = ctx.program();
        match used(program, param) {
            Use::Product { rows, columns, out } if found.is_second(param, rows) => {
                shard_over(ctx, param, rows, &self.j)?;
                shard_over(ctx, param, columns, &self.l)?;
                store_over(ctx, param, columns, &self.i)?;
                self.stream(ctx, out)
            }
            Use::Product { rows, columns, out } => {
                let [_, keys] = heads_in(program, Some(out));
                shard_over(ctx, param, rows, &self.l)?;
                let rest = shard_heads(ctx, param, columns, &self.j, keys)?;
                store_over(ctx, param, rows, &self.i)?;
                store_over(ctx, param, rows, &rest)?;
                let last = program.ty(out).shape.len() - 1;
                self.batch(ctx, out, &self.l)?;
                shard_heads(ctx, out, last, &self.j, keys)?;
                rest.iter().try_for_each(|axis| ctx.replicate(out, axis.name()))
            }
            Use::Table { out } => {
                shard_over(ctx, param, 0, &self.j)?;
                shard_over(ctx, param, 1, &self.l)?;
                store_over(ctx, param, 1, &self.i)?;
                self.stream(ctx, out)
            }
            Use::Matrix => {
                shard_over(ctx, param, program.ty(param).shape.len() - 1, &self.l)?;
                store_even(ctx, param, 0, &self.i, None)?;
                store_even(ctx, param, 0, &self.j, None)
            }
            Use::Vector { out } if found.is_split(param) => {
                let [heads, keys] = heads_in(program, out);
                let rest = shard_heads(ctx, param, 0, &self.j, keys)?;
                for axes in [&self.i, &self.l, &rest] {
                    store_even(ctx, param, 0, axes, heads)?;
                }
                Ok(())
            }
            Use::Vector { .. } => {
                shard_over(ctx, param, 0, &self.l)?;
                store_even(ctx, param, 0, &self.i, None)?;
                store_even(ctx, param, 0, &self.j, None)
            }
        }
    }
}
