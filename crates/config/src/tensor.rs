//! The shapes of tensor parallelism: a line of ranks, a square, several squares, a cube, a grid. One rank is each of
//! them, with nothing to divide, as one rank is any kind of context parallelism.

use phalanx_spmd::strategies::{Gspmd, floor_root, whole_root};

use super::fits::near;
use super::model::assignments;
use super::parallel::{ParallelConfig, TpKind};
use super::values::Values;
use super::{Config, Count};
use phalanx_error::{Problem, counted};

/// What the ranks of tensor parallelism divide, besides weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorShape {
    /// Ranks that divide heads.
    pub heads: usize,
    /// Ranks that divide samples.
    pub samples: usize,
}

impl ParallelConfig {
    /// The shape of tensor parallelism, if its ranks form one.
    pub fn tensor_shape(&self) -> Option<TensorShape> {
        shape(self, self.tp.get())
    }

    /// Rejects degrees that form no square or cube, and keys that other shapes do not use.
    pub(crate) fn check_tensor_shape(&self, values: &mut Values) {
        let (tp, kind) = (self.tp.get(), self.tp_kind);
        let depth = self.tp_depth.get();
        let flat = kind != TpKind::TwoAndAHalfD;
        values.rule(&["parallel.tp_depth", "parallel.tp_kind"], !flat || depth == 1, || {
            Problem::new(format!(
                "parallel.tp_depth = {depth} is set, but parallel.tp_kind = \"{}\"",
                kind.name()
            ))
            .because("only 2.5d tensor parallelism has a depth")
            .fix("parallel.tp_kind = \"2.5d\", or leave parallel.tp_depth out")
        });
        self.check_rows(values);
        let keys = ["parallel.tp", "parallel.tp_kind", "parallel.tp_depth"];
        let formed = self.tensor_shape().is_some() || flat && depth > 1 || kind == TpKind::Gspmd;
        values.rule(&keys, formed, || {
            let what = match kind {
                TpKind::TwoAndAHalfD => format!("q²·{depth} ranks (parallel.tp_depth = {depth})"),
                TpKind::ThreeD => "a cube of ranks".to_owned(),
                TpKind::OneD | TpKind::TwoD | TpKind::Gspmd => "a square of ranks".to_owned(),
            };
            let nearest = self.nearest_shapes();
            Problem::new(format!("parallel.tp = {tp} is not {what}"))
                .because(format!(
                    "parallel.tp_kind = \"{}\" divides weights in {} directions",
                    kind.name(),
                    if kind == TpKind::ThreeD { "three" } else { "two" }
                ))
                .nearest(assignments("parallel.tp", &nearest))
        });
        self.check_alone(values);
        self.check_stream(values);
    }

    /// Rejects rows that form no grid, and rows of what has none.
    fn check_rows(&self, values: &mut Values) {
        let (tp, rows, kind) = (self.tp.get(), self.tp_rows.get(), self.tp_kind);
        let used = kind == TpKind::Gspmd || rows == 1;
        values.rule(&["parallel.tp_rows", "parallel.tp_kind"], used, || {
            let kind = kind.name();
            Problem::new(format!(
                "parallel.tp_rows = {rows} is set, but parallel.tp_kind = \"{kind}\""
            ))
            .because("only gspmd's grid of ranks may have any number of rows")
            .fix("parallel.tp_kind = \"gspmd\", or leave parallel.tp_rows out")
        });
        let even = kind != TpKind::Gspmd || tp.is_multiple_of(rows);
        values.rule(&["parallel.tp_rows", "parallel.tp"], even, || {
            Problem::new(format!("parallel.tp_rows = {rows} does not divide parallel.tp = {tp}"))
                .because("the ranks of parallel.tp form a grid of equal rows")
                .nearest(assignments("parallel.tp_rows", &near(rows, |n| tp.is_multiple_of(n))))
        });
    }

