//! `[parallel]`: how the work is divided among ranks.

use phalanx_pipeline::{NamedSchedule, RoundConcat, Warmup};
use phalanx_spmd::strategies::Cut;
use toml_edit::Value;

use super::context::{CpKind, CpOrder};
use super::expert_policy::PolicyKind;
use super::experts::{CommPriority, ExchangeKind, PlacementKind};
use super::holders::{PipelineSplit, PlanKind, StageCounts};
use super::key::section;
use super::setting::{Count, NonNegative, Positive, Setting, choice, quoted, words};
use super::sync::{SyncKind, SyncMomentum};
use super::tensor::usual_rows;
use super::values::Values;
use phalanx_error::Problem;

section! {
    /// `[parallel]`: degrees of parallelism, their kinds and their tuning.
    pub struct ParallelConfig in "parallel" () {
        /// Data-parallel degree: replicas that take different sequences.
        dp: Count = "1"; aka "data_parallel_size" "data_parallel_degree" "data_parallel_replicate_degree",
        /// Tensor-parallel degree in total (2d: q², 2.5d: q²·tp_depth, 3d: q³, gspmd: tp_rows × columns).
        tp: Count = "1"; aka "tensor_model_parallel_size" "tensor_parallel_degree" "tp_size" "autotp_size",
        /// Context-parallel degree: ranks that share a sequence.
        cp: Count = "1"; aka "context_parallel_size" "context_parallel_degree" "sp_size" "sequence_parallel_size",
        /// Pipeline degree: stages that hold different layers.
        pp: Count = "1"; aka "pipeline_model_parallel_size" "pipeline_parallel_degree" "pp_size",
        /// Expert-parallel degree: of the dp ranks, how many share the experts among them.
        ep: Count = "1"; aka "expert_parallel" "expert_model_parallel_size" "expert_parallel_degree" "ep_size",
        /// How tokens meet the experts of other ranks.
        expert_exchange: ExchangeKind = "auto"; aka "moe_token_dispatcher_type" "token_dispatcher",
        /// What decides between steps where experts and tokens meet. tutel: tokens go or experts come, by what moves less.
        expert_policy: PolicyKind = "static"; aka "adaptive_r",
        /// Which experts the ranks of ep have. block: neighbours; round-robin: distributed one by one.
        expert_placement: PlacementKind = "block"; aka "expert_distribution",
        /// Where nobody is dropped: room for the rows of experts that a rank gets, or places with model.capacity =
        /// "auto", as a multiple of the even share. A step that lacks room changes nothing and is taken again with twice
        /// as much. 0: for the worst choices.
        expert_slack: NonNegative = "1.25"; aka "moe_expert_rank_capacity_factor" "expert_rank_capacity_factor",
        /// Which calls between ranks go first. lina: exchanges of tokens, before reductions of gradients.
        comm_priority: CommPriority = "none"; aka "all_to_all_priority",
        /// ZeRO stage: what data-parallel ranks shard (1: optimizer state, 2: also gradients, 3:
        /// also weights).
        zero: ZeroStage = "0"; aka "zero_stage" "stage" "use_distributed_optimizer",
        /// Sequence parallelism between tensor-parallel regions.
        sp: bool = "false"; aka "sequence_parallel" "enable_sequence_parallel",
        /// Shape of tensor parallelism.
        tp_kind: TpKind = "1d"; aka "tp_mode" "tensor_parallel_kind",
        /// Depth of 2.5d tensor parallelism: the number of squares.
        tp_depth: Count = "1"; aka "tesseract_depth",
        /// Rows of gspmd's grid of ranks, which divide the batch; its columns divide widths.
        tp_rows: Count = "the largest divisor of parallel.tp up to its root for gspmd, else 1"
            => usual_rows(tp, tp_kind); aka "mesh_rows",
        /// Whether the products of tp go block by block, the next block on its way, or gather whole operands
        /// first. It needs tp_kind 2d, 2.5d, 3d or gspmd, or sp.
        stream: bool = "false"; aka "tp_comm_overlap" "async_tp" "enable_async_tensor_parallel",
        /// Which weights tp splits, by name. The first rule that matches a weight applies; weights
        /// that no rule matches are not split. Without rules, weights are split as Megatron does.
        tp_plan: TensorRules = "[]"; aka "parallelize_plan" "tp_rules",
        /// How attention sees the whole sequence.
        cp_kind: CpKind = "ulysses"; aka "cp_comm_type" "sequence_parallelism_mode",
        /// How the positions of a sequence are distributed to the ranks of cp. zigzag and striped give
        /// each rank the same work under causal masks; they need cp_kind = "ring" or "allgather".
        cp_order: CpOrder = "zigzag for ring, else block" => cp_kind.usual_order();
            aka "cp_load_balance" "context_parallel_load_balance",
        /// How data-parallel replicas are kept equal.
        sync: SyncKind = "ddp"; aka "data_parallel_kind",
        /// local-sgd and average: steps from one average to the next; 0: one average, after the last
        /// step. Gradients are clipped in each replica by itself.
        sync_every: usize = "1"; aka "sync_interval" "local_steps",
        /// local-sgd: whether the optimizer's state is averaged with the weights, or each replica
        /// keeps its own.
        sync_momentum: SyncMomentum = "average"; aka "average_momentum",
        /// local-sgd: first steps, each of which ends with an average.
        sync_warmup: usize = "0"; aka "local_sgd_warmup",
        /// Number of dp ranks that share one copy of the weights; other dp ranks hold further
        /// copies.
        dp_shard: Count = "parallel.dp" => dp;
            aka "data_parallel_shard_degree" "mics_shard_size",
        /// ZeRO-3 as PyTorch's FSDP runs it: embedding and head stay gathered until their backward.
        fsdp: bool = "false"; aka "fully_shard" "enable_fsdp",
        /// Whether fsdp releases weights after the forward and gathers them again for the backward.
        fsdp_reshard: bool = "true"; aka "reshard_after_forward" "fsdp_reshard_after_forward",
        /// How many runs ahead fsdp gathers weights.
        fsdp_prefetch: usize = "1"; aka "forward_prefetch" "backward_prefetch",
        /// For how many runs at a time fsdp holds gathered weights.
        fsdp_in_flight: Count = "2"; aka "limit_all_gathers",
        /// Layers that fsdp gathers and reduces together.
        fsdp_layers: Count = "1"; aka "auto_wrap_policy" "fsdp_unit",
        /// What decides the layouts of weights and activations on dp, tp and cp: the keys above, or
        /// a search for the shortest step time within run.memory_limit.
        layout: LayoutKind = "given"; aka "auto_parallel" "auto_sharding",
        /// Order in which stages take micro-batches.
        schedule: PipelineSchedule = "1f1b"; aka "pipeline_parallel_schedule" "pp_style" "pp_engine",
        /// How many micro-batches a stage of 1f1b starts with. pa: one for each stage from here to
        /// the last; pb: links between stages count as stages too, for slow links.
        warmup: Warmup = "pa"; aka "pipeline_warmup",
        /// Chunks of layers that each stage group holds.
        chunks: Count = "2 for interleaved, breadth-first, zb-v, v-half and v-min, else 1"
            => Count::new(schedule.usual_chunks()).unwrap_or(Count::MIN);
            aka "num_virtual_stages_per_rank" "virtual_pipeline_model_parallel_size" "num_model_chunks",
        /// The memory that zb-auto may use for kept values, in shares: 1 is what the first stage of 1f1b
        /// keeps.
        schedule_memory: Positive = "1"; aka "zero_bubble_max_pending_backward" "schedule_memory_limit",
        /// Pipelines in each direction of chimera.
        pairs: Count = "1"; aka "chimera_pairs",
        /// How chimera runs more micro-batches than stages. direct: round after round; doubling: two
        /// forwards, then their backwards; halving: the same with micro-batches in two halves.
        concat: RoundConcat = "direct"; aka "chimera_concat",
        /// pipedream: whether a micro-batch reads the same version of the weights on all stages.
        vertical_sync: bool = "false"; aka "vertical_synchronization",
        /// Whether a step begins before the norm of the step before is known: previewed weights, and a step
        /// that is done again if gradients were clipped after all.
        post_validation: bool = "false"; aka "optimizer_post_validation" "enable_optimizer_post_validation",
        /// Whether the layers of a pair of dualpipe, a forward and a backward, take turns.
        braid: bool = "false"; aka "forward_backward_overlap",
        /// How layers are divided among pipeline stages: evenly by one of these measures, or how many each stage has, as
        /// in 3-2-3, embedding and head counted.
        split: PipelineSplit = "flops"; aka "pipeline_split" "pp_split" "partition_method",
        /// How many times each stage is held, as in 2-1-1; none: once. Holders of a stage of pipedream take micro-batches
        /// in turn; those of other schedules split each micro-batch, as if the stage had as many times more dp ranks.
        holders: StageCounts = "none"; aka "stage_replicas" "pp_replicas",
        /// What arranges dp × pp ranks: these keys, or a planner of stages and holders. Planners take predicted times, so that
        /// all processes plan alike; phalanx schedule --plan measures.
        plan: PlanKind = "none"; aka "pipeline_planner",
        /// Order of the axes in the numbering of ranks, fastest first; axes left out have degree 1.
        order: AxisOrder = "tp-cp-dp-pp"; aka "rank_order" "axis_order",
        /// Size of a gradient bucket of ddp in MiB; the first bucket holds 1 MiB.
        bucket_mib: Count = "25"; aka "bucket_cap_mb" "ddp_bucket_size",
        /// Elements that ZeRO reduces at a time.
        reduce_bucket_size: Count = "5e8"; aka "reduce_bucket",
        /// Elements that ZeRO gathers at a time.
        allgather_bucket_size: Count = "5e8"; aka "allgather_bucket" "all_gather_bucket_size",
    }
}

