//! Ring Self-Attention (Li et al., 2021): attention with stored scores, whose keys come block by block.
//!
//! Keys go around once, and each step fills the columns of the keys that are here in the rows of
//! scores. Their softmax needs no other rank, because rows are whole then. Values go around once more,
//! and each step adds its columns' share of the result. The backward does the same with values, then
//! with keys; the sums of their gradients follow the blocks, and come home in the end.

use phalanx_ir::ops::{
    AttentionGrad, Cast, Dropout, KeyForm, KeyProduct, Scale, Softmax, SoftmaxGrad,
};
use phalanx_ir::{Op, Rewriter, TensorType, ValueId};

use super::Ring;

impl Ring<'_> {
    /// Whether every query sees a key and no gradient is a partial sum: rows of scores then have a
    /// softmax, and what is computed from them may be rounded.
    pub(super) fn has_whole_rows(&self) -> bool {
        let ty = |i: usize| self.program.ty(self.instr.inputs[i]);
        let sees = !self.of.causal || ty(0).shape[1] <= ty(1).shape[1];
        let dy = match self.instr.op {
            Op::AttentionGrad(AttentionGrad { of }) => {
                Some(self.instr.inputs.len() - 1 - usize::from(of.drops()))
            }
            _ => None,
        };
        sees && dy.is_none_or(|dy| ty(dy).layout.partial().is_empty())
    }

    pub(super) fn forward_scored(&self, to: &mut Rewriter<'_>) {
        let (o, p) = (self.instr.outputs[0], self.instr.outputs[1]);
        let q = to.resolve(self.instr.inputs[0]);
        let [mut k, mut v] = self.own.map(|value| to.resolve(value));
        let mut scores = Vec::new();
        for step in 0..self.blocks {
            k = if step > 0 { self.turn(to, k) } else { k };
            scores = self.step(to, KeyForm::Scores, [q, k], &scores, self.wide(p));
        }
        let wide = self.wide(p);
        let scaled = self.one(to, Scale { by: self.scale() }, &scores, wide.clone());
        let shares = self.one(to, Softmax, &[scaled], wide);
        self.rounded(to, shares, p);
        let mut weights = to.resolve(p);
        if let (Some(key), Some(&dropped)) = (self.key(to), self.instr.outputs.get(2)) {
            let ty = self.program.ty(dropped).clone();
            weights = self.one(to, self.dropout(), &[weights, key], ty);
            to.bind(dropped, weights);
        }
        let mut sum = Vec::new();
        for step in 0..self.blocks {
            v = if step > 0 { self.turn(to, v) } else { v };
            sum = self.step(to, KeyForm::Weighted, [weights, v], &sum, self.wide(o));
        }
        self.rounded(to, sum[0], o);
    }

    pub(super) fn backward_scored(&self, to: &mut Rewriter<'_>, scatters: [usize; 2]) {
        let inputs: Vec<ValueId> = self.instr.inputs.iter().map(|&v| to.resolve(v)).collect();
        let (q, p, dy) =
            (inputs[0], inputs[4], inputs[inputs.len() - 1 - usize::from(self.of.drops())]);
        let weights = if self.of.drops() { inputs[5] } else { p };
        let (wide, homes) = (self.wide(self.instr.inputs[4]), self.homes(scatters));
        let own = self.own.map(|value| to.resolve(value));
        let (mut by_weights, mut dv) = (Vec::new(), Vec::new());
        let [mut k, mut v] = own;
        for step in 1..=self.blocks {
            // The own block comes last, so that sums travel once less.
            v = if step < self.blocks { self.turn(to, v) } else { own[1] };
            by_weights = self.step(to, KeyForm::Scores, [dy, v], &by_weights, wide.clone());
            dv = self.passed_on(to, dv);
            let sums = self.sums(to, v, homes[1]);
            dv = self.step(to, KeyForm::Sums, [weights, dy], &dv, sums);
        }
        let mut by_shares = by_weights[0];
        if let Some(key) = self.key(to) {
            by_shares = self.one(to, self.dropout(), &[by_shares, key], wide.clone());
        }
        let shares = self.cast(to, p, wide.clone());
        let by_scores = self.one(to, SoftmaxGrad, &[shares, by_shares], wide.clone());
        let by_scores = self.one(to, Scale { by: self.scale() }, &[by_scores], wide);
        let narrow = self.program.ty(self.instr.inputs[4]).clone();
        let by_scores = self.cast(to, by_scores, narrow);
        let (mut dq, mut dk) = (Vec::new(), Vec::new());
        let dq_type = self.wide(self.instr.outputs[0]);
        for step in 1..=self.blocks {
            k = if step < self.blocks { self.turn(to, k) } else { own[0] };
            dq = self.step(to, KeyForm::Weighted, [by_scores, k], &dq, dq_type.clone());
            dk = self.passed_on(to, dk);
            let sums = self.sums(to, k, homes[0]);
            dk = self.step(to, KeyForm::Sums, [by_scores, q], &dk, sums);
        }
        self.rounded(to, dq[0], self.instr.outputs[0]);
        self.rounded(to, dk[0], homes[0]);
        self.rounded(to, dv[0], homes[1]);
    }

    /// Sums that follow their block to the next rank, if there are any yet.
    fn passed_on(&self, to: &mut Rewriter<'_>, sums: Vec<ValueId>) -> Vec<ValueId> {
        sums.into_iter().map(|sum| self.turn(to, sum)).collect()
    }

    fn step(
        &self,
        to: &mut Rewriter<'_>,
        form: KeyForm,
        operands: [ValueId; 2],
        so_far: &[ValueId],
        ty: TensorType,
    ) -> Vec<ValueId> {
        // The mask is that of the forward: gradients of hidden scores are multiplied by zero.
        let causal = self.of.causal && self.scatters.is_none() && form == KeyForm::Scores;
        let key_heads = self.program.ty(self.instr.inputs[1]).shape[2];
        let product = KeyProduct { form, key_heads, causal, goes_on: !so_far.is_empty() };
        to.add(product, &[&operands[..], so_far].concat(), vec![ty], self.phase())
    }

    fn one(
        &self,
        to: &mut Rewriter<'_>,
        op: impl Into<Op>,
        operands: &[ValueId],
        ty: TensorType,
    ) -> ValueId {
        to.add(op, operands, vec![ty], self.phase())[0]
    }

    fn cast(&self, to: &mut Rewriter<'_>, value: ValueId, ty: TensorType) -> ValueId {
        match to.ty(value).dtype == ty.dtype {
            true => value,
            false => self.one(to, Cast { to: ty.dtype }, &[value], ty),
        }
    }

    fn dropout(&self) -> Dropout {
        Dropout { p: self.of.dropout, site: self.of.site }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.program.ty(self.instr.inputs[0]).shape[3] as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::{Axis, Program};

    use crate::testing::check_on;

    fn over_cp(program: &Program) -> Program {
        crate::dead_code(&crate::stream(program, &[Axis::new("cp").unwrap()]))
    }

    /// Keys go around for the scores, then values for the result.
    #[test]
    fn rows_of_scores_are_filled_block_by_block() {
        check_on(
            "cp=2",
            "
            q: boundary bf16[2,8,4,4]{1:cp}
            k: boundary bf16[2,8,2,4]{1:cp}
            v: boundary bf16[2,8,2,4]{1:cp}
            %1 = all_gather<cp>(k, dim=1) : bf16[2,8,2,4]
            %2 = all_gather<cp>(v, dim=1) : bf16[2,8,2,4]
            %3, %4 = attention(q, %1, %2, kind=materialised, causal=true, dropout=0, site=1) : bf16[2,8,4,4]{1:cp}, bf16[2,4,8,8]{2:cp}
            return o: boundary %3
            return p: boundary %4",
            over_cp,
            "
            %5 = key_product(q, k, form=scores, key_heads=2, causal=true, goes_on=false) : f32[2,4,8,8]{2:cp}
            %6 = turn<cp>(k, dim=1) : bf16[2,8,2,4]{1:cp+1}
            %7 = key_product(q, %6, %5, form=scores, key_heads=2, causal=true, goes_on=true) : f32[2,4,8,8]{2:cp}
            %8 = scale(%7, by=0.5) : f32[2,4,8,8]{2:cp}
            %9 = softmax(%8) : f32[2,4,8,8]{2:cp}
            %4 = cast(%9, to=bf16) : bf16[2,4,8,8]{2:cp}
            %10 = key_product(%4, v, form=weighted, key_heads=2, causal=false, goes_on=false) : f32[2,8,4,4]{1:cp}
            %11 = turn<cp>(v, dim=1) : bf16[2,8,2,4]{1:cp+1}
            %12 = key_product(%4, %11, %10, form=weighted, key_heads=2, causal=false, goes_on=true) : f32[2,8,4,4]{1:cp}
            %3 = cast(%12, to=bf16) : bf16[2,8,4,4]{1:cp}",
        );
    }

    /// Values go around with the sums of their gradients behind them, then keys.
    #[test]
    fn sums_of_gradients_follow_their_blocks() {
        check_on(
            "cp=2",
            "
            q: boundary f32[2,8,2,4]{1:cp}
            k: boundary f32[2,8,1,4]{1:cp}
            v: boundary f32[2,8,1,4]{1:cp}
            o: boundary f32[2,8,2,4]{1:cp}
            p: boundary f32[2,2,8,8]{2:cp}
            d: boundary f32[2,8,2,4]{1:cp}
            %1 = all_gather<cp>(k, dim=1) : f32[2,8,1,4]
            %2 = all_gather<cp>(v, dim=1) : f32[2,8,1,4]
            %3, %4, %5 = attention_grad(q, %1, %2, o, p, d, kind=materialised, causal=true, dropout=0, site=1) : f32[2,8,2,4]{1:cp}, f32[2,8,1,4]{P:cp}, f32[2,8,1,4]{P:cp}
            %6 = reduce_scatter<cp>(%4, dim=1) : f32[2,8,1,4]{1:cp}
            %7 = reduce_scatter<cp>(%5, dim=1) : f32[2,8,1,4]{1:cp}
            return dq: probe %3
            return dk: probe %6
            return dv: probe %7",
            over_cp,
            "
            %8 = turn<cp>(v, dim=1) : f32[2,8,1,4]{1:cp+1}
            %9 = key_product(d, %8, form=scores, key_heads=1, causal=false, goes_on=false) : f32[2,2,8,8]{2:cp}
            %10 = key_product(p, d, form=sums, key_heads=1, causal=false, goes_on=false) : f32[2,8,1,4]{1:cp+1}
            %11 = key_product(d, v, %9, form=scores, key_heads=1, causal=false, goes_on=true) : f32[2,2,8,8]{2:cp}
            %12 = turn<cp>(%10, dim=1) : f32[2,8,1,4]{1:cp}
            %7 = key_product(p, d, %12, form=sums, key_heads=1, causal=false, goes_on=true) : f32[2,8,1,4]{1:cp}
            %13 = softmax_grad(p, %11) : f32[2,2,8,8]{2:cp}
            %14 = scale(%13, by=0.5) : f32[2,2,8,8]{2:cp}
            %15 = turn<cp>(k, dim=1) : f32[2,8,1,4]{1:cp+1}
            %16 = key_product(%14, %15, form=weighted, key_heads=1, causal=false, goes_on=false) : f32[2,8,2,4]{1:cp}
            %17 = key_product(%14, q, form=sums, key_heads=1, causal=false, goes_on=false) : f32[2,8,1,4]{1:cp+1}
            %3 = key_product(%14, k, %16, form=weighted, key_heads=1, causal=false, goes_on=true) : f32[2,8,2,4]{1:cp}
            %18 = turn<cp>(%17, dim=1) : f32[2,8,1,4]{1:cp}
            %6 = key_product(%14, q, %18, form=sums, key_heads=1, causal=false, goes_on=true) : f32[2,8,1,4]{1:cp}",
        );
    }
}
