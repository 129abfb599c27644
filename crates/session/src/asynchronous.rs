//! What pipelines without a flush cannot mean. Settings that come from keys were refused before, in the words of keys.

use phalanx_error::{Error, Problem, Result};
use phalanx_ir::Model;
use phalanx_script::Updates;

use crate::Settings;

/// Refuses what several updates per script, or updates from older weights, cannot mean.
pub(crate) fn check(settings: &Settings, model: &Model, updates: Option<&Updates>) -> Result<()> {
    let name = settings.parallel.pipeline.name();
    let refuse = |problem: Problem| Err(Error::refused(problem));
    let apart = [
        (updates.is_some(), "weights that are updated without a flush"),
        (settings.scaling.is_some(), "a loss that is scaled, as f16 needs"),
        (settings.parallel.replicas.is_some(), "replicas that train by themselves"),
    ];
    let ahead = settings.parallel.pipeline.post_validation;
    if let Some((_, other)) = apart.into_iter().find(|(found, _)| ahead && *found) {
        let problem = Problem::new(format!("post-validation does not work with {other}"));
        let why = "it previews one synchronous update of all ranks, whose norm comes later";
        return refuse(problem.because(why).nearest("parallel.post_validation = false"));
    }
    let Some(updates) = updates else { return Ok(()) };
    if settings.scaling.is_some() {
        return refuse(
            Problem::new(format!("{name} does not scale the loss, as f16 needs"))
                .because("its stages update before all of them know whether a gradient overflowed")
                .nearest("precision.compute = \"bf16\""),
        );
    }
    if settings.parallel.replicas.is_some() {
        return refuse(
            Problem::new(format!("{name} does not work with replicas that train by themselves"))
                .because("they would average the newest weights, but read older ones")
                .nearest("parallel.sync = \"ddp\", or parallel.schedule = \"1f1b\""),
        );
    }
    if let (Some(clip), true) = (settings.clip, updates.round < updates.step) {
        return refuse(
            Problem::new(format!("{name} cannot clip to a global norm of {clip}"))
                .because(
                    "each stage updates after its own backward: there is no moment at which all gradients of a \
                     micro-batch exist",
                )
                .nearest(
                    "optim.clip = \"none\"; or parallel.schedule = \"pipedream-2bw\", which clips at the end of a batch",
                ),
        );
    }
    match shared(model, updates) {
        None => Ok(()),
        Some(param) => refuse(
            Problem::new(format!("{name} cannot train `{param}`, which several stages share"))
                .because("they would update it at different times")
                .nearest("model.tied = false, or parallel.schedule = \"pipedream-2bw\""),
        ),
    }
}

/// DataParallel's root is the only rank that has state, and the others get the newest weights from it.
pub(crate) fn owner_updates(name: &str) -> Error {
    let problem = Problem::new(format!("{name} does not work with DataParallel"))
        .because("the rank that updates would have to send other weights than the newest too")
        .nearest("DDP or ZeRO; or parallel.schedule = \"1f1b\"");
    Error::refused(problem)
}

/// By parameter: how many older versions are kept of it.
pub(crate) fn older(model: &Model, updates: &Updates) -> Vec<usize> {
    let mut older = vec![0; model.params().len()];
    for (index, instance) in model.instances().iter().enumerate() {
        instance.params.values().for_each(|param| older[*param] = updates.older(index));
    }
    older
}

/// A parameter that instances read which are updated at different times.
fn shared<'a>(model: &'a Model, updates: &Updates) -> Option<&'a str> {
    let mut known: Vec<Option<[usize; 2]>> = vec![None; model.params().len()];
    let other = reads(model, updates)
        .find(|(param, timing)| *known[*param].get_or_insert(*timing) != *timing);
    other.map(|(param, _)| model.params()[param].name.as_str())
}

/// Every parameter with the delay of an instance that reads it, and the rounds that its updates take.
fn reads(model: &Model, updates: &Updates) -> impl Iterator<Item = (usize, [usize; 2])> {
    let timings = updates.delays.iter().zip(&updates.holders);
    let all = model.instances().iter().zip(timings);
    all.flat_map(|(instance, (delay, holders))| {
        instance.params.values().map(move |param| (*param, [*delay, *holders]))
    })
}
