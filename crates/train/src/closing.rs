//! What is said when a run has ended.

use phalanx_config::{Config, Loaded, ModelKind};
use phalanx_error::{Error, Problem, counted};
use phalanx_inspect::trace::Written;

use crate::metrics::{Summary, Taken};

/// What a step takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PerStep {
    Tokens(u64),
    Images(u64),
}

impl PerStep {
    /// Of a configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let samples = config.train.tokens_per_step() as u64;
        match config.model.kind {
            ModelKind::Cnn => PerStep::Images(samples),
            _ => PerStep::Tokens(samples),
        }
    }

    /// So many steps of it.
    pub(crate) fn times(self, steps: u64, seconds: f64) -> Taken {
        // A run that only wrote its weights took none.
        let per_s = |all: u64| if steps > 0 { all as f64 / seconds } else { 0.0 };
        match self {
            PerStep::Tokens(each) => {
                let tokens = each * steps;
                Taken::Tokens { tokens, tokens_per_s: per_s(tokens) }
            }
            PerStep::Images(each) => {
                let images = each * steps;
                Taken::Images { images, images_per_s: per_s(images) }
            }
        }
    }
}

/// What a reader wants to know when a run has ended.
pub(crate) fn closing(summary: &Summary, time: &str) -> Vec<String> {
    let Summary { first_loss, last_loss, seconds, .. } = summary;
    let steps = counted(summary.steps, "step");
    let (what, rate) = match summary.taken {
        Taken::Tokens { tokens, tokens_per_s } => {
            (format!("{tokens} tokens"), format!("{tokens_per_s:.0} tok/s"))
        }
        Taken::Images { images, images_per_s } => {
            (format!("{images} images"), format!("{images_per_s:.0} img/s"))
        }
    };
    let mut lines = vec![String::new(), format!("{steps}, {what} in {seconds:.1} s ({rate})")];
    let held_out = match summary.val_loss {
        Some(loss) => {
            let right = summary.val_accuracy.map(|share| format!(", {:.2}% right", 100.0 * share));
            format!("; on held-out data {loss:.4}{}", right.unwrap_or_default())
        }
        None => String::new(),
    };
    lines.push(time.to_owned());
    lines.push(format!("loss {first_loss:.4} → {last_loss:.4}{held_out}"));
    if let Some(floor) = summary.entropy_floor {
        let reached = summary.val_loss.unwrap_or(*last_loss);
        lines.push(to_floor(*first_loss, reached, floor));
    }
    let files = "model.safetensors, loss.svg, metrics.jsonl, config.toml";
    lines.extend(summary.run_dir.as_ref().map(|dir| format!("in {dir}: {files}")));
    lines
}

/// Commands that a reader may want to run after a run, of a model that may have a form at Hugging Face.
pub(crate) fn next(summary: &Summary, exports: bool) -> Vec<String> {
    let Some(dir) = &summary.run_dir else { return Vec::new() };
    let mut lines = vec![format!("next: phalanx eval --model run:{dir}")];
    if exports {
        lines.push(format!("      phalanx export --run {dir} --out DIR  (transformers)"));
    }
    // Who trained on a file knows how.
    let own = "      phalanx train --set data.kind=text --set data.path=FILE  (your own text)";
    lines.extend(summary.entropy_floor.map(|_| own.to_owned()));
    lines
}

/// The error of a run that the user stopped, and whose last checkpoint may have failed.
pub(crate) fn stopped_early(loaded: &Loaded, summary: &Summary, unsaved: Option<Error>) -> Problem {
    let (taken, steps) = (summary.steps, loaded.config.train.steps);
    let dir = summary.run_dir.clone().unwrap_or_default();
    let problem = Problem::new(format!("stopped on request after step {taken} of {steps}"))
        .because(format!("its weights are in {dir}, as if the run had ended there"));
    match unsaved {
        Some(error) => error
            .problems()
            .iter()
            .fold(problem, |told, why| told.because(format!("no checkpoint: {}", why.message))),
        None if loaded.config.run.saves() => problem.because(format!(
            "next: phalanx train --resume {dir} goes on with it; or phalanx eval --model run:{dir}"
        )),
        None => problem.because(format!(
            "next: phalanx eval --model run:{dir}; or a new run from these weights, with a new \
             optimizer: --set model.from=run:{dir}"
        )),
    }
}

/// Where a trace is, and what to do with it.
pub(crate) fn where_traced(written: &Written) -> String {
    let Written { step, file, drawing, measured, replayed, predicted, transfers } = written;
    let (file, drawing) = (file.display(), drawing.display());
    format!(
        "trace of step {step}: {file} (open it in ui.perfetto.dev or chrome://tracing)\n\
         it took {measured:.2} ms, replayed from its scripts {replayed:.2} ms, predicted {predicted:.2} ms; \
         drawn: {drawing}{transfers}"
    )
}

/// How far a loss has come on its way down to the entropy of the source.
fn to_floor(first: f64, reached: f64, floor: f64) -> String {
    let way = 100.0 * (first - reached) / (first - floor);
    let way = match first > floor && way >= 0.5 {
        true => format!(", {:.0}% of the way done", way.min(100.0)),
        false => String::new(),
    };
    // A few batches may happen to be easier than the source is on average.
    let left = (reached - floor).max(0.0);
    format!("the source's entropy is {floor:.4}, and no model gets below it: {left:.4} to go{way}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_did_not_fall_has_come_no_negative_way() {
        let text = to_floor(5.0, 3.0, 1.0);
        assert!(text.ends_with("2.0000 to go, 50% of the way done"), "{text}");
        for reached in [5.0, 5.001, 7.0] {
            assert!(to_floor(5.0, reached, 1.0).ends_with("to go"), "{reached}");
        }
        assert!(to_floor(5.0, 0.99, 1.0).ends_with("0.0000 to go, 100% of the way done"));
        assert!(to_floor(0.5, 0.4, 1.0).ends_with("to go"));
    }

    /// Only the synthetic source has a known entropy.
    #[test]
    fn who_trained_on_a_file_is_not_told_to() {
        let summary = Summary { steps: 1, run_dir: Some("runs/a".into()), ..Summary::default() };
        let tells = |summary: &Summary| next(summary, true).concat().contains("your own text");
        assert!(!tells(&summary));
        assert!(tells(&Summary { entropy_floor: Some(1.0), ..summary }));
    }

    /// A network that sees images counts them, says how many were right, and is no language model.
    #[test]
    fn images_are_not_tokens() {
        let taken = PerStep::Images(64).times(2, 0.5);
        let run_dir = Some("runs/a".into());
        let (val_loss, val_accuracy) = (Some(0.25), Some(0.975));
        let summary = Summary {
            steps: 2,
            taken,
            seconds: 0.5,
            val_loss,
            val_accuracy,
            run_dir,
            ..Summary::default()
        };
        let text = [closing(&summary, ""), next(&summary, false)].concat().join("\n");
        assert!(text.contains("2 steps, 128 images in 0.5 s (256 img/s)"), "{text}");
        assert!(text.contains("on held-out data 0.2500, 97.50% right"), "{text}");
        assert!(!text.contains("tok") && !text.contains("transformers"), "{text}");
        assert!(summary.to_json().contains(r#""images":128,"images_per_s":256.0"#));
    }

    #[test]
    fn one_step_is_no_steps() {
        let summary = Summary { steps: 1, ..Summary::default() };
        let lines = closing(&summary, "");
        assert!(lines[1].starts_with("1 step, "), "{lines:?}");
    }
}