choice! {
    /// Shape of tensor parallelism.
    pub enum TpKind {
        /// Columns, then rows (Megatron).
        OneD = "1d",
        /// A square of ranks.
        TwoD = "2d",
        /// Several squares.
        TwoAndAHalfD = "2.5d",
        /// A cube of ranks.
        ThreeD = "3d",
        /// A grid of ranks, by GSPMD's recipe.
        Gspmd = "gspmd",
    }
}

choice! {
    /// What decides the layouts of weights and activations.
    pub enum LayoutKind {
        /// The keys of this section.
        Given = "given",
        /// A search.
        Auto = "auto",
    }
}

words!(Warmup { Pa = "pa", Pb = "pb", });

words!(RoundConcat { Direct = "direct", Doubling = "doubling", Halving = "halving", });

/// Order in which pipeline stages take micro-batches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PipelineSchedule {
    /// One of the named schedules.
    Named(NamedSchedule),
    /// The shortest one that fits into `run.memory_limit`.
    Auto,
    /// A schedule read from a CSV file.
    Csv(std::path::PathBuf),
}

/// The names of the named schedules.
const SCHEDULES: [&str; NamedSchedule::ALL.len()] = {
    let (mut names, mut i) = ([""; NamedSchedule::ALL.len()], 0);
    while i < names.len() {
        names[i] = NamedSchedule::ALL[i].name();
        i += 1;
    }
    names
};

