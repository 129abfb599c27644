//! Sharded weights and gradients under pipelines: how often a unit is gathered and summed.

use phalanx_config::Loaded;
use phalanx_pipeline::NamedSchedule;
use phalanx_script::{Action, Kind, Part, Unit, check};
use phalanx_session::{Lowered, Parallel, Pipeline, PipelineOrder, TrainPlan};
use phalanx_spmd::strategies::Zero;

use crate::support::{gpt, is_gather, is_reduce, llama, models, on, settings, shared};

const MICROBATCHES: usize = 4;

/// The plans of the first rank of each of two stages, with ZeRO over two ranks each.
fn plans(loaded: &Loaded, named: NamedSchedule, zero: u8) -> [TrainPlan; 2] {
    plans_of(loaded, Pipeline { order: PipelineOrder::Named(named), ..Pipeline::default() }, zero)
}

fn plans_of(loaded: &Loaded, pipeline: Pipeline, zero: u8) -> [TrainPlan; 2] {
    let parallel = Parallel { pipeline, ..on("pp=2 dp=2", [shared(Zero::stage(zero))]) };
    let lowered = Lowered::new(&models(loaded), settings(loaded, Some(parallel))).unwrap();
    [0, 2].map(|rank| {
        let plan = lowered.plan(rank).unwrap();
        check(&plan.script).unwrap();
        plan
    })
}

fn small(make: fn(&[&str]) -> Loaded, named: NamedSchedule) -> Loaded {
    let layers = format!("model.layers={}", 2 * named.usual_chunks());
    make(&[&layers, "train.microbatches=4"])
}

/// By unit: how many of a kind of action are about it.
fn counts(plan: &TrainPlan, kind: fn(&Action) -> bool) -> Vec<usize> {
    let name = |label: &str| label.rsplit(' ').next().unwrap_or_default().to_owned();
    let about = |unit: &str| {
        let actions = plan.script.actions.iter();
        actions.filter(|a| kind(a) && name(&a.label) == unit).count()
    };
    plan.units.iter().map(|unit| about(&unit.name)).collect()
}

/// How many micro-batches go through each of a device's chunks.
fn each(named: NamedSchedule) -> usize {
    if named.goes_both_ways() { MICROBATCHES / 2 } else { MICROBATCHES }
}

/// How many backwards of the first instance are split.
fn split(plan: &TrainPlan) -> usize {
    plan.script.turns.iter().filter(|(_, turn)| turn.instance == 0 && turn.part == Part::W).count()
}

/// Whether a device takes all micro-batches through a chunk before it turns to anything else.
fn sweeps(named: NamedSchedule) -> bool {
    matches!(named, NamedSchedule::GPipe | NamedSchedule::Vectorised | NamedSchedule::BreadthFirst)
}

#[test]
fn units_are_gathered_once_a_sweep_or_once_a_micro_batch() {
    for named in NamedSchedule::ALL {
        for plan in plans(&small(llama, named), named, 3) {
            // Once for the forwards and once for the backwards. W reads no weights, and an embedding
            // has nothing to do in B.
            let none = |unit: &Unit| if unit.name == "embed" { split(&plan) } else { 0 };
            let each = if sweeps(named) { 1 } else { each(named) };
            let times: Vec<usize> = plan.units.iter().map(|unit| 2 * each - none(unit)).collect();
            assert_eq!(counts(&plan, is_gather), times, "{named}");
            let released =
                |action: &Action| matches!(action.kind, Kind::Release { .. }) && is_unit(action);
            assert_eq!(counts(&plan, released), times, "{named}");
        }
    }
}

/// A chunk that goes forward again does so on the way back, with the weights that are there for it. The head
/// then goes forward on that way only.
#[test]
fn what_is_run_again_is_not_gathered_again() {
    for named in [NamedSchedule::GPipe, NamedSchedule::BreadthFirst] {
        let order = PipelineOrder::Named(named);
        let pipeline = Pipeline { order, rematerialise: true, ..Pipeline::default() };
        for plan in plans_of(&small(llama, named), pipeline, 3) {
            let ways = |unit: &Unit| if unit.name == "head" { 1 } else { 2 };
            let times: Vec<usize> = plan.units.iter().map(ways).collect();
            assert_eq!(counts(&plan, is_gather), times, "{named}");
            assert!(counts(&plan, is_reduce).iter().all(|&n| n == 1), "{named}");
        }
    }
}

/// Whether a release is that of a gathered unit, and not that of a value that was sent.
fn is_unit(action: &Action) -> bool {
    action.label.starts_with("release ")
}

#[test]
fn gradients_are_summed_as_often_as_the_stage_says() {
    for named in NamedSchedule::ALL {
        for zero in 1..=3 {
            for plan in plans(&small(llama, named), named, zero) {
                // Whole gradients are summed when the step's last contribution is there, shards for
                // every micro-batch, or for all of a sweep.
                let updates = if named == NamedSchedule::PipeDream { each(named) } else { 1 };
                let times = if zero == 1 || sweeps(named) { updates } else { each(named) };
                // Replicas of a stage sum once more.
                let times = times + usize::from(named.goes_both_ways());
                let what = format!("{named}, stage {zero}");
                assert_eq!(counts(&plan, is_reduce), vec![times; plan.units.len()], "{what}");
                // At the other stages, updated weights are gathered once for each update.
                let gathers = counts(&plan, is_gather).iter().sum::<usize>();
                assert_eq!(gathers > updates * plan.units.len(), zero == 3, "{what}");
            }
        }
    }
}

/// What stages share is summed once more, over the stages.
#[test]
fn tied_weights_are_summed_over_stages_once() {
    for named in [NamedSchedule::OneFOneB, NamedSchedule::VHalf, NamedSchedule::BreadthFirst] {
        for zero in 1..=3 {
            let times = if zero == 1 || sweeps(named) { 1 } else { MICROBATCHES };
            for plan in plans(&small(gpt, named), named, zero) {
                for (unit, found) in plan.units.iter().zip(counts(&plan, is_reduce)) {
                    // In a V, first and last stage are on one device, which sums for itself.
                    let more = usize::from(unit.stage_groups.len() > 1);
                    let what = format!("{named}, stage {zero}, {}", unit.name);
                    assert_eq!(found, times + more, "{what}");
                }
                let shared = plan.units.iter().any(|unit| unit.stage_groups.len() > 1);
                assert_eq!(shared, !named.is_vee(), "{named}");
            }
        }
    }
}
