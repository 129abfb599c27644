//! Rules for pipelines: which settings a schedule accepts, and which it would ignore.
//!
//! Every pipeline setting of a user is applied or refused. One stage is a pipeline too: its
//! schedule says when each micro-batch runs forward and backward.

use phalanx_pipeline::{NamedSchedule, RoundConcat, Schedule, ScheduleShape, Warmup, split};

use super::holders::PipelineSplit;
use super::model::assignments;
use super::parallel::PipelineSchedule;
use super::setting::{Count, Setting};
use super::sync::SyncKind;
use super::values::Values;
use super::{Config, FloatKind, ModelKind, RecomputeKind};
use phalanx_error::Problem;

const PP: &str = "parallel.pp";
const SCHEDULE: &str = "parallel.schedule";
const CHUNKS: &str = "parallel.chunks";
const WARMUP: &str = "parallel.warmup";
const PAIRS: &str = "parallel.pairs";
const CONCAT: &str = "parallel.concat";
const MEMORY: &str = "parallel.schedule_memory";
const BRAID: &str = "parallel.braid";
const POST_VALIDATION: &str = "parallel.post_validation";
const VERTICAL_SYNC: &str = "parallel.vertical_sync";
const SPLIT: &str = "parallel.split";
const HOLDERS: &str = "parallel.holders";

/// Pipeline settings of a preset are for its own pipeline: they are dropped if the user has none,
/// and its chunks and warm-up are dropped if the user chose another schedule.
pub(super) fn drop_unused_preset(values: &mut Values) {
    let pp = values.given.get(PP).filter(|given| given.by_user);
    let none = pp.is_some_and(|given| Count::read(&given.value) == Some(Count::MIN));
    let other = values.by_user(SCHEDULE);
    let cause = if none { PP } else { SCHEDULE };
    let Some(cause) = values.given.get(cause).map(|given| format!("{cause} = {}", given.text()))
    else {
        return;
    };
    let dropped = values.drop_of_preset(|key| match key {
        SCHEDULE | SPLIT => none,
        CHUNKS | WARMUP | PAIRS | CONCAT | MEMORY | BRAID | VERTICAL_SYNC | HOLDERS => {
            none || other
        }
        _ => false,
    });
    values.note_dropped(&dropped, &cause, "set it too to keep it");
}

impl Config {
    /// The micro-batches of a step, halves counted.
    pub fn microbatches(&self) -> usize {
        self.train.microbatches.get() * self.parallel.concat.pieces()
    }

    /// Each stage needs layers, and a schedule may need a certain number of micro-batches. A table
    /// is checked when it is read.
    pub(super) fn check_pipeline(&self, values: &mut Values) {
        let named = match &self.parallel.schedule {
            PipelineSchedule::Named(named) => *named,
            PipelineSchedule::Auto => return self.check_auto(values),
            PipelineSchedule::Csv(_) => return self.check_table(values),
        };
        let (parallel, stages) = (&self.parallel, self.parallel.pp.get());
        let parts = self.train.microbatches.get();
        let mut shape = ScheduleShape::new(parallel.stage_groups(), parts);
        if parallel.takes_turns() {
            shape = shape.vertical_sync(parallel.vertical_sync);
            shape.holders.clone_from(&parallel.holders.0);
        }
        let shape = shape.chunks(parallel.chunks.get()).warmup(parallel.warmup);
        let shape = shape.pairs(parallel.pairs.get()).concat(parallel.concat);
        let built = named.outline(shape.memory(parallel.schedule_memory.get()));
        let keys = [
            SCHEDULE,
            PP,
            CHUNKS,
            WARMUP,
            PAIRS,
            CONCAT,
            MEMORY,
            VERTICAL_SYNC,
            HOLDERS,
            "train.microbatches",
        ];
        let legal = built.is_ok();
        values.rule(&keys, legal, || {
            built.clone().err().map_or_else(|| Problem::new(""), Problem::from)
        });
        self.check_holders(named, values);
        self.check_braid(named, values);
        self.check_asynchronous(named, values);
        self.check_post_validation(named, values);
        self.check_halves(values);
        if let Ok(schedule) = &built {
            let enough = self.enough_layers(schedule);
            values.rule(&[PP, CHUNKS, "model.layers"], enough.is_ok(), || {
                enough.err().map_or_else(|| Problem::new(""), Problem::from)
            });
        }
        if stages == 1 {
            self.check_one_device(named, values);
        }
        if let Ok(schedule) = &built {
            self.check_stages_again(schedule, values);
        }
    }

