//! Segments in local form: tensor code for what *one* rank of an axis holds, with the exchanges written by hand, inside a
//! model that is otherwise partitioned (GSPMD's manual mode, Xu et al., 2021; `shard_map` of JAX).
//!
//! A value of local form either **varies** over the ranks of the axis, or is the **same** on all of them. What varies has
//! one more dim in the program, in front: which rank. The axis shards that dim, so each rank computes its own block, and
//! nothing else. The number of ranks belongs to the model; on a mesh without the axis, one rank computes all blocks, with the
//! same numbers. So such a segment has gradients, types, predictions and `verify` like any other.
//!
//! | from | by | to |
//! |---|---|---|
//! | a value of the program | [`LocalForm::same`] | same |
//! | a value of the program | [`LocalForm::block`] | varies: each rank has a part of a dim |
//! | – | [`LocalForm::own_param`] | varies: each rank has weights of its own |
//! | same, same | any op | same |
//! | varies, any | any op | varies |
//! | varies | [`LocalTensor::sum_ranks`], [`LocalTensor::gather`] | same |
//! | varies | [`LocalTensor::scatter_sum`], [`LocalTensor::exchange`] | varies |
//! | same | [`LocalTensor::leave`] | a value of the program |
//!
//! Sums and gathers of what is the same, and values that leave while they vary, are refused: they would be counted once
//! for each rank, or be one rank's only.

use phalanx_ir::ops::{Broadcast, Reshape, Transpose, UnaryKind};
use phalanx_ir::{Builder, IrError, Tensor};

/// Code for one of the ranks of an axis, inside a segment.
///
/// ```
/// use phalanx_ir::{Builder, DType};
/// use phalanx_models::LocalForm;
///
/// // Megatron's feed-forward part by hand, for four ranks of `tp`: each has a quarter of the inner features.
/// let b = Builder::new("mlp", DType::F32);
/// let local = LocalForm::new(&b, "tp", 4);
/// let x = local.same(b.boundary("h", [8, 16, 32]));
/// let (up, down) = (local.own_param("up", &[32, 16])?, local.own_param("down", &[16, 32])?);
/// let y = x.matmul(up)?.gelu().matmul(down)?.sum_ranks()?;
/// b.output("h", x.plus(y)?.leave()?);
/// # b.finish()?;
/// # Ok::<(), phalanx_ir::IrError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LocalForm<'b> {
    b: &'b Builder,
    axis: &'b str,
    ranks: usize,
}

/// A value of local form.
#[derive(Clone, Copy, Debug)]
pub struct LocalTensor<'b> {
    form: LocalForm<'b>,
    /// With a dim of ranks in front, if it varies.
    value: Tensor<'b>,
    varies: bool,
}

impl<'b> LocalForm<'b> {
    /// Local form over so many ranks of an axis.
    pub fn new(b: &'b Builder, axis: &'b str, ranks: usize) -> Self {
        Self { b, axis, ranks }
    }

