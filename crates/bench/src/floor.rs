//! The time of the matrix products of a step's linear layers and head alone.
//!
//! Every rank computes the products of its own shapes, forward, gradient of the input and gradient
//! of the weight, each product on all ranks at the same time. The measured rates give the time of a
//! step's products, each counted once: work that a layout does twice does not raise the floor.

use phalanx_ir::DType;
use phalanx_pipeline::split;
use phalanx_script::Part;

use phalanx_error::Result;
use phalanx_session::job;
use phalanx_session::products::{Limits, Round, TimedProduct, median, products, segment_products};
use phalanx_session::{Backend, Lowered, Size, Timing};

/// How carefully products are timed.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds of each product.
    rounds: usize,
    /// The fewest FLOPs of a round.
    work: u64,
    /// The most FLOPs of a timed product: larger products are timed in part.
    most: u64,
    /// About how long it may take in all.
    seconds: f64,
    /// Whether the best round counts, or the median.
    best: bool,
    /// Whether only as many ranks are timed as keep the cores busy.
    few: bool,
}

impl Effort {
    /// For benchmarks: whole products on all ranks, and their median time. With more ranks than
    /// cores, a round must be long enough that ranks compete for cores as they do in a step.
    pub const CAREFUL: Self = Self {
        rounds: 7,
        work: 100_000_000,
        most: u64::MAX,
        seconds: f64::INFINITY,
        best: false,
        few: false,
    };
    /// Before a run, where it must be quick: parts of large products, and their best time. Ranks
    /// beyond the number of cores would only wait for them, so few are timed.
    pub const SHORT: Self = Self {
        rounds: 4,
        work: 100_000_000,
        most: 200_000_000,
        seconds: 0.2,
        best: true,
        few: true,
    };

    /// How many of the ranks are timed.
    fn ranks(&self, size: Size) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Ranks that are processes take part in everything.
        match self.few && job::joined().is_none() {
            true => cores.div_ceil(size.threads).clamp(1, size.ranks),
            false => size.ranks,
        }
    }
}

/// A product of a rank's layers, timed on all ranks at once.
pub(crate) struct ProductTime {
    /// The product.
    pub(crate) product: TimedProduct,
    /// How many of them there are in a micro-batch.
    pub(crate) count: usize,
    /// How long one takes.
    pub(crate) seconds: f64,
}

/// Seconds that the products of one step would take alone; `None` for a model without any.
pub fn seconds(
    lowered: &Lowered,
    backend: &dyn Backend,
    compute: DType,
    effort: Effort,
) -> Result<Option<f64>> {
    let model = &lowered.model;
    let times = times(lowered, backend, compute, effort)?;
    if times.is_empty() {
        return Ok(None);
    }
    let mut once: f64 = times.iter().map(|time| time.count as f64 * time.seconds).sum();
    // The ranks that were not timed take turns on the same cores.
    let size = Size::of(lowered);
    once *= size.ranks as f64 / effort.ranks(size) as f64;
    let done: f64 = flops(times.iter().map(|time| (&time.product, time.count)));
    let done = done * lowered.mesh().ranks() as f64;
    let needed = products(model, |segment| &model.segments()[segment]);
    let needed: f64 = flops(needed.iter().map(|(product, &count)| (product, count)));
    Ok(Some(once * needed / done * passes(lowered)?))
}

/// The distinct products of a rank's layers in one micro-batch.
pub(crate) fn times(
    lowered: &Lowered,
    backend: &dyn Backend,
    compute: DType,
    effort: Effort,
) -> Result<Vec<ProductTime>> {
    let (model, compiled) = (&lowered.model, lowered.compiled());
    let local = products(model, |segment| compiled.program(segment, Part::F));
    let (whole, counts): (Vec<TimedProduct>, Vec<usize>) = local.into_iter().unzip();
    if whole.is_empty() {
        return Ok(Vec::new());
    }
    let cut: Vec<TimedProduct> = whole.iter().map(|p| p.cut(effort.most)).collect();
    let types = [compute, lowered.settings.precision.grads];
    let Effort { rounds, work, seconds, .. } = effort;
    let timing = Timing { products: &cut, types, limits: Limits { rounds, work, seconds } };
    let size = Size::of(lowered);
    // Nobody sends a message, so the ranks need no channels.
    let size = Size { ranks: effort.ranks(size), depth: None, ..size };
    let rounds = backend.time_products(size, &timing)?;
    let time = |(at, (whole, count)): (usize, (TimedProduct, usize))| {
        let ranks: Vec<&[Round]> = rounds.iter().map(|ranks| &ranks[at].rounds[..]).collect();
        let repeats = rounds.first().map_or(1, |products| products[at].repeats);
        let seconds = together(&ranks, effort.best) / repeats as f64;
        let seconds = seconds * whole.flops() as f64 / cut[at].flops() as f64;
        ProductTime { product: whole, count, seconds }
    };
    Ok(whole.iter().copied().zip(counts).enumerate().map(time).collect())
}

