//! A deep model on a long pipeline: scripts grow with what is done, and so does the memory of checking
//! them. A test binary of its own, for it counts what is allocated.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_autodiff::Recompute;
use phalanx_call::NoScratch;
use phalanx_ir::{DType, Mesh, Model};
use phalanx_models::{Architecture, BatchShape, Llama};
use phalanx_pipeline::{NamedSchedule, ScheduleShape, split};
use phalanx_script::{
    Class, Compiled, Library, Optimizer, PlannedScript, Precision, RankPlace, ScheduledRun, Script,
    StageGroup, TrainingScript, World, check_classes, merge_adjacent, train_script,
};
use phalanx_spmd::Sharing;
use phalanx_sys::count_alloc::{CountingAllocator, counts};
use phalanx_testing::{compile, tiny};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const LAYERS: usize = 96;
const DEVICES: usize = 16;

static ALONE: (Mesh, Sharing) = (Mesh::single(), Sharing::none());

/// Layers that are as narrow as can be, for nothing here depends on their width.
fn model() -> (Model, Compiled) {
    let mut llama: Llama = tiny(4);
    llama.spec.layers = LAYERS;
    let model = llama.model(BatchShape { batch: 1, seq: 4 }, DType::F32).unwrap();
    assert_eq!(model.instances().len(), LAYERS + 2);
    let compiled = compile(&model, DType::F32, Recompute::None);
    (model, compiled)
}

/// By device of a 1F1B pipeline: its turns.
fn turns(microbatches: usize) -> Vec<Vec<ScheduledRun>> {
    let instances = LAYERS + 2;
    let stages = split::by_count(1..LAYERS + 1, instances, DEVICES).unwrap();
    let schedule =
        NamedSchedule::OneFOneB.build(ScheduleShape::new(DEVICES, microbatches)).unwrap();
    let lists = schedule.instances(&stages);
    lists.iter().map(|list| merge_adjacent(list, instances)).collect()
}

/// The scripts of all devices, each of one rank.
fn scripts(model: &Model, compiled: &Compiled, turns: &[Vec<ScheduledRun>]) -> Vec<Script> {
    let ranks: Vec<[usize; 1]> = (0..DEVICES).map(|rank| [rank]).collect();
    let (mesh, sharing) = (&ALONE.0, &ALONE.1);
    let stage_groups = (turns.iter().zip(&ranks)).map(|(turns, ranks)| StageGroup {
        compiled,
        turns,
        mesh,
        sharing,
        ranks,
    });
    let library = Arc::new(Library::new(Arc::new(NoScratch)));
    let world = World::new(model, stage_groups.collect(), library).unwrap();
    let script = |stage_group| {
        let training = TrainingScript {
            world: &world,
            at: RankPlace { stage_group, place: 0 },
            precision: Precision {
                weights: DType::F32,
                grads: DType::F32,
                state: DType::F32,
                split: false,
            },
            optimizer: Optimizer::adamw(),
            clip: Some(1.0),
            scaling: None,
        };
        train_script(&training, &training.state().unwrap()).unwrap()
    };
    (0..DEVICES).map(script).collect()
}

/// How many actions a device has, by hand.
fn actions(stage_group: usize, microbatches: usize) -> usize {
    let (first, last) = (stage_group == 0, stage_group + 1 == DEVICES);
    let layers = LAYERS / DEVICES;
    let instances = layers + usize::from(first) + usize::from(last);
    // Every instance goes there and back; the head does both at once.
    let runs = 2 * instances - usize::from(last);
    // A hidden state or its cotangent from and to each neighbour; what was sent is freed.
    let neighbours = 2 - usize::from(first) - usize::from(last);
    let (receives, sends, frees) = (neighbours, neighbours, neighbours);
    // The device's sums, the norm over all devices, and an update of each instance's unit.
    (runs + receives + sends + frees) * microbatches + 2 + instances
}

struct Measured {
    building: Duration,
    checking: Duration,
    /// Numbers that the orders of all scripts keep.
    order: usize,
    /// Bytes that checking and planning allocate, freed or not: the memory they take is at most that.
    allocated: u64,
}

/// Builds, checks and plans the scripts of all devices.
fn measure(model: &Model, compiled: &Compiled, microbatches: usize) -> Measured {
    let turns = turns(microbatches);
    let start = Instant::now();
    let scripts = scripts(model, compiled, &turns);
    let building = start.elapsed();
    for (stage_group, script) in scripts.iter().enumerate() {
        assert_eq!(
            script.actions.len(),
            actions(stage_group, microbatches),
            "device {stage_group}"
        );
    }
    let (start, before) = (Instant::now(), counts());
    let planned: Vec<PlannedScript> =
        scripts.into_iter().map(|script| PlannedScript::new(script, None).unwrap()).collect();
    let classes: Vec<Class<'_>> = (planned.iter())
        .map(|p| Class { script: &p.script, order: &p.order, others: Vec::new() })
        .collect();
    check_classes(&classes).unwrap();
    let (checking, allocated) = (start.elapsed(), (counts() - before).bytes);
    let order = planned.iter().map(|p| p.order.size()).sum();
    Measured { building, checking, order, allocated }
}

#[test]
fn a_deep_model_on_a_long_pipeline_is_built_and_checked() {
    let (model, compiled) = model();
    let [half, whole] = [64, 128].map(|microbatches| {
        let measured = measure(&model, &compiled, microbatches);
        println!(
            "{LAYERS} layers, {microbatches} micro-batches, {DEVICES} stage_groups: building {:.3} s, \
             checking and planning {:.3} s, {} bytes allocated",
            measured.building.as_secs_f64(),
            measured.checking.as_secs_f64(),
            measured.allocated
        );
        measured
    });
    let ratio = whole.order as f64 / half.order as f64;
    assert!(ratio < 2.2, "the orders of twice as many micro-batches are {ratio} times as large");
    let ratio = whole.allocated as f64 / half.allocated as f64;
    assert!(ratio < 2.4, "checking twice as many micro-batches takes {ratio} times the memory");
}
