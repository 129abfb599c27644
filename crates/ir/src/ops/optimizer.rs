//! Optimizer updates over packed units, and the norm that clipping needs.
//!
//! An update is not linear in any operand: a gradient that is still a partial sum does not
//! type-check.

use super::elementwise::Elementwise;
use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Weight decay, and which elements of a unit it applies to: the first `first` of every `block`.
/// A unit holds the parameters that decay before those that don't, and ranks may hold different
/// blocks of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Decay {
    /// The rate.
    pub rate: f64,
    /// How many elements of each block decay.
    pub first: usize,
    /// Elements of a block.
    pub block: usize,
}

impl Decay {
    /// Every element decays.
    pub const fn all(rate: f64) -> Self {
        Self { rate, first: 1, block: 1 }
    }

    /// The rate of the element with this index, and how many elements from it on have the same
    /// rate.
    pub fn at(&self, element: usize) -> (f64, usize) {
        if self.first >= self.block {
            return (self.rate, usize::MAX);
        }
        match element % self.block {
            at if at < self.first => (self.rate, self.first - at),
            at => (0.0, self.block - at),
        }
    }

    fn with_attrs(&self, attrs: Attrs) -> Attrs {
        attrs.with("decay", self.rate).with("decays", self.first).with("block", self.block)
    }

    fn read(attrs: &mut AttrReader) -> Result<Self, String> {
        let decay = Self {
            rate: attrs.take("decay")?,
            first: attrs.take("decays")?,
            block: attrs.take("block")?,
        };
        match decay.block {
            0 => Err("a block must have at least one element".to_owned()),
            _ => Ok(decay),
        }
    }
}

/// What programs read of the weights that an update changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Narrow {
    /// The weights themselves.
    None,
    /// A copy in this type: w is a master, and the last result is the copy.
    Copy(DType),
    /// Upper halves: w is the bf16 of an f32 master, whose lower halves are an operand of their own after the
    /// gradient, and a result after w ([`crate::halves`]).
    Split,
}

impl Narrow {
    /// How many operands, and results, hold lower halves.
    const fn halves(self) -> usize {
        matches!(self, Narrow::Split) as usize
    }

    /// The type that an update of such weights computes in.
    const fn master(self, weights: DType) -> DType {
        match self {
            Narrow::None | Narrow::Copy(_) => weights,
            Narrow::Split => DType::F32,
        }
    }

    fn text(self) -> String {
        match self {
            Narrow::None => "none".to_owned(),
            Narrow::Copy(dtype) => dtype.to_string(),
            Narrow::Split => "split".to_owned(),
        }
    }

    fn read(attrs: &mut AttrReader) -> Result<Self, String> {
        match attrs.take::<String>("narrow")?.as_str() {
            "none" => Ok(Narrow::None),
            "split" => Ok(Narrow::Split),
            text => text.parse().map(Narrow::Copy),
        }
    }
}

/// AdamW (Loshchilov and Hutter, 2019), as `torch.optim.AdamW` defines it; if `coupled`, Adam (Kingma
/// and Ba, 2015), as `torch.optim.Adam` does.
///
/// Operands w, g, m, v and the scalars lr, step (from 1) and clip, by which g is multiplied.
/// Results w, m, v, and those that `narrow` says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub decay: Decay,
    /// Whether the decay is added to the gradient (Adam), instead of to the step (AdamW).
    pub coupled: bool,
    /// What programs read, if it is narrower than what is updated.
    pub narrow: Narrow,
}

/// Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it (L2 decay, no
/// dampening).
///
/// Operands w, g, momentum buffer, lr, step, clip; results w, momentum buffer and those that `narrow`
/// says. The buffer exists even with `momentum = 0`, so that scripts need no special case.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sgd {
    /// The momentum; 0 for plain descent.
    pub momentum: f64,
    /// Nesterov's form.
    pub nesterov: bool,
    /// L2 decay, added to the gradient.
    pub decay: Decay,
    /// What programs read, if it is narrower than what is updated.
    pub narrow: Narrow,
}

/// Lion (Chen et al., 2023): steps of one size, in the direction of the sign of a mean.
///
/// With c = β₁m + (1−β₁)g: w ← w − lr·(sign c + decay·w), then m ← β₂m + (1−β₂)g. Operands w, g, m, lr,
/// step, clip; results w, m and those that `narrow` says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lion {
    /// Share of m in the direction of a step.
    pub beta1: f64,
    /// Share of m that is kept.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub decay: Decay,
    /// What programs read, if it is narrower than what is updated.
    pub narrow: Narrow,
}

/// The direction of LAMB (You et al., 2020) before each parameter's trust ratio scales it:
/// u = m̂ / (√v̂ + eps) + decay·w, with the corrected moments of Adam.
///
/// Operands as those of AdamW; results u, m, v. The weights themselves are read only.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LambDirection {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, a part of the direction.
    pub decay: Decay,
}

/// The sum of squares of a unit, in its accumulator type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SumSquares;

pub(super) fn read_adamw(coupled: bool, attrs: &mut AttrReader) -> Result<AdamW, String> {
    Ok(AdamW {
        beta1: attrs.take("beta1")?,
        beta2: attrs.take("beta2")?,
        eps: attrs.take("eps")?,
        decay: Decay::read(attrs)?,
        coupled,
        narrow: Narrow::read(attrs)?,
    })
}

pub(super) fn read_sgd(attrs: &mut AttrReader) -> Result<Sgd, String> {
    Ok(Sgd {
        momentum: attrs.take("momentum")?,
        nesterov: attrs.take("nesterov")?,
        decay: Decay::read(attrs)?,
        narrow: Narrow::read(attrs)?,
    })
}

