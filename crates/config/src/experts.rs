//! Experts in place of a dense feed-forward part: their kinds, and rules between their keys.

use super::Config;
use super::fits::near;
use super::model::{ModelConfig, ModelKind, assignments, default_init, default_top_k};
use super::parallel::ParallelConfig;
use super::run::DeviceKind;
use super::setting::{NonNegative, Positive, Setting, choice, quoted};
use super::values::Values;
use phalanx_error::Problem;
use phalanx_spmd::strategies::two_factors;
use toml_edit::Value;

choice! {
    /// How a token chooses its experts.
    pub enum RouterKind {
        /// The likeliest one, times its probability (Switch).
        Switch = "switch",
        /// Two, the second at random by its weight (GShard).
        GShard = "gshard",
        /// The likeliest ones, with gates that add up to one (Mixtral).
        TopK = "top-k",
        /// The likeliest ones after noise is added in training, of a size that is learned (Shazeer).
        Noisy = "noisy",
        /// Each expert chooses tokens, which a causal model cannot do.
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

choice! {
    /// How tokens meet the experts of other ranks.
    pub enum ExchangeKind {
        /// What moves less.
        Auto = "auto",
        /// Rows travel to their experts and back.
        AllToAll = "all-to-all",
        /// Every rank gathers all tokens; results are summed and scattered.
        AllGather = "all-gather",
        /// All-to-all in two steps, within nodes and between them.
        Hierarchical = "hierarchical",
        /// All-to-all of a part of each row where tensor parallelism has whole ones.
        Coordinated = "coordinated",
        /// Tokens stay: every rank gathers the weights of all experts.
        Weights = "weights",
    }
}

choice! {
    /// Which experts the ranks of ep have.
    pub enum PlacementKind {
        /// Neighbours: of 8 experts on 4 ranks, the first one has 0 and 1.
        Block = "block",
        /// Distributed one by one: of 8 experts on 4 ranks, the first one has 0 and 4.
        RoundRobin = "round-robin",
    }
}

choice! {
    /// Which calls between ranks go first.
    pub enum CommPriority {
        /// Those that were started first.
        None = "none",
        /// Exchanges of tokens, before reductions of gradients (Lina).
        Lina = "lina",
    }
}

/// How many places an expert has.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CapacityKind {
    /// So many times its even share of the choices.
    Factor(Positive),
    /// Nobody is dropped, and rows are packed by expert.
    Dropless,
    /// As many as a step needs, so that nobody is dropped (Tutel).
    Auto,
}

impl Setting for CapacityKind {
    fn expects() -> String {
        "a finite number of at least 0, or \"auto\"".into()
    }
    fn read(value: &Value) -> Option<Self> {
        match value.as_str() {
            Some("auto") => Some(Self::Auto),
            Some(_) => None,
            None => {
                let factor = NonNegative::read(value)?;
                Some(Positive::new(factor.get()).map_or(Self::Dropless, Self::Factor))
            }
        }
    }
    fn write(&self) -> String {
        match self {
            Self::Factor(factor) => factor.write(),
            Self::Dropless => "0.0".into(),
            Self::Auto => quoted("auto"),
        }
    }
}

/// Keys that say something about experts, and nothing where there are none; but for those that follow from
/// other keys, which a run's folder holds even where they say nothing.
const OF_EXPERTS: [&str; 16] = [
    "model.router",
    "model.top_k",
    "model.capacity",
    "model.eval_capacity",
    "model.moe_every",
    "model.late_experts",
    "model.late_layers",
    "model.shared_experts",
    "model.residual_experts",
    "model.aux_loss",
    "model.aux_scope",
    "model.z_loss",
    "model.jitter",
    "model.router_bias_zipf",
    "model.expert_dropout",
    "model.expert_init",
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
        let late = self.late_experts;
        values.rule(&["model.top_k", "model.late_experts"], late == 0 || k <= late, || {
            Problem::new(format!("model.top_k = {k} is more than model.late_experts = {late}"))
                .because("a token takes each expert at most once")
                .nearest(format!("model.top_k = {late}, or model.late_experts = {k}"))
        });
        let (drops, capacity) = (self.expert_dropout.get(), self.capacity);
        let numbered = matches!(capacity, CapacityKind::Factor(_));
        values.rule(&["model.expert_dropout", "model.capacity"], drops == 0.0 || numbered, || {
            let why = match capacity {
                CapacityKind::Auto => {
                    "numbers inside experts are drawn by place, and places change from step to step"
                }
                _ => "where nobody is dropped, a row's place says nothing of its sample",
            };
            Problem::new(format!(
                "model.expert_dropout = {drops} does not work with model.capacity = {}",
                capacity.write()
            ))
            .because(why)
            .fix("model.capacity = 1.25, or model.expert_dropout = 0")
        });
        let (own, usual) = (self.late_layers.get(), 2);
        values.rule(&["model.late_layers", "model.late_experts"], late > 0 || own == usual, || {
            Problem::new(format!(
                "model.late_layers = {own} has no effect with model.late_experts = 0"
            ))
            .because("all layers with experts have as many")
            .fix(format!("model.late_experts = {}, or leave model.late_layers out", 2 * experts))
        });
        let all = layers / every.max(1);
        values.rule(&["model.late_layers", "model.layers"], late == 0 || own <= all, || {
            Problem::new(format!(
                "model.late_layers = {own}, but {all} of model.layers = {layers} have experts"
            ))
            .nearest(format!("model.late_layers = {all}"))
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
        values.rule(&["model.router"], router != RouterKind::ExpertChoice, || {
            Problem::new(format!("model.router = \"{name}\" does not work in a causal model"))
                .because("an expert that picks among all tokens of a sequence looks ahead")
                .fix("model.router = \"top-k\" or \"switch\"")
        });
        let two = k == 2 || router != RouterKind::GShard;
        values.rule(&["model.top_k", "model.router"], two, || {
            Problem::new(format!("model.top_k = {k} does not work with model.router = gshard"))
                .because("gshard sends each token to one expert and, at random, to a second")
                .fix("model.top_k = 2, or model.router = \"top-k\"")
        });
        let jitter = self.jitter.get();
        values.rule(&["model.jitter"], jitter < 1.0, || {
            Problem::new(format!("model.jitter = {jitter} is not below 1"))
                .because("numbers are multiplied by 1 − jitter at least, and must keep their sign")
                .nearest("model.jitter = 0.01")
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
                "model.eval_capacity" => self.capacity.write(),
                "model.expert_init" => default_init(self.router).write(),
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

impl ParallelConfig {
    /// Rejects exchanges that would have no effect, or that ranks cannot do.
    pub(crate) fn check_exchange(&self, values: &mut Values) {
        let (kind, name, ep) = (self.expert_exchange, self.expert_exchange.name(), self.ep.get());
        let keys = ["parallel.expert_exchange", "parallel.ep"];
        values.rule(&keys, kind == ExchangeKind::Auto || ep > 1, || {
            Problem::new(format!(
                "parallel.expert_exchange = \"{name}\" has no effect with parallel.ep = 1"
            ))
            .because("every rank has all experts")
            .fix("parallel.ep = 2, or leave parallel.expert_exchange out")
        });
        let dealt = self.expert_placement == PlacementKind::RoundRobin;
        values.rule(&["parallel.expert_placement", "parallel.ep"], !dealt || ep > 1, || {
            Problem::new(
                "parallel.expert_placement = \"round-robin\" has no effect with parallel.ep = 1",
            )
            .because("every rank has all experts")
            .fix("parallel.ep = 2, or leave parallel.expert_placement out")
        });
        let steps = kind != ExchangeKind::Hierarchical || ep == 1 || two_factors(ep).is_some();
        values.rule(&keys, steps, || {
            let degrees = near(ep, |n| two_factors(n).is_some());
            Problem::new(format!(
                "parallel.expert_exchange = \"{name}\" does not work with parallel.ep = {ep}"
            ))
            .because("tokens travel among neighbours, then between groups of them: two numbers above 1 whose product is ep")
            .nearest(assignments("parallel.ep", &degrees))
        });
        let parts = kind != ExchangeKind::Coordinated || self.tp.get() > 1;
        values.rule(&["parallel.expert_exchange", "parallel.tp"], parts, || {
            Problem::new(format!(
                "parallel.expert_exchange = \"{name}\" has no effect with parallel.tp = 1"
            ))
            .because("ranks of tp, which have the same rows, send a part of each")
            .fix("parallel.tp = 2, or parallel.expert_exchange = \"all-to-all\"")
        });
    }
}

/// What the room for rows is a multiple of the even share by, where nobody says.
const USUAL_SLACK: f64 = 1.25;

impl ParallelConfig {
    /// The first bound of the room for rows of experts where nobody is dropped, as a multiple of the even share; none:
    /// room for the worst choices. Updates that do not wait for all ranks cannot be taken back.
    pub fn slack(&self) -> Option<f64> {
        Some(self.expert_slack.get()).filter(|slack| self.may_repeat() && *slack > 0.0)
    }

    /// Whether a step that lacked room can be taken again.
    fn may_repeat(&self) -> bool {
        self.updates_wait() && !self.post_validation
    }

    /// Rejects room that would have no effect, or that is less than the even share.
    fn check_slack(&self, capacity: Option<CapacityKind>, values: &mut Values) {
        const SLACK: &str = "parallel.expert_slack";
        let (slack, ep) = (self.expert_slack.get(), self.ep.get());
        let (drops, fits) = match capacity {
            Some(CapacityKind::Dropless) => (false, false),
            Some(CapacityKind::Auto) => (false, true),
            Some(CapacityKind::Factor(_)) | None => (true, false),
        };
        values.rule(&[SLACK], slack == 0.0 || slack >= 1.0, || {
            Problem::new(format!("{SLACK} = {slack} is less than the even share"))
                .because("no choices of experts would need so little room on every rank")
                .nearest(format!("{SLACK} = 1, or 0 for the worst choices"))
        });
        // A run's folder holds all keys.
        let given = slack != USUAL_SLACK;
        values.rule(&[SLACK, "parallel.ep"], !given || fits || ep > 1, || {
            Problem::new(format!("{SLACK} = {slack} has no effect with parallel.ep = 1"))
                .because("every rank has all experts, and so as many rows as its tokens choose")
                .fix(format!("parallel.ep = 2, or leave {SLACK} out"))
        });
        values.rule(&[SLACK, "model.capacity"], !given || ep == 1 || !drops, || {
            Problem::new(format!("{SLACK} = {slack} has no effect with a model.capacity above 0"))
                .because("places are as many as the capacity says, and tokens beyond are dropped")
                .fix(format!("model.capacity = 0, or leave {SLACK} out"))
        });
        let waits = self.may_repeat();
        values.rule(&["model.capacity", "parallel.schedule"], !fits || waits, || {
            Problem::new("model.capacity = \"auto\" needs updates that wait for all ranks")
                .because("a step that lacked places is taken again, and with this schedule some of it has been applied")
                .fix("model.capacity = 0, or parallel.schedule = \"1f1b\" without parallel.post_validation")
        });
        values.rule(&[SLACK, "parallel.schedule"], !given || slack == 0.0 || waits, || {
            Problem::new(format!("{SLACK} = {slack} needs updates that wait for all ranks"))
                .because("a step that lacked room is taken again, and with this schedule some of it has been applied")
                .fix(format!("{SLACK} = 0, or parallel.schedule = \"1f1b\" without parallel.post_validation"))
        });
    }
}

impl Config {
    /// Rejects an order of calls that would have no effect or that a GPU does not keep.
    pub(crate) fn check_priority(&self, values: &mut Values) {
        let capacity = (self.model.experts > 0).then_some(self.model.capacity);
        let packed = capacity == Some(CapacityKind::Dropless);
        self.parallel.check_slack(capacity, values);
        self.parallel.check_policy(packed, values);
        self.check_shared_groups(packed, values);
        let (ep, lina) =
            (self.parallel.ep.get(), self.parallel.comm_priority == CommPriority::Lina);
        values.rule(&["parallel.comm_priority", "parallel.ep"], !lina || ep > 1, || {
            Problem::new("parallel.comm_priority = \"lina\" has no effect with parallel.ep = 1")
                .because("only exchanges of tokens go before other calls")
                .fix("parallel.ep = 2, or parallel.comm_priority = \"none\"")
        });
        let cores = self.run.device == DeviceKind::Cpu;
        values.rule(&["parallel.comm_priority", "run.device"], !lina || cores, || {
            Problem::new("parallel.comm_priority = \"lina\" does not work with run.device = cuda")
                .because("a GPU does what it is given in the order in which it is given")
                .fix("run.device = \"cpu\", or parallel.comm_priority = \"none\"")
        });
    }

    /// Experts are distributed evenly to a part of the ranks that samples are distributed to.
    pub(crate) fn check_expert_ranks(&self, values: &mut Values) {
        let (ep, dp) = (self.parallel.ep.get(), self.parallel.dp.get());
        if ep == 1 {
            return;
        }
        let (experts, sync) = (self.model.experts, self.parallel.sync);
        values.rule(&["parallel.ep", "model.experts"], experts > 0, || {
            Problem::new(format!("parallel.ep = {ep} has no effect with model.experts = 0"))
                .fix("model.experts = 8, or parallel.ep = 1")
        });
        for (key, count) in
            [("model.experts", experts), ("model.late_experts", self.model.late_experts)]
        {
            values.rule(&["parallel.ep", key], count.is_multiple_of(ep), || {
                Problem::new(format!("parallel.ep = {ep} does not divide {key} = {count}"))
                    .because("every rank has the same number of experts")
                    .nearest(assignments("parallel.ep", &near(ep, |n| count.is_multiple_of(n))))
            });
        }
        values.rule(&["parallel.ep", "parallel.dp"], dp.is_multiple_of(ep), || {
            let near = assignments("parallel.ep", &near(ep, |n| dp.is_multiple_of(n)));
            let above = dp.next_multiple_of(ep);
            Problem::new(format!("parallel.ep = {ep} does not divide parallel.dp = {dp}"))
                .because("the ranks that share experts are some of those that share the batch")
                .nearest(format!("{near}, or parallel.dp = {above}"))
        });
        let name = sync.name();
        values.rule(&["parallel.ep", "parallel.sync"], !self.parallel.has_replicas(), || {
            Problem::new(format!("parallel.ep = {ep} does not work with parallel.sync = {name}"))
                .because("replicas that train by themselves exchange no tokens")
                .fix("parallel.sync = \"ddp\", or parallel.ep = 1")
        });
        let shard = self.parallel.dp_shard.get();
        let nests = shard.is_multiple_of(ep) || ep.is_multiple_of(shard);
        values.rule(&["parallel.ep", "parallel.dp_shard"], nests, || {
            let fits = |n: usize| {
                (shard.is_multiple_of(n) || n.is_multiple_of(shard)) && experts.is_multiple_of(n)
            };
            Problem::new(format!(
                "parallel.ep = {ep} does not nest with parallel.dp_shard = {shard}"
            ))
            .because("groups that share experts and groups that share a copy lie within each other")
            .nearest(assignments("parallel.ep", &near(ep, fits)))
        });
    }

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
