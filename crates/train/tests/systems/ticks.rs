//! The vectorised pipeline: GPipe's numbers, exactly (m + p − 1)/m of its work and its messages' closed form, ticks on
//! zeros that leave no trace, and planted bugs.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_pipeline::{NamedSchedule, Placement, Schedule, ScheduleShape};
use phalanx_script::{BufferKey, Category, Kind, Part, Script, ScriptKey, plan, traffic};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::{Lowered, Parallel, Pipeline, Planner};

use crate::bits::{params, trained};
use crate::support::{agrees, gpt, laid, llama, settings, try_llama};

/// Stages, micro-batches, times around.
type Shape = (usize, usize, usize);

fn sets(schedule: &str, (p, m, v): Shape) -> Vec<String> {
    vec![
        format!("parallel.schedule={schedule}"),
        format!("parallel.pp={p}"),
        format!("parallel.chunks={v}"),
        // One layer more than stages, so that not all of them are alike.
        format!("model.layers={}", p * v + 1),
        format!("train.microbatches={m}"),
        format!("train.batch_size={}", 2 * m),
    ]
}

fn loaded(schedule: &str, shape: Shape, more: &[&str]) -> Loaded {
    let sets = sets(schedule, shape);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    llama(&[&sets[..], more].concat())
}

/// The same on one mesh, with the order of this schedule.
fn ordered(loaded: &Loaded, order: Schedule) -> Parallel {
    let own = settings(loaded, None).parallel;
    Parallel { pipeline: Pipeline { order: order.into(), ..own.pipeline }, ..own }
}

/// The vectorised pipeline without the ticks on zeros.
fn without_empty((p, m, v): Shape) -> Schedule {
    let whole = NamedSchedule::Vectorised.build(ScheduleShape::new(p, m).chunks(v)).unwrap();
    let lists = (0..p).map(|group| {
        let turns = whole.turns(group).iter().copied();
        turns.filter(|turn| !whole.is_empty(turn)).collect()
    });
    Schedule::from_lists("real", m, Placement::looped(p, v).unwrap(), lists.collect()).unwrap()
}

const LAYOUTS: [&[&str]; 6] = [
    &[],
    &["parallel.tp=2", "parallel.sp=true"],
    &["parallel.dp=2", "parallel.zero=2"],
    &["parallel.dp=2", "parallel.zero=3", "train.recompute=stage"],
    &["train.recompute=full", "precision.compute=f32"],
    &["parallel.cp=2", "optim.kind=lamb"],
];

/// A tick on zeros adds zeros to gradients and nothing to the loss.
#[test]
fn ticks_on_zeros_change_no_bit() {
    let shapes: [Shape; 6] = [(2, 4, 1), (3, 5, 1), (4, 2, 1), (2, 3, 2), (3, 4, 1), (2, 2, 3)];
    for (shape, layout) in shapes.into_iter().zip(LAYOUTS) {
        let own = loaded("vectorised", shape, layout);
        let real = ordered(&own, without_empty(shape));
        assert_eq!(params(&own, None, 3), params(&own, Some(real), 3), "{shape:?}, {layout:?}");
    }
}

/// Losses and weights of GPipe; gradients are summed from the last micro-batch to the first, so not to the last bit.
#[test]
fn it_computes_what_gpipe_does() {
    let values = |schedule: &str| {
        let mut session = trained(&loaded(schedule, (3, 5, 1), &[]), None, 3);
        session.params().unwrap().into_values().flat_map(|tensor| tensor.to_f64()).collect()
    };
    let [own, gpipe]: [Vec<f64>; 2] = ["vectorised", "gpipe"].map(values);
    assert_eq!(own.len(), gpipe.len());
    for (a, b) in own.iter().zip(&gpipe) {
        assert!((a - b).abs() <= 1e-10 * a.abs().max(1e-3), "{a} {b}");
    }
    // The first loss is the same to the last bit: forwards have one order.
    let first = |schedule: &str| {
        let own = loaded(schedule, (3, 5, 1), &[]);
        let mut session = trained(&own, None, 0);
        let mut loader = corpus::training(&own, &corpus::open(&own).unwrap()).unwrap();
        let step = with_step_data(loader.next_batch().unwrap(), |data| session.step(data, 0.01));
        step.unwrap().loss.to_bits()
    };
    assert_eq!(first("vectorised"), first("gpipe"));
}

