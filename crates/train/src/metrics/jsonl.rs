//! Metrics for programs: one compact JSON object per line, numbers in full precision.

use phalanx_session::ExpertLoad;
use serde::{Deserialize, Serialize};

use crate::times::LedgerLine;

/// One training step. Its JSON has exactly these keys; `accuracy` of a classifier, `moe` of a model with
/// experts, the last two if losses are scaled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Step {
    /// The step, counted from 1.
    pub step: usize,
    /// Mean loss per valid token of the step's batch, before the update.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// The learning rate of the update.
    pub lr: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Wall time of the step in milliseconds.
    pub step_ms: f64,
    /// The share of the batch that was classified right, if that is what the model does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// How tokens were spread over experts, if the model has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeLine>,
    /// What the loss was multiplied by before the backward pass, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Steps so far that overflowed and so changed nothing, if losses are scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<u64>,
}

/// How the tokens of a step were spread over experts.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct MoeLine {
    /// The load of the busiest expert of any layer, as a multiple of an even share.
    pub max_over_mean: f64,
    /// The share of all choices that found no place.
    pub dropped: f64,
    /// Room for the rows of a rank's experts as a multiple of their even share, where it is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<f64>,
    /// How many times the step was taken again, because rows found no room.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub repeats: usize,
    /// Whether every rank read all experts, and tokens stayed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gathered: bool,
}

impl MoeLine {
    /// The load of a step that had this room.
    pub fn new(load: &ExpertLoad, room: Option<f64>, repeats: usize, gathered: bool) -> Self {
        let (max_over_mean, dropped) = (load.max_over_mean(), load.dropped);
        Self { max_over_mean, dropped, room, repeats, gathered }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(value: &bool) -> bool {
    !*value
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// A number; JSON has none for infinity and NaN, which a step that overflowed may have.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

impl Step {
    /// The step as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        json(self)
    }
}

/// One evaluation on held-out data. Its keys differ from those of a step, so that a reader who
/// looks for `step` or `loss` finds training steps only.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct EvaluationLine {
    /// The step after which it took place.
    pub after_step: usize,
    /// Mean loss per valid token.
    pub val_loss: f64,
    /// The share that was classified right, if that is what the model does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
}

impl EvaluationLine {
    /// The evaluation as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("eval", self)
    }
}

/// The first steps of a run on many ranks, taken once more on one. Its keys differ from those of a
/// step for the same reason.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct OneRank {
    /// How many steps.
    pub steps: usize,
    /// The largest difference between a step's two losses, relative to them.
    pub loss_max_rel: f64,
}

impl OneRank {
    /// The comparison as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("one_rank", self)
    }
}

/// A run that goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Resumed {
    /// Steps that were taken before.
    pub at_step: u64,
}

impl Resumed {
    /// The event as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("resumed", self)
    }
}

/// A step that was done twice, because it had begun before the gradients of the step before were found too large.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Repeated {
    /// The step.
    pub at_step: usize,
}

impl Repeated {
    /// The event as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("repeated", self)
    }
}

/// A step that was taken again, because rows of experts found no room.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct LackedRoom {
    /// The step.
    pub at_step: usize,
    /// Rows that found no room the first time, over all layers and micro-batches.
    pub lacking: u64,
    /// How many times it was taken again.
    pub repeats: usize,
    /// The room that it had in the end, as a multiple of the even share of a rank's experts.
    pub room: f64,
}

impl LackedRoom {
    /// The event as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("lacked_room", self)
    }
}

/// Ranks that were started again after one was lost.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RestartLine {
    /// How many times that happened so far.
    pub restarts: u64,
    /// The rank that was lost.
    pub rank: usize,
    /// How.
    pub cause: String,
    /// The phase of the step that it was in: F, B, reduce, update, save …; empty between steps.
    pub phase: String,
    /// Where the state comes from: memory, checkpoint or beginning.
    pub from: &'static str,
    /// Steps that count as taken.
    pub at_step: u64,
}

impl RestartLine {
    /// The event as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("restart", self)
    }
}

/// A checkpoint that is whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SavedLine {
    /// The step after which it was taken.
    pub after_step: u64,
    /// Its folder.
    pub path: String,
}

impl SavedLine {
    /// The event as a line of JSON, without the line break.
    pub fn to_json(&self) -> String {
        event("checkpoint", self)
    }
}

/// What a run went through, and how fast.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Taken {
    /// Text.
    Tokens {
        /// Tokens of all steps.
        tokens: u64,
        /// Tokens per second over all steps.
        tokens_per_s: f64,
    },
    /// Pictures.
    Images {
        /// Images of all steps.
        images: u64,
        /// Images per second over all steps.
        images_per_s: f64,
    },
}

