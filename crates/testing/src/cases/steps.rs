//! The steps of random programs: every family of ops, on any value that it takes.

use phalanx_ir::ops::{
    AttentionKind, Reshape, RopeScaling, Rotary, Transpose, Window, ZeroPadding,
};
use phalanx_ir::{Builder, DType, Role, Tensor as Value, TensorType};

use super::dice::Dice;

/// The longest dim that is put together of parts.
const LONGEST: usize = 16;

/// Makes one step of a program with its own dice.
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
        Some(match self.dice.below(25) {
            0..=3 if rank > 0 => {
                let to = self.dice.pick(&[2, 3, 4, 4, 5, 6, 8]);
                let w = self.param(&[last, to]);
                x.matmul(w)
            }
            4 | 19 | 20 => match self.dice.below(5) {
                0 => x.gelu(),
                1 => x.silu(),
                2 => x.tanh(),
                3 => self.b.apply(ZeroPadding, &[x]),
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
            22 if rank > 0 => self.concatenated(x, pool)?,
            23 if matches!(rank, 3 | 4) && last.is_multiple_of(2) => self.rotated(x),
            24 if rank == 3 => self.windowed(x)?,
            _ => return None,
        })
    }

    fn param(&mut self, shape: &[usize]) -> Value<'b> {
        self.params += 1;
        let name = format!("w{}{}", self.step, ["a", "b", "c"][self.params - 1]);
        self.b.input(&name, Role::Param, TensorType::new(DType::F64, shape))
    }

    /// A window over sequence and width, taken for the height and width of images.
    fn windowed(&mut self, x: Value<'b>) -> Option<Value<'b>> {
        let [batch, height, width] = x.shape()[..] else { return None };
        let channels = if width.is_multiple_of(2) { self.dice.pick(&[1, 2]) } else { 1 };
        let window = self.dice.pick(&[
            Window::of([2, 3]).dilation([2, 1]).pad([1, 1]),
            Window::of([3, 3]).pad([1, 1]),
            Window::of([3, 1]).pad([1, 0]),
            Window::of([2, 2]).stride([2, 2]),
            Window::of([3, 2]).stride([2, 2]).pad([1, 0]),
        ]);
        let [rows, columns] = window.outputs([height, width / channels]).ok()?;
        if rows * columns == 0 {
            return None;
        }
        let x = x.reshape([batch, height, width / channels, channels]);
        let (y, to) = match self.dice.below(4) {
            0 => (x.max_pool(window), channels),
            1 => (x.mean_pool(window), channels),
            _ => {
                let to = self.dice.pick(&[1, 2, 3]);
                let w = self.param(&[window.size[0], window.size[1], channels, to]);
                (x.conv2d(w, window), to)
            }
        };
        (columns * to <= LONGEST).then(|| y.reshape([batch, rows, columns * to]))
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

    /// Concatenated with up to two values that differ from it in at most one dim; it may also be
    /// one of them.
    fn concatenated(&mut self, x: Value<'b>, pool: &[Value<'b>]) -> Option<Value<'b>> {
        let shape = x.shape();
        let dim = self.dice.below(shape.len());
        let without = |mut shape: Vec<usize>| {
            shape[dim] = 0;
            shape
        };
        let fits = |y: &&Value<'b>| {
            y.shape().len() == shape.len() && without(y.shape()) == without(shape.clone())
        };
        let fitting: Vec<Value<'b>> = pool.iter().filter(fits).copied().collect();
        let mut parts = vec![x];
        for _ in 0..1 + self.dice.below(2) {
            let part = self.dice.pick(&fitting);
            parts.insert(self.dice.below(parts.len() + 1), part);
        }
        // Repeated doubling makes cases slow, but not better.
        let size: usize = parts.iter().map(|part| part.shape()[dim]).sum();
        (size <= LONGEST).then(|| self.b.concat(&parts, dim))
    }

    /// In heads, if it has none yet.
    fn rotated(&mut self, x: Value<'b>) -> Value<'b> {
        let (shape, rotary) = (x.shape(), self.rotary());
        if let [batch, seq, width] = shape[..] {
            let heads = if width.is_multiple_of(4) { self.dice.pick(&[1, 2]) } else { 1 };
            return x
                .reshape([batch, seq, heads, width / heads])
                .rotary(rotary)
                .reshape([batch, seq, width]);
        }
        x.rotary(rotary)
    }

    /// Positions rotate by large angles, so that a wrong one is detected.
    fn rotary(&mut self) -> Rotary {
        let scaling = self.dice.pick(&[RopeScaling::None, RopeScaling::Linear { factor: 2.0 }]);
        Rotary { theta: self.dice.pick(&[10.0, 10_000.0]), scaling, inverse: false }
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
        let (mut q, mut k, v) = (project(heads), project(kv), project(kv));
        if self.dice.percent(50) {
            let rotary = self.rotary();
            (q, k) = (q.rotary(rotary), k.rotary(rotary));
        }
        let o = q.attention(k, v, kind, dropout);
        o.reshape([shape[0], shape[1], heads * size])
    }
}
