//! The experts that a configuration describes.

use phalanx_config::{
    AuxScopeKind, CapacityKind, ExchangeKind, ModelConfig, ParallelConfig, PlacementKind,
    PolicyKind, RouterKind, TpKind,
};
use phalanx_models::hf::{LlamaSpec, MixtralSpec, ModelSpec};
use phalanx_models::{AuxScope, Capacity, Experts, LateExperts, Router};

/// The specification of a model that may have experts.
pub(super) fn spec(config: &ModelConfig, base: LlamaSpec) -> ModelSpec {
    if !config.has_experts() {
        return ModelSpec::Llama(base);
    }
    ModelSpec::Mixtral(MixtralSpec {
        base,
        experts: config.experts,
        top_k: config.top_k.get(),
        expert_ffn: config.expert_ffn.get(),
        every: config.moe_every.get(),
        shared: config.shared_experts,
        residual: config.residual_experts,
        normalised: config.router != RouterKind::Switch,
        noisy: config.router == RouterKind::Noisy,
        late: (config.late_experts > 0).then_some(LateExperts {
            layers: config.late_layers.get(),
            count: config.late_experts,
        }),
    })
}

/// The experts of a specification, with the settings that it does not have.
pub(super) fn of(config: &ModelConfig, parallel: &ParallelConfig, spec: &MixtralSpec) -> Experts {
    Experts {
        count: spec.experts,
        router: match spec.normalised {
            true if config.router == RouterKind::GShard => Router::GShard,
            true if spec.noisy => Router::Noisy { k: spec.top_k },
            true => Router::TopK { k: spec.top_k },
            false => Router::Switch,
        },
        capacity: places(config.capacity),
        // Where experts come to the tokens, every rank has all of them while it multiplies.
        parts: match parallel.expert_exchange {
            ExchangeKind::Weights => 1,
            _ => parallel.ep.get(),
        },
        dealt: match parallel.expert_placement {
            PlacementKind::Block => 1,
            PlacementKind::RoundRobin => parallel.ep.get(),
        },
        may_stay: parallel.expert_policy == PolicyKind::Tutel,
        slack: parallel.slack(),
        // Where other axes divide samples too, a region of several would not fit on a rank.
        regions: (parallel.tp_kind == TpKind::OneD).then_some(parallel.dp.get()),
        group: Some(config.group.get()),
        ffn: spec.expert_ffn,
        every: spec.every,
        shared: spec.shared,
        residual: spec.residual,
        aux_loss: config.aux_loss.get(),
        aux_scope: match config.aux_scope {
            AuxScopeKind::Group => AuxScope::Group,
            AuxScopeKind::MicroBatch => AuxScope::MicroBatch,
        },
        z_loss: config.z_loss.get(),
        jitter: config.jitter.get(),
        bias_zipf: config.router_bias_zipf.get(),
        eval_capacity: Some(places(config.eval_capacity)),
        dropout: config.expert_dropout.get(),
        late: spec.late,
        init_scale: Some(config.expert_init.get()).filter(|scale| *scale > 0.0),
    }
}

fn places(capacity: CapacityKind) -> Capacity {
    match capacity {
        CapacityKind::Factor(factor) => Capacity::Factor(factor.get()),
        CapacityKind::Dropless => Capacity::Dropless,
        CapacityKind::Auto => Capacity::Fitting,
    }
}

/// The keys of experts, with the values of a model folder.
pub(super) fn shape_keys(spec: &ModelSpec) -> Vec<(&'static str, String)> {
    match spec {
        ModelSpec::Gpt(_) | ModelSpec::T5(_) => vec![],
        ModelSpec::Llama(_) => vec![("model.experts", "0".to_owned())],
        ModelSpec::Mixtral(s) => {
            let router = match (s.normalised, s.noisy) {
                (false, _) => "switch",
                (true, true) => "noisy",
                (true, false) => "top-k",
            };
            vec![
                ("model.experts", s.experts.to_string()),
                ("model.router", router.to_owned()),
                ("model.top_k", s.top_k.to_string()),
                ("model.expert_ffn", s.expert_ffn.to_string()),
                ("model.moe_every", s.every.to_string()),
                ("model.shared_experts", s.shared.to_string()),
                ("model.residual_experts", s.residual.to_string()),
                ("model.late_experts", s.late.map_or(0, |late| late.count).to_string()),
                ("model.late_layers", s.late.map_or(2, |late| late.layers).to_string()),
            ]
        }
    }
}
