//! Ring Attention: each rank attends to its own block of keys first, then passes blocks on and attends
//! to the next one. In the backward blocks are passed on in the same way, with the sums of their
//! gradients behind them, so that these are complete when they come home. The own block is taken last
//! there, so sums travel n − 1 times.

use phalanx_ir::ops::{Attend, AttendGrad};
use phalanx_ir::{Rewriter, ValueId};

use super::Ring;

impl Ring<'_> {
    /// The own block first; the last result is rounded once.
    pub(super) fn forward(&self, to: &mut Rewriter<'_>) {
        let [o, lse] = [self.instr.outputs[0], self.instr.outputs[1]];
        let q = to.resolve(self.instr.inputs[0]);
        let [mut k, mut v] = self.own.map(|value| to.resolve(value));
        let types = vec![self.wide(o), self.wide(lse)];
        let mut state = Vec::new();
        for step in 0..self.blocks {
            if step > 0 {
                (k, v) = (self.turn(to, k), self.turn(to, v));
            }
            let mut operands = vec![q, k, v];
            operands.extend(&state);
            operands.extend(self.key(to));
            let attend = Attend { of: self.of, goes_on: step > 0 };
            state = to.add(attend, &operands, types.clone(), self.phase());
        }
        self.rounded(to, state[0], o);
        to.bind(lse, state[1]);
    }

    /// The own block last: sums of gradients then come home from the rank before.
    pub(super) fn backward(&self, to: &mut Rewriter<'_>, scatters: [usize; 2]) {
        let inputs: Vec<ValueId> = self.instr.inputs.iter().map(|&v| to.resolve(v)).collect();
        let (q, kept) = (inputs[0], [inputs[3], inputs[4], inputs[5]]);
        let own = self.own.map(|value| to.resolve(value));
        let homes = self.homes(scatters);
        let dq = self.instr.outputs[0];
        let [mut k, mut v] = own;
        let mut sums: Vec<ValueId> = Vec::new();
        for step in 1..=self.blocks {
            (k, v) = match step == self.blocks {
                true => (own[0], own[1]),
                false => (self.turn(to, k), self.turn(to, v)),
            };
            if step > 1 {
                sums = vec![sums[0], self.turn(to, sums[1]), self.turn(to, sums[2])];
            }
            let mut types = vec![self.wide(dq)];
            types.extend([(k, homes[0]), (v, homes[1])].map(|(y, home)| self.sums(to, y, home)));
            let mut operands = vec![q, k, v];
            operands.extend(kept);
            operands.extend(&sums);
            operands.extend(self.key(to));
            let grad = AttendGrad { of: self.of, goes_on: step > 1 };
            sums = to.add(grad, &operands, types, self.phase());
        }
        self.rounded(to, sums[0], dq);
        self.rounded(to, sums[1], homes[0]);
        self.rounded(to, sums[2], homes[1]);
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::{Axis, Program};

    use crate::stream;
    use crate::testing::check_on;

    fn over_cp(program: &Program) -> Program {
        crate::dead_code(&stream(program, &[Axis::new("cp").unwrap()]))
    }

    #[test]
    fn keys_come_block_by_block() {
        check_on(
            "cp=3",
            "
            q: boundary bf16[2,12,4,2]{1:cp@zigzag}
            k: boundary bf16[2,12,2,2]{1:cp@zigzag}
            v: boundary bf16[2,12,2,2]{1:cp@zigzag}
            %1 = all_gather<cp>(k, dim=1) : bf16[2,12,2,2]
            %2 = all_gather<cp>(v, dim=1) : bf16[2,12,2,2]
            %3, %4 = attention(q, %1, %2, kind=flash, causal=true, dropout=0, site=1) : bf16[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            return o: boundary %3
            return l: boundary %4",
            over_cp,
            "
            %1, %2 = attend(q, k, v, causal=true, dropout=0, site=1, goes_on=false) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %5 = turn<cp>(k, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+1}
            %6 = turn<cp>(v, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+1}
            %7, %8 = attend(q, %5, %6, %1, %2, causal=true, dropout=0, site=1, goes_on=true) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %9 = turn<cp>(%5, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+2}
            %10 = turn<cp>(%6, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+2}
            %11, %4 = attend(q, %9, %10, %7, %8, causal=true, dropout=0, site=1, goes_on=true) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %3 = cast(%11, to=bf16) : bf16[2,12,4,2]{1:cp@zigzag}",
        );
    }

    /// One key head on two ranks of tp: sums over the ranks that share it stay sums.
    #[test]
    fn sums_of_gradients_come_home() {
        check_on(
            "cp=2 tp=2",
            "
            q: boundary f32[2,8,2,2]{1:cp 2:tp}
            k: boundary f32[2,8,1,2]{1:cp}
            v: boundary f32[2,8,1,2]{1:cp}
            o: boundary f32[2,8,2,2]{1:cp 2:tp}
            l: boundary f32[2,2,8]{1:tp 2:cp}
            d: boundary f32[2,8,2,2]{1:cp 2:tp}
            %1 = all_gather<cp>(k, dim=1) : f32[2,8,1,2]
            %2 = all_gather<cp>(v, dim=1) : f32[2,8,1,2]
            %3, %4, %5 = attention_grad(q, %1, %2, o, l, d, kind=flash, causal=true, dropout=0, site=1) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{P:cp,tp}, f32[2,8,1,2]{P:cp,tp}
            %6 = reduce_scatter<cp>(%4, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %7 = reduce_scatter<cp>(%5, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            return dq: probe %3
            return dk: probe %6
            return dv: probe %7",
            over_cp,
            "
            %1 = turn<cp>(k, dim=1) : f32[2,8,1,2]{1:cp+1}
            %2 = turn<cp>(v, dim=1) : f32[2,8,1,2]{1:cp+1}
            %8, %4, %5 = attend_grad(q, %1, %2, o, l, d, causal=true, dropout=0, site=1, goes_on=false) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{1:cp+1 P:tp}, f32[2,8,1,2]{1:cp+1 P:tp}
            %9 = turn<cp>(%4, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %10 = turn<cp>(%5, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %3, %6, %7 = attend_grad(q, k, v, o, l, d, %8, %9, %10, causal=true, dropout=0, site=1, goes_on=true) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{1:cp P:tp}, f32[2,8,1,2]{1:cp P:tp}",
        );
    }
}
