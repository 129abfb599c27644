//! The same training on fewer ranks.

use super::setting::Count;
use super::{Config, Loaded, PipelineSplit, StageCounts, TpKind};

impl Config {
    /// The nearest legal layout of at most this many ranks, with the same batch: degrees are divided,
    /// data parallelism first, and each remaining replica takes the micro-batches of those that are
    /// gone. So micro-batches stay as large as they were, and numbers change only by rounding.
    pub fn shrink(&self, ranks: usize) -> Option<Config> {
        let own = &self.parallel;
        if own.ranks().get() <= ranks {
            return Some(self.clone());
        }
        let mut found: Option<(Degrees, Config)> = None;
        for tp in divisors(own.tp) {
            for cp in divisors(own.cp) {
                for pp in divisors(own.pp) {
                    for dp in divisors(own.dp) {
                        let degrees = Degrees { ranks: tp * cp * pp * dp, tp, pp, cp, dp };
                        let better = found.as_ref().is_none_or(|(best, _)| degrees > *best);
                        if degrees.ranks <= ranks && better {
                            let config = self.with(degrees).filter(Config::is_legal);
                            found = config.map(|config| (degrees, config)).or(found);
                        }
                    }
                }
            }
        }
        found.map(|(_, config)| config)
    }

    fn with(&self, Degrees { tp, pp, cp, dp, .. }: Degrees) -> Option<Config> {
        let mut config = self.clone();
        let gone = self.parallel.dp.get() / dp;
        config.train.microbatches = Count::new(self.train.microbatches.get().checked_mul(gone)?)?;
        let parallel = &mut config.parallel;
        (parallel.tp, parallel.cp) = (Count::new(tp)?, Count::new(cp)?);
        if tp == 1 {
            // One rank has no shape.
            (parallel.tp_kind, parallel.tp_depth) = (TpKind::OneD, Count::MIN);
            parallel.tp_rows = Count::MIN;
        }
        if matches!(parallel.split, PipelineSplit::Given(_)) && parallel.pp.get() != pp {
            parallel.split = PipelineSplit::Flops;
        }
        // Holders are for the ranks that there were.
        parallel.holders = StageCounts::default();
        (parallel.pp, parallel.dp) = (Count::new(pp)?, Count::new(dp)?);
        // Copies of the weights are shared by as many ranks as before, or by all that are left.
        let shard = parallel.dp_shard.get().min(dp);
        let shard = (1..=shard).rev().find(|&shard| dp.is_multiple_of(shard))?;
        parallel.dp_shard = Count::new(shard)?;
        Some(config)
    }
}

impl Loaded {
    /// The same configuration on fewer ranks, if there is a legal one.
    pub fn shrink(&self, ranks: usize) -> Option<Loaded> {
        Some(Loaded { config: self.config.shrink(ranks)?, ..self.clone() })
    }
}

/// Degrees in the order in which they count: as many ranks as possible, then what is kept longest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Degrees {
    ranks: usize,
    tp: usize,
    pp: usize,
    cp: usize,
    dp: usize,
}

fn divisors(of: Count) -> impl Iterator<Item = usize> + Clone {
    let of = of.get();
    (1..=of).filter(move |&divisor| of.is_multiple_of(divisor))
}
