//! How unusual a value is among the last ones: a cheap alarm for loss spikes.

use std::collections::VecDeque;

/// How many past values are used.
const WINDOW: usize = 128;

/// With fewer values than this, a standard deviation is meaningless.
const FEWEST: usize = 8;

/// Standard deviations between each value and the mean of the window that ends with it.
#[derive(Clone, Debug, Default)]
pub struct ZScore {
    window: VecDeque<f64>,
}

impl ZScore {
    /// A score without any value yet.
    pub fn new() -> Self {
        ZScore::default()
    }

    /// Takes the next value and returns its score, or nothing while too few values were seen. A
    /// value that is not finite gets no score and is not stored, because it would spoil the next
    /// 127 scores.
    pub fn push(&mut self, value: f64) -> Option<f64> {
        if !value.is_finite() {
            return None;
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(value);
        if self.window.len() < FEWEST {
            return None;
        }
        // Two passes over 128 numbers cost nothing next to a step, and unlike running sums they
        // do not lose digits when the loss is large and steady.
        let count = self.window.len() as f64;
        let mean = self.window.iter().sum::<f64>() / count;
        let variance = self.window.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        if variance == 0.0 {
            return Some(0.0);
        }
        Some((value - mean) / variance.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For 1, 2, …, n the mean is (n+1)/2 and the variance (n²−1)/12.
    #[test]
    fn a_ramp_has_a_closed_form() {
        let mut score = ZScore::new();
        for n in 1..=500 {
            let n_in_window = n.min(WINDOW) as f64;
            let expected = (n_in_window - 1.0) / 2.0 / ((n_in_window.powi(2) - 1.0) / 12.0).sqrt();
            match score.push(1e6 + n as f64) {
                Some(z) => assert!((z - expected).abs() < 1e-9, "{n}: {z} and {expected}"),
                None => assert!(n < FEWEST),
            }
        }
    }

    #[test]
    fn a_spike_stands_out_and_leaves_after_the_window() {
        let mut score = ZScore::new();
        let mut steady =
            |n: usize| (0..n).filter_map(|i| score.push(if i % 2 == 0 { 1.0 } else { 1.1 })).last();
        assert!(steady(200).is_some_and(|z| z.abs() < 1.01));
        assert!(score.push(5.0).is_some_and(|z| z > 10.0));
        assert_eq!(score.push(f64::NAN), None);
        for _ in 0..WINDOW {
            score.push(1.0);
        }
        assert_eq!(score.push(1.0), Some(0.0));
    }
}