impl PipelineSchedule {
    /// How many chunks of layers a stage group of this schedule holds by default.
    pub fn usual_chunks(&self) -> usize {
        match self {
            PipelineSchedule::Named(named) => named.usual_chunks(),
            PipelineSchedule::Auto | PipelineSchedule::Csv(_) => 1,
        }
    }
}

impl Setting for PipelineSchedule {
    fn expects() -> String {
        format!("{} | auto | csv:FILE", SCHEDULES.join(" | "))
    }
    fn read(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        match text.strip_prefix("csv:") {
            Some(file) => (!file.is_empty()).then(|| PipelineSchedule::Csv(file.into())),
            None if text == "auto" => Some(PipelineSchedule::Auto),
            None => {
                let named = NamedSchedule::ALL.into_iter().find(|named| named.name() == text);
                named.map(PipelineSchedule::Named)
            }
        }
    }
    fn write(&self) -> String {
        match self {
            PipelineSchedule::Named(name) => quoted(name.name()),
            PipelineSchedule::Auto => quoted("auto"),
            PipelineSchedule::Csv(file) => quoted(&format!("csv:{}", file.display())),
        }
    }
    fn words() -> &'static [&'static str] {
        &SCHEDULES
    }
}

/// Which weights are split, and how, in the order in which rules are tried.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TensorRules(pub Vec<(String, Cut)>);

