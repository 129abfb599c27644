//! Finds changes that make a plan fit into memory, by planning again with each change.
//!
//! Each single change that might help is planned in full, in pure code and without memory. Changes
//! that fit come first, ordered by the predicted time of a step; among them, changes that need more
//! ranks come last. Then come those that save most.

use std::cmp::Ordering;

use phalanx_config::{Config, Count, Loaded, RecomputeKind, Setting, ZeroStage};
use phalanx_error::bytes;
use phalanx_error::{Error, Problem, Result};
use phalanx_session::network::Network;
use phalanx_session::predict::step_seconds;
use phalanx_session::{Backend, Lowered, MemoryExcess, Models, Prepared, Settings, StageSplit};

/// The most changes that a message names.
const NAMED: usize = 3;

/// Prepares a session; if its plan takes too much memory, refuses it and names changes that would
/// help.
pub fn prepare(
    loaded: &Loaded,
    network: &Network,
    models: &Models,
    lowered: &Lowered,
    backend: &dyn Backend,
) -> Result<Prepared> {
    Prepared::load(lowered, backend)?.map_err(|over| {
        let planner = Planner {
            network,
            evaluate: models.evaluate.is_some(),
            split: &lowered.settings.parallel.pipeline.split,
        };
        let problem = advise(&loaded.config, &planner, &over);
        Error::refused(loaded.located("run.memory_limit", problem))
    })
}

/// The problem, and the changes that would cost least.
fn advise(config: &Config, planner: &Planner<'_>, over: &MemoryExcess) -> Problem {
    let size = |rank: usize, all: usize| over.limit.counted(rank, all);
    let now = size(over.rank, over.all);
    let planned = changes(config).into_iter().filter_map(|(text, changed)| {
        let lowered = planner.lowered(&changed)?;
        let (rank, all) = lowered.arenas().ok()?;
        let bytes = size(rank, all);
        let fits = match over.limit.allows(rank, all) {
            true => Some((lowered.ranks(), step_seconds(&lowered).ok()?)),
            false => None,
        };
        (bytes < now).then_some(Planned { text, bytes, fits, changed })
    });
    let mut planned: Vec<Planned> = one_recomputation(planned.collect(), config);
    planned.sort_by(Planned::order);
    planned.truncate(NAMED);
    let Some(first) = planned.first() else { return over.problem() };
    let texts: Vec<String> =
        planned.iter().map(|p| format!("{} ({})", p.text, bytes(p.bytes as u64))).collect();
    let texts = texts.join("; ");
    if first.fits.is_some() {
        let fitting = planned.iter().filter(|p| p.fits.is_some()).count();
        return over.diagnostic().nearest(match fitting {
            all if all == planned.len() => texts,
            1 => format!("{texts}; the first fits"),
            some => format!("{texts}; the first {some} fit"),
        });
    }
    let told =
        over.diagnostic().because(format!("no single change is enough; these save most: {texts}"));
    let planned = together(config, &planned).and_then(|all| planner.lowered(&all));
    match planned.and_then(|lowered| lowered.arenas().ok()) {
        Some((rank, all)) => {
            let amount = bytes(size(rank, all) as u64);
            match over.limit.allows(rank, all) {
                true => told.nearest(format!("all of these together ({amount})")),
                false => told.fix(format!(
                    "all of these together take {amount}, so also a shorter train.seq_len, a smaller \
                     model or more ranks"
                )),
            }
        }
        None => told.fix("a shorter train.seq_len, a smaller model or more ranks"),
    }
}

/// Of the ways to recompute, which exclude each other, the one that saves most.
fn one_recomputation(mut planned: Vec<Planned>, config: &Config) -> Vec<Planned> {
    let recomputes = |p: &Planned| p.changed.train.recompute != config.train.recompute;
    let least = planned.iter().filter(|p| recomputes(p)).map(|p| p.bytes).min();
    planned.retain(|p| !recomputes(p) || Some(p.bytes) == least);
    planned
}

