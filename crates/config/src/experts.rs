//! Experts in place of a dense feed-forward part: their kinds, and rules between their keys.

use super::Config;
use super::model::{ModelConfig, ModelKind, assignments, default_top_k};
use super::setting::{Setting, choice};
use super::values::Values;
use phalanx_error::Problem;

choice! {
    /// How a token chooses its experts.
    pub enum RouterKind {
        /// The likeliest one, times its probability (Switch).
        Switch = "switch",
        /// Two, the second at random by its weight (GShard).
        GShard = "gshard" later,
        /// The likeliest ones, with gates that add up to one (Mixtral).
        TopK = "top-k",
        /// The likeliest ones after noise is added.
        Noisy = "noisy" later,
        /// Each expert chooses tokens.
        ExpertChoice = "expert-choice" later,
    }
}

choice! {
    /// The tokens that one balancing loss is taken over.
    pub enum AuxScopeKind {
        /// A group.
        Group = "group",
        /// All tokens of a micro-batch, on all ranks.
        MicroBatch = "microbatch",
    }
}

/// Keys that say something about experts, and nothing where there are none; but for those that follow from
/// other keys, which a run's folder holds even where they say nothing.
const OF_EXPERTS: [&str; 9] = [
    "model.router",
    "model.top_k",
    "model.capacity",
    "model.moe_every",
    "model.shared_experts",
    "model.residual_experts",
    "model.aux_loss",
    "model.aux_scope",
    "model.z_loss",
];

impl ModelConfig {
    /// Whether some layer has experts.
    pub fn has_experts(&self) -> bool {
        self.experts > 0
    }

    pub(crate) fn check_experts(&self, values: &mut Values) {
        if !self.has_experts() {
            return self.check_no_experts(values);
        }
        let (experts, kind) = (self.experts, self.kind);
        values.rule(&["model.experts", "model.kind"], kind == ModelKind::Llama, || {
            Problem::new(format!(
                "model.experts = {experts} does not work with model.kind = {kind}"
            ))
            .because("experts take the place of the SwiGLU of llama's blocks")
            .fix("model.kind = \"llama\", or model.experts = 0")
        });
        self.check_router(values);
        let (k, every, layers) = (self.top_k.get(), self.moe_every.get(), self.layers.get());
        values.rule(&["model.top_k", "model.experts"], k <= experts, || {
            Problem::new(format!("model.top_k = {k} is more than model.experts = {experts}"))
                .because("a token takes each expert at most once")
                .nearest(format!("model.top_k = {experts}, or model.experts = {k}"))
        });
        values.rule(&["model.moe_every", "model.layers"], every <= layers, || {
            Problem::new(format!(
                "model.moe_every = {every} is more than model.layers = {layers}: no layer has experts"
            ))
            .because("layer i, counted from 1, has experts if moe_every divides i")
            .nearest(format!("model.moe_every = {layers}, or model.experts = 0"))
        });
    }

    fn check_router(&self, values: &mut Values) {
        let (router, k) = (self.router, self.top_k.get());
        let name = router.name();
        let built = matches!(router, RouterKind::Switch | RouterKind::TopK);
        values.rule(&["model.router"], router != RouterKind::ExpertChoice, || {
            Problem::new(format!("model.router = \"{name}\" does not work in a causal model"))
                .because("an expert that picks among all tokens of a sequence looks ahead")
                .fix("model.router = \"top-k\" or \"switch\"")
        });
        let known = built || router == RouterKind::ExpertChoice;
        values.rule(&["model.router"], known, || {
            Problem::new(format!("model.router = \"{name}\" is not built yet"))
                .nearest("model.router = \"top-k\" or \"switch\"")
        });
        let fits = k == 1 || router != RouterKind::Switch;
        values.rule(&["model.top_k", "model.router"], fits, || {
            Problem::new(format!("model.top_k = {k} does not work with model.router = switch"))
                .because("switch sends each token to one expert")
                .fix("model.top_k = 1, or model.router = \"top-k\"")
        });
    }

    /// A value that says something about experts is a mistake where there are none.
    fn check_no_experts(&self, values: &mut Values) {
        let written = self.write();
        for key in Self::KEYS.iter().filter(|key| OF_EXPERTS.contains(&key.name)) {
            let value = written.iter().find(|(own, _)| *own == key.name).map(|(_, value)| value);
            let usual = match key.name {
                "model.top_k" => default_top_k(self.router).write(),
                _ => key.usual(),
            };
            let Some(value) = value.filter(|value| **value != usual) else { continue };
            values.rule(&[key.name, "model.experts"], false, || {
                Problem::new(format!("{} = {value} has no effect with model.experts = 0", key.name))
                    .fix(format!("model.experts = 8, or {} = {usual}", key.name))
            });
        }
    }
}

impl Config {
    /// Groups of tokens are parts of sequences.
    pub(crate) fn check_groups(&self, values: &mut Values) {
        let (group, seq) = (self.model.group.get(), self.train.seq_len.get());
        let nests = seq.is_multiple_of(group) || !self.model.has_experts();
        values.rule(&["model.group", "train.seq_len"], nests, || {
            let near: Vec<usize> = [
                (1..group.min(seq)).rev().find(|n| seq.is_multiple_of(*n)),
                (group + 1..=seq).find(|n| seq.is_multiple_of(*n)),
                (group > seq).then_some(seq),
            ]
            .into_iter()
            .flatten()
            .collect();
            Problem::new(format!("model.group = {group} does not divide train.seq_len = {seq}"))
                .because(
                    "tokens of a group share the places of experts; a sequence has whole groups",
                )
                .nearest(assignments("model.group", &near))
        });
    }
}