impl TensorRules {
    fn rule(text: &str) -> Option<(String, Cut)> {
        let (name, how) = text.trim().split_once(char::is_whitespace)?;
        let cut = match how.trim() {
            "columns" => Cut::Columns,
            "rows" => Cut::Rows,
            other => Cut::Dim(other.strip_prefix("dim ")?.trim().parse().ok()?),
        };
        Some((name.to_owned(), cut))
    }
}

impl Setting for TensorRules {
    fn expects() -> String {
        "a list such as [\"attn.out rows\", \"attn.* columns\"]; also \"NAME dim N\"".into()
    }
    fn read(value: &Value) -> Option<Self> {
        let rules = value.as_array()?.iter().map(|rule| Self::rule(rule.as_str()?));
        Some(Self(rules.collect::<Option<_>>()?))
    }
    fn write(&self) -> String {
        let rules = self.0.iter().map(|(name, cut)| {
            quoted(&match cut {
                Cut::Columns => format!("{name} columns"),
                Cut::Rows => format!("{name} rows"),
                Cut::Dim(dim) => format!("{name} dim {dim}"),
            })
        });
        format!("[{}]", rules.collect::<Vec<_>>().join(", "))
    }
}

/// What data-parallel ranks shard instead of replicating.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ZeroStage {
    /// Nothing.
    Zero,
    /// Optimizer state.
    One,
    /// Optimizer state and gradients.
    Two,
    /// Optimizer state, gradients and weights.
    Three,
}

impl Setting for ZeroStage {
    fn expects() -> String {
        "0, 1, 2 or 3".into()
    }
    fn read(value: &Value) -> Option<Self> {
        use ZeroStage::{One, Three, Two, Zero};
        [Zero, One, Two, Three].get(usize::read(value)?).copied()
    }
    fn write(&self) -> String {
        (*self as usize).to_string()
    }
}

choice! {
    /// An axis of the mesh of ranks.
    pub enum ParallelAxis {
        /// Tensor parallelism.
        Tp = "tp",
        /// Context parallelism.
        Cp = "cp",
        /// Data parallelism.
        Dp = "dp",
        /// Pipeline parallelism.
        Pp = "pp",
    }
}

/// The axes of the mesh, fastest first, each at most once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AxisOrder(Vec<ParallelAxis>);

impl AxisOrder {
    /// The axes, fastest first.
    pub fn axes(&self) -> &[ParallelAxis] {
        &self.0
    }
}

impl Setting for AxisOrder {
    fn expects() -> String {
        "tp, cp, dp and pp joined by `-`, each at most once, such as tp-cp-dp-pp".into()
    }
    fn read(value: &Value) -> Option<Self> {
        let mut axes = Vec::new();
        for word in value.as_str()?.split('-') {
            let axis = ParallelAxis::read(&Value::from(word))?;
            if axes.contains(&axis) {
                return None;
            }
            axes.push(axis);
        }
        Some(AxisOrder(axes))
    }
    fn write(&self) -> String {
        let words: Vec<&str> = self.0.iter().map(|axis| axis.name()).collect();
        quoted(&words.join("-"))
    }
}

impl ParallelConfig {
    /// Whether all gradients of an update exist at some moment, so that they have a norm.
    pub(crate) fn has_norm(&self) -> bool {
        self.schedule != PipelineSchedule::Named(NamedSchedule::PipeDream)
    }

    /// Whether updates wait until all ranks have taken a step.
    pub(crate) fn updates_wait(&self) -> bool {
        !matches!(self.schedule, PipelineSchedule::Named(named) if named.is_asynchronous())
    }

    /// Ranks of the whole run.
    pub fn ranks(&self) -> Count {
        let holders = Count::new(self.held()).unwrap_or(Count::MIN);
        [self.tp, self.cp, self.dp, holders].into_iter().fold(Count::MIN, Count::saturating_mul)
    }