/// By how much the time of one micro-batch's products is multiplied: by the number of micro-batches
/// or, in a pipeline, by the time that the heaviest stage group needs until the last micro-batch is
/// done.
fn passes(lowered: &Lowered) -> Result<f64> {
    let (model, stage_groups) = (&lowered.model, lowered.stage_groups().len());
    let costs: Vec<f64> = (model.instances().iter())
        .map(|i| {
            segment_products(&model.segments()[i.segment]).iter().map(|p| p.flops() as f64).sum()
        })
        .collect();
    let runs = split::by_cost(&costs, stage_groups)?;
    let heaviest = runs.into_iter().map(|run| costs[run].iter().sum::<f64>()).fold(0.0, f64::max);
    let share = heaviest / costs.iter().sum::<f64>();
    Ok((lowered.settings.microbatches + stage_groups - 1) as f64 * share)
}

fn flops<'p>(products: impl Iterator<Item = (&'p TimedProduct, usize)>) -> f64 {
    products.map(|(product, count)| product.flops() as f64 * count as f64).sum()
}

/// The time of a round, from the start of the first rank to the end of the last.
fn together(ranks: &[&[Round]], best: bool) -> f64 {
    let taken = ranks.iter().map(|rounds| rounds.len()).min().unwrap_or(0);
    let mut rounds: Vec<f64> = (0..taken)
        .filter_map(|round| {
            let begun = ranks.iter().map(|rounds| rounds[round].0).min()?;
            let ended = ranks.iter().map(|rounds| rounds[round].1).max()?;
            Some((ended - begun).as_secs_f64())
        })
        .collect();
    let median = median(&mut rounds);
    if best { rounds[0] } else { median }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use phalanx_config::Sources;
    use phalanx_session::Settings;
    use phalanx_session::network::{Network, load};

    /// FLOPs of a rank's products and of the model's, and the largest rows, widths and outputs of
    /// the rank's.
    fn work(settings: &[&str]) -> (f64, f64, [usize; 3]) {
        let sources = settings.iter().fold(Sources::default().preset("tiny"), |s, set| s.set(*set));
        let loaded = load(&sources).unwrap();
        let models = Network::new(&loaded).unwrap().models(&loaded.config, false).unwrap();
        let lowered = Lowered::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
        let (model, compiled) = (&lowered.model, lowered.compiled());
        let own = products(model, |segment| compiled.program(segment, Part::F));
        let all = products(model, |segment| &model.segments()[segment]);
        let largest = |side: fn(&TimedProduct) -> usize| own.keys().map(side).max().unwrap();
        let sides = [largest(|p| p.rows), largest(|p| p.from), largest(|p| p.to)];
        let total = |p: &std::collections::BTreeMap<TimedProduct, usize>| {
            flops(p.iter().map(|(p, n)| (p, *n)))
        };
        (total(&own), total(&all), sides)
    }

    /// `tiny` has 32 sequences of 64 tokens, width 64, ffn 128 and a vocabulary of 509.
    #[test]
    fn a_rank_does_the_products_of_its_local_shapes() {
        let (alone, all, sides) = work(&[]);
        assert_eq!((alone, sides), (all, [2048, 128, 509]));
        // Replicas and context-parallel ranks share the rows, tensor-parallel ones the weights; 509
        // columns of the head are 510 with padding.
        let (own, all, sides) = work(&["parallel.dp=2", "parallel.cp=2"]);
        assert_eq!((own * 4.0, sides), (all, [512, 128, 509]));
        let (own, all, sides) = work(&["parallel.dp=2", "parallel.tp=2", "parallel.zero=3"]);
        assert_eq!(sides, [1024, 64, 255]);
        assert!((own * 4.0 / all - 1.0).abs() < 1e-3, "{own} {all}");
        // Weights in another element type still count as weights.
        let (own, all, _) = work(&["precision.weights=bf16", "precision.compute=bf16"]);
        assert_eq!(own, all);
    }

    /// Keys and values of a head that all ranks need are computed on each: more work, same floor.
    #[test]
    fn work_that_is_done_twice_is_seen() {
        let (own, all, _) = work(&["parallel.tp=4", "model.kv_heads=2"]);
        assert!(own * 4.0 > 1.01 * all, "{own} {all}");
    }

    /// However many ranks a run has, a short measurement takes no more than the cores.
    #[test]
    fn few_ranks_are_timed_before_a_run() {
        let units = phalanx_config::CpuUnits::Auto;
        let size = |ranks, threads| Size {
            ranks,
            threads,
            depth: None,
            keeps: false,
            tf32: false,
            units,
            exchanges_first: false,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(Effort::SHORT.ranks(size(1, 1)), 1);
        assert_eq!(Effort::SHORT.ranks(size(4096, 1)), cores.min(4096));
        assert_eq!(Effort::SHORT.ranks(size(64, cores)), 1);
        assert_eq!(Effort::CAREFUL.ranks(size(4096, 1)), 4096);
    }

    #[test]
    fn a_round_lasts_from_the_first_to_the_last() {
        let zero = Instant::now();
        let ms = |from: u64, to: u64| {
            (zero + Duration::from_millis(from), zero + Duration::from_millis(to))
        };
        let (a, b) =
            ([ms(0, 10), ms(100, 130), ms(200, 210)], [ms(5, 15), ms(101, 120), ms(199, 207)]);
        assert!((together(&[&a, &b], false) - 0.015).abs() < 1e-9);
        assert!((together(&[&a, &b], true) - 0.011).abs() < 1e-9);
    }
}