/// A change and its plan.
struct Planned {
    text: String,
    bytes: usize,
    /// If it fits: its ranks, and the predicted seconds of a step.
    fits: Option<(usize, f64)>,
    changed: Config,
}

impl Planned {
    /// The order in which changes are named.
    fn order(&self, other: &Self) -> Ordering {
        match (self.fits, other.fits) {
            (Some((ranks, seconds)), Some((more, later))) => {
                ranks.cmp(&more).then(seconds.total_cmp(&later))
            }
            (None, None) => self.bytes.cmp(&other.bytes),
            (own, _) => {
                if own.is_some() {
                    Ordering::Less
                } else {
                    Ordering::Greater
                }
            }
        }
    }
}

/// Every single change that might save memory.
fn changes(config: &Config) -> Vec<(String, Config)> {
    let mut found: Vec<(String, Config)> = Vec::new();
    let mut change = |text: String, set: &dyn Fn(&mut Config)| {
        let mut changed = config.clone();
        set(&mut changed);
        if changed.is_legal() {
            found.push((text, changed));
        }
    };
    let next = match config.parallel.zero {
        ZeroStage::Zero => Some(ZeroStage::One),
        ZeroStage::One => Some(ZeroStage::Two),
        ZeroStage::Two => Some(ZeroStage::Three),
        ZeroStage::Three => None,
    };
    if let Some(stage) = next {
        let text = format!("parallel.zero = {}", stage as usize);
        change(text, &|c| c.parallel.zero = stage);
    }
    if next.is_some_and(|stage| stage < ZeroStage::Three) {
        change("parallel.zero = 3".to_owned(), &|c| c.parallel.zero = ZeroStage::Three);
    }
    let parts = twice(config.train.microbatches);
    change(format!("train.microbatches = {parts}"), &|c| c.train.microbatches = parts);
    for policy in [RecomputeKind::Full, RecomputeKind::Stage] {
        if config.train.recompute != policy {
            let text = format!("train.recompute = {}", policy.write());
            change(text, &|c| c.train.recompute = policy);
        }
    }
    let tp = twice(config.parallel.tp);
    change(format!("parallel.tp = {tp}"), &|c| c.parallel.tp = tp);
    let dp = twice(config.parallel.dp);
    change(format!("parallel.dp = {dp}"), &|c| {
        if c.parallel.dp_shard == c.parallel.dp {
            c.parallel.dp_shard = dp;
        }
        c.parallel.dp = dp;
    });
    found
}

fn twice(count: Count) -> Count {
    count.saturating_add(count.get())
}

/// Several changes of different keys at once, if that is legal.
fn together(config: &Config, planned: &[Planned]) -> Option<Config> {
    let mut all = config.clone();
    for Planned { changed, .. } in planned {
        if changed.parallel != config.parallel {
            let (parallel, other) = (&mut all.parallel, &changed.parallel);
            parallel.zero = parallel.zero.max(other.zero);
            parallel.tp = parallel.tp.max(other.tp);
            parallel.dp = parallel.dp.max(other.dp);
            parallel.dp_shard = parallel.dp_shard.max(other.dp_shard);
        }
        all.train.microbatches = all.train.microbatches.max(changed.train.microbatches);
        if changed.train.recompute != config.train.recompute {
            all.train.recompute = changed.train.recompute;
        }
    }
    all.is_legal().then_some(all)
}

/// What all changes have in common.
struct Planner<'a> {
    network: &'a Network,
    evaluate: bool,
    /// How the plan that takes too much memory divides its layers. Changes use the same division,
    /// so that they differ from it in nothing else.
    split: &'a StageSplit,
}