    /// A value that every rank has whole.
    pub fn same(self, value: Tensor<'b>) -> LocalTensor<'b> {
        LocalTensor { form: self, value, varies: false }
    }

    /// The rank's block of a dim.
    pub fn block(self, value: Tensor<'b>, dim: usize) -> Result<LocalTensor<'b>, IrError> {
        let mut shape = value.shape();
        let size = shape.get(dim).copied().unwrap_or(0);
        if size == 0 || !size.is_multiple_of(self.ranks) {
            let what = format!("dim {dim} of {} has no {} equal blocks", value.ty(), self.ranks);
            return Err(IrError::operands("block", what));
        }
        shape.splice(dim..=dim, [self.ranks, size / self.ranks]);
        let parts = self.b.apply(Reshape { shape }, &[value]);
        Ok(self.varying(self.moved(parts, dim, 0)))
    }

    /// Weights of which every rank has its own; the shape, of one to three dims, is that on one rank.
    pub fn own_param(self, name: &str, shape: &[usize]) -> Result<LocalTensor<'b>, IrError> {
        let value = match *shape {
            [a] => self.b.param(name, [self.ranks, a]),
            [a, b] => self.b.param(name, [self.ranks, a, b]),
            [a, b, c] => self.b.param(name, [self.ranks, a, b, c]),
            _ => {
                let what = format!("`{name}` of local shape {shape:?} has not one to three dims");
                return Err(IrError::operands("own_param", what));
            }
        };
        Ok(self.varying(value))
    }

    fn varying(self, value: Tensor<'b>) -> LocalTensor<'b> {
        let value = value.annotate(&format!("0:{} ...", self.axis));
        LocalTensor { form: self, value, varies: true }
    }

    /// The value with a dim moved to another place.
    fn moved(self, value: Tensor<'b>, from: usize, to: usize) -> Tensor<'b> {
        let mut perm: Vec<usize> = (0..value.shape().len()).collect();
        let dim = perm.remove(from);
        perm.insert(to, dim);
        match from == to {
            true => value,
            false => self.b.apply(Transpose { perm }, &[value]),
        }
    }
}

impl<'b> LocalTensor<'b> {
    /// The shape on one rank.
    pub fn shape(self) -> Vec<usize> {
        self.value.shape().split_off(usize::from(self.varies))
    }

    /// Whether ranks have different values.
    pub fn varies(self) -> bool {
        self.varies
    }

    /// Projection of the last dim: `[…, d] · [d, e]`.
    pub fn matmul(self, w: LocalTensor<'b>) -> Result<LocalTensor<'b>, IrError> {
        if !w.varies {
            return Ok(Self { value: self.value.matmul(w.value), ..self });
        }
        let dims = self.shape().len();
        if dims == 0 || dims > 8 || w.shape().len() != 2 {
            let what = format!("a product of local {:?} and {:?}", self.shape(), w.shape());
            return Err(IrError::operands("matmul", what));
        }
        let rows = &"abcdefgh"[..dims - 1];
        let ranks = if self.varies { "r" } else { "" };
        let spec = format!("{ranks}{rows}k,rke->r{rows}e");
        Ok(self.form.varying(self.value.einsum(w.value, &spec)))
    }

    /// The sum with a value of the same local shape.
    pub fn plus(self, other: LocalTensor<'b>) -> Result<LocalTensor<'b>, IrError> {
        self.with(other, "plus", |a, b| a + b)
    }

    /// The product with a value of the same local shape, element by element.
    pub fn times(self, other: LocalTensor<'b>) -> Result<LocalTensor<'b>, IrError> {
        self.with(other, "times", |a, b| a * b)
    }

    fn with(
        self,
        other: LocalTensor<'b>,
        op: &str,
        make: impl Fn(Tensor<'b>, Tensor<'b>) -> Tensor<'b>,
    ) -> Result<LocalTensor<'b>, IrError> {
        if self.shape() != other.shape() {
            let what = format!("local shapes {:?} and {:?}", self.shape(), other.shape());
            return Err(IrError::operands(op, what));
        }
        let varies = self.varies || other.varies;
        let value = make(self.lifted(varies), other.lifted(varies));
        Ok(Self { value, varies, ..self })
    }

    /// With a dim of ranks, if asked for.
    fn lifted(self, varies: bool) -> Tensor<'b> {
        if !varies || self.varies {
            return self.value;
        }
        let shape = [&[self.form.ranks], &self.shape()[..]].concat();
        self.form.b.apply(Broadcast { shape, dims: vec![0] }, &[self.value])
    }

    /// A function of one argument.
    pub fn unary(self, kind: UnaryKind) -> LocalTensor<'b> {
        Self { value: self.value.unary(kind), ..self }
    }

    /// GELU, by its tanh approximation.
    pub fn gelu(self) -> LocalTensor<'b> {
        Self { value: self.value.gelu(), ..self }
    }

    /// Multiplication by a constant.
    pub fn scale(self, by: f64) -> LocalTensor<'b> {
        Self { value: self.value.scale(by), ..self }
    }

    /// Softmax over the last dim: of what this rank has of it.
    pub fn softmax(self) -> LocalTensor<'b> {
        Self { value: self.value.softmax(), ..self }
    }

    /// Root-mean-square norm over what this rank has of the last dim.
    pub fn rms_norm(self, gain: Tensor<'b>, eps: f64) -> LocalTensor<'b> {
        Self { value: self.value.rms_norm(gain, eps), ..self }
    }

    /// The sum over ranks, which all of them get: an all-reduce.
    pub fn sum_ranks(self) -> Result<LocalTensor<'b>, IrError> {
        let value = self.summed("sum_ranks")?;
        Ok(self.form.same(value.annotate(&format!("-:{} ...", self.form.axis))))
    }

