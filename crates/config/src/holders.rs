//! How many layers and holders stages have, who plans them, and which schedules take what.
//!
//! Holders of a stage of PipeDream take micro-batches in turn, so each is a stage group. Those of other schedules split each
//! micro-batch, as DAPPLE's planner has it: the stage has as many times more data-parallel ranks.

use phalanx_pipeline::NamedSchedule;
use toml_edit::Value;

use super::model::assignments;
use super::parallel::{LayoutKind, ParallelAxis};
use super::setting::{Count, Setting, choice, quoted};
use super::sync::SyncKind;
use super::values::Values;
use super::{Config, ModelKind};
use phalanx_error::Problem;

/// How layers are divided among pipeline stages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PipelineSplit {
    /// By the FLOPs of their layers, embedding and head included.
    Flops,
    /// By the number of their layers.
    Count,
    /// By the time that their layers take on this machine.
    Measured,
    /// So many to each stage, embedding and head included.
    Given(Vec<usize>),
}

impl Setting for PipelineSplit {
    fn expects() -> String {
        "flops | count | measured | the layers of each stage, such as 3-2-3".into()
    }
    fn read(value: &Value) -> Option<Self> {
        Some(match value.as_str()? {
            "flops" => PipelineSplit::Flops,
            "count" => PipelineSplit::Count,
            "measured" => PipelineSplit::Measured,
            counts => PipelineSplit::Given(read_counts(counts)?),
        })
    }
    fn write(&self) -> String {
        quoted(&match self {
            PipelineSplit::Flops => "flops".to_owned(),
            PipelineSplit::Count => "count".to_owned(),
            PipelineSplit::Measured => "measured".to_owned(),
            PipelineSplit::Given(counts) => write_counts(counts),
        })
    }
    fn words() -> &'static [&'static str] {
        &["flops", "count", "measured"]
    }
}

choice! {
    /// What arranges the ranks of a pipeline.
    pub enum PlanKind {
        /// The other keys.
        None = "none",
        /// Whatever is fastest.
        Auto = "auto" later,
        /// PipeDream's planner: stages whose holders take micro-batches in turn.
        PipeDream = "pipedream",
        /// DAPPLE's planner: stages whose holders split micro-batches.
        Dapple = "dapple",
        /// The planner of PipeDream-2BW: equal pipelines.
        TwoBw = "2bw",
    }
}

/// A number for each stage of a pipeline; none: one each.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StageCounts(pub Vec<usize>);

impl Setting for StageCounts {
    fn expects() -> String {
        "none, or a number for each stage, such as 2-1-1".into()
    }
    fn read(value: &Value) -> Option<Self> {
        match value.as_str()? {
            "none" => Some(StageCounts::default()),
            counts => read_counts(counts).map(StageCounts),
        }
    }
    fn write(&self) -> String {
        match &self.0[..] {
            [] => quoted("none"),
            counts => quoted(&write_counts(counts)),
        }
    }
    fn words() -> &'static [&'static str] {
        &["none"]
    }
}

/// Numbers from 1 on, joined by `-`.
fn read_counts(text: &str) -> Option<Vec<usize>> {
    let count =
        |word: &str| usize::read(&Value::from(word.parse::<i64>().ok()?)).filter(|n| *n > 0);
    text.split('-').map(count).collect()
}

fn write_counts(counts: &[usize]) -> String {
    counts.iter().map(usize::to_string).collect::<Vec<_>>().join("-")
}

const HOLDERS: &str = "parallel.holders";

const PLAN: &str = "parallel.plan";

/// What planners decide.
const PLANNED: [&str; 9] = [
    HOLDERS,
    "parallel.schedule",
    "parallel.split",
    "parallel.chunks",
    "parallel.warmup",
    "parallel.pairs",
    "parallel.concat",
    "parallel.braid",
    "parallel.post_validation",
];

impl Config {
    /// What is planned has its own settings.
    pub(super) fn check_plan(&self, values: &mut Values) {
        let plan = self.parallel.plan;
        values.rule(&[PLAN], plan != PlanKind::Auto, || {
            Problem::new(format!("{PLAN} = \"auto\" is not built yet"))
                .because("planners expect times of different things, which are not compared yet")
                .nearest(format!("{PLAN} = \"dapple\", \"pipedream\" or \"2bw\""))
        });
        if matches!(plan, PlanKind::None | PlanKind::Auto) {
            return;
        }
        // The planner of PipeDream-2BW chooses micro-batches too.
        let more: &[&str] = match plan {
            PlanKind::TwoBw => &["train.microbatches", "train.recompute"],
            _ => &[],
        };
        for key in PLANNED.iter().chain(more) {
            values.rule(&[key, PLAN], !values.by_user(key), || {
                Problem::new(format!("{key} has no effect with {PLAN} = \"{plan}\""))
                    .because("the planner chooses it")
                    .fix(format!("leave {key} out, or {PLAN} = \"none\""))
            });
        }
        let ranks = self.parallel.dp.get().saturating_mul(self.parallel.pp.get());
        values.rule(&[PLAN, "parallel.pp", "parallel.dp"], ranks > 1, || {
            Problem::new(format!("{PLAN} = \"{plan}\" has nothing to arrange"))
                .because("parallel.dp × parallel.pp says how many ranks it has, and that is 1")
                .nearest("parallel.pp = 2 or more")
        });
    }

