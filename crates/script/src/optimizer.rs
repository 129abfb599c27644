//! Update rules: their constants, their ops, and what they keep for each parameter.

use phalanx_ir::Op;
use phalanx_ir::ops::{AdamW, Decay, LambDirection, Lion, Narrow, Sgd};

use crate::factored::StateOf;

/// The update rule; `decay` applies to parameters that decay.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the fields are those of the ops")]
pub enum Optimizer {
    /// Adam with decoupled decay (Loshchilov and Hutter, 2019).
    AdamW { beta1: f64, beta2: f64, eps: f64, decay: f64 },
    /// Adam (Kingma and Ba, 2015); decay is added to the gradient.
    Adam { beta1: f64, beta2: f64, eps: f64, decay: f64 },
    /// Gradient descent with momentum; decay is added to the gradient.
    Sgd { momentum: f64, nesterov: bool, decay: f64 },
    /// Adam whose step has, for each parameter, the length of the parameter (You et al., 2020).
    Lamb { beta1: f64, beta2: f64, eps: f64, decay: f64 },
    /// Steps by the sign of a mean, with decoupled decay (Chen et al., 2023).
    Lion { beta1: f64, beta2: f64, decay: f64 },
    /// Second moments as products of row and column means, steps relative to the parameter's size (Shazeer
    /// and Stern, 2018): `eps` is added to squares, a parameter counts as at least `least` large, and a step
    /// longer than `longest` is scaled down to it.
    Adafactor { eps: f64, least: f64, longest: f64, decay: f64 },
}

impl Optimizer {
    /// AdamW with the constants that language models are usually trained with.
    pub const fn adamw() -> Self {
        Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 }
    }

    /// Adam with PyTorch's constants.
    pub const fn adam() -> Self {
        Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 }
    }

    /// Gradient descent with momentum (0: none) and nothing else.
    pub const fn sgd(momentum: f64) -> Self {
        Optimizer::Sgd { momentum, nesterov: false, decay: 0.0 }
    }

    /// LAMB with its paper's constants.
    pub const fn lamb() -> Self {
        Optimizer::Lamb { beta1: 0.9, beta2: 0.999, eps: 1e-6, decay: 0.01 }
    }

    /// Lion with its paper's constants.
    pub const fn lion() -> Self {
        Optimizer::Lion { beta1: 0.9, beta2: 0.99, decay: 0.0 }
    }

    /// Adafactor with its paper's constants.
    pub const fn adafactor() -> Self {
        Optimizer::Adafactor { eps: 1e-30, least: 1e-3, longest: 1.0, decay: 0.0 }
    }

    /// The op that applies it, or that gives the direction of its step: `decays` gives the decay of a
    /// unit at this rate. None if no single op does.
    pub(crate) fn op(self, decays: impl Fn(f64) -> Decay, narrow: Narrow) -> Option<Op> {
        Some(match self {
            Optimizer::Adafactor { .. } => return None,
            Optimizer::AdamW { beta1, beta2, eps, decay } => {
                AdamW { beta1, beta2, eps, decay: decays(decay), coupled: false, narrow }.into()
            }
            Optimizer::Adam { beta1, beta2, eps, decay } => {
                AdamW { beta1, beta2, eps, decay: decays(decay), coupled: true, narrow }.into()
            }
            Optimizer::Sgd { momentum, nesterov, decay } => {
                Sgd { momentum, nesterov, decay: decays(decay), narrow }.into()
            }
            Optimizer::Lamb { beta1, beta2, eps, decay } => {
                LambDirection { beta1, beta2, eps, decay: decays(decay) }.into()
            }
            Optimizer::Lion { beta1, beta2, decay } => {
                Lion { beta1, beta2, decay: decays(decay), narrow }.into()
            }
        })
    }

    /// What the numbers of one of its states belong to.
    pub fn state_of(&self, state: usize) -> StateOf {
        match (self, state) {
            (Optimizer::Adafactor { .. }, 0) => StateOf::Rows,
            (Optimizer::Adafactor { .. }, _) => StateOf::Columns,
            _ => StateOf::Elements,
        }
    }

    /// The numbers that it keeps of parameters of these shapes: the name and the count of each state.
    pub fn kept<'p>(
        &self,
        shapes: impl Iterator<Item = &'p [usize]> + Clone,
    ) -> impl Iterator<Item = (&'static str, usize)> {
        let count = |state: usize| -> usize {
            shapes.clone().map(|s| self.state_of(state).shape(s).iter().product::<usize>()).sum()
        };
        let counts: Vec<usize> = (0..self.states()).map(count).collect();
        self.state_names().iter().copied().zip(counts)
    }

    /// How many state buffers it keeps besides a master copy.
    pub fn states(&self) -> usize {
        self.state_names().len()
    }

    /// What these buffers hold, by the names that PyTorch has for them.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW { .. } | Optimizer::Adam { .. } | Optimizer::Lamb { .. } => {
                &["exp_avg", "exp_avg_sq"]
            }
            Optimizer::Sgd { .. } => &["momentum_buffer"],
            Optimizer::Lion { .. } => &["exp_avg"],
            Optimizer::Adafactor { .. } => &["row_var", "col_var"],
        }
    }
}