pub(super) fn read_lion(attrs: &mut AttrReader) -> Result<Lion, String> {
    Ok(Lion {
        beta1: attrs.take("beta1")?,
        beta2: attrs.take("beta2")?,
        decay: Decay::read(attrs)?,
        narrow: Narrow::read(attrs)?,
    })
}

pub(super) fn read_lamb(attrs: &mut AttrReader) -> Result<LambDirection, String> {
    Ok(LambDirection {
        beta1: attrs.take("beta1")?,
        beta2: attrs.take("beta2")?,
        eps: attrs.take("eps")?,
        decay: Decay::read(attrs)?,
    })
}

/// An update in place of w and of `STATES` buffers of its length. Operands are w, g, the states,
/// then the scalars lr, step and clip; results w, the states and, if there is one, the copy of w.
/// Lower halves, if there are any, come before the states, among operands and results.
///
/// One more scalar may follow, `go`. Where it is 0 nothing changes: weights and states are given as
/// they were, whatever the gradient holds.
///
/// An update treats each element alone, since a rank may hold any part of a unit, and maps zeros to
/// zeros, since the padding of a unit must stay zero. States are zero before the first step.
trait Update {
    /// One or two.
    const STATES: usize;

    fn name(&self) -> &'static str;

    /// The attributes besides the copy's element type.
    fn own_attrs(&self) -> Attrs;

    fn narrow(&self) -> Narrow;

    /// Whether the first result is w, and not a direction for it.
    const MOVES: bool = true;
}

impl<T: Update> Elementwise for T {
    const ARITY: usize = 5 + T::STATES;

    fn arity(&self) -> usize {
        Self::ARITY + self.narrow().halves()
    }

    fn name(&self) -> &'static str {
        Update::name(self)
    }

    fn attrs(&self) -> Attrs {
        match T::MOVES {
            true => self.own_attrs().with("narrow", self.narrow().text()),
            false => self.own_attrs(),
        }
    }

    fn takes(&self, operands: usize) -> bool {
        (self.arity()..=self.arity() + 1).contains(&operands)
    }

    fn results(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let (w, narrow) = (ins[0], self.narrow());
        let master = narrow.master(w.dtype);
        let (halves, rest) = ins[2..].split_at(narrow.halves());
        let (states, scalars) = rest.split_at(T::STATES);
        super::shape_is("the gradient", ins[1], &w.shape)?;
        for lower in halves {
            super::dtype_is("an upper half", w, DType::Bf16)?;
            super::shape_is("a lower half", lower, &w.shape)?;
            super::dtype_is("a lower half", lower, DType::U16)?;
        }
        for state in states {
            super::shape_is("a state", state, &w.shape)?;
            super::dtype_is("a state", state, master)?;
        }
        for scalar in scalars {
            super::shape_is("a scalar", scalar, &[])?;
            super::dtype_is("a scalar", scalar, master.accumulator())?;
        }
        let mut dtypes = vec![w.dtype];
        dtypes.extend(halves.iter().map(|lower| lower.dtype));
        dtypes.extend(states.iter().map(|state| state.dtype));
        if let Narrow::Copy(dtype) = narrow {
            dtypes.push(dtype);
        }
        Ok(dtypes.into_iter().map(|dtype| (dtype, w.shape.clone())).collect())
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "updates end a step"))
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        let from = if T::MOVES { 0 } else { 1 };
        &[(0, 0), (2, 1), (3, 2), (4, 3)][from..1 + T::STATES + self.narrow().halves()]
    }

    fn accumulates(&self) -> bool {
        false
    }

    fn is_update(&self) -> bool {
        true
    }
}

impl Update for AdamW {
    const STATES: usize = 2;

    fn name(&self) -> &'static str {
        if self.coupled { "adam" } else { "adamw" }
    }

    fn own_attrs(&self) -> Attrs {
        let attrs =
            Attrs::new().with("beta1", self.beta1).with("beta2", self.beta2).with("eps", self.eps);
        self.decay.with_attrs(attrs)
    }

    fn narrow(&self) -> Narrow {
        self.narrow
    }
}

impl Update for Sgd {
    const STATES: usize = 1;

    fn name(&self) -> &'static str {
        "sgd"
    }

    fn own_attrs(&self) -> Attrs {
        let attrs = Attrs::new().with("momentum", self.momentum).with("nesterov", self.nesterov);
        self.decay.with_attrs(attrs)
    }

    fn narrow(&self) -> Narrow {
        self.narrow
    }
}

impl Update for Lion {
    const STATES: usize = 1;

    fn name(&self) -> &'static str {
        "lion"
    }

    fn own_attrs(&self) -> Attrs {
        let attrs = Attrs::new().with("beta1", self.beta1).with("beta2", self.beta2);
        self.decay.with_attrs(attrs)
    }

    fn narrow(&self) -> Narrow {
        self.narrow
    }
}

impl Update for LambDirection {
    const STATES: usize = 2;
    const MOVES: bool = false;

    fn name(&self) -> &'static str {
        "lamb_direction"
    }

    fn own_attrs(&self) -> Attrs {
        let attrs =
            Attrs::new().with("beta1", self.beta1).with("beta2", self.beta2).with("eps", self.eps);
        self.decay.with_attrs(attrs)
    }

    fn narrow(&self) -> Narrow {
        Narrow::None
    }
}

impl OpDef for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        Ok(vec![(ins[0].dtype.accumulator(), Vec::new())])
    }

    /// Squares of shards add up, so a sharded operand gives a partial sum; a partial operand is
    /// refused, because the square of a sum is not the sum of squares.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let names: Vec<String> = (0..ins[0].len()).map(|i| format!("x{i}")).collect();
        Rule::declare(&format!("{} -> ", names.join(" ")), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "use square and sum where a gradient is needed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn gives_units(&self) -> bool {
        false
    }
}