    /// What stages that are held several times cannot mean.
    pub(super) fn check_holders(&self, named: NamedSchedule, values: &mut Values) {
        let (parallel, pp) = (&self.parallel, self.parallel.pp.get());
        if parallel.holders.0.is_empty() {
            return;
        }
        let (found, told) = (parallel.holders.0.len(), parallel.holders.write());
        values.rule(&[HOLDERS, "parallel.pp"], found == pp && pp > 1, || {
            let problem =
                Problem::new(format!("{HOLDERS} = {told} does not fit parallel.pp = {pp}"));
            match found {
                1 => problem.because("holders of the only stage are data-parallel ranks").nearest(
                    format!("leave {HOLDERS} out, or parallel.dp = {}", parallel.holders.0[0]),
                ),
                _ => problem
                    .because("it has a number for each stage")
                    .nearest(format!("parallel.pp = {found}, or as many numbers as stages")),
            }
        });
        let order = parallel.order.axes();
        if parallel.takes_turns() {
            let alone = self.model.kind != ModelKind::T5;
            values.rule(&[HOLDERS, "model.kind"], alone, || {
                Problem::new(format!("{HOLDERS} = {told} does not work with model.kind = t5"))
                    .because("stages would update the tables that they share at different times")
                    .nearest(format!("{HOLDERS} = \"none\""))
            });
            return;
        }
        let one_each = named.usual_chunks() == 1
            && parallel.chunks == Count::MIN
            && !named.goes_both_ways()
            && named != NamedSchedule::BPipe
            && named != NamedSchedule::Vectorised;
        values.rule(&[HOLDERS, "parallel.schedule", "parallel.chunks"], one_each, || {
            Problem::new(format!(
                "{HOLDERS} = {told} does not work with parallel.schedule = \"{named}\""
            ))
            .because(
                "holders are those of a stage, and its stage groups hold or keep parts of several",
            )
            .nearest("parallel.schedule = \"1f1b\"; or pipedream, whose holders take turns")
        });
        values.rule(&[HOLDERS, "parallel.sync"], parallel.sync == SyncKind::Ddp, || {
            let sync = parallel.sync.write();
            Problem::new(format!("{HOLDERS} = {told} does not work with parallel.sync = {sync}"))
                .because("its replicas have as many ranks for each stage")
                .nearest("parallel.sync = \"ddp\"")
        });
        let given = parallel.layout == LayoutKind::Given;
        values.rule(&[HOLDERS, "parallel.layout"], given, || {
            Problem::new(format!(
                "{HOLDERS} = {told} does not work with parallel.layout = \"auto\""
            ))
            .because("the search does not know which stages have more ranks")
            .nearest("parallel.layout = \"given\"")
        });
        values.rule(&[HOLDERS, "parallel.ep"], parallel.ep == Count::MIN, || {
            Problem::new(format!(
                "{HOLDERS} = {told} does not work with parallel.ep = {}",
                parallel.ep
            ))
            .because("stages would share their experts among different numbers of ranks")
            .nearest("parallel.ep = 1")
        });
        let known = order.contains(&ParallelAxis::Dp);
        let last = order.last() == Some(&ParallelAxis::Pp);
        values.rule(&[HOLDERS, "parallel.order"], known && last, || {
            let order = parallel.order.write();
            Problem::new(format!("{HOLDERS} = {told} does not work with parallel.order = {order}"))
                .because("stages of different sizes lie one after the other, each with its own dp")
                .nearest("parallel.order = \"tp-cp-dp-pp\"")
        });
        self.check_split_batch(values);
    }

    /// Every holder of a stage has whole sequences of each micro-batch.
    fn check_split_batch(&self, values: &mut Values) {
        let holders = &self.parallel.holders.0;
        // A square or cube of ranks divides samples, too; micro-batches that are not whole for it are refused elsewhere.
        let samples = self.parallel.tensor_shape().map_or(1, |shape| shape.samples);
        let Some(all) = self.sequences().filter(|all| all.is_multiple_of(samples)) else { return };
        let first = holders.iter().position(|count| !(all / samples).is_multiple_of(*count));
        let keys = [HOLDERS, "train.batch_size", "train.microbatches", "parallel.dp"];
        values.rule(&keys, first.is_none(), || {
            let stage = first.unwrap_or(0);
            let each = holders[stage].saturating_mul(samples);
            Problem::new(format!(
                "the {} holders of stage {stage} cannot split micro-batches of {all} sequences",
                holders[stage]
            ))
            .because("each of them takes whole sequences of every micro-batch")
            .nearest(assignments("train.batch_size", &self.batches_of(each)))
        });
    }
}
