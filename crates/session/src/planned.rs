//! What planners of pipelines find, as settings that run.
//!
//! A plan says which layers a stage has and how many devices hold it: `parallel.split` and `parallel.holders`. With
//! `parallel.plan` it is made when a configuration is read, of the ranks that dp × pp gives, so nothing behind that knows of it.
//! Times are then predicted, not measured, for the accelerator that layouts are searched for (`parallel.layout = "auto"`): all processes
//! of a run must plan alike, and so must a run that goes on.

use phalanx_config::{Config, Loaded, PlanKind, Sources};
use phalanx_cost::Hardware;
use phalanx_error::Result;
use phalanx_pipeline::plan::{
    LayerProfile, PipelinePlan, PlannerName, TwoBwChoice, TwoBwDemand, dapple, pipedream, two_bw,
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

/// The configuration with what its planner finds; as it is, if it asks for none.
pub(crate) fn planned(loaded: Loaded, sources: &Sources) -> Result<Loaded> {
    let (config, plan) = (&loaded.config, loaded.config.parallel.plan);
    let devices = config.parallel.dp.get() * config.parallel.pp.get();
    let link = Hardware::default().link_bytes_per_s;
    let profile = || predicted(&loaded);
    let settings = match plan {
        PlanKind::None | PlanKind::Auto => return Ok(loaded),
        PlanKind::PipeDream => {
            settings_of(&pipedream(&profile()?.layers, devices, link)?, PlannerName::PipeDream)
        }
        PlanKind::Dapple => {
            let m = config.microbatches();
            let found = dapple(&profile()?.layers, m, &[devices], [link; 2])?;
            settings_of(&found, PlannerName::Dapple)
        }
        PlanKind::TwoBw => {
            let demand = demand(&loaded, &profile()?, (devices, link))?;
            let choices = two_bw(&demand)?;
            choices.first().map_or_else(Vec::new, |best| settings_of_choice(best, demand.batch))
        }
    };
    let told = format!("parallel.plan = \"{plan}\" is {}", settings.join(" "));
    let fixed = sources.clone().set("parallel.plan=none");
    let all = settings.iter().fold(fixed, |sources, set| sources.set(set));
    let mut found = Config::load(&all).map_err(|error| error.because(&told))?;
    found.notes.push(told);
    Ok(found)
}