/// FLOPs of layers on each stage group, by part.
fn flops(lowered: &Lowered) -> Vec<BTreeMap<Part, u64>> {
    let layers = 1..lowered.model.instances().len() - 1;
    let groups = lowered.stage_groups();
    let of = |group: &phalanx_script::StageGroup<'_>| {
        let mut sums = BTreeMap::new();
        for turn in group.turns.iter().filter(|turn| layers.contains(&turn.instance)) {
            let segment = lowered.model.instances()[turn.instance].segment;
            let program = group.compiled.program(segment, turn.part);
            *sums.entry(turn.part).or_insert(0) += program.flops();
        }
        sums
    };
    groups.iter().map(of).collect()
}

/// Each stage group computes (v·m + p − 1)/(v·m) times what GPipe's does, or the breadth-first pipeline's, exactly;
/// embedding and head are outside of the ticks.
#[test]
fn work_is_as_much_more_as_there_are_more_ticks() {
    for shape @ (p, m, v) in [(2, 4, 1), (4, 6, 1), (3, 2, 1), (2, 4, 2), (3, 5, 3)] {
        // As many layers in each stage: a circular one does the ticks of all its chunks.
        let even = format!("model.layers={}", p * v);
        let more = [even.as_str(), "parallel.split=count"];
        let other = if v == 1 { "gpipe" } else { "breadth-first" };
        let [own, plain] = ["vectorised", other]
            .map(|schedule| flops(&laid(&loaded(schedule, shape, &more), None).lowered));
        let ticks = (v * m + p - 1) as u64;
        for (own, plain) in own.iter().zip(&plain) {
            assert_eq!(own.keys().collect::<Vec<_>>(), plain.keys().collect::<Vec<_>>());
            for (part, flops) in own {
                assert_eq!(flops * (v * m) as u64, plain[part] * ticks, "{shape:?}, {part}");
            }
        }
    }
}

/// Bytes that a rank sends.
fn sent(script: &Script) -> u64 {
    traffic(script).iter().filter(|(route, _)| route.op == "send").map(|(_, m)| m.bytes).sum()
}

/// Every tick but the last shifts: each boundary is crossed m + p − 2 times in each direction.
#[test]
fn every_tick_shifts() {
    for shape @ (p, m, _) in [(2, 4, 1), (4, 3, 1), (5, 6, 1)] {
        let [own, plain] =
            ["vectorised", "gpipe"].map(|name| laid(&loaded(name, shape, &[]), None).lowered);
        for rank in 0..p {
            let [own, plain] = [&own, &plain].map(|l| sent(&l.plan(rank).unwrap().script));
            let (m, p) = (m as u64, p as u64);
            assert_eq!(own * m, plain * (m + p - 2), "{shape:?}, rank {rank}");
        }
    }
}

/// All ticks are kept until their backward, and as many bytes are written as planned.
#[test]
fn all_ticks_are_kept() {
    let residuals = |own: &Loaded, parallel: Option<Parallel>| -> Vec<usize> {
        let mut session = trained(own, parallel.clone(), 0);
        let mut loader = corpus::training(own, &corpus::open(own).unwrap()).unwrap();
        with_step_data(loader.next_batch().unwrap(), |data| session.step(data, 0.01)).unwrap();
        let lowered = laid(own, parallel).lowered;
        let written = session.observe().unwrap();
        let both = written.iter().enumerate().map(|(rank, observed)| {
            let planned = plan(&lowered.plan(rank).unwrap().script).unwrap();
            let found = observed.peaks.iter().find(|(c, _)| *c == Category::Residuals).unwrap().1;
            assert_eq!(planned.peak(Category::Residuals), found, "rank {rank}");
            found
        });
        both.collect()
    };
    let shape @ (p, m, _) = (4, 4, 1);
    let own = loaded("vectorised", shape, &["model.layers=4", "parallel.split=count"]);
    let real = residuals(&own, Some(ordered(&own, without_empty(shape))));
    let all = residuals(&own, None);
    // The second and the third stage group have layers alone.
    for rank in [1, 2] {
        assert_eq!(all[rank] * m, real[rank] * (m + p - 1), "{all:?}, {real:?}");
    }
}