    /// What is chosen has its own settings.
    fn check_auto(&self, values: &mut Values) {
        for key in [CHUNKS, WARMUP, PAIRS, CONCAT, MEMORY, BRAID, VERTICAL_SYNC, HOLDERS] {
            values.rule(&[key, SCHEDULE], !values.by_user(key), || {
                Problem::new(format!("{key} has no effect with {SCHEDULE} = \"auto\""))
                    .because("the schedule that is chosen has its usual settings")
                    .fix(format!("leave {key} out, or name a schedule"))
            });
        }
        let one = self.parallel.pp.get() == 1;
        values.rule(&[SCHEDULE, PP], !one, || {
            Problem::new(format!("{SCHEDULE} = \"auto\" has no effect with {PP} = 1"))
                .because("one stage has nothing to order")
                .fix(format!("leave {SCHEDULE} out, or {PP} = 2 or more"))
        });
    }

    /// Only DualPipe has pairs.
    fn check_braid(&self, named: NamedSchedule, values: &mut Values) {
        let read = !self.parallel.braid || named == NamedSchedule::DualPipe;
        values.rule(&[BRAID, SCHEDULE], read, || {
            Problem::new(format!("{BRAID} = true has no effect with {SCHEDULE} = \"{named}\""))
                .because("only dualpipe has pairs of a forward and a backward")
                .fix(format!("leave {BRAID} out, or {SCHEDULE} = \"dualpipe\""))
        });
    }

    /// What pipelines without a flush cannot mean.
    fn check_asynchronous(&self, named: NamedSchedule, values: &mut Values) {
        let read = !self.parallel.vertical_sync || named == NamedSchedule::PipeDream;
        values.rule(&[VERTICAL_SYNC, SCHEDULE], read, || {
            Problem::new(format!(
                "{VERTICAL_SYNC} = true has no effect with {SCHEDULE} = \"{named}\""
            ))
            .because("only pipedream has a choice of versions of the weights")
            .fix(format!("leave {VERTICAL_SYNC} out, or {SCHEDULE} = \"pipedream\""))
        });
        let clips = self.optim.clip.0.is_some() && !self.parallel.has_norm();
        values.rule(&["optim.clip", SCHEDULE], !clips, || {
            let clip = self.optim.clip.write();
            Problem::new(format!("optim.clip = {clip} does not work with {SCHEDULE} = \"{named}\""))
                .because(
                    "each stage updates after its own backward, so that there is no moment at which \
                     all gradients of a micro-batch exist, and no global norm",
                )
                .nearest(format!(
                    "optim.clip = \"none\", or {SCHEDULE} = \"pipedream-2bw\", which clips once per batch"
                ))
        });
        if !named.is_asynchronous() {
            return;
        }
        let apart = self.model.tied && self.parallel.pp.get() > 1 && !self.parallel.has_norm();
        values.rule(&["model.tied", SCHEDULE, PP], !apart, || {
            Problem::new(format!("model.tied = true does not work with {SCHEDULE} = \"{named}\""))
                .because("the first and the last stage would update the shared weights at different times")
                .nearest(format!("model.tied = false, or {SCHEDULE} = \"pipedream-2bw\""))
        });
        let half = self.precision.compute == FloatKind::F16;
        values.rule(&["precision.compute", SCHEDULE], !half, || {
            Problem::new(format!(
                "precision.compute = \"f16\" does not work with {SCHEDULE} = \"{named}\""
            ))
            .because("stages update before all of them know whether a gradient overflowed")
            .nearest("precision.compute = \"bf16\"")
        });
        let alone = self.parallel.sync == SyncKind::Ddp;
        values.rule(&["parallel.sync", SCHEDULE], alone, || {
            let sync = self.parallel.sync.write();
            Problem::new(format!(
                "parallel.sync = {sync} does not work with {SCHEDULE} = \"{named}\""
            ))
            .because(match self.parallel.sync {
                SyncKind::DataParallel => {
                    "the rank that updates would have to send older weights too"
                }
                _ => "replicas would average the newest weights, but read older ones",
            })
            .nearest(format!("parallel.sync = \"ddp\", or {SCHEDULE} = \"1f1b\""))
        });
    }

