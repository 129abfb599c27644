//! Megatron's tensor parallelism (Shoeybi et al., 2019): of two products in a row the first weight is
//! split by columns and the second by rows, so that one reduction at the end suffices.
//!
//! The program itself shows which weight is which. A weight whose product is followed, through
//! elementwise ops, reshapes and attention, by another product is split by columns; the one that
//! comes after a column-split one is split by rows. Biases are sharded like the result that they
//! are added to. The embedding is split along the vocabulary, the head's projection too, and
//! cross-entropy works on the shards. With fewer key heads than ranks, keys and values are sharded
//! by the major part of the axis only. If a segment is a single layer (`[batch, width]` in and
//! out), the axis shards the width between segments: the first layer is split by columns, the
//! others by rows, and their sums are scattered.

use std::collections::BTreeMap;

use phalanx_ir::{Instr, Mesh, Op, OpDef, Program, Role, ValueId};

use super::find::{attentions, heads_of, readers};
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Shards weights over an axis, by columns and rows alternately.
#[derive(Clone, Debug)]
pub struct Megatron {
    /// The axis.
    pub axis: String,
}

impl Default for Megatron {
    fn default() -> Self {
        Self { axis: "tp".to_owned() }
    }
}

impl Strategy for Megatron {
    fn name(&self) -> &'static str {
        "Megatron tensor parallelism"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let degree = mesh.degree(&self.axis);
        let cut = |kv_heads| AxisSplit { axis: self.axis.clone(), major: shared(kv_heads, degree) };
        Ok(attentions(program).iter().map(|a| cut(a.kv_heads)).collect())
    }

    fn place(&self) -> Precedence {
        Precedence::Weights
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        let degree = ctx.degree(&self.axis);
        if degree == 1 {
            return Ok(());
        }
        let program = ctx.program();
        for found in attentions(program) {
            enough_heads(ctx, &self.axis, degree, found.heads, found.kv_heads)?;
        }
        for value in ctx.boundaries() {
            if is_flat(program, value) {
                ctx.shard(value, 1, &self.axis)?;
            }
        }
        let columns = Columns::of(program);
        for param in ctx.params() {
            match columns.params.get(&param.value) {
                None => ctx.replicate(param.value, &self.axis)?,
                Some(&Part { dim, room }) => self.part(ctx, param.value, dim, room)?,
            }
        }
        Ok(())
    }
}

impl Megatron {
    /// Shards a dim by as many parts of the axis as fit.
    fn part(
        &self,
        ctx: &mut Annotator<'_>,
        param: ValueId,
        dim: usize,
        room: Option<usize>,
    ) -> Result<(), SpmdError> {
        let Some(mut room) = room else { return ctx.shard(param, dim, &self.axis) };
        let mesh = ctx.mesh();
        for atom in mesh.expand(&self.axis)? {
            let size = mesh.count(&[atom]);
            if room >= size {
                ctx.shard(param, dim, atom.name())?;
                room = room.div_ceil(size);
            } else {
                ctx.replicate(param, atom.name())?;
            }
        }
        Ok(())
    }
}

/// How a parameter is split.
#[derive(Clone, Copy, Debug)]
struct Part {
    dim: usize,
    /// If it produces keys or values: their number of heads, which may be less than the ranks.
    room: Option<usize>,
}

/// The parameters that are split, found by walking the program.
#[derive(Debug, Default)]
pub(super) struct Columns {
    params: BTreeMap<ValueId, Part>,
    /// Values that are sharded because of a parameter: the dim.
    sharded: BTreeMap<ValueId, usize>,
}

impl Columns {
    /// Whether a weight belongs to the second of two products in a row: its rows are split.
    pub(super) fn is_second(&self, weight: ValueId, rows: usize) -> bool {
        self.params.get(&weight).is_some_and(|part| part.dim == rows)
    }

    /// Whether a parameter is split at all.
    pub(super) fn is_split(&self, param: ValueId) -> bool {
        self.params.contains_key(&param)
    }