/// Dropout, tied weights, an encoder and a decoder, experts whose routers have a loss of their own, late norms: every
/// kind of block.
#[test]
fn every_kind_of_model_has_ticks() {
    let tied = sets("vectorised", (2, 4, 1));
    let tied: Vec<&str> = tied.iter().map(String::as_str).collect();
    agrees("gpt", &gpt(&[&tied[..], &["model.dropout=0.1"]].concat()), None);
    agrees("t5", &crate::support::t5(&[&tied[..], &["model.layers=2"]].concat()), None);
    let experts = ["model.experts=4", "model.expert_ffn=6", "model.moe_every=2", "parallel.dp=2"];
    agrees("experts", &loaded("vectorised", (2, 3, 1), &experts), None);
    let ahead = ["parallel.post_validation=true"];
    agrees("post-validation", &loaded("vectorised", (3, 4, 1), &ahead), None);
}

/// A tick that reads what happens to lie in memory, one that is left out, and one whose output goes elsewhere.
#[test]
fn planted_bugs_of_ticks_are_found() {
    let lowered = laid(&loaded("vectorised", (3, 4, 1), &[]), None).lowered;
    let scripts: Vec<Script> = (0..3).map(|rank| lowered.plan(rank).unwrap().script).collect();
    phalanx_script::check_together(&scripts).unwrap();
    Planner::new(&lowered).unwrap().check().unwrap();
    let good = &scripts[1];
    let empty = |key: &BufferKey| matches!(key, BufferKey::Value(value) if value.microbatch >= 4);
    let clears = |action: &phalanx_script::Action| match &action.kind {
        Kind::Clear { run } => {
            run.outputs.iter().any(|(view, _)| empty(&good.buffers[view.buffer.0].key))
        }
        _ => false,
    };
    let all: Vec<usize> = (0..good.actions.len()).filter(|&at| clears(&good.actions[at])).collect();
    assert!(!all.is_empty());
    for at in all {
        let mut stale = good.clone();
        let Kind::Clear { run } = &mut stale.actions[at].kind else { unreachable!() };
        // It sets a buffer of another tick to zero.
        let own = run.outputs[0].0.buffer.0;
        let other = good.buffers.iter().position(|buffer| {
            buffer.bytes == good.buffers[own].bytes
                && !empty(&buffer.key)
                && matches!(buffer.key, BufferKey::Value(_))
        });
        run.outputs[0].0.buffer.0 = other.unwrap();
        assert!(phalanx_script::check(&stale).is_err(), "{}", good.actions[at].label);
    }
    // A shift of an empty tick that nobody receives.
    let mut lost = scripts.clone();
    let sends = |action: &phalanx_script::Action| match &action.kind {
        Kind::Send { messages, .. } => messages.iter().any(|message| message.value.microbatch >= 4),
        _ => false,
    };
    let at = lost[1].actions.iter().position(sends).unwrap();
    let Kind::Send { messages, .. } = &mut lost[1].actions[at].kind else { unreachable!() };
    messages.clear();
    assert!(phalanx_script::check_together(&lost).is_err());
}

/// Evaluation has no use for ticks on zeros.
#[test]
fn evaluation_runs_what_is_real() {
    let own = loaded("vectorised", (3, 4, 1), &["train.eval_every=1", "train.eval_batches=1"]);
    let models = phalanx_session::network::Network::new(&own).unwrap();
    let models = models.models(&own.config, true).unwrap();
    let lowered = Lowered::new(&models, settings(&own, None)).unwrap();
    let scripts = Planner::new(&lowered).unwrap().scripts_of(ScriptKey::Evaluate).unwrap();
    assert_eq!(scripts.len(), 3);
    for script in &scripts {
        let turns = &script.planned.script.turns;
        assert!(!turns.is_empty() && turns.iter().all(|(_, turn)| turn.microbatch < 4));
    }
}

#[test]
fn what_cannot_go_around_is_refused() {
    let refused = |shape| {
        let sets = sets("vectorised", shape);
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        try_llama(&sets).unwrap_err().to_string()
    };
    let said = refused((4, 3, 2));
    assert!(said.contains("cannot go around 2 times with 3 micro-batches on 4 stages"), "{said}");
    assert!(said.contains("4 micro-batches, or 1 chunk"), "{said}");
}
