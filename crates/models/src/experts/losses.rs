//! What keeps a router even and its logits small.

use phalanx_ir::{Builder, Tensor};

use super::{AuxScope, Experts, Places, Router};
use crate::architecture::port;

impl Experts {
    /// Adds the balancing loss, experts · Σ f·p: f is an expert's share of the choices and p its mean
    /// probability. It is 1 where both are even. Counts have no gradient, probabilities do.
    ///
    /// Switch counts the one choice of a token, GShard the first; otherwise all count.
    pub(super) fn balance<'b>(
        &self,
        b: &'b Builder,
        chances: Tensor<'b>,
        index: Tensor<'b>,
        places: Places,
    ) {
        if self.aux_loss == 0.0 {
            return;
        }
        let (index, choices) = match self.router {
            Router::GShard => (chances.top_k(1).1, 1),
            Router::Switch | Router::TopK { .. } | Router::Noisy { .. } => {
                (index, self.router.choices())
            }
        };
        let (batch, chance) = (chances.shape()[0], chances.sum(&[2]));
        let load = index.histogram(self.count, 1, chances.dtype());
        // A loss for each group of a sample, or one for all: of how many tokens, and how much of the
        // mean over samples it is.
        let (load, chance, tokens, weight) = match self.aux_scope {
            AuxScope::Group => (load, chance, places.tokens, 1.0 / places.groups as f64),
            AuxScope::MicroBatch => {
                let tokens = batch * places.groups * places.tokens;
                (load.sum(&[0, 1]), chance.sum(&[0, 1]), tokens, batch as f64)
            }
        };
        let shares = (tokens * choices) as f64 * tokens as f64;
        let scale = self.aux_loss * weight * self.count as f64 / shares;
        let total = (load * chance).sum_all().scale(scale);
        b.loss("aux", total * b.scalar(port::INV_SAMPLES));
    }

    /// Adds the z-loss: the mean over tokens of the squared log-sum-exp of their logits.
    pub(super) fn restrain<'b>(&self, b: &'b Builder, logits: Tensor<'b>, seq: usize) {
        if self.z_loss == 0.0 {
            return;
        }
        let shape = logits.shape();
        // −log p of the likeliest expert, plus its logit.
        let (most, index) = logits.top_k(1);
        let rows = [shape[0], shape[1], shape[2]];
        let total = logits.cross_entropy(index.reshape(rows)) + most.reshape(rows);
        let mean = total.square().sum_all().scale(self.z_loss / seq as f64);
        b.loss("z", mean * b.scalar(port::INV_SAMPLES));
    }
}
