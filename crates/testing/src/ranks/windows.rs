//! What a rank sees of images whose height or width is sharded: its own rows and those that come from its
//! neighbours. All others are hidden, so an op that reads further gives no number.

use phalanx_ir::{Instr, Op, OpDef, Program, Reach, TensorType};

use super::blocks::{Block, indices, offset};
use super::bugs::Bug;

/// An instruction that may read through windows.
pub(super) struct Windows<'a> {
    pub(super) program: &'a Program,
    pub(super) instr: &'a Instr,
    pub(super) bug: Option<Bug>,
}

/// Where a rank's block of a dim lies in the whole, and what it sees of it.
struct Span {
    dim: usize,
    own: [usize; 2],
    seen: [usize; 2],
}

impl Windows<'_> {
    /// Whether each rank sums over its own rows alone: the gradient of weights.
    pub(super) fn are_of_weights(&self) -> bool {
        matches!(self.instr.op, Op::Conv2dWeightGrad(_))
    }

    /// Hides of whole operands what a rank has neither itself nor from its neighbours.
    pub(super) fn hide(&self, rank: usize, operands: &mut [Block]) {
        let reaches = self.instr.op.reaches();
        if reaches.is_empty() {
            return;
        }
        // What is summed must not be hidden by what is not a number.
        let of_weights = self.are_of_weights();
        for (number, block) in operands.iter_mut().enumerate() {
            let ty = self.program.ty(self.instr.inputs[number]);
            if ty.shape.len() != 4 || number > 0 && !self.is_image(number, &reaches) {
                continue;
            }
            let hidden = if of_weights || !ty.dtype.is_float() { 0.0 } else { f64::NAN };
            for span in [1, 2].into_iter().filter_map(|dim| self.span(rank, number, ty, dim)) {
                self.hide_along(&span, block, hidden);
            }
        }
    }

    /// Whether an operand has the height and width of images or outputs.
    fn is_image(&self, number: usize, reaches: &[Reach]) -> bool {
        self.are_of_weights() || reaches.iter().any(|reach| reach.operand == number)
    }

    fn span(&self, rank: usize, number: usize, ty: &TensorType, dim: usize) -> Option<Span> {
        let mesh = self.program.mesh();
        let axes = ty.layout.axes(dim);
        if mesh.count(axes) == 1 {
            return None;
        }
        let len = ty.local_shape(mesh)[dim];
        let (start, reaches) = (mesh.shard(rank, axes) * len, self.instr.op.reaches());
        let reach = reaches.iter().find(|reach| reach.operand == number && reach.dim == dim);
        let [mut before, mut after] = reach.map_or([0; 2], |reach| [reach.before, reach.after]);
        if self.bug == Some(Bug::RowTooFew) {
            (before, after) = (before.saturating_sub(1), after.saturating_sub(1));
        }
        let own = [start, start + len];
        Some(Span { dim, own, seen: [start.saturating_sub(before), start + len + after] })
    }

    fn hide_along(&self, &Span { dim, own, seen }: &Span, block: &mut Block, hidden: f64) {
        let all = block.clone();
        let extent = all.shape[dim];
        for index in indices(&all.shape) {
            let at = index[dim];
            let number = &mut block.data[offset(&all.shape, &index)];
            let is_own = (own[0]..own[1]).contains(&at);
            if !(seen[0]..seen[1]).contains(&at) {
                // A row that was forgotten is what the room for it was before.
                *number = if self.bug == Some(Bug::RowTooFew) { 0.0 } else { hidden };
            } else if !is_own && self.bug == Some(Bug::RowsOfWrongNeighbour) {
                // As far from the block, on its other side.
                let other = match at < own[0] {
                    true => Some(own[1] + (own[0] - 1 - at)),
                    false => own[0].checked_sub(1 + at - own[1]),
                };
                let other = other.filter(|&other| other < extent);
                *number = other.map_or(0.0, |other| {
                    let mut index = index.clone();
                    index[dim] = other;
                    all.data[offset(&all.shape, &index)]
                });
            }
        }
    }
}
