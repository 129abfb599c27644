//! Measures the time of each segment on this machine: the costs for splitting a model into even
//! stages.
//!
//! A model with one instance of each distinct segment takes a few steps on one rank. An instance costs what
//! its segment's forward and backward took, in the fastest of these steps.
//!
//! Two measurements are never equal. So a model is measured once, when it is first lowered, and the
//! costs are kept in the settings that everything later starts from.

use std::sync::Arc;
use std::time::Duration;

use phalanx_cost::Hardware;
use phalanx_ir::{DType, Model, Port, Program, Role};
use phalanx_pipeline::{NamedSchedule, Times};
use phalanx_script::{EveryStep, Part};

use super::codec::{decoded, encoded};
use super::{
    BatchShare, Field, InstanceCosts, Lowered, Models, Parallel, Pipeline, Prepared, Settings,
    StepData, host, initial, job,
};
use phalanx_comm::CommError;
use phalanx_error::{Error, Problem, Result};

/// Steps that are timed, after one that is not.
const STEPS: usize = 3;

/// The same, measured by one process of a job for all of them: two would measure different costs, and
/// split the model at different places.
pub(super) fn costs_of_job(
    models: &Models,
    settings: &Settings,
    group: &Parallel,
) -> Result<Vec<InstanceCosts>> {
    let Some(job) = job::joined() else { return measured(&models.train, settings, group) };
    let own = match job.rank() {
        0 => encoded(
            &measured(&models.train, settings, group)?
                .iter()
                .flat_map(numbers)
                .collect::<Vec<f64>>(),
        ),
        _ => Vec::new(),
    };
    let given = job.from_first(own).map_err(|error| match error {
        CommError::Aborted(failure) => job::elsewhere(failure, job.ranks()),
        error => Error::failed(Problem::new(error.to_string())),
    })?;
    let broken = || Error::failed(Problem::new("rank 0 sent costs that cannot be read"));
    let given: Vec<f64> = decoded(&given).ok_or_else(broken)?;
    Ok(given.as_chunks().0.iter().map(from_numbers).collect())
}

fn numbers(costs: &InstanceCosts) -> [f64; 5] {
    let InstanceCosts { times: Times { f, b, w }, until_b, until_w } = *costs;
    [f, b, w, until_b, until_w]
}

fn from_numbers(&[f, b, w, until_b, until_w]: &[f64; 5]) -> InstanceCosts {
    InstanceCosts { times: Times { f, b, w }, until_b, until_w }
}

/// The same, predicted for an accelerator, as layouts are searched for: equal in all processes, and on all machines.
pub(super) fn predicted(
    model: &Model,
    settings: &Settings,
    group: &Parallel,
) -> Result<Vec<InstanceCosts>> {
    let (sample, _) = one_of_each(model)?;
    let settings = Settings {
        parallel: group.clone(),
        microbatches: 1,
        memory_limit: None,
        ..settings.clone()
    };
    let lowered = Lowered::new(&Models::trained(sample), settings)?;
    let (kept, hardware) = (kept(model, &lowered), Hardware::default());
    let costs = |segment: usize| {
        let of = |part| phalanx_cost::seconds(lowered.compiled().program(segment, part), &hardware);
        let [until_b, until_w] = kept[segment];
        InstanceCosts { times: Times { f: of(Part::F), b: of(Part::BW), w: 0.0 }, until_b, until_w }
    };
    Ok(model.instances().iter().map(|instance| costs(instance.segment)).collect())
}

/// For each instance of the model: seconds and bytes of its forward and backward for one micro-batch, on a rank of a group that shares the
/// work.
pub(super) fn measured(
    model: &Model,
    settings: &Settings,
    group: &Parallel,
) -> Result<Vec<InstanceCosts>> {
    let (sample, instances) = one_of_each(model)?;
    // Where a schedule is searched, weight gradients are timed by themselves.
    let order = match settings.parallel.pipeline.is_searched() {
        true => NamedSchedule::ZbH1,
        false => NamedSchedule::OneFOneB,
    };
    let pipeline = Pipeline { order: order.into(), ..Pipeline::default() };
    let settings = Settings {
        parallel: Parallel { pipeline, ..group.clone() },
        microbatches: 1,
        memory_limit: None,
        // One rank averages with nobody.
        controller: Arc::new(EveryStep),
        share: BatchShare::WHOLE,
        ..settings.clone()
    };
    let seed = settings.seed;
    let models = Models::trained(sample);
    let lowered = Lowered::new(&models, settings)?;
    let kept = kept(model, &lowered);
    let backend = host::ranks(lowered.settings.device);
    let mut session = Prepared::of(&lowered, &*backend)?.start(&initial(seed))?;
    let mut best = vec![[Duration::MAX; 3]; model.segments().len()];
    with_zeros(model, |data| {
        for step in 0..=STEPS {
            session.trace_at(session.steps() + 1);
            session.step(data, 0.0)?;
            let trace = session.take_trace().expect("the step was timed");
            let traced = &trace.ranks[0];
            let mut spent = vec![[Duration::ZERO; 3]; model.segments().len()];
            for (turn, times) in traced.iter().filter_map(|t| Some((t.turn?, t.times))) {
                let parts: &[usize] = match turn.part {
                    Part::F | Part::R => &[0],
                    Part::B | Part::BW => &[1],
                    Part::W => &[2],
                    Part::FBW => &[0, 1, 2],
                };
                // What runs at once is divided evenly.
                let share = (times.ended - times.started) / parts.len() as u32;
                parts.iter().for_each(|&part| spent[instances[turn.instance]][part] += share);
            }
            for (best, spent) in best.iter_mut().zip(spent).filter(|_| step > 0) {
                let sum = |times: &[Duration; 3]| {
                    times.iter().copied().fold(Duration::ZERO, Duration::saturating_add)
                };
                *best = if sum(&spent) < sum(best) { spent } else { *best };
            }
        }
        Ok(())
    })?;
    let costs = |segment: usize| {
        let [f, b, w] = best[segment].map(|time| time.as_secs_f64());
        let [until_b, until_w] = kept[segment];
        InstanceCosts { times: Times { f, b, w }, until_b, until_w }
    };
    Ok(model.instances().iter().map(|instance| costs(instance.segment)).collect())
}

