//! Rules between the degrees of parallelism and what they divide.

use phalanx_ir::ops::AttentionKind;
use phalanx_spmd::strategies::heads_fit;

use super::context::CpKind;
use super::model::assignments;
use super::parallel::{ParallelAxis, ParallelConfig, TpKind};
use super::setting::Setting;
use super::tensor::shape;
use super::values::Values;
use super::{Config, ModelKind};
use phalanx_error::Problem;
use phalanx_error::counted;

impl Config {
    pub(super) fn check_fits(&self, values: &mut Values) {
        self.check_order(values);
        self.check_shards(values);
        self.check_expert_ranks(values);
        self.check_priority(values);
        self.check_replicas(values);
        self.check_plan(values);
        self.check_pipeline(values);
        self.check_samples(values);
        self.check_ring(values);
        if self.model.kind.is_language() {
            self.check_heads(values);
        }
        if self.model.kind == ModelKind::T5 {
            self.check_encoder_decoder(values);
        }
    }

    /// Every axis with more than one rank must be in the order.
    fn check_order(&self, values: &mut Values) {
        let parallel = &self.parallel;
        for axis in [ParallelAxis::Tp, ParallelAxis::Cp, ParallelAxis::Dp, ParallelAxis::Pp] {
            let (degree, name) = (parallel.degree(axis).get(), axis.name());
            let key = format!("parallel.{name}");
            let placed = degree == 1 || parallel.order.axes().contains(&axis);
            values.rule(&["parallel.order", &key], placed, || {
                let order: Vec<&str> = parallel.order.axes().iter().map(|a| a.name()).collect();
                let order = order.join("-");
                Problem::new(format!("parallel.order = \"{order}\" leaves out {name} = {degree}"))
                    .because("ranks are numbered by the order, fastest axis first")
                    .nearest(format!("parallel.order = \"{order}-{name}\", or {key} = 1"))
            });
        }
    }

    /// Copies of the weights are sharded within equal groups of ranks.
    fn check_shards(&self, values: &mut Values) {
        let (dp, shard) = (self.parallel.dp.get(), self.parallel.dp_shard.get());
        let divides = dp % shard == 0;
        values.rule(&["parallel.dp_shard", "parallel.dp"], divides, || {
            Problem::new(format!("parallel.dp_shard = {shard} does not divide parallel.dp = {dp}"))
                .because("each group of dp_shard ranks shares one copy of the weights")
                .nearest(assignments("parallel.dp_shard", &near(shard, |n| dp.is_multiple_of(n))))
        });
    }

    /// A ring passes keys on between ranks that have some, and stores all scores or none.
    fn check_ring(&self, values: &mut Values) {
        let (cp, seq) = (self.parallel.cp.get(), self.train.seq_len.get());
        let (stored, other) = match self.parallel.cp_kind {
            CpKind::Ring if cp > 1 => (false, "allgather"),
            CpKind::Rsa if cp > 1 => (true, "ring"),
            _ => return,
        };
        values.rule(&["parallel.cp", "train.seq_len"], seq >= cp, || {
            Problem::new(format!("train.seq_len = {seq} is shorter than parallel.cp = {cp} ranks"))
                .because("in a ring each rank has positions of every sequence")
                .nearest(format!("parallel.cp = {seq}, or train.seq_len = {cp}"))
        });
        let (kind, attention) = (self.parallel.cp_kind.name(), self.model.attention);
        let fits = stored == (attention == AttentionKind::Materialised);
        values.rule(&["parallel.cp_kind", "model.attention"], fits, || {
            let problem = Problem::new(format!(
                "parallel.cp_kind = \"{kind}\" does not work with model.attention = \"{attention}\""
            ));
            let (why, works) = match stored {
                true => ("it passes blocks between rows of stored scores", "materialised"),
                false => {
                    ("a ring sees some keys at a time, and stored scores are those of all", "flash")
                }
            };
            problem.because(why).nearest(format!(
                "model.attention = \"{works}\", or parallel.cp_kind = \"{other}\""
            ))
        });
    }

