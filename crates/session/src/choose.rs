//! `parallel.schedule = "auto"`: the shortest schedule that fits into `run.memory_limit`, with recomputation if it must be.
//!
//! Candidates are ordered by their simulated makespan, with equal times of F, B and W; what is recomputed takes a forward more. Then
//! they are planned in full, one after the other, until one fits: exact bytes decide, not estimates. A limit that was not asked
//! for is not used, because the free memory of machines differs and all processes of a run must choose alike.

use phalanx_config::{Config, Count, Loaded, PipelineSchedule, RecomputeKind, Setting};
use phalanx_error::{Error, Problem, Result, bytes};
use phalanx_pipeline::{NamedSchedule, ScheduleShape, Times, TurnCosts, simulate};

use crate::network::Network;
use crate::{Lowered, Settings};

/// A schedule with a way to recompute, and the makespan that is expected.
struct Candidate {
    config: Config,
    name: String,
    makespan: f64,
}

/// The configuration with the schedule that is chosen for it; as it is, if it names one.
pub(crate) fn schedule(mut loaded: Loaded) -> Result<Loaded> {
    if loaded.config.parallel.schedule != PipelineSchedule::Auto {
        return Ok(loaded);
    }
    let mut candidates = candidates(&loaded);
    candidates.sort_by(|a, b| a.makespan.total_cmp(&b.makespan));
    let limit = Settings::new(&with_named(&loaded.config, NamedSchedule::OneFOneB))?.memory_limit;
    let limit = limit.and_then(|limit| limit.asked());
    let mut considered = Vec::new();
    let mut least: Option<usize> = None;
    for Candidate { config, name, makespan } in candidates {
        let mut own = loaded.clone();
        own.config = config;
        // A configuration does not know every model's stages: what cannot be built is no candidate.
        let bytes_of_rank = match planned(&own) {
            Ok(bytes) => bytes,
            Err(refused) if refused.exit_code() == 2 => {
                let text = refused.to_string();
                let why = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
                considered.push(format!("{name}: {why}"));
                continue;
            }
            Err(other) => return Err(other),
        };
        let told = format!("{name}: {makespan:.1}, {}", bytes(bytes_of_rank as u64));
        if limit.is_none_or(|limit| bytes_of_rank <= limit) {
            loaded.config = own.config;
            loaded.notes.push(chosen(&told, &considered));
            return Ok(loaded);
        }
        least = Some(least.map_or(bytes_of_rank, |least| least.min(bytes_of_rank)));
        considered.push(told);
    }
    let problem = Problem::new("no schedule fits into run.memory_limit")
        .because(format!("parallel.schedule = \"auto\" planned {}", considered.join("; ")));
    Err(Error::refused(match least {
        Some(least) => problem.nearest(format!("run.memory_limit = {least}")),
        None => problem.fix("other sizes: no schedule takes these stages and micro-batches"),
    }))
}

/// Bytes of the largest rank.
fn planned(own: &Loaded) -> Result<usize> {
    let models = Network::new(own)?.models(&own.config, own.config.train.eval_every > 0)?;
    Ok(Lowered::new(&models, Settings::new(&own.config)?)?.arenas()?.0)
}

fn chosen(told: &str, considered: &[String]) -> String {
    let others = match considered {
        [] => "the shortest of all".to_owned(),
        others => format!("shorter ones do not fit: {}", others.join("; ")),
    };
    format!(
        "parallel.schedule = \"auto\" is {told} (makespan where F, B and W take 1 each; {others})"
    )
}

/// Everything that could run.
fn candidates(loaded: &Loaded) -> Vec<Candidate> {
    let own = &loaded.config;
    // A search would need times that differ from process to process; the vectorised pipeline is GPipe with more work.
    let other = [NamedSchedule::ZbAuto, NamedSchedule::Vectorised];
    let built = |named: &NamedSchedule| !named.is_asynchronous() && !other.contains(named);
    let ways = match loaded.by_user("train.recompute") {
        true => vec![own.train.recompute],
        false => vec![
            RecomputeKind::None,
            RecomputeKind::Selective,
            RecomputeKind::Full,
            RecomputeKind::Stage,
        ],
    };
    let mut found = Vec::new();
    for named in NamedSchedule::ALL.into_iter().filter(built) {
        for &recompute in &ways {
            let mut config = with_named(own, named);
            config.train.recompute = recompute;
            let name = format!("{named}, train.recompute = {}", recompute.write());
            let makespan = makespan(&config, named);
            let legal = config.is_legal();
            found.extend(makespan.filter(|_| legal).map(|makespan| Candidate {
                config,
                name,
                makespan,
            }));
        }
    }
    found
}

