//! The line that is printed for a step.

use std::time::Duration;

use phalanx_error::{bytes, short, three_digits};

use super::jsonl::{MoeLine, Step};

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
    /// Bytes that the process uses, or that are used of the GPU, and how many of them the plan takes.
    pub memory: Option<(u64, u64)>,
    /// The GPU, if programs run on one.
    pub gpu: Option<GpuPart>,
    /// Time until the last step.
    pub eta: Option<Duration>,
}

/// What a step line shows of a GPU.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct GpuPart {
    /// FLOPs per second as a share of the peak rate, if that is known.
    pub mfu: Option<f64>,
    /// The clock in MHz.
    pub clock_mhz: Option<u32>,
    /// The power in watts.
    pub watts: Option<f64>,
}

impl StepLine {
    /// The line as text; in colours if `colour`. In a terminal of `width` columns the least important
    /// parts are left out until it fits.
    pub fn text(&self, colour: bool, width: Option<usize>) -> String {
        let mut parts = self.parts();
        let length = |parts: &[LinePart]| -> usize {
            parts.iter().map(|part| part.gap.len() + part.text.chars().count()).sum()
        };
        while width.is_some_and(|width| length(&parts) > width) && parts.len() > 2 {
            let most = (0..parts.len()).max_by_key(|&at| parts[at].yields).unwrap_or(0);
            parts.remove(most);
        }
        let paint = Paint(colour);
        parts
            .iter()
            .map(|part| format!("{}{}", part.gap, paint.as_code(part.code, &part.text)))
            .collect()
    }

    /// Everything that the line can show, in order.
    fn parts(&self) -> Vec<LinePart> {
        let Step { step, loss, grad_norm, lr, tokens_per_s, .. } = self.step;
        let at = |step: usize| format!("step {step}/{}", self.steps);
        let part = |yields, code, text| LinePart { gap: "  ", text, code, yields };
        let mut parts = vec![
            LinePart { gap: "", ..part(0, "", format!("{:<1$}", at(step), at(self.steps).len())) },
            part(0, "1;32", format!("loss {loss:.4}")),
        ];
        parts.extend(score(self.loss_z, 5));
        let accuracy = self.step.accuracy.map(|share| format!("accuracy {:.1}%", 100.0 * share));
        parts.extend(accuracy.map(|text| part(1, "1;32", text)));
        if let Some(MoeLine { max_over_mean, dropped, room, repeats, gathered }) = self.step.moe {
            let lost = if dropped > 0.0 {
                format!(" dropped {:.1}%", 100.0 * dropped)
            } else {
                String::new()
            };
            let read = if gathered { " gathered" } else { "" };
            parts.push(part(3, "35", format!("moe max/mean {max_over_mean:.2}{lost}{read}")));
            if let Some(room) = room.filter(|_| repeats > 0) {
                parts.push(part(1, "1;31", format!("again, with room {room:.2}")));
            }
        }
        parts.push(part(4, "33", format!("gnorm {grad_norm:.2}")));
        parts.extend(score(self.grad_norm_z, 6));
        let rate = if lr == 0.0 { "lr 0".to_owned() } else { format!("lr {lr:.1e}") };
        parts.push(part(3, "", rate));
        let what = if self.step.accuracy.is_some() { "img/s" } else { "tok/s" };
        parts.push(part(2, "36", format!("{} {what}", short(tokens_per_s))));
        if let Some(scale) = self.step.loss_scale {
            parts.push(part(4, "", format!("scale {}", power(scale))));
        }
        if let Some(skipped) = self.step.skipped.filter(|skipped| *skipped > 0) {
            parts.push(part(1, "1;31", format!("{skipped} skipped")));
        }
        if let Some(rate) = self.flops_per_s {
            let rate = match self.gpu {
                Some(_) => format!("{} TFLOP/s", three_digits(rate / 1e12)),
                None => format!("{} GFLOP/s", three_digits(rate / 1e9)),
            };
            parts.push(part(8, "", rate));
        }
        if let Some(mfu) = self.gpu.and_then(|gpu| gpu.mfu) {
            parts.push(part(7, "", format!("{:.0}% MFU", 100.0 * mfu)));
        }
        if let Some(share) = self.gemm_rate_fraction {
            parts.push(part(7, "", format!("{:.0}% of GEMM rate", 100.0 * share)));
        }
        if let Some((used, planned)) = self.memory {
            let whose = if self.gpu.is_some() { "GPU" } else { "mem" };
            parts.push(part(9, "", format!("{whose} {} (plan {})", bytes(used), bytes(planned))));
        }
        let gpu = self.gpu.unwrap_or_default();
        parts.extend(gpu.clock_mhz.map(|clock| part(10, "", format!("{clock} MHz"))));
        parts.extend(gpu.watts.map(|watts| part(10, "", format!("{watts:.0} W"))));
        if let Some(eta) = self.eta {
            parts.push(part(1, "2", format!("eta {}", duration(eta))));
        }
        parts
    }
}