    /// Rejects blocks of operands that are not gathered.
    fn check_stream(&self, values: &mut Values) {
        let gathers = self.tp_kind != TpKind::OneD || self.sp;
        let keys = ["parallel.stream", "parallel.tp_kind", "parallel.sp"];
        values.rule(&keys, gathers || !self.stream, || {
            Problem::new("parallel.stream = true is set, but no operand of a product is gathered")
                .because("parallel.tp_kind = \"1d\" without parallel.sp has them whole")
                .fix("parallel.sp = true, or leave parallel.stream out")
        });
    }

    /// Rejects keys that only a line of ranks has a use for.
    fn check_alone(&self, values: &mut Values) {
        let kind = self.tp_kind;
        for (key, set, why) in [
            ("parallel.sp", self.sp, "nothing is left whole between its products"),
            ("parallel.tp_plan", !self.tp_plan.0.is_empty(), "it divides every weight"),
        ] {
            let alone = kind == TpKind::OneD || !set;
            values.rule(&["parallel.tp_kind", key], alone, || {
                let kind = kind.name();
                Problem::new(format!("parallel.tp_kind = \"{kind}\" does not work with {key}"))
                    .because(why)
                    .fix(format!("leave {key} out, or parallel.tp_kind = \"1d\""))
            });
        }
    }

    /// The numbers of ranks below and above that form a shape.
    fn nearest_shapes(&self) -> Vec<usize> {
        let (power, depth) = match self.tp_kind {
            TpKind::ThreeD => (3, 1),
            TpKind::TwoAndAHalfD => (2, self.tp_depth.get()),
            TpKind::OneD | TpKind::TwoD | TpKind::Gspmd => (2, 1),
        };
        let root = floor_root(self.tp.get() / depth, power);
        let ranks = |q: usize| q.checked_pow(power)?.checked_mul(depth);
        [root, root + 1].into_iter().filter(|&q| q > 0).filter_map(ranks).collect()
    }
}

impl Config {
    /// A square or cube of ranks divides the samples of a micro-batch.
    pub(super) fn check_samples(&self, values: &mut Values) {
        let Some(TensorShape { samples, .. }) = self.parallel.tensor_shape() else { return };
        let (batch, micro) = (self.train.batch_size.get(), self.train.microbatches.get());
        let (dp, kind) = (self.parallel.dp.get(), self.parallel.tp_kind.name());
        let Some(each) = self.sequences() else { return };
        let keys = [
            "train.batch_size",
            "train.microbatches",
            "parallel.dp",
            "parallel.tp",
            "parallel.tp_kind",
        ];
        values.rule(&keys, each.is_multiple_of(samples), || {
            Problem::new(format!(
                "{} of a micro-batch cannot be divided among {samples} ranks of \
                 parallel.tp_kind = \"{kind}\"",
                counted(each, "sequence")
            ))
            .because(format!(
                "train.batch_size = {batch}, parallel.dp = {dp}, train.microbatches = {micro}; \
                 it divides samples as well as weights"
            ))
            .nearest(assignments("train.batch_size", &self.batches_of(samples)))
        });
    }
}

/// Rows of the grid of ranks, where nobody says how many.
pub(super) fn usual_rows(tp: Count, kind: TpKind) -> Count {
    let rows = if kind == TpKind::Gspmd { Gspmd::usual_rows(tp.get()) } else { 1 };
    Count::new(rows).unwrap_or(Count::MIN)
}

/// The shape of this many ranks.
pub(super) fn shape(parallel: &ParallelConfig, tp: usize) -> Option<TensorShape> {
    let depth = match parallel.tp_kind {
        TpKind::OneD => return Some(TensorShape { heads: tp, samples: 1 }),
        TpKind::ThreeD => {
            let q = whole_root(tp, 3)?;
            return Some(TensorShape { heads: q, samples: q * q });
        }
        TpKind::Gspmd => {
            let rows = parallel.tp_rows.get();
            let columns = tp.is_multiple_of(rows).then_some(tp / rows)?;
            return Some(TensorShape { heads: columns, samples: rows });
        }
        TpKind::TwoD => Count::MIN,
        TpKind::TwoAndAHalfD => parallel.tp_depth,
    }
    .get();
    let q = tp.is_multiple_of(depth).then(|| whole_root(tp / depth, 2)).flatten()?;
    Some(TensorShape { heads: q, samples: q * depth })
}
