//! `phalanx schedule --plan`: which stages to make of the configured model, and on how many devices each.

use std::fmt::Write;

use phalanx::config::{Loaded, Sources};
use phalanx::error::{Error, Problem, Result, bytes, counted};
use phalanx::pipeline::plan::{
    PipelinePlan, PlannerName, TwoBwChoice, dapple_ranked, pipedream_ranked, two_bw,
};
use phalanx::session::network;
use phalanx::session::planned::{Ranked, demand, settings_of, settings_of_choice};
use phalanx::session::profile::{ModelProfile, profile};
use serde::Serialize;

use crate::args::Schedule as Asked;
use crate::out;

/// The most choices of PipeDream-2BW that are shown.
const SHOWN: usize = 5;

/// Measures the layers, plans, and shows what was found.
pub(crate) fn run(asked: &Asked, planner: PlannerName) -> Result<()> {
    let sources = asked.sources().set("parallel.plan=none");
    let loaded = network::load(&sources)?;
    let machines = machines(asked, &loaded)?;
    let found = profile(out::noted(&loaded))?;
    let first = |plans: Vec<PipelinePlan>| Shown::first(plans, &found, planner, &sources);
    let plans = match planner {
        PlannerName::PipeDream => vec![first(by_pipedream(asked, &machines, &found)?)?],
        PlannerName::Dapple => {
            let m = loaded.config.microbatches();
            vec![first(dapple_ranked(&found.layers, m, &machines, asked.bandwidths()?)?)?]
        }
        PlannerName::TwoBw => {
            let choices = by_two_bw(asked, &machines, &loaded, &found)?;
            choices.into_iter().map(|plan| plan.checked(&sources)).collect()
        }
    };
    if asked.json {
        plans.iter().for_each(out::json);
        return Ok(());
    }
    let mut text = layers(&found);
    for plan in &plans {
        let _ = write!(text, "\n{}", plan.text(planner));
    }
    out::line(text.trim_end());
    Ok(())
}

/// What stages are made of, of each machine: devices, or groups of them that share the work of layers.
fn machines(asked: &Asked, loaded: &Loaded) -> Result<Vec<usize>> {
    if asked.devices.contains(&0) || asked.devices.is_empty() {
        return Err(Error::refused(
            Problem::new("--plan needs the devices of each machine, 1 or more")
                .fix("--devices 4; for two machines --devices 4,4"),
        ));
    }
    let parallel = &loaded.config.parallel;
    let each = parallel.tp.get() * parallel.cp.get();
    match asked.devices.iter().find(|devices| !devices.is_multiple_of(each)) {
        None => Ok(asked.devices.iter().map(|devices| devices / each).collect()),
        Some(devices) => {
            let near = asked.devices.iter().map(|own| own.next_multiple_of(each).to_string());
            Err(Error::refused(
                Problem::new(format!(
                    "{devices} devices of a machine cannot be divided into groups of {each}"
                ))
                .because("parallel.tp × parallel.cp ranks share the work of a layer")
                .nearest(format!("--devices {}", near.collect::<Vec<_>>().join(","))),
            ))
        }
    }
}

impl Asked {
    /// Bytes per second within a machine and between machines.
    fn bandwidths(&self) -> Result<[f64; 2]> {
        match self.bandwidth[..] {
            [] => Ok([f64::INFINITY; 2]),
            [all] => Ok([all; 2]),
            [within, between] => Ok([within, between]),
            _ => Err(Error::refused(
                Problem::new(format!("--bandwidth has {} numbers", self.bandwidth.len()))
                    .because("there is one within a machine and one between machines")
                    .fix("--bandwidth 1e10, or --bandwidth 1e11,1e10"),
            )),
        }
    }
}

/// PipeDream's dynamic program; machines are a second level, if they are alike.
fn by_pipedream(
    asked: &Asked,
    machines: &[usize],
    found: &ModelProfile,
) -> Result<Vec<PipelinePlan>> {
    let [within, between] = asked.bandwidths()?;
    let each = machines[0];
    if machines.iter().any(|other| *other != each) {
        return Err(Error::refused(
            Problem::new(format!("--plan pipedream cannot plan for machines of {machines:?}"))
                .because("inside a level every machine is one device, so that all must be alike")
                .nearest("--plan dapple, which takes machines of any size"),
        ));
    }
    let levels = match machines.len() {
        1 => vec![(each, within)],
        count => vec![(each, within), (count, between)],
    };
    Ok(pipedream_ranked(&found.layers, &levels)?)
}

/// The fastest choices of PipeDream-2BW within `run.memory_limit`.
fn by_two_bw(
    asked: &Asked,
    machines: &[usize],
    loaded: &Loaded,
    found: &ModelProfile,
) -> Result<Vec<Shown>> {
    let devices = machines.iter().sum();
    let bandwidth = asked.bandwidths()?[usize::from(machines.len() > 1)];
    let demand = demand(loaded, found, (devices, bandwidth))?;
    let choices = two_bw(&demand)?;
    Ok(choices.iter().take(SHOWN).map(|choice| Shown::of_choice(choice, demand.batch)).collect())
}

