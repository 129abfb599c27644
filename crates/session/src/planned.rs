//! What planners of pipelines find, as settings that run.
//!
//! A plan says which layers a stage has and how many devices hold it: `parallel.split` and `parallel.holders`. With
//! `parallel.plan` it is made when a configuration is read, of the ranks that dp × pp gives, so nothing behind that knows of it.
//! Times are then predicted, not measured, for the accelerator that layouts are searched for (`parallel.layout = "auto"`): all processes
//! of a run must plan alike, and so must a run that goes on.
//!
//! A planner does not know what runs: round robin cannot feed every shape, and holders split whole sequences only. So planners rank
//! plans, and the first that runs is taken. Plans of one stage are no pipeline: they count only where they are the best.

use phalanx_config::{Config, Loaded, PlanKind, Sources};
use phalanx_cost::Hardware;
use phalanx_error::{Error, Problem, Result};
use phalanx_pipeline::plan::{
    LayerProfile, PipelinePlan, PlannerName, TwoBwChoice, TwoBwDemand, dapple_ranked,
    pipedream_ranked, two_bw,
};

use crate::Settings;
use crate::profile::{ModelProfile, predicted};

/// The settings, `key=value`, with which a plan runs. The stages of PipeDream have holders that take micro-batches in turn; those of
/// DAPPLE split them.
pub fn settings_of(plan: &PipelinePlan, planner: PlannerName) -> Vec<String> {
    let listed = |numbers: &mut dyn Iterator<Item = usize>| {
        numbers.map(|number| number.to_string()).collect::<Vec<_>>().join("-")
    };
    let [first, ..] = &plan.stages[..] else { return Vec::new() };
    if plan.stages.len() == 1 {
        return vec!["parallel.pp=1".to_owned(), format!("parallel.dp={}", first.devices)];
    }
    let schedule = match planner {
        PlannerName::PipeDream => "pipedream",
        PlannerName::Dapple => "1f1b",
        PlannerName::TwoBw => "pipedream-2bw",
    };
    // As many devices for each stage that splits micro-batches are data-parallel ranks.
    let alike = plan.stages.iter().all(|stage| stage.devices == first.devices);
    let dp = if alike && planner != PlannerName::PipeDream { first.devices } else { 1 };
    let held = (!alike || dp != first.devices).then(|| {
        format!("parallel.holders={}", listed(&mut plan.stages.iter().map(|stage| stage.devices)))
    });
    let settings = [
        format!("parallel.pp={}", plan.stages.len()),
        format!("parallel.dp={dp}"),
        format!("parallel.schedule={schedule}"),
        format!("parallel.split={}", listed(&mut plan.stages.iter().map(|s| s.layers.len()))),
    ];
    settings.into_iter().chain(held).collect()
}

/// The settings of a choice of PipeDream-2BW's planner, for batches of so many samples.
pub fn settings_of_choice(choice: &TwoBwChoice, batch: usize) -> Vec<String> {
    let TwoBwChoice { width, depth, microbatch, recompute, .. } = *choice;
    let mut settings = vec![
        format!("parallel.pp={depth}"),
        format!("parallel.dp={width}"),
        format!("train.microbatches={}", batch / (width * microbatch)),
    ];
    settings.extend((depth > 1).then(|| "parallel.schedule=pipedream-2bw".to_owned()));
    settings.extend(recompute.then(|| "train.recompute=stage".to_owned()));
    settings
}

/// What PipeDream-2BW's planner is asked for a profile.
pub fn demand(
    loaded: &Loaded,
    found: &ModelProfile,
    (devices, bandwidth): (usize, f64),
) -> Result<TwoBwDemand> {
    let one = |layer: &LayerProfile| {
        let samples = found.samples as f64;
        let LayerProfile { forward, backward, output, kept, .. } = *layer;
        let [forward, backward, output, kept] =
            [forward, backward, output, kept].map(|cost| cost / samples);
        LayerProfile { forward, backward, output, kept, ..*layer }
    };
    let settings = Settings::new(&loaded.config)?;
    let limit = settings.memory_limit.and_then(|limit| limit.asked());
    Ok(TwoBwDemand {
        layers: found.layers.iter().map(one).collect(),
        devices,
        bandwidth,
        memory: limit.map_or(f64::MAX, |bytes| bytes as f64),
        state: found.state,
        batch: loaded.config.train.batch_size.get(),
    })
}

/// What planners rank, the best first.
pub struct Ranked<T> {
    /// Each with the settings that run it.
    pub all: Vec<(T, Vec<String>)>,
}

/// The first of them that runs.
#[derive(Debug)]
pub struct FirstThatRuns<T, L> {
    /// What it is.
    pub found: T,
    /// The settings that run it.
    pub settings: Vec<String>,
    /// The configuration with these settings.
    pub loaded: L,
    /// Better ones, with the reasons why they do not run.
    pub passed: Vec<String>,
}

impl Ranked<PipelinePlan> {
    /// The plans of a planner.
    pub fn plans(plans: Vec<PipelinePlan>, planner: PlannerName) -> Self {
        let several = |(at, plan): &(usize, PipelinePlan)| *at == 0 || plan.stages.len() > 1;
        let plans = plans.into_iter().enumerate().filter(several);
        let with_settings = |(_, plan): (usize, PipelinePlan)| {
            let settings = settings_of(&plan, planner);
            (plan, settings)
        };
        Self { all: plans.map(with_settings).collect() }
    }
}