impl Planner<'_> {
    /// The programs of a configuration, if it can be planned.
    fn lowered(&self, config: &Config) -> Option<Lowered> {
        let models = self.network.models(config, self.evaluate).ok()?;
        let mut settings = Settings::new(config).ok()?;
        settings.parallel.pipeline.split = self.split.clone();
        Lowered::new(&models, settings).ok()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use phalanx_config::Sources;
    use phalanx_session::network::load;

    /// Costs that leave all layers but one to the first stage plan more memory on a rank than even
    /// ones: so a change has the cut of the plan that it is to relieve, and measures nothing.
    #[test]
    fn a_change_is_cut_like_the_plan_that_it_relieves() {
        let sets = ["parallel.pp=2", "train.microbatches=4", "parallel.split=measured"];
        let sources = sets.iter().fold(Sources::default().preset("tiny"), |s, set| s.set(*set));
        let loaded = load(&sources).unwrap();
        let network = Network::new(&loaded).unwrap();
        let largest = |costs: [f64; 10]| {
            let split = &StageSplit::Costs(costs.to_vec());
            let planner = Planner { network: &network, evaluate: false, split };
            planner.lowered(&loaded.config).unwrap().arenas().unwrap().0
        };
        let (mut uneven, even) = ([0.0; 10], [1.0; 10]);
        uneven[8..].fill(1.0);
        assert!(largest(uneven) > largest(even) * 5 / 4, "{} {}", largest(uneven), largest(even));
    }

    /// Recomputing takes a third more of the work, more micro-batches read the weights more often, and
    /// shards that are gathered for every run are moved more often than those that are gathered once.
    #[test]
    fn changes_are_ordered_by_the_predicted_step() {
        let sets = ["parallel.dp=2", "train.steps=1"];
        let sources = sets.iter().fold(Sources::default().preset("tiny"), |s, set| s.set(*set));
        let loaded = load(&sources).unwrap();
        let network = Network::new(&loaded).unwrap();
        let split = &StageSplit::Flops;
        let planner = Planner { network: &network, evaluate: false, split };
        let seconds = |config: &Config| step_seconds(&planner.lowered(config).unwrap()).unwrap();
        let now = seconds(&loaded.config);
        let all: Vec<(String, f64)> =
            changes(&loaded.config).into_iter().map(|(t, c)| (t, seconds(&c) / now)).collect();
        let of = |text: &str| all.iter().find(|(t, _)| t == text).unwrap().1;
        let (state, weights) = (of("parallel.zero = 1"), of("parallel.zero = 3"));
        assert!(state < weights && of("train.microbatches = 2") > 1.0, "{all:?}");
        assert!((1.2..1.4).contains(&of("train.recompute = \"full\"")), "{all:?}");
        assert!(of("parallel.tp = 2") < 1.0 && of("parallel.dp = 4") < 1.0, "{all:?}");
        let planned = |ranks, seconds| Planned {
            text: String::new(),
            bytes: 1,
            fits: Some((ranks, seconds)),
            changed: loaded.config.clone(),
        };
        assert!(planned(2, 3.0).order(&planned(4, 1.0)).is_lt(), "more ranks cost ranks");
        assert!(planned(2, 3.0).order(&Planned { fits: None, ..planned(2, 1.0) }).is_lt());
    }

    /// Ways to recompute exclude each other, so one of them is named: that which saves more.
    #[test]
    fn one_way_to_recompute_is_proposed() {
        for (sets, best, other) in [
            (["model.layers=8", "train.microbatches=16", "train.batch_size=16"], "stage", "full"),
            (["model.layers=8", "train.microbatches=2", "train.batch_size=16"], "full", "stage"),
        ] {
            let pipeline =
                ["parallel.pp=2", "parallel.schedule=gpipe", "run.memory_limit=\"1MiB\""];
            let all = pipeline.iter().chain(&sets);
            let sources = all.fold(Sources::default().preset("tiny"), |s, set| s.set(*set));
            let loaded = load(&sources).unwrap();
            let network = Network::new(&loaded).unwrap();
            let models = network.models(&loaded.config, false).unwrap();
            let lowered = Lowered::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
            let told =
                prepare(&loaded, &network, &models, &lowered, &*phalanx_session::host::threads());
            let told = told.err().unwrap().to_string();
            assert!(told.contains(&format!("train.recompute = \"{best}\" (")), "{told}");
            assert!(!told.contains(&format!("train.recompute = \"{other}\"")), "{told}");
        }
    }
}
