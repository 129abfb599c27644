//! The results of steps beside those of one rank.
//!
//! In f16 a loss is scaled, and a step whose gradients overflow changes nothing. What is decided then must be the same
//! in every layout, bit by bit: the scale of each step, whether it was applied, and how many were not. The norm of a
//! step that both skip is infinite in both, and its gradients are compared in the first step that is applied; until
//! then the weights are those of the start.

use phalanx_session::StepResult;

use super::{Difference, larger, relative};

#[derive(Default)]
pub(super) struct Comparison {
    /// The results of one rank.
    pub(super) expected: Vec<StepResult>,
    pub(super) first_loss: f64,
    /// Of the first step that was applied.
    pub(super) first_grad_norm: f64,
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    /// Of the first step that was applied.
    pub(super) gradients: Option<Difference>,
    pub(super) params: Difference,
    /// Whether a step was applied, on one rank and in the layout.
    pub(super) applied: bool,
    /// Steps whose scale, or what became of it, is not that of one rank.
    pub(super) scale_flips: usize,
    steps: usize,
}

impl Comparison {
    pub(super) fn step(&mut self, b: StepResult) {
        let a = self.expected[self.steps];
        let skips = |result: &StepResult| result.scaling.is_some_and(|scale| scale.overflowed);
        self.scale_flips += usize::from(a.scaling != b.scaling);
        let loss = relative(a.loss, b.loss);
        let norm = match skips(&a) && skips(&b) {
            true => 0.0,
            false => relative(a.grad_norm, b.grad_norm),
        };
        if self.steps == 0 {
            self.first_loss = loss;
        }
        if !self.applied && !skips(&a) && !skips(&b) {
            (self.applied, self.first_grad_norm) = (true, norm);
        }
        self.steps += 1;
        self.loss = larger(self.loss, loss);
        self.grad_norm = larger(self.grad_norm, norm);
    }
}

#[cfg(test)]
mod tests {
    use phalanx_session::StepScale;

    use super::*;

    fn result(grad_norm: f64, scaling: Option<StepScale>) -> StepResult {
        StepResult { loss: 1.0, grad_norm, scaling, repeated: false, room: Default::default() }
    }

    fn scale(loss_scale: f64, overflowed: bool, skipped: u64) -> Option<StepScale> {
        Some(StepScale { loss_scale, overflowed, skipped })
    }

    fn compared(pairs: &[(StepResult, StepResult)]) -> Comparison {
        let expected = pairs.iter().map(|(a, _)| *a).collect();
        let mut found = Comparison { expected, ..Comparison::default() };
        pairs.iter().for_each(|(_, b)| found.step(*b));
        found
    }

    /// Steps that both skip have no norm; the first one that both apply is the first to compare.
    #[test]
    fn steps_that_overflow_alike_agree() {
        let skipped = result(f64::INFINITY, scale(8.0, true, 1));
        let (a, b) = (result(2.0, scale(4.0, false, 1)), result(2.5, scale(4.0, false, 1)));
        let found = compared(&[(skipped, skipped)]);
        assert!(!found.applied && found.grad_norm == 0.0 && found.scale_flips == 0);
        let found = compared(&[(skipped, skipped), (a, b)]);
        assert!(found.applied && found.scale_flips == 0);
        assert!((found.first_grad_norm - 0.2).abs() < 1e-12);
    }

    #[test]
    fn another_scale_or_decision_is_a_flip() {
        let applied = result(2.0, scale(8.0, false, 0));
        let skipped = result(f64::INFINITY, scale(8.0, true, 1));
        let found = compared(&[(applied, skipped), (applied, result(2.0, scale(16.0, false, 0)))]);
        assert_eq!(found.scale_flips, 2);
        assert!(found.grad_norm.is_infinite());
    }

    #[test]
    fn without_a_scale_every_step_is_applied() {
        let one = result(2.0, None);
        let found = compared(&[(one, one)]);
        assert!(found.applied && found.scale_flips == 0 && found.grad_norm == 0.0);
        assert!(compared(&[(one, result(f64::NAN, None))]).grad_norm.is_infinite());
    }
}