    /// Walks a segment.
    pub(super) fn of(program: &Program) -> Self {
        let mut columns = Self::default();
        let flat = program.inputs_with(Role::Boundary).filter(|p| is_flat(program, p.value));
        columns.sharded.extend(flat.map(|p| (p.value, 1)));
        for instr in program.instrs() {
            columns.visit(program, instr);
        }
        columns
    }

    fn visit(&mut self, program: &Program, instr: &Instr) {
        let is_param = |v: &ValueId| program.inputs_with(Role::Param).any(|p| p.value == *v);
        let param = instr.inputs.iter().position(is_param);
        let rank = |v: ValueId| program.ty(v).shape.len();
        let out = instr.outputs[0];
        match (&instr.op, param) {
            (Op::Embedding(_), Some(0)) => {
                // Sharded by vocabulary: one rank has the row, and the results are summed over
                // ranks.
                self.params.insert(instr.inputs[0], Part { dim: 0, room: None });
            }
            // The weights of experts are a batch of matrices.
            (Op::Matmul(_) | Op::GroupedMatmul(_), Some(1))
                if matches!(rank(instr.inputs[1]), 2 | 3) =>
            {
                let (x, w) = (instr.inputs[0], instr.inputs[1]);
                let Some([rows, columns]) = sides(&instr.op) else { return };
                let flows = flow(program, out);
                let ends =
                    !flows.iter().any(|&v| is_multiplied(program, v) || leaves_flat(program, v));
                if self.sharded.get(&x) == Some(&(rank(x) - 1)) {
                    self.params.insert(w, Part { dim: rows, room: None });
                } else if !ends {
                    let room = kv_heads(program, out);
                    self.params.insert(w, Part { dim: columns, room });
                    self.sharded.insert(out, rank(out) - 1);
                }
            }
            // A bias is sharded like the value that it is added to.
            (Op::Binary(_), Some(p)) if rank(instr.inputs[p]) == 1 => {
                let x = instr.inputs[1 - p];
                let scattered = flow(program, out).iter().any(|&v| leaves_flat(program, v));
                if scattered || self.sharded.get(&x) == Some(&(rank(x) - 1)) {
                    self.params
                        .insert(instr.inputs[p], Part { dim: 0, room: kv_heads(program, x) });
                    self.sharded.insert(out, rank(out) - 1);
                }
            }
            _ => self.follow(program, instr),
        }
    }

    /// Follows the sharded dim through ops that keep it, and through reshapes between a width and
    /// heads.
    fn follow(&mut self, program: &Program, instr: &Instr) {
        let Some((dim, operand)) = (instr.inputs.iter())
            .enumerate()
            .find_map(|(i, v)| self.sharded.get(v).map(|&d| (d, i)))
        else {
            return;
        };
        let rule = program.rule(instr);
        let factor = rule.inputs[operand][dim].iter().find(|&&f| rule.factors[f].size > 1);
        let Some(factor) = factor else { return };
        let kept = rule.outputs[0].iter().position(|d| d.contains(factor));
        // A product with a weight ends what a weight began; heads go through one of two activations.
        let weight = |v: &ValueId| program.inputs_with(Role::Param).any(|p| p.value == *v);
        let is_product = matches!(instr.op, Op::Matmul(_) | Op::GroupedMatmul(_));
        let ends = is_product && instr.inputs.iter().any(weight);
        if let (Some(dim), false) = (kept, ends) {
            self.sharded.insert(instr.outputs[0], dim);
        }
    }
}

/// Whether a value is `[batch, width]` between segments.
fn is_flat(program: &Program, value: ValueId) -> bool {
    program.ty(value).shape.len() == 2
}

/// Whether a value leaves the segment as `[batch, width]`.
fn leaves_flat(program: &Program, value: ValueId) -> bool {
    is_flat(program, value) && program.outputs_with(Role::Boundary).any(|p| p.value == value)
}

