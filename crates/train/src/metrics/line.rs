//! The line that is printed for a step.

use std::time::Duration;

use phalanx_error::{bytes, short, three_digits};

use super::jsonl::Step;

/// A step and everything else that its line shows. Unknown values are left out.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepLine {
    /// The step itself.
    pub step: Step,
    /// Steps of the whole run.
    pub steps: usize,
    /// How unusual the loss is.
    pub loss_z: Option<f64>,
    /// How unusual the gradient norm is.
    pub grad_norm_z: Option<f64>,
    /// Floating-point operations per second of a rank.
    pub flops_per_s: Option<f64>,
    /// Share of the step that the matrix products of its linear layers would take alone, at their
    /// measured rate.
    pub gemm_rate_fraction: Option<f64>,
    /// Bytes that the process uses, and how many of them its plan takes.
    pub memory: Option<(u64, u64)>,
    /// Time until the last step.
    pub eta: Option<Duration>,
}

impl StepLine {
    /// The line as text; in colours if `colour`.
    pub fn text(&self, colour: bool) -> String {
        let paint = Paint(colour);
        let Step { step, loss, grad_norm, lr, tokens_per_s, .. } = self.step;
        let at = |step: usize| format!("step {step}/{}", self.steps);
        let mut parts = vec![
            format!("{:<1$}", at(step), at(self.steps).len()),
            paint.as_code("1;32", &format!("loss {loss:.4}")) + &self.z(self.loss_z, paint),
            paint.as_code("33", &format!("gnorm {grad_norm:.2}"))
                + &self.z(self.grad_norm_z, paint),
            if lr == 0.0 { "lr 0".to_owned() } else { format!("lr {lr:.1e}") },
            paint.as_code("36", &format!("{} tok/s", short(tokens_per_s))),
        ];
        if let Some(rate) = self.flops_per_s {
            parts.push(format!("{} GFLOP/s", three_digits(rate / 1e9)));
        }
        if let Some(share) = self.gemm_rate_fraction {
            parts.push(format!("{:.0}% of GEMM rate", 100.0 * share));
        }
        if let Some((used, planned)) = self.memory {
            parts.push(format!("mem {} ({} planned)", bytes(used), bytes(planned)));
        }
        if let Some(eta) = self.eta {
            parts.push(paint.as_code("2", &format!("eta {}", duration(eta))));
        }
        parts.join("  ")
    }

    fn z(&self, score: Option<f64>, paint: Paint) -> String {
        let Some(z) = score else { return String::new() };
        // Avoids "-0.0z".
        let z = if z.abs() < 0.05 { 0.0 } else { z };
        // Beyond three standard deviations the score is highlighted.
        let code = if z.abs() >= 3.0 { "1;31" } else { "2" };
        format!(" {}", paint.as_code(code, &format!("({z:+.1}z)")))
    }
}

/// Wraps text in terminal colour codes, if colours are wanted.
#[derive(Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn as_code(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// `42s`, `5m07s`, `1h12m`, `3d04h`: the two largest units.
fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> StepLine {
        StepLine {
            step: Step {
                step: 120,
                loss: 3.21458,
                grad_norm: 0.9123,
                lr: 3e-4,
                tokens_per_s: 12_400.0,
                step_ms: 165.0,
            },
            steps: 5000,
            loss_z: Some(-0.31),
            grad_norm_z: Some(0.12),
            flops_per_s: Some(142.3e9),
            gemm_rate_fraction: Some(0.868),
            memory: Some((74_658_611, 66_060_288)),
            eta: Some(Duration::from_secs(72 * 60 + 20)),
        }
    }

    #[test]
    fn the_full_line() {
        assert_eq!(
            example().text(false),
            "step 120/5000   loss 3.2146 (-0.3z)  gnorm 0.91 (+0.1z)  lr 3.0e-4  12.4k tok/s  142 GFLOP/s  \
             87% of GEMM rate  mem 71.2 MiB (63.0 MiB planned)  eta 1h12m"
        );
    }

    #[test]
    fn numbers_stand_below_one_another_and_nothing_is_negative_zero() {
        let mut line = example();
        line.step.step = 7;
        line.step.lr = 0.0;
        line.loss_z = Some(-0.01);
        let text = line.text(false);
        assert!(text.starts_with("step 7/5000     loss 3.2146 (+0.0z)"), "{text}");
        assert!(text.contains("  lr 0  "), "{text}");
    }

    #[test]
    fn unknown_parts_are_left_out() {
        let line = StepLine {
            loss_z: None,
            grad_norm_z: None,
            flops_per_s: None,
            gemm_rate_fraction: None,
            memory: None,
            eta: None,
            ..example()
        };
        assert_eq!(
            line.text(false),
            "step 120/5000   loss 3.2146  gnorm 0.91  lr 3.0e-4  12.4k tok/s"
        );
    }

    #[test]
    fn colours_only_add_codes() {
        let coloured = example().text(true);
        assert!(coloured.contains("\x1b[1;32mloss 3.2146\x1b[0m"));
        let mut plain = String::new();
        for part in coloured.split('\x1b') {
            plain += part
                .split_once('m')
                .filter(|(code, _)| code.starts_with('['))
                .map_or(part, |(_, rest)| rest);
        }
        assert_eq!(plain, example().text(false));
    }

    #[test]
    fn times_have_their_two_largest_units() {
        let times = [0.4, 59.0, 59.6, 307.0, 4340.0, 273_600.0]
            .map(|s| duration(Duration::from_secs_f64(s)));
        assert_eq!(times, ["0s", "59s", "1m00s", "5m07s", "1h12m", "3d04h"]);
    }
}
