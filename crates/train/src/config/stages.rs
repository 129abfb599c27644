//! Rules of pipelines: what a schedule takes, and what would go unheard.
//!
//! Whatever a user writes of a pipeline is done or refused. One stage is a pipeline too: its schedule
//! says when micro-batches go forward and when back.

use phalanx_pipeline::{Named, Schedule, Shape, split};

use super::parallel::{PipelineSchedule, PipelineSplit, PipelineWarmup};
use super::setting::{Count, Setting};
use super::values::Values;
use super::{Config, ModelKind, Recompute};
use crate::error::Problem;

const PP: &str = "parallel.pp";
const SCHEDULE: &str = "parallel.schedule";
const CHUNKS: &str = "parallel.chunks";
const WARMUP: &str = "parallel.warmup";
const SPLIT: &str = "parallel.split";

/// What a preset says of a pipeline suits its own: it yields to a user who has none, and its chunks
/// and warm-up yield to another schedule.
pub(super) fn yield_to_user(values: &mut Values) {
    let pp = values.given.get(PP).filter(|given| given.by_user);
    let none = pp.is_some_and(|given| Count::read(&given.value) == Some(Count::MIN));
    let other = values.by_user(SCHEDULE);
    values.given.retain(|key, given| {
        let yields = match *key {
            SCHEDULE | SPLIT => none,
            CHUNKS | WARMUP => none || other,
            _ => false,
        };
        given.by_user || !yields
    });
}

impl Config {
    /// Stages need layers, and a schedule may ask for a number of micro-batches. What is in a table is
    /// known once it is read.
    pub(super) fn check_pipeline(&self, values: &mut Values) {
        let PipelineSchedule::Named(named) = self.parallel.schedule else {
            return self.check_table(values);
        };
        let (parallel, stages) = (&self.parallel, self.parallel.pp.get());
        let shape = Shape::new(stages, self.train.microbatches.get());
        let built = named.build(shape.chunks(parallel.chunks.get()).warmup(parallel.warmup.into()));
        let keys = [SCHEDULE, PP, CHUNKS, WARMUP, "train.microbatches"];
        let legal = built.is_ok();
        values.rule(&keys, legal, || {
            built.clone().err().map_or_else(|| Problem::new(""), Problem::from)
        });
        if legal && self.model.kind != ModelKind::Mlp {
            let (layers, chunks) = (self.model.layers.get(), parallel.chunks.get());
            let enough = split::enough_layers(layers, stages, chunks);
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

    /// Where every backward follows its forward at once, there is nothing to run again.
    fn check_stages_again(&self, schedule: &Schedule, values: &mut Values) {
        let keys = ["train.recompute", PP, SCHEDULE];
        let heard = self.train.recompute != Recompute::Stage || schedule.runs_again();
        values.rule(&keys, heard, || {
            let (name, pp) = (schedule.name(), self.parallel.pp);
            Problem::new(format!(
                "train.recompute = \"stage\" has no effect with {name} and {PP} = {pp}"
            ))
            .because("on every device a backward follows its forward, so it keeps one micro-batch at most")
            .fix(format!("{PP} = 2 or more with another {SCHEDULE}, or train.recompute = \"full\""))
        });
    }

    /// A table says by itself what a named schedule is told.
    fn check_table(&self, values: &mut Values) {
        let parallel = &self.parallel;
        let (schedule, chunks) = (parallel.schedule.write(), parallel.chunks);
        let heard = chunks == Count::MIN || !values.by_user(CHUNKS);
        values.rule(&[CHUNKS, SCHEDULE], heard, || {
            Problem::new(format!("{CHUNKS} = {chunks} has no effect with {SCHEDULE} = {schedule}"))
                .because("a table says by itself which chunks a device holds")
                .fix(format!("leave {CHUNKS} out, or {SCHEDULE} = \"interleaved\""))
        });
        let heard = parallel.warmup == PipelineWarmup::Pa || !values.by_user(WARMUP);
        values.rule(&[WARMUP, SCHEDULE], heard, || {
            let warmup = parallel.warmup.write();
            Problem::new(format!("{WARMUP} = {warmup} has no effect with {SCHEDULE} = {schedule}"))
                .because("a table says by itself how many micro-batches a stage starts with")
                .fix(format!("leave {WARMUP} out, or {SCHEDULE} = \"1f1b\""))
        });
    }

    /// With one device, some choices are none.
    fn check_one_device(&self, named: Named, values: &mut Values) {
        let parallel = &self.parallel;
        let late = parallel.warmup != PipelineWarmup::Pa && named == Named::OneFOneB;
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