/// The measured layers.
fn layers(found: &ModelProfile) -> String {
    let mut text = format!("measured here, for micro-batches of {}:\n", found.samples);
    for (name, layer) in found.names.iter().zip(&found.layers) {
        let [f, b] = [layer.forward, layer.backward].map(|seconds| 1e6 * seconds);
        let [weights, kept] = [layer.weights, layer.kept].map(|count| bytes(count as u64));
        let _ = writeln!(
            text,
            "  {name:<12} F {f:>9.1} µs  B {b:>9.1} µs  weights {weights:>9}  keeps {kept:>9}"
        );
    }
    text
}

/// A plan as it is printed.
#[derive(Serialize)]
struct Shown {
    /// Devices of each stage, such as `2-1-1`.
    shape: String,
    stages: Vec<Stage>,
    /// Between two micro-batches, or of a step for DAPPLE.
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples_per_s: Option<f64>,
    /// Settings with which it runs, if there are some.
    settings: Vec<String>,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// Better plans that do not run, each with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    passed: Vec<String>,
}

#[derive(Serialize)]
struct Stage {
    first: String,
    last: String,
    devices: usize,
}

impl Shown {
    /// The first plan that runs; if none does, the best one, and why it does not.
    fn first(
        plans: Vec<PipelinePlan>,
        found: &ModelProfile,
        planner: PlannerName,
        sources: &Sources,
    ) -> Result<Self> {
        let best = plans.first().cloned();
        let load = |settings: &[String]| {
            network::load(&settings.iter().fold(sources.clone(), |sources, set| sources.set(set)))
        };
        match (Ranked::plans(plans, planner).first_that_runs(load), best) {
            (Ok(first), _) => {
                Ok(Shown { passed: first.passed, ..Shown::of(&first.found, found, planner) })
            }
            (Err(error), Some(best)) if error.exit_code() == 2 => Ok(Shown {
                settings: Vec::new(),
                refused: Some(error.to_string()),
                ..Shown::of(&best, found, planner)
            }),
            (Err(error), _) => Err(error),
        }
    }

    fn of(plan: &PipelinePlan, found: &ModelProfile, planner: PlannerName) -> Self {
        let stage = |stage: &phalanx::pipeline::plan::PlannedStage| Stage {
            first: found.names[stage.layers.start].clone(),
            last: found.names[stage.layers.end - 1].clone(),
            devices: stage.devices,
        };
        Shown {
            shape: plan.shape(),
            stages: plan.stages.iter().map(stage).collect(),
            seconds: plan.seconds,
            samples_per_s: None,
            settings: settings_of(plan, planner),
            refused: None,
            passed: Vec::new(),
        }
    }

    fn of_choice(choice: &TwoBwChoice, batch: usize) -> Self {
        let TwoBwChoice { width, depth, seconds, rate, .. } = *choice;
        let settings = settings_of_choice(choice, batch);
        let shape = vec![width.to_string(); depth].join("-");
        let (stages, samples_per_s) = (Vec::new(), Some(rate));
        let (refused, passed) = (None, Vec::new());
        Shown { shape, stages, seconds, samples_per_s, settings, refused, passed }
    }

    /// The same without settings that would be refused.
    fn checked(self, sources: &Sources) -> Self {
        if self.settings.is_empty() {
            return self;
        }
        let all = self.settings.iter().fold(sources.clone(), |sources, set| sources.set(set));
        match network::load(&all) {
            Ok(_) => self,
            Err(error) => Shown { settings: Vec::new(), refused: Some(error.to_string()), ..self },
        }
    }

    fn text(&self, planner: PlannerName) -> String {
        let what = match planner {
            PlannerName::PipeDream => "between two micro-batches",
            PlannerName::Dapple => "for a step",
            PlannerName::TwoBw => "between two micro-batches of a pipeline",
        };
        let mut text = format!("{planner}: {}, {:.1} µs {what}", self.shape, 1e6 * self.seconds);
        if let Some(rate) = self.samples_per_s {
            let _ = write!(text, ", {rate:.0} samples/s");
        }
        for (number, Stage { first, last, devices }) in self.stages.iter().enumerate() {
            let devices = counted(*devices, "device");
            let _ = write!(text, "\n  stage {number}: {first} to {last} on {devices}");
        }
        let sets: Vec<String> = self.settings.iter().map(|set| format!("--set {set}")).collect();
        let _ = match &self.refused {
            None => writeln!(text, "\n  {}", sets.join(" ")),
            Some(why) => writeln!(text, "\n  no settings: {}", why.trim().replace('\n', "\n  ")),
        };
        for passed in &self.passed {
            let _ = writeln!(text, "  better, but does not run: {passed}");
        }
        text
    }
}
