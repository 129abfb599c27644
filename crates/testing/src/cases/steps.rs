//! The steps of random programs: every family of ops, on any value that it takes.

use phalanx_ir::ops::{AttentionKind, Reshape, Transpose};
use phalanx_ir::{Builder, DType, Role, Tensor as Value, TensorType};

use super::dice::Dice;

/// Makes one step of a program with dice of its own.
pub(super) struct Maker<'b> {
    pub(super) b: &'b Builder,
    pub(super) dice: Dice,
    /// The number of the step, which is in the names of its parameters.
    pub(super) step: u64,
    pub(super) params: usize,
}

impl<'b> Maker<'b> {
    /// Something computed from one of the last values; nothing if what was drawn does not fit it.
    pub(super) fn step(&mut self, pool: &[Value<'b>]) -> Option<Value<'b>> {
        let from = pool.len().saturating_sub(2);
        let x = pool[from + self.dice.below(pool.len() - from)];
        let shape = x.shape();
        let (rank, last) = (shape.len(), shape.last().copied().unwrap_or(1));
        let alike: Vec<Value<'b>> = pool.iter().copied().filter(|y| y.shape() == shape).collect();
        Some(match self.dice.below(22) {
            0..=3 if rank > 0 => {
                let to = self.dice.pick(&[2, 3, 4, 4, 5, 6, 8]);
                let w = self.param(&[last, to]);
                x.matmul(w)
            }
            4 | 19 | 20 => match self.dice.below(4) {
                0 => x.gelu(),
                1 => x.silu(),
                2 => x.tanh(),
                _ => x.scale(0.5),
            },
            5 => x + self.dice.pick(&alike),
            6 | 21 => x * self.dice.pick(&alike),
            7 if rank > 0 => {
                let gain = self.param(&[last]);
                x.rms_norm(gain, 1e-5)
            }
            8 if rank > 0 => {
                let (gain, bias) = (self.param(&[last]), self.param(&[last]));
                x.layer_norm(gain, bias, 1e-5)
            }
            9 if rank > 0 => x.softmax(),
            10 => self.transposed(x),
            11 => self.reshaped(x)?,
            12 if rank == 3 => self.attention(x),
            13 if rank > 2 => x.sum(&[self.dice.below(rank)]),
            14 if rank > 0 => x + self.param(&[last]),
            15 if rank == 3 => {
                let same = |y: &&Value<'b>| {
                    let s = y.shape();
                    s.len() == 3 && s[0] == shape[0] && s[2] == shape[2]
                };
                let others: Vec<Value<'b>> = pool.iter().filter(same).copied().collect();
                x.einsum(self.dice.pick(&others), "abc,adc->abd").scale(1.0 / last as f64)
            }
            16 => x.dropout(0.3),
            17 if rank > 0 && last > 2 => x.slice(rank - 1, 1, last - 1),
            18 => x.max(x.scale(0.3)),
            _ => return None,
        })
    }

    fn param(&mut self, shape: &[usize]) -> Value<'b> {
        self.params += 1;
        let name = format!("w{}{}", self.step, ["a", "b", "c"][self.params - 1]);
        self.b.input(&name, Role::Param, TensorType::new(DType::F64, shape))
    }

    fn transposed(&mut self, x: Value<'b>) -> Value<'b> {
        let mut perm: Vec<usize> = (0..x.shape().len()).collect();
        for i in (1..perm.len()).rev() {
            perm.swap(i, self.dice.below(i + 1));
        }
        self.b.apply(Transpose { perm }, &[x])
    }

    fn reshaped(&mut self, x: Value<'b>) -> Option<Value<'b>> {
        let mut shape = x.shape();
        if shape.len() > 1 && self.dice.percent(50) {
            let i = self.dice.below(shape.len() - 1);
            let minor = shape.remove(i + 1);
            shape[i] *= minor;
        } else {
            let i = self.dice.below(shape.len().max(1));
            let size = *shape.get(i)?;
            let parts: Vec<usize> =
                [2, 3, 4].into_iter().filter(|&f| size > f && size.is_multiple_of(f)).collect();
            if parts.is_empty() || shape.len() > 3 {
                return None;
            }
            let part = self.dice.pick(&parts);
            let pair =
                if self.dice.percent(50) { [part, size / part] } else { [size / part, part] };
            shape.splice(i..=i, pair);
        }
        Some(self.b.apply(Reshape { shape }, &[x]))
    }

    fn attention(&mut self, x: Value<'b>) -> Value<'b> {
        let shape = x.shape();
        let (heads, kv, size) =
            self.dice.pick(&[(4, 4, 2), (4, 2, 2), (2, 1, 2), (2, 2, 4), (3, 3, 2)]);
        let kind = self.dice.pick(&[AttentionKind::Flash, AttentionKind::Materialised]);
        let dropout = if self.dice.percent(20) { 0.3 } else { 0.0 };
        let mut project = |n: usize| {
            let w = self.param(&[shape[2], n * size]);
            x.matmul(w).reshape([shape[0], shape[1], n, size])
        };
        let (q, k, v) = (project(heads), project(kv), project(kv));
        let o = q.attention(k, v, kind, dropout);
        o.reshape([shape[0], shape[1], heads * size])
    }
}
