//! A fixed preference for the first experts, so that tests and measurements can ask for uneven load (Zipf's law: expert i
//! is chosen as if it were i to the power of s as rare as the first).
//!
//! It is no parameter: nothing trains it away. It costs a sum of a few numbers per token.

use phalanx_ir::ops::Fill;
use phalanx_ir::{Builder, Tensor};

use super::Experts;

impl Experts {
    /// Logits with −s·ln i added for expert i, counted from 1; probabilities are then divided by i to the power of s.
    pub(super) fn skewed<'b>(&self, b: &'b Builder, logits: Tensor<'b>) -> Tensor<'b> {
        if self.bias_zipf == 0.0 {
            return logits;
        }
        let dtype = logits.dtype();
        let one = |expert: usize| {
            let value = -self.bias_zipf * ((expert + 1) as f64).ln();
            b.apply(Fill { dtype, shape: vec![1], value }, &[])
        };
        let all: Vec<Tensor<'b>> = (0..self.count).map(one).collect();
        logits + b.concat(&all, 0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_ir::DType;
    use phalanx_reference::{RefTensor, run};

    use super::*;
    use crate::experts::Router;

    /// Of equal logits: 1, 1/2 and 1/3, divided by their sum.
    #[test]
    fn probabilities_follow_zipf() {
        let b = Builder::new("skew", DType::F64);
        let logits = b.boundary("logits", [2, 3]);
        let experts = Experts { bias_zipf: 1.0, ..Experts::new(3, 1, Router::Switch) };
        b.probe("chances", experts.skewed(&b, logits).softmax());
        let zeros = RefTensor::from_f64(&[2, 3], &[0.0; 6]).unwrap();
        let found = run(&b.finish().unwrap(), &[("logits", zeros)]).unwrap();
        for row in found[0].1.values().chunks(3) {
            for (chance, expected) in row.iter().zip([6.0, 3.0, 2.0]) {
                assert!((chance - expected / 11.0).abs() < 1e-15, "{row:?}");
            }
        }
    }
}