    /// What an attention that is made of products, and tables that many stages share, cannot be.
    fn check_encoder_decoder(&self, values: &mut Values) {
        const KIND: &str = "model.kind";
        let (cp, tp_kind) = (self.parallel.cp.get(), self.parallel.tp_kind);
        values.rule(&["parallel.cp", KIND], cp == 1, || {
            Problem::new(format!("parallel.cp = {cp} does not work with model.kind = t5"))
                .because("each half of a sequence has positions of its own, and scores are stored")
                .nearest("parallel.cp = 1, and parallel.dp or parallel.tp instead")
        });
        let seq = self.train.seq_len.get();
        values.rule(&["train.seq_len", KIND], seq > 1, || {
            Problem::new("train.seq_len = 1 does not work with model.kind = t5")
                .because(
                    "the encoder reads the first half of a sample, and the decoder continues it",
                )
                .nearest("train.seq_len = 2")
        });
        let one = self.parallel.tp.get() == 1 || tp_kind == TpKind::OneD;
        values.rule(&["parallel.tp_kind", KIND], one, || {
            let name = tp_kind.name();
            Problem::new(format!(
                "parallel.tp_kind = \"{name}\" does not work with model.kind = t5"
            ))
            .because("squares and cubes of ranks divide products that follow each other directly")
            .nearest("parallel.tp_kind = \"1d\"")
        });
        let (norm, pp) = (self.parallel.has_norm(), self.parallel.pp.get());
        values.rule(&["parallel.schedule", KIND, "parallel.pp"], norm || pp == 1, || {
            let name = self.parallel.schedule.write();
            Problem::new(format!("parallel.schedule = {name} does not work with model.kind = t5"))
                .because("stages would update the tables that they share at different times")
                .nearest("parallel.schedule = \"pipedream-2bw\"")
        });
    }

    /// Ranks that share the work of attention share its heads.
    fn check_heads(&self, values: &mut Values) {
        let (heads, kv) = (self.model.heads.get(), self.model.kv_heads.get());
        let tp = self.parallel.tp.get();
        let keys = ["parallel.tp", "model.heads", "model.kv_heads"];
        // Ranks that form no square or cube are refused as such.
        let Some(shaped) = self.parallel.tensor_shape() else { return };
        let sharing = shaped.heads;
        let fits = heads_fit(heads, kv, sharing);
        let fit = |n: usize| {
            shape(&self.parallel, n).is_some_and(|shape| heads_fit(heads, kv, shape.heads))
        };
        let (cp, ulysses) = (self.parallel.cp.get(), self.parallel.cp_kind == CpKind::Ulysses);
        let splits = splits_heads(&self.parallel);
        // Ulysses divides the heads of each rank of tp, whatever tp splits.
        values.rule(&keys, fits || !(splits || ulysses && cp > 1), || {
            let degrees = assignments("parallel.tp", &near(tp, fit));
            let problem = format!("parallel.tp = {tp} does not work with {}", of_heads(heads, kv));
            let problem = Problem::new(problem).because(why(heads, kv, sharing));
            match splits {
                true => problem.nearest(degrees),
                false => problem
                    .because("Ulysses divides the heads of each of them among ranks of cp")
                    .nearest(format!("{degrees}; or parallel.cp_kind = \"allgather\"")),
            }
        });
        if !fits || !ulysses {
            return;
        }
        let (heads, kv) = (heads / sharing, kv.div_ceil(sharing));
        let keys = ["parallel.cp", "parallel.tp", "model.heads", "model.kv_heads"];
        values.rule(&keys, heads_fit(heads, kv, cp), || {
            let left = match sharing {
                1 => of_heads(heads, kv),
                _ => format!("{} on each of parallel.tp = {tp} ranks", of_heads(heads, kv)),
            };
            let degrees = assignments("parallel.cp", &near(cp, |n| heads_fit(heads, kv, n)));
            Problem::new(format!("parallel.cp = {cp} does not work with {left}"))
                .because(why(heads, kv, cp))
                .because("Ulysses gives every rank whole sequences of some heads")
                .nearest(format!("{degrees}; or parallel.cp_kind = \"allgather\""))
        });
    }
}

/// Whether tp gives every rank heads of its own. A plan splits only what it names; if it splits
/// attention by more ranks than there are heads, the partitioner refuses it.
fn splits_heads(parallel: &ParallelConfig) -> bool {
    match parallel.tp_kind {
        TpKind::OneD => parallel.tp_plan.0.is_empty(),
        TpKind::TwoD | TpKind::TwoAndAHalfD | TpKind::ThreeD | TpKind::Gspmd => true,
    }
}

fn of_heads(heads: usize, kv: usize) -> String {
    match heads == kv {
        true => counted(heads, "head"),
        false => format!("{} and {}", counted(heads, "head"), counted(kv, "key head")),
    }
}

fn why(heads: usize, kv: usize, degree: usize) -> String {
    match heads < degree {
        true => format!(
            "{degree} ranks can't share {}: each needs at least one",
            counted(heads, "head")
        ),
        false => {
            format!("{degree} ranks can't share {kv} key heads: neither divides the other evenly")
        }
    }
}

/// The closest degrees below and above that work, up to twice the degree.
pub(super) fn near(degree: usize, works: impl Fn(usize) -> bool) -> Vec<usize> {
    let below = (1..degree).rev().find(|&n| works(n));
    let above = (degree + 1..=2 * degree).find(|&n| works(n));
    below.into_iter().chain(above).collect()
}