    /// The sum over ranks, of which each gets a block of a dim: a reduce-scatter.
    pub fn scatter_sum(self, dim: usize) -> Result<LocalTensor<'b>, IrError> {
        self.form.block(self.summed("scatter_sum")?, dim)
    }

    /// The blocks of all ranks, put together along a dim: an all-gather.
    pub fn gather(self, dim: usize) -> Result<LocalTensor<'b>, IrError> {
        let value = self.joined(self.varying("gather")?, dim)?;
        Ok(self.form.same(value.annotate(&format!("-:{} ...", self.form.axis))))
    }

    /// Each rank cuts its value along one dim, gives every rank a part, and puts together what it gets along another: an
    /// all-to-all.
    pub fn exchange(self, cut: usize, join: usize) -> Result<LocalTensor<'b>, IrError> {
        let whole = self.joined(self.varying("exchange")?, join)?;
        self.form.block(whole, cut)
    }

    /// The value for code that is not in local form.
    pub fn leave(self) -> Result<Tensor<'b>, IrError> {
        match self.varies {
            false => Ok(self.value),
            true => Err(IrError::operands(
                "leave",
                format!(
                    "{:?} varies over the {} ranks of `{}`\n  usual fix: gather or sum_ranks before",
                    self.shape(),
                    self.form.ranks,
                    self.form.axis
                ),
            )),
        }
    }

    /// The value, if it varies.
    fn varying(self, op: &str) -> Result<Tensor<'b>, IrError> {
        match self.varies {
            true => Ok(self.value),
            false => Err(IrError::operands(
                op,
                format!(
                    "{:?} is the same on all {} ranks of `{}`: it would be counted once for each of them",
                    self.shape(),
                    self.form.ranks,
                    self.form.axis
                ),
            )),
        }
    }

    /// The sum over ranks in the value's own element type.
    fn summed(self, op: &str) -> Result<Tensor<'b>, IrError> {
        let value = self.varying(op)?;
        let (dtype, sum) = (value.dtype(), value.sum(&[0]));
        Ok(if sum.dtype() == dtype { sum } else { sum.cast(dtype) })
    }

    /// Blocks of all ranks side by side along a dim.
    fn joined(self, value: Tensor<'b>, dim: usize) -> Result<Tensor<'b>, IrError> {
        let mut shape = self.shape();
        let Some(size) = shape.get_mut(dim) else {
            let what = format!("there is no dim {dim} in local {:?}", self.shape());
            return Err(IrError::operands("gather", what));
        };
        *size *= self.form.ranks;
        let beside = self.form.moved(value, 0, dim);
        Ok(self.form.b.apply(Reshape { shape }, &[beside]))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::DType;

    use super::*;

    /// What varies and what is the same is kept apart.
    #[test]
    fn sums_of_what_is_the_same_are_refused() {
        let b = Builder::new("s", DType::F64);
        let local = LocalForm::new(&b, "tp", 2);
        let x = b.boundary("x", [4, 6]);
        let (same, block) = (local.same(x), local.block(x, 1).unwrap());
        assert_eq!((same.shape(), block.shape()), (vec![4, 6], vec![4, 3]));
        for (refused, words) in [
            (same.sum_ranks().err(), "once for each"),
            (same.gather(0).err(), "the same on all 2 ranks of `tp`"),
            (same.scatter_sum(0).err(), "the same on all"),
            (same.exchange(0, 1).err(), "the same on all"),
            (block.leave().err(), "usual fix: gather or sum_ranks"),
            (block.plus(same).err(), "[4, 3] and [4, 6]"),
            (local.block(x, 2).err(), "no 2 equal blocks"),
            (local.block(b.boundary("y", [5]), 0).err(), "no 2 equal blocks"),
        ] {
            let text = refused.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains(words), "`{words}` is not in `{text}`");
        }
        let varies = [
            same.plus(same).unwrap().varies(),
            block.plus(local.same(b.boundary("z", [4, 3]))).unwrap().varies(),
            block.gather(1).unwrap().varies(),
            block.exchange(0, 1).unwrap().varies(),
            block.sum_ranks().unwrap().varies(),
            block.scatter_sum(0).unwrap().varies(),
        ];
        assert_eq!(varies, [false, true, false, true, false, true]);
    }
}