/// A part of a step line.
struct LinePart {
    /// What stands before it.
    gap: &'static str,
    text: String,
    /// Its colour code; empty for none.
    code: &'static str,
    /// Parts with larger numbers are left out first.
    yields: u8,
}

/// How unusual a number is, in standard deviations.
fn score(score: Option<f64>, yields: u8) -> Option<LinePart> {
    // Avoids "-0.0z".
    let z = score.map(|z| if z.abs() < 0.05 { 0.0 } else { z })?;
    // Beyond three standard deviations the score is highlighted.
    let code = if z.abs() >= 3.0 { "1;31" } else { "2" };
    Some(LinePart { gap: " ", text: format!("({z:+.1}z)"), code, yields })
}

/// Wraps text in terminal colour codes, if colours are wanted.
#[derive(Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn as_code(self, code: &str, text: &str) -> String {
        if self.0 && !code.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }
}

/// `2^16`, or a number that is no power of two as it is.
fn power(scale: f64) -> String {
    let power = scale.log2().round();
    if power.exp2() == scale { format!("2^{power}") } else { short(scale) }
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
                accuracy: None,
                moe: None,
                loss_scale: None,
                skipped: None,
            },
            steps: 5000,
            loss_z: Some(-0.31),
            grad_norm_z: Some(0.12),
            flops_per_s: Some(142.3e9),
            gemm_rate_fraction: Some(0.868),
            memory: Some((74_658_611, 66_060_288)),
            gpu: None,
            eta: Some(Duration::from_secs(72 * 60 + 20)),
        }
    }

    #[test]
    fn a_gpu_shows_its_share_memory_clock_and_power() {
        let gpu = GpuPart { mfu: Some(0.412), clock_mhz: Some(1755), watts: Some(688.4) };
        let line = StepLine {
            loss_z: None,
            grad_norm_z: None,
            flops_per_s: Some(407.3e12),
            gemm_rate_fraction: None,
            memory: Some((14_817_637_171, 13_743_895_347)),
            gpu: Some(gpu),
            eta: None,
            ..example()
        };
        assert_eq!(
            line.text(false, None),
            "step 120/5000   loss 3.2146  gnorm 0.91  lr 3.0e-4  12.4k tok/s  407 TFLOP/s  41% MFU  \
             GPU 13.8 GiB (plan 12.8 GiB)  1755 MHz  688 W"
        );
        let unknown = StepLine { gpu: Some(GpuPart::default()), ..line };
        assert!(unknown.text(false, None).ends_with("(plan 12.8 GiB)"));
    }

    #[test]
    fn the_full_line() {
        assert_eq!(
            example().text(false, None),
            "step 120/5000   loss 3.2146 (-0.3z)  gnorm 0.91 (+0.1z)  lr 3.0e-4  12.4k tok/s  142 GFLOP/s  \
             87% of GEMM rate  mem 71.2 MiB (plan 63.0 MiB)  eta 1h12m"
        );
    }

    #[test]
    fn numbers_stand_below_one_another_and_nothing_is_negative_zero() {
        let mut line = example();
        line.step.step = 7;
        line.step.lr = 0.0;
        line.loss_z = Some(-0.01);
        let text = line.text(false, None);
        assert!(text.starts_with("step 7/5000     loss 3.2146 (+0.0z)"), "{text}");
        assert!(text.contains("  lr 0  "), "{text}");
    }

    #[test]
    fn a_scaled_loss_tells_its_scale_and_what_was_skipped() {
        let mut line = example();
        line.step.loss_scale = Some(65536.0);
        line.step.skipped = Some(0);
        let text = line.text(false, None);
        assert!(text.contains("tok/s  scale 2^16  142 GFLOP/s"), "{text}");
        line.step.loss_scale = Some(96.0);
        line.step.skipped = Some(3);
        let text = line.text(false, None);
        assert!(text.contains("tok/s  scale 96  3 skipped  142 GFLOP/s"), "{text}");
    }

    #[test]
    fn experts_tell_their_load_and_a_step_that_was_taken_again() {
        let mut line = example();
        let (room, repeats, gathered) = (Some(1.25), 0, false);
        let mut moe = MoeLine { max_over_mean: 1.5, dropped: 0.0, room, repeats, gathered };
        line.step.moe = Some(moe);
        let text = line.text(false, None);
        assert!(text.contains("  moe max/mean 1.50  gnorm"), "{text}");
        line.step.moe = Some(MoeLine { gathered: true, ..moe });
        let text = line.text(false, None);
        assert!(text.contains("  moe max/mean 1.50 gathered  gnorm"), "{text}");
        (moe.room, moe.repeats) = (Some(2.5), 1);
        line.step.moe = Some(moe);
        let text = line.text(false, None);
        assert!(text.contains("  moe max/mean 1.50  again, with room 2.50  gnorm"), "{text}");
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
            line.text(false, None),
            "step 120/5000   loss 3.2146  gnorm 0.91  lr 3.0e-4  12.4k tok/s"
        );
    }

    /// Nothing is broken in the middle, and what matters most stays.
    #[test]
    fn a_narrow_terminal_shows_fewer_parts() {
        let full = example().text(false, None);
        assert_eq!(example().text(false, Some(full.len())), full);
        let text = example().text(false, Some(80));
        assert_eq!(
            text,
            "step 120/5000   loss 3.2146 (-0.3z)  gnorm 0.91  lr 3.0e-4  12.4k tok/s  eta 1h12m"
                .replace(" (-0.3z)", "")
        );
        for width in 10..200 {
            let text = example().text(false, Some(width));
            assert!(text.chars().count() <= width.max(28), "{width}: {text}");
            assert!(text.starts_with("step 120/5000   loss 3.2146"), "{text}");
            let whole = text.split("  ").all(|part| full.contains(part));
            assert!(whole, "{width}: {text}");
        }
    }

    #[test]
    fn colours_only_add_codes() {
        let coloured = example().text(true, None);
        assert!(coloured.contains("\x1b[1;32mloss 3.2146\x1b[0m"));
        let mut plain = String::new();
        for part in coloured.split('\x1b') {
            plain += part
                .split_once('m')
                .filter(|(code, _)| code.starts_with('['))
                .map_or(part, |(_, rest)| rest);
        }
        assert_eq!(plain, example().text(false, None));
    }

    #[test]
    fn times_have_their_two_largest_units() {
        let times = [0.4, 59.0, 59.6, 307.0, 4340.0, 273_600.0]
            .map(|s| duration(Duration::from_secs_f64(s)));
        assert_eq!(times, ["0s", "59s", "1m00s", "5m07s", "1h12m", "3d04h"]);
    }
}