/// Whether a value goes into another product or into a cross-entropy.
fn is_multiplied(program: &Program, value: ValueId) -> bool {
    let multiplies =
        |op: &Op| matches!(op, Op::Matmul(_) | Op::GroupedMatmul(_) | Op::CrossEntropy(_));
    readers(program, value).any(|i| multiplies(&i.op))
}

/// The dims of a weight that its product sums over and that the result has, if it has both.
fn sides(op: &Op) -> Option<[usize; 2]> {
    match op {
        Op::Matmul(m) => {
            let [of_x, of_w, of_out] = m.spec.letters();
            let rows = of_w.find(|c| !of_out.contains(c))?;
            Some([rows, of_w.find(|c| !of_x.contains(c))?])
        }
        Op::GroupedMatmul(m) => Some(if m.transposed { [2, 1] } else { [1, 2] }),
        _ => None,
    }
}

/// The values that follow from a value through ops along its last dim, itself first; a residual
/// addition ends the list.
fn flow(program: &Program, value: ValueId) -> Vec<ValueId> {
    let mut seen = vec![value];
    let mut next = 0;
    while let Some(&value) = seen.get(next) {
        next += 1;
        for instr in readers(program, value) {
            let passes = match &instr.op {
                Op::Attention(_) | Op::Rotary(_) | Op::Reshape(_) | Op::Unary(_) => true,
                Op::Cast(_) | Op::Scale(_) | Op::Shift(_) => true,
                Op::Dropout(_) | Op::Noise(_) => true,
                // A bias or a gate does not end the branch.
                Op::Binary(_) => {
                    let partner = instr.inputs.iter().find(|&&v| v != value);
                    !partner.is_some_and(|&p| is_stream(program, p))
                }
                _ => false,
            };
            if passes && !seen.contains(&instr.outputs[0]) {
                seen.push(instr.outputs[0]);
            }
        }
    }
    seen
}

/// Whether a value is the residual stream: what a norm reads, or an input of the segment.
fn is_stream(program: &Program, value: ValueId) -> bool {
    let outside = program.inputs().iter().any(|p| p.value == value && p.role != Role::Param);
    let norm = |i: &Instr| i.op.name().ends_with("_norm");
    outside || readers(program, value).any(norm)
}

/// The number of heads, if the value becomes keys or values.
fn kv_heads(program: &Program, value: ValueId) -> Option<usize> {
    heads_of(program, value).filter(|found| found.keys).map(|found| found.heads)
}

/// Among how many ranks key heads are divided: all ranks, or as many as there are key heads.
pub(super) fn shared(kv_heads: usize, degree: usize) -> usize {
    kv_heads.min(degree)
}

/// Whether heads can be divided among the ranks of an axis: every rank has a head, and if there are
/// fewer key heads than ranks, each is shared by the same number of ranks.
pub fn heads_fit(heads: usize, kv_heads: usize, degree: usize) -> bool {
    heads >= degree && (kv_heads >= degree || degree.is_multiple_of(kv_heads))
}

/// Fails if heads cannot be divided among the ranks of an axis.
pub(super) fn enough_heads(
    ctx: &Annotator<'_>,
    axis: &str,
    degree: usize,
    heads: usize,
    kv_heads: usize,
) -> Result<(), SpmdError> {
    if heads_fit(heads, kv_heads, degree) {
        return Ok(());
    }
    Err(ctx.refuse(match heads < degree {
        true => format!(
            "{heads} heads are fewer than the {degree} ranks of `{axis}`\n  \
             each rank needs at least one\n  nearest that work: at most {heads} ranks of `{axis}`"
        ),
        false => format!(
            "{kv_heads} key heads are fewer than the {degree} ranks of `{axis}` and do not divide \
             them\n  no split of the axis gives each head the same number of ranks\n  \
             nearest that work: a multiple of {kv_heads} ranks, or at most {kv_heads}"
        ),
    }))
}