/// For each segment: bytes that it keeps from F to B, and from B to W.
fn kept(model: &Model, lowered: &Lowered) -> Vec<[f64; 2]> {
    let bytes = |program: &Program, ports: &mut dyn Iterator<Item = &Port>| -> f64 {
        ports.map(|port| program.ty(port.value).local_bytes(program.mesh()) as f64).sum()
    };
    let segment = |segment: usize| {
        let of = |part| lowered.compiled().program(segment, part);
        let (f, w) = (of(Part::F), of(Part::W));
        [
            bytes(f, &mut f.outputs_with(Role::Residual)),
            bytes(w, &mut w.inputs_with(Role::Residual)),
        ]
    };
    (0..model.segments().len()).map(segment).collect()
}

/// The model with the first instance of each segment, and the segments of these instances.
fn one_of_each(model: &Model) -> Result<(Model, Vec<usize>)> {
    let mut sample = Model::new(model.name.clone());
    for segment in model.segments() {
        sample.segment(segment.clone());
    }
    for param in model.params() {
        sample.param(param.clone())?;
    }
    let mut kept: Vec<usize> = Vec::new();
    for instance in model.instances() {
        if !kept.contains(&instance.segment) {
            kept.push(instance.segment);
            sample.append(instance.name.clone(), instance.segment, instance.params.clone())?;
        }
    }
    Ok((sample, kept))
}

/// A batch of zeros for the model's data ports.
fn with_zeros(model: &Model, run: impl FnOnce(&StepData<'_>) -> Result<()>) -> Result<()> {
    let mut ports: Vec<(&str, DType, usize)> = Vec::new();
    for segment in model.segments() {
        for port in segment.inputs_with(Role::Data) {
            let ty = segment.ty(port.value);
            if !ports.iter().any(|(name, ..)| *name == port.name) {
                ports.push((&port.name, ty.dtype, ty.elements()));
            }
        }
    }
    let most = ports.iter().map(|(.., elements)| *elements).max().unwrap_or(0);
    let (whole, real) = (vec![0_i32; most], vec![0_f32; most]);
    let fields: Vec<(&str, Field<'_>)> = (ports.iter())
        .map(|&(name, dtype, elements)| match dtype {
            DType::I32 => (name, Field::I32(&whole[..elements])),
            _ => (name, Field::F32(&real[..elements])),
        })
        .collect();
    run(&StepData { fields: &fields, count: 1, first_sample: 0, scalars: &[] })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::network::{Network, load};
    use crate::{Lowered, StageSplit};
    use phalanx_config::Sources;

    /// What was measured decides where stages end; layers are alike. How much longer a head takes is left
    /// to the machine.
    #[test]
    fn instances_of_a_segment_cost_the_same_and_stages_follow_the_costs() {
        let sets = ["model.vocab=8192", "model.layers=4", "train.batch_size=4", "parallel.pp=2"];
        let sources = sets.iter().fold(Sources::default().preset("tiny"), |s, set| s.set(*set));
        let loaded =
            load(&sources.set("train.microbatches=4").set("parallel.split=measured")).unwrap();
        let models = Network::new(&loaded).unwrap().models(&loaded.config, false).unwrap();
        let settings = Settings::new(&loaded.config).unwrap();
        assert_eq!(settings.parallel.pipeline.split, StageSplit::Measured);
        let costs = measured(&models.train, &settings, &Parallel::default()).unwrap();
        let costs: Vec<f64> = costs.iter().map(InstanceCosts::seconds).collect();
        assert_eq!(costs.len(), 6);
        assert!(costs[1] > 0.0 && costs[1..5].iter().all(|c| *c == costs[1]), "{costs:?}");
        assert!(costs[5] > 0.0, "{costs:?}");
        let lowered = Lowered::new(&models, settings).unwrap();
        let stage_groups = lowered.stage_groups();
        let holds = |instance| stage_groups[1].turns.iter().any(|turn| turn.instance == instance);
        let split = |lowered: &Lowered| lowered.settings.parallel.pipeline.split.clone();
        let StageSplit::Costs(found) = split(&lowered) else { panic!("costs were measured") };
        let stages = phalanx_pipeline::split::by_cost(&found, 2).unwrap();
        for instance in 0..6 {
            assert_eq!(holds(instance), stages[1].contains(&instance), "{found:?}");
        }
        // Lowering again from these settings gives exactly the same numbers; a second measurement
        // would not.
        assert_ne!(found, costs);
        let again = Lowered::new(&models, lowered.settings.clone()).unwrap();
        assert_eq!(split(&lowered), split(&again));
    }
}