    /// What a step that begins before the one before is certain cannot mean.
    fn check_post_validation(&self, named: NamedSchedule, values: &mut Values) {
        if !self.parallel.post_validation {
            return;
        }
        let several = self.parallel.pp.get() > 1;
        values.rule(&[POST_VALIDATION, PP], several, || {
            Problem::new(format!("{POST_VALIDATION} = true has no effect with {PP} = 1"))
                .because("one stage waits for no other")
                .fix(format!("leave {POST_VALIDATION} out, or {PP} = 2 or more"))
        });
        let predicts = self.model.kind == ModelKind::Cnn;
        values.rule(&[POST_VALIDATION, "model.kind"], !predicts, || {
            Problem::new(format!(
                "{POST_VALIDATION} = true does not work with model.kind = \"cnn\""
            ))
            .because("its predictions are read after each step, so no step goes ahead")
            .fix(format!("leave {POST_VALIDATION} out"))
        });
        values.rule(&[POST_VALIDATION, SCHEDULE], !named.is_asynchronous(), || {
            Problem::new(format!(
                "{POST_VALIDATION} = true does not work with {SCHEDULE} = \"{named}\""
            ))
            .because("its stages wait for no norm, or read older weights anyway")
            .fix(format!("leave {POST_VALIDATION} out"))
            .nearest(format!("{SCHEDULE} = \"zb-h2\""))
        });
        let half = self.precision.compute == FloatKind::F16;
        values.rule(&[POST_VALIDATION, "precision.compute"], !half, || {
            Problem::new(format!(
                "{POST_VALIDATION} = true does not work with precision.compute = \"f16\""
            ))
            .because("the scale of the next step's loss depends on whether gradients overflowed")
            .nearest("precision.compute = \"bf16\"")
        });
        values.rule(
            &[POST_VALIDATION, "parallel.sync"],
            self.parallel.sync == SyncKind::Ddp,
            || {
                let sync = self.parallel.sync.write();
                Problem::new(format!(
                    "{POST_VALIDATION} = true does not work with parallel.sync = {sync}"
                ))
                .because("its ranks do not all update at the end of each step")
                .nearest("parallel.sync = \"ddp\"")
            },
        );
    }

    /// Half a micro-batch is whole sequences too.
    fn check_halves(&self, values: &mut Values) {
        let pieces = self.parallel.concat.pieces();
        let Some(each) = self.sequences() else { return };
        values.rule(
            &[CONCAT, "train.batch_size", "train.microbatches", "parallel.dp"],
            each.is_multiple_of(pieces),
            || {
                let concat = self.parallel.concat.write();
                Problem::new(format!(
                    "{CONCAT} = {concat} cannot cut micro-batches of {each} sequences in {pieces}"
                ))
                .because("batch_size = dp × microbatches × micro-batch, all whole numbers")
                .nearest(assignments("train.batch_size", &self.batches_of(pieces)))
            },
        );
    }

    /// If every backward directly follows its forward, there is nothing to recompute.
    fn check_stages_again(&self, schedule: &Schedule, values: &mut Values) {
        let keys = ["train.recompute", PP, SCHEDULE, "train.microbatches"];
        let idle = self.idle_stages(schedule);
        values.rule(&keys, idle.is_none(), || idle.unwrap_or_else(|| Problem::new("")));
    }

    /// The problem if stages should be recomputed but never are.
    fn idle_stages(&self, schedule: &Schedule) -> Option<Problem> {
        if self.train.recompute != RecomputeKind::Stage || schedule.rematerialises() {
            return None;
        }
        let (name, pp, parts) = (schedule.name(), self.parallel.pp, self.train.microbatches);
        let mut remedies = self.stages_that_run_again();
        remedies.push("train.recompute = \"full\"".to_owned());
        let problem = Problem::new(format!(
            "train.recompute = \"stage\" has no effect with {name}, {PP} = {pp} and \
             train.microbatches = {parts}"
        ));
        let problem = problem.because(
            "in every stage group each backward directly follows its forward, so at most one \
            micro-batch is kept",
        );
        Some(problem.nearest(remedies.join(", or ")))
    }

    /// Single changes after which a stage would be recomputed: more micro-batches, another
    /// schedule, more stage groups.
    fn stages_that_run_again(&self) -> Vec<String> {
        let PipelineSchedule::Named(own) = self.parallel.schedule else { return Vec::new() };
        let (pp, parts) = (self.parallel.pp.get(), self.train.microbatches.get());
        let works = |named: NamedSchedule, pp: usize, parts: usize| {
            named
                .outline(ScheduleShape::new(pp, parts))
                .is_ok_and(|schedule| schedule.rematerialises())
        };
        let more = [parts + 1, 2 * pp].into_iter().find(|&parts| works(own, pp, parts));
        let other = [NamedSchedule::OneFOneB, NamedSchedule::GPipe]
            .into_iter()
            .find(|&n| works(n, pp, parts));
        let wider = (pp == 1 && works(own, 2, parts)).then(|| format!("{PP} = 2"));
        let more = more.map(|parts| format!("train.microbatches = {parts}"));
        let other = other.map(|named| format!("{SCHEDULE} = \"{named}\""));
        more.into_iter().chain(other).chain(wider).collect()
    }