impl Default for Taken {
    fn default() -> Self {
        Taken::Tokens { tokens: 0, tokens_per_s: 0.0 }
    }
}

/// Summary of the whole run, written once at its end. Unknown values are left out.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Summary {
    /// Steps taken.
    pub steps: usize,
    /// Loss of the first step.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Loss of the last evaluation on held-out data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Share of held-out samples that the last evaluation classified right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
    /// Entropy of the data's source: no model gets below it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_floor: Option<f64>,
    /// Trained parameters.
    pub parameters: u64,
    /// What all steps took.
    #[serde(flatten)]
    pub taken: Taken,
    /// Wall time of all steps in seconds.
    pub seconds: f64,
    /// Share of the step time that the matrix products of linear layers would take alone, at their
    /// measured rate; at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm_rate_fraction: Option<f64>,
    /// Memory that the plans of all ranks take together, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_bytes: Option<u64>,
    /// Peak memory of the process, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_rss_bytes: Option<u64>,
    /// The run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_dir: Option<String>,
    /// The measured timeline of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// Where the time went.
    pub ledger: LedgerLine,
}

impl Summary {
    /// `{"summary":{…}}`, without the line break.
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Whole<'a> {
            summary: &'a Summary,
        }
        json(&Whole { summary: self })
    }
}

impl LedgerLine {
    /// The ledger as JSON.
    pub fn to_json(&self) -> String {
        json(self)
    }
}

/// An event other than a step.
fn event(name: &'static str, facts: &impl Serialize) -> String {
    #[derive(Serialize)]
    struct Event<'a, T> {
        event: &'static str,
        #[serde(flatten)]
        facts: &'a T,
    }
    json(&Event { event: name, facts })
}

/// Plain structs of numbers and text always serialise; a number that is not finite becomes `null`,
/// because JSON has no such number.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| unreachable!("plain data: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_exactly_the_contracts_keys_and_full_precision() {
        let step = Step {
            step: 3,
            loss: 0.1 + 0.2,
            grad_norm: 1.0 / 3.0,
            lr: 3e-4,
            tokens_per_s: 12_345.678_9,
            step_ms: 1e-7,
            accuracy: None,
            moe: None,
            loss_scale: None,
            skipped: None,
        };
        assert_eq!(
            step.to_json(),
            r#"{"step":3,"loss":0.30000000000000004,"grad_norm":0.3333333333333333,"lr":0.0003,"tokens_per_s":12345.6789,"step_ms":1e-7}"#
        );
        let back: serde_json::Value = serde_json::from_str(&step.to_json()).unwrap();
        assert_eq!(back["loss"].as_f64().unwrap().to_bits(), step.loss.to_bits());
    }

    #[test]
    fn a_summary_and_an_evaluation_are_told_apart_from_steps() {
        let evaluation = EvaluationLine { after_step: 50, val_loss: 2.5, val_accuracy: None };
        assert_eq!(evaluation.to_json(), r#"{"event":"eval","after_step":50,"val_loss":2.5}"#);
        let compared = OneRank { steps: 20, loss_max_rel: 2.5e-7 };
        let lacked = LackedRoom { at_step: 3, lacking: 41, repeats: 1, room: 2.5 };
        assert_eq!(
            lacked.to_json(),
            r#"{"event":"lacked_room","at_step":3,"lacking":41,"repeats":1,"room":2.5}"#
        );
        assert_eq!(Repeated { at_step: 7 }.to_json(), r#"{"event":"repeated","at_step":7}"#);
        let text = r#"{"event":"one_rank","steps":20,"loss_max_rel":2.5e-7}"#;
        assert_eq!(compared.to_json(), text);
        let summary = Summary { steps: 2, val_loss: Some(1.5), ..Summary::default() };
        let text = summary.to_json();
        assert!(text.starts_with(r#"{"summary":{"steps":2,"#) && text.ends_with("}}"), "{text}");
        assert!(text.contains(r#""val_loss":1.5"#) && !text.contains("run_dir"), "{text}");
    }

    #[test]
    fn a_loss_that_is_no_number_is_still_json() {
        let step = Step {
            step: 1,
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            lr: 0.0,
            tokens_per_s: 1.0,
            step_ms: 1.0,
            accuracy: None,
            moe: None,
            loss_scale: Some(0.5),
            skipped: Some(2),
        };
        let text = step.to_json();
        assert!(text.contains(r#""loss":null,"grad_norm":null"#));
        assert!(text.ends_with(r#""loss_scale":0.5,"skipped":2}"#), "{text}");
        let back: Step = serde_json::from_str(&text).unwrap();
        assert!(back.loss.is_nan() && back.skipped == Some(2), "{back:?}");
    }
}