impl<T> Ranked<T> {
    /// The first that runs. If none does, why the best one does not.
    pub fn first_that_runs<L>(
        self,
        load: impl Fn(&[String]) -> Result<L>,
    ) -> Result<FirstThatRuns<T, L>> {
        let (mut passed, mut first) = (Vec::new(), None);
        for (found, settings) in self.all {
            match load(&settings) {
                Ok(loaded) => return Ok(FirstThatRuns { found, settings, loaded, passed }),
                Err(error) if error.exit_code() == REFUSED => {
                    passed.push(format!("{}: {}", settings.join(" "), reason(&error)));
                    first.get_or_insert((error, settings));
                }
                Err(other) => return Err(other),
            }
        }
        Err(match first {
            Some((error, settings)) => error.because(format!("that is {}", settings.join(" "))),
            None => Error::refused(Problem::new("there is no plan").fix("more devices or memory")),
        })
    }
}

/// The exit code of what is refused.
const REFUSED: u8 = 2;

/// What is wrong, in one line.
fn reason(error: &Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// The configuration with what its planner finds; as it is, if it asks for none.
pub(crate) fn planned(loaded: Loaded, sources: &Sources) -> Result<Loaded> {
    let (config, plan) = (&loaded.config, loaded.config.parallel.plan);
    let devices = config.parallel.dp.get() * config.parallel.pp.get();
    let link = Hardware::default().link_bytes_per_s;
    let profile = || predicted(&loaded);
    let fixed = sources.clone().set("parallel.plan=none");
    let load = |settings: &[String]| {
        Config::load(&settings.iter().fold(fixed.clone(), |sources, set| sources.set(set)))
    };
    let (settings, mut found, passed) = match plan {
        PlanKind::None | PlanKind::Auto => return Ok(loaded),
        PlanKind::PipeDream | PlanKind::Dapple => {
            let (layers, m) = (profile()?.layers, config.microbatches());
            let ranked = match plan {
                PlanKind::Dapple => Ranked::plans(
                    dapple_ranked(&layers, m, &[devices], [link; 2])?,
                    PlannerName::Dapple,
                ),
                _ => Ranked::plans(
                    pipedream_ranked(&layers, &[(devices, link)])?,
                    PlannerName::PipeDream,
                ),
            };
            let first = ranked.first_that_runs(load)?;
            (first.settings, first.loaded, first.passed)
        }
        PlanKind::TwoBw => {
            let demand = demand(&loaded, &profile()?, (devices, link))?;
            let choices = two_bw(&demand)?.into_iter();
            let with_settings = |choice: TwoBwChoice| {
                let settings = settings_of_choice(&choice, demand.batch);
                (choice, settings)
            };
            let first =
                Ranked { all: choices.map(with_settings).collect() }.first_that_runs(load)?;
            (first.settings, first.loaded, first.passed)
        }
    };
    let others = match &passed[..] {
        [] => String::new(),
        passed => format!(" (better ones do not run: {})", passed.join("; ")),
    };
    found.notes.push(format!("parallel.plan = \"{plan}\" is {}{others}", settings.join(" ")));
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use phalanx_pipeline::plan::PlannedStage;

    fn plan(devices: &[usize]) -> PipelinePlan {
        let stage = |(layer, count): (usize, &usize)| PlannedStage {
            layers: layer..layer + 1,
            devices: *count,
        };
        PipelinePlan { stages: devices.iter().enumerate().map(stage).collect(), seconds: 1.0 }
    }

    /// Plans that are refused are passed over, with the reason; one stage counts only where it is the best.
    #[test]
    fn the_first_plan_that_runs_is_taken() {
        fn refuse<T>(why: &str) -> Result<T> {
            Err(Error::refused(Problem::new(why.to_owned()).fix("other")))
        }
        let shapes: [&[usize]; 4] = [&[1, 3, 1], &[4], &[2, 1], &[1, 1]];
        let ranked = || Ranked::plans(shapes.map(plan).to_vec(), PlannerName::PipeDream);
        let found = ranked().first_that_runs(|settings| match settings {
            [.., held] if held == "parallel.holders=1-3-1" => refuse("starved"),
            _ => Ok(settings.len()),
        });
        let found = found.unwrap();
        assert_eq!((found.found.shape(), found.loaded), ("2-1".to_owned(), 5));
        assert_eq!(found.settings.last().unwrap(), "parallel.holders=2-1");
        let [passed] = &found.passed[..] else { panic!("{:?}", found.passed) };
        assert!(passed.contains("holders=1-3-1: starved"), "{passed}");
        let none = ranked().first_that_runs(|settings| refuse::<()>(settings.last().unwrap()));
        let none = none.err().unwrap().to_string();
        assert!(none.contains("parallel.holders=1-3-1"), "{none}");
        let alone = Ranked::plans(vec![plan(&[4]), plan(&[2, 1])], PlannerName::Dapple);
        let found = alone.first_that_runs(|_| Ok(())).unwrap();
        assert_eq!(found.settings, ["parallel.pp=1", "parallel.dp=4"]);
    }
}