    /// How many times stages are held, all together.
    fn held(&self) -> usize {
        match &self.holders.0[..] {
            [] => self.pp.get(),
            holders => holders.iter().fold(0, |sum: usize, count| sum.saturating_add(*count)),
        }
    }

    /// Whether holders of a stage take micro-batches in turn; otherwise they split them.
    pub fn takes_turns(&self) -> bool {
        self.schedule == PipelineSchedule::Named(NamedSchedule::PipeDream)
    }

    /// Stage groups of the pipeline.
    pub fn stage_groups(&self) -> usize {
        if self.takes_turns() { self.held() } else { self.pp.get() }
    }

    /// Ranks along an axis.
    pub fn degree(&self, axis: ParallelAxis) -> Count {
        match axis {
            ParallelAxis::Tp => self.tp,
            ParallelAxis::Cp => self.cp,
            ParallelAxis::Dp => self.dp,
            ParallelAxis::Pp => self.pp,
        }
    }

    /// Rejects keys that contradict each other or that would have no effect.
    fn check_sharing(&self, values: &mut Values) {
        let written = Self::KEYS.iter().zip(self.write());
        for (key, (name, value)) in written.filter(|(key, _)| key.field().starts_with("fsdp_")) {
            values.rule(&[name], self.fsdp || value == key.usual(), || {
                Problem::new(format!("{name} is set, but parallel.fsdp is false"))
                    .because("only fsdp uses it")
                    .fix("parallel.fsdp = true")
            });
        }
        let stage = self.zero as usize;
        let alone = !self.fsdp || matches!(self.zero, ZeroStage::Zero | ZeroStage::Three);
        values.rule(&["parallel.fsdp", "parallel.zero"], alone, || {
            Problem::new(format!("parallel.fsdp = true does not work with parallel.zero = {stage}"))
                .because(
                    "fsdp already shards weights, gradients and optimizer state, as ZeRO \
                    stage 3 does",
                )
                .fix("leave parallel.zero out, or leave parallel.fsdp out")
        });
        let ruled = self.tp_plan.0.is_empty() || self.tp.get() > 1;
        values.rule(&["parallel.tp_plan", "parallel.tp"], ruled, || {
            Problem::new("parallel.tp_plan is set, but parallel.tp = 1".to_owned())
                .because("with one rank there is nothing to split")
                .fix("parallel.tp = 2, or leave parallel.tp_plan out")
        });
    }

    /// Rejects keys that a search for layouts decides itself.
    fn check_search(&self, values: &mut Values) {
        if self.layout == LayoutKind::Given {
            return;
        }
        for (key, set) in [
            ("parallel.zero", self.zero != ZeroStage::Zero),
            ("parallel.fsdp", self.fsdp),
            ("parallel.sp", self.sp),
            ("parallel.ep", self.ep.get() > 1),
            ("parallel.tp_kind", self.tp_kind != TpKind::OneD),
            ("parallel.tp_plan", !self.tp_plan.0.is_empty()),
        ] {
            values.rule(&["parallel.layout", key], !set, || {
                Problem::new(format!("parallel.layout = \"auto\" does not work with {key}"))
                    .because("the search chooses the layouts of all weights")
                    .fix(format!("leave {key} out, or parallel.layout = \"given\""))
            });
        }
    }

    /// Refuses every value that is not implemented yet. When a key's system is built, remove `later`
    /// from the key. If only some of its values are built, mark the other words `later` instead and
    /// refuse them by a rule, as for `cp_kind`.
    pub(crate) fn check_built(&self, values: &mut Values) {
        self.check_cp_kind(values);
        self.check_sync(values);
        self.check_sharing(values);
        self.check_exchange(values);
        self.check_search(values);
        self.check_tensor_shape(values);
        for (key, (name, value)) in Self::KEYS.iter().zip(self.write()) {
            let Some(system) = key.later else { continue };
            let works = key.usual();
            values.rule(&[name], value == works, || {
                Problem::new(format!("{name} = {value}: {system} is not built yet"))
                    .because(
                        "this version has data, expert, tensor, sequence, context and pipeline parallelism and ZeRO",
                    )
                    .nearest(format!("{name} = {works}"))
            });
        }
    }
}