    /// Checks that need the contents of a table.
    pub fn check_read(&self, schedule: &Schedule) -> Result<(), Problem> {
        self.enough_layers(schedule)?;
        self.idle_stages(schedule).map_or(Ok(()), Err)
    }

    /// Refuses more stages than there are layers.
    fn enough_layers(&self, schedule: &Schedule) -> phalanx_pipeline::Result<()> {
        let (stage_groups, chunks) = (schedule.stage_groups(), schedule.chunks());
        let stages = schedule.placement().stages();
        // The message speaks of stage groups and chunks if that is how stages were counted.
        let (stage_groups, chunks) =
            if stages == stage_groups * chunks { (stage_groups, chunks) } else { (stages, 1) };
        match self.model.kind {
            ModelKind::Mlp | ModelKind::Cnn => Ok(()),
            kind => {
                let blocks = kind.blocks(self.model.layers.get());
                split::enough_layers(blocks, stage_groups, chunks)
            }
        }
    }

    /// A table already contains what settings say for a named schedule.
    fn check_table(&self, values: &mut Values) {
        let parallel = &self.parallel;
        let (schedule, chunks) = (parallel.schedule.write(), parallel.chunks);
        let read = chunks == Count::MIN || !values.by_user(CHUNKS);
        values.rule(&[CHUNKS, SCHEDULE], read, || {
            Problem::new(format!("{CHUNKS} = {chunks} has no effect with {SCHEDULE} = {schedule}"))
                .because("a table states which chunks each stage group holds")
                .fix(format!("leave {CHUNKS} out, or {SCHEDULE} = \"interleaved\""))
        });
        for (key, value, usual) in [
            (PAIRS, parallel.pairs.to_string(), parallel.pairs == Count::MIN),
            (CONCAT, parallel.concat.write(), parallel.concat == RoundConcat::Direct),
            (MEMORY, parallel.schedule_memory.write(), parallel.schedule_memory.get() == 1.0),
            (HOLDERS, parallel.holders.write(), parallel.holders.0.is_empty()),
        ] {
            values.rule(&[key, SCHEDULE], usual || !values.by_user(key), || {
                Problem::new(format!("{key} = {value} has no effect with {SCHEDULE} = {schedule}"))
                    .because("a table says itself who does what and when")
                    .fix(format!("leave {key} out, or name a schedule"))
            });
        }
        let read = parallel.warmup == Warmup::Pa || !values.by_user(WARMUP);
        values.rule(&[WARMUP, SCHEDULE], read, || {
            let warmup = parallel.warmup.write();
            Problem::new(format!("{WARMUP} = {warmup} has no effect with {SCHEDULE} = {schedule}"))
                .because("a table states how many micro-batches each stage starts with")
                .fix(format!("leave {WARMUP} out, or {SCHEDULE} = \"1f1b\""))
        });
    }

    /// With one stage group, some settings have no effect.
    fn check_one_device(&self, named: NamedSchedule, values: &mut Values) {
        let parallel = &self.parallel;
        let late = parallel.warmup != Warmup::Pa && named == NamedSchedule::OneFOneB;
        values.rule(&[WARMUP, PP], !late || !values.by_user(WARMUP), || {
            let warmup = parallel.warmup.write();
            Problem::new(format!("{WARMUP} = {warmup} has no effect with {PP} = 1"))
                .because("the only stage starts with one micro-batch, whatever its warm-up")
                .fix(format!("leave {WARMUP} out, or {PP} = 2 or more"))
        });
        let whole = parallel.split != PipelineSplit::Flops && parallel.chunks == Count::MIN;
        values.rule(&[SPLIT, PP], !whole || !values.by_user(SPLIT), || {
            let split = parallel.split.write();
            Problem::new(format!("{SPLIT} = {split} has no effect with {PP} = 1"))
                .because("the only stage holds all layers, so there is nothing to split")
                .fix(format!("leave {SPLIT} out, or {PP} = 2 or more"))
        });
    }
}