fn with_named(own: &Config, named: NamedSchedule) -> Config {
    let mut config = own.clone();
    config.parallel.schedule = PipelineSchedule::Named(named);
    config.parallel.chunks = Count::new(named.usual_chunks()).unwrap_or(Count::MIN);
    config
}

/// How long it would take, if its shape is one that it takes.
fn makespan(config: &Config, named: NamedSchedule) -> Option<f64> {
    let shape = ScheduleShape::new(config.parallel.pp.get(), config.train.microbatches.get());
    let schedule = named.build(shape).ok()?;
    let again = match config.train.recompute {
        RecomputeKind::None => 0.0,
        // Scores alone are made again, which takes little of a forward.
        RecomputeKind::Selective => 0.1,
        RecomputeKind::Full | RecomputeKind::Stage => 1.0,
    };
    let costs = TurnCosts::even(Times { f: 1.0, b: 1.0 + again, w: 1.0 }, 0.0).ok()?;
    Some(simulate(&schedule, &costs).ok()?.makespan)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::network::load;
    use phalanx_config::Sources;

    fn auto(more: &[&str]) -> Result<Loaded> {
        let sets = ["parallel.pp=2", "train.microbatches=4", "parallel.schedule=auto"];
        let all = sets.iter().chain(more);
        load(&all.fold(Sources::default().preset("tiny"), |sources, set| sources.set(*set)))
    }

    fn named(loaded: &Loaded) -> NamedSchedule {
        let PipelineSchedule::Named(named) = loaded.config.parallel.schedule else {
            panic!("a schedule is chosen")
        };
        named
    }

    fn time(loaded: &Loaded) -> f64 {
        makespan(&loaded.config, named(loaded)).unwrap()
    }

    /// Each limit below what the last choice takes gives one that fits and is not shorter, until nothing does; and every
    /// candidate that is shorter than the choice takes more than the limit.
    #[test]
    fn less_memory_gives_the_next_schedule_that_fits() {
        let mut last = auto(&[]).unwrap();
        let recompute = |loaded: &Loaded| loaded.config.train.recompute;
        assert_eq!(recompute(&last), RecomputeKind::None, "{:?}", last.notes);
        let mut steps = 0;
        loop {
            let limit = planned(&last).unwrap() - 1;
            let found = match auto(&[&format!("run.memory_limit={limit}")]) {
                Ok(found) => found,
                Err(error) => {
                    let said = error.to_string();
                    assert!(
                        said.contains("no schedule fits") && said.contains("nearest"),
                        "{said}"
                    );
                    break;
                }
            };
            assert!(planned(&found).unwrap() <= limit && time(&found) >= time(&last));
            for other in
                candidates(&auto_of(&last)).into_iter().filter(|c| c.makespan < time(&found))
            {
                let mut own = found.clone();
                own.config = other.config;
                assert!(planned(&own).unwrap() > limit, "{}", other.name);
            }
            (last, steps) = (found, steps + 1);
        }
        assert!(steps >= 2, "{steps}");
    }

    /// The same configuration before anything was chosen.
    fn auto_of(loaded: &Loaded) -> Loaded {
        let mut own = loaded.clone();
        own.config.parallel.schedule = PipelineSchedule::Auto;
        own
    }

    #[test]
    fn what_the_user_says_stays() {
        let own = auto(&["train.recompute=full"]).unwrap();
        assert_eq!(own.config.train.recompute, RecomputeKind::Full);
        assert!(own.notes.iter().any(|note| note.contains("\"auto\" is ")), "{:?}", own.notes);
        for (set, word) in [
            ("parallel.chunks=2", "parallel.chunks"),
            ("parallel.warmup=pb", "parallel.warmup"),
            ("parallel.pp=1", "parallel.pp = 1"),
        ] {
            let said = auto(&[set]).unwrap_err().to_string();
            assert!(said.contains(word) && said.contains("auto"), "{said}");
        }
    }
}
