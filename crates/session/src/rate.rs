//! The learning rate of each step, as a pure function of the step.
//!
//! Steps count from 1. During a warm-up of w steps, step s has the rate `lr · s/w`: step 1 already
//! moves (`lr · 1/w`) and step w has the full rate. After it, with progress
//! `p = (s − 1 − w) / (steps − w)` running from 0 up to just below 1,
//!
//! - constant stays at `lr`,
//! - linear has `lr · (r + (1 − r)(1 − p))`,
//! - cosine has `lr · (r + (1 − r)(1 + cos πp)/2)`, where r is `optim.min_lr_ratio`.
//!
//! After the warm-up these are the values of the `transformers` schedules and, without a warm-up, of
//! torch's `CosineAnnealingLR`. The warm-up differs in one deliberate way: `transformers` gives its
//! first step the rate 0, and so wastes it; here every rate of the warm-up comes one step earlier.

use std::f64::consts::PI;

use phalanx_config::{Config, LrSchedule};

/// The learning rate as a function of the step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LearningRate {
    peak: f64,
    shape: LrSchedule,
    warmup: usize,
    steps: usize,
    min_ratio: f64,
}

impl LearningRate {
    /// The schedule that a configuration asks for.
    pub fn new(config: &Config) -> Self {
        LearningRate {
            peak: config.optim.lr.get(),
            shape: config.optim.schedule,
            warmup: config.optim.warmup_steps,
            steps: config.train.steps.get(),
            min_ratio: config.optim.min_lr_ratio.get(),
        }
    }

    /// The rate of `step`, counted from 1. Steps beyond the last have the rate the curve ends at.
    pub fn at(&self, step: usize) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let (past, length) = (step - 1 - self.warmup, self.steps.saturating_sub(self.warmup));
        let progress = (past as f64 / length.max(1) as f64).min(1.0);
        let height = match self.shape {
            LrSchedule::Constant => return self.peak,
            LrSchedule::Linear => 1.0 - progress,
            LrSchedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        };
        self.peak * (self.min_ratio + (1.0 - self.min_ratio) * height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(shape: LrSchedule, warmup: usize, steps: usize, min_ratio: f64) -> Vec<f64> {
        let peak = 0.5;
        let rate = LearningRate { peak, shape, warmup, steps, min_ratio };
        (1..=steps).map(|step| rate.at(step)).collect()
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() < 1e-15, "step {}: {a} and {b}", i + 1);
        }
    }

    /// Printed by transformers 5.22 (lr 0.5, 4 warm-up steps of 12); the warm-up is one step ahead.
    #[test]
    fn decay_equals_transformers_step_for_step() {
        let warm = [0.125, 0.25, 0.375, 0.5];
        let cosine_to_a_tenth = [
            0.5,
            0.48287289481503953,
            0.4340990257669732,
            0.3611037722821452,
            0.275,
            0.1888962277178548,
            0.11590097423302682,
            0.06712710518496048,
        ];
        let linear = [0.5, 0.4375, 0.375, 0.3125, 0.25, 0.1875, 0.125, 0.0625];
        close(&rates(LrSchedule::Cosine, 4, 12, 0.1), &[&warm[..], &cosine_to_a_tenth].concat());
        close(&rates(LrSchedule::Linear, 4, 12, 0.0), &[&warm[..], &linear].concat());
        // Printed by torch's CosineAnnealingLR(T_max = 8, eta_min = 0.05).
        close(&rates(LrSchedule::Cosine, 0, 8, 0.1), &cosine_to_a_tenth);
    }

    #[test]
    fn linear_loses_the_same_amount_every_step() {
        let all = rates(LrSchedule::Linear, 0, 10, 0.2);
        for pair in all.windows(2) {
            assert!((pair[0] - pair[1] - 0.5 * 0.8 / 10.0).abs() < 1e-15);
        }
        assert_eq!(all[0], 0.5);
    }

    #[test]
    fn constant_only_warms_up() {
        close(&rates(LrSchedule::Constant, 2, 4, 0.0), &[0.25, 0.5, 0.5, 0.5]);
        close(&rates(LrSchedule::Constant, 0, 2, 0.0), &[0.5, 0.5]);
        close(&rates(LrSchedule::Cosine, 3, 3, 0.0), &[0.5 / 3.0, 1.0 / 3.0, 0.5]);
    }

    #[test]
    fn beyond_the_last_step_the_rate_stays_at_its_end() {
        let rate = LearningRate {
            peak: 1.0,
            shape: LrSchedule::Cosine,
            warmup: 0,
            steps: 5,
            min_ratio: 0.25,
        };
        assert_eq!(rate.at(6), 0.25);
        assert_eq!(rate.at(1000), 0.25);
    }
}
