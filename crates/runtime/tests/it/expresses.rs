//! What systems that are still to come need of scripts can be said, checked, planned and run: several
//! versions of weights, scripts for the beginning and the end of a run, memory lent by a peer, and several
//! replicas of a stage on one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_comm::{Communicator, RankPool, Threads};
use phalanx_cpu::{CpuEngine, CpuRequirements};
use phalanx_engine::Engine;
use phalanx_ir::{Builder, DType, Init, Model, Param, Program, text};
use phalanx_reference::ReferenceEngine;
use phalanx_runtime::Executor;
use phalanx_script::{
    Action, Block, Buffer, BufferId, BufferKey, Category, Kind, Lane, Library, MemoryPlan, Message,
    Optimizer, Part, Placed, PlannedScript, Precision, RankPlace, Run, ScheduledRun, Script, Slots,
    Source, StageGroup, Tier, TrainingScript, Value, View, World, Write, check, plan, train_script,
};
use phalanx_testing::{Remote, compile};

const N: usize = 64;

fn program(name: &str, inputs: &[&str], op: &str) -> Program {
    let ports: String = inputs.iter().map(|x| format!("  {x}: state f64[{N}]\n")).collect();
    let source =
        format!("mesh\nprogram {name} {{\n{ports}  %1 = {op} : f64[{N}]\n  return o: state %1\n}}");
    text::parse(&source).unwrap()
}

fn buffer(script: &mut Script, name: &str, category: Category, source: Source) -> BufferId {
    let (key, bytes, tier) = (own(name), N * 8, Tier::Device);
    script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] })
}

fn own(name: &str) -> BufferKey {
    BufferKey::Own(name.into())
}

fn run(script: &mut Script, program: &Program, inputs: &[BufferId], output: BufferId) {
    let view = |&buffer: &BufferId| View { buffer, offset: 0 };
    // No engine needs scratch memory for ops as simple as these.
    let slots = Slots::assign_for(program, &CpuRequirements::default());
    let run = Run {
        program: script.program(Placed::new(program.clone(), slots)),
        inputs: inputs.iter().map(view).collect(),
        outputs: vec![(view(&output), Write::Overwrite)],
        contributes: vec![],
    };
    push(script, &program.name, Lane::Compute, Kind::Run(run));
}

fn push(script: &mut Script, label: &str, lane: Lane, kind: Kind) {
    script.actions.push(Action { label: label.to_owned(), lane, kind, after: vec![] });
}

fn planned(script: Script, base: Option<&MemoryPlan>) -> Arc<PlannedScript> {
    Arc::new(PlannedScript::new(script, base).unwrap())
}

fn bytes(value: f64) -> Vec<u8> {
    value.to_le_bytes().repeat(N)
}

fn value(bytes: &[u8]) -> f64 {
    let values: Vec<f64> =
        bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect();
    assert!(values.iter().all(|v| *v == values[0]), "{values:?}");
    values[0]
}

/// Weights that are updated by what their version before gave, as in PipeDream-2BW: w(t+1) = w(t) +
/// f(w(t−1)). With f(w) = w these are Fibonacci's numbers. A prologue makes the first old version, a
/// body repeats, and a drain takes one more step and keeps no old version.
#[test]
fn two_versions_of_weights_with_a_prologue_a_body_and_a_drain() {
    let copy = program("copy", &["x"], "scale(x, by=1)");
    let add = program("add", &["x", "y"], "add(x, y)");
    let mut state = Script::default();
    let weights =
        ["w", "w.old"].map(|name| buffer(&mut state, name, Category::Weights, Source::State));
    let [new, old] = weights;
    let made = buffer(&mut state, "made", Category::Workspace, Source::Script);
    let [mut prologue, mut body, mut drain] = [(); 3].map(|()| state.clone());
    run(&mut prologue, &copy, &[new], old);
    run(&mut body, &add, &[new, old], made);
    run(&mut body, &copy, &[new], old);
    run(&mut body, &copy, &[made], new);
    run(&mut drain, &add, &[new, old], made);
    run(&mut drain, &copy, &[made], new);
    let mut executor = Executor::new(ReferenceEngine::new());
    let base = plan(&state).unwrap();
    let ids =
        [prologue, body, drain].map(|script| executor.load(planned(script, Some(&base))).unwrap());
    executor.reserve().unwrap();
    executor.write(ids[0], new, &bytes(1.0)).unwrap();
    for id in [ids[0], ids[1], ids[1], ids[1], ids[1], ids[2]] {
        executor.run(id).unwrap();
    }
    let mut out = vec![0; N * 8];
    executor.read(ids[2], new, &mut out).unwrap();
    assert_eq!(value(&out), 13.0);
    executor.read(ids[2], old, &mut out).unwrap();
    assert_eq!(value(&out), 5.0);
}

/// A rank whose memory is short lends a residual to its neighbour and gets it back, as in BPipe.
#[test]
fn a_peer_keeps_a_residual_meanwhile() {
    let double = program("double", &["x"], "scale(x, by=2)");
    let add = program("add", &["x", "y"], "add(x, y)");
    let whole = Block { first: 0, stride: N, rows: 1, len: N };
    let to = |peer: usize, channel: u32| {
        // Any number that both ends agree on.
        let instance = channel as usize;
        let value = Value { instance, port: "message".into(), microbatch: 0, again: false };
        vec![Message { peer, channel, value, dtype: DType::F64, blocks: vec![whole] }]
    };
    let residual =
        |script: &mut Script, name: &str| buffer(script, name, Category::Residuals, Source::Script);
    let lender = |lends: bool| {
        let mut script = Script::of_rank(0, [0].into());
        let x = buffer(&mut script, "x", Category::Inputs, Source::Host);
        let y = buffer(&mut script, "y", Category::Workspace, Source::Result);
        let [first, second] = ["r0", "r1"].map(|name| residual(&mut script, name));
        let back = if lends { residual(&mut script, "r0 again") } else { first };
        run(&mut script, &double, &[x], first);
        if lends {
            push(
                &mut script,
                "evict r0",
                Lane::Send,
                Kind::Send { buffer: first, messages: to(1, 7) },
            );
            // The neighbour says that it has it by sending something back.
            let has = buffer(&mut script, "has", Category::Communication, Source::Script);
            push(
                &mut script,
                "has r0",
                Lane::Receive,
                Kind::Receive { buffer: has, messages: to(1, 8) },
            );
            run(&mut script, &add, &[has, x], has);
            push(&mut script, "free r0", Lane::Compute, Kind::Release { buffer: first });
        }
        run(&mut script, &double, &[x], second);
        run(&mut script, &add, &[second, x], y);
        if lends {
            push(
                &mut script,
                "fetch r0",
                Lane::Receive,
                Kind::Receive { buffer: back, messages: to(1, 7) },
            );
        }
        run(&mut script, &add, &[back, y], y);
        script
    };
    let keeper = || {
        let mut script = Script::of_rank(1, [1].into());
        let kept = residual(&mut script, "kept");
        push(
            &mut script,
            "keep",
            Lane::Receive,
            Kind::Receive { buffer: kept, messages: to(0, 7) },
        );
        let note = buffer(&mut script, "note", Category::Communication, Source::Script);
        run(&mut script, &double, &[kept], note);
        push(&mut script, "told", Lane::Send, Kind::Send { buffer: note, messages: to(0, 8) });
        push(&mut script, "give back", Lane::Send, Kind::Send { buffer: kept, messages: to(0, 7) });
        script
    };
    let peak = |script: &Script| plan(script).unwrap().peak(Category::Residuals);
    assert_eq!((peak(&lender(false)), peak(&lender(true))), (2 * N * 8, N * 8));
    fn lent<E: Engine + Send>(
        scripts: [Script; 2],
        engine: impl Fn(Box<dyn Communicator>) -> E + Sync,
    ) -> f64 {
        let make = |endpoint: Box<dyn Communicator>| {
            let rank = endpoint.rank();
            let mut executor = Executor::new(engine(endpoint));
            let script = scripts[rank].clone();
            let (x, y) = (script.find(&own("x")), script.find(&own("y")));
            let id = executor.load(planned(script, None)).unwrap();
            executor.reserve().unwrap();
            if let Some(x) = x {
                executor.write(id, x, &bytes(3.0)).unwrap();
            }
            Ok::<_, String>((executor, id, y))
        };
        let mut crew = RankPool::new(&Threads::new(2), make).unwrap();
        let found = crew.run(|_, (executor, id, y)| {
            executor.run(*id).unwrap();
            let mut out = vec![0; N * 8];
            if let Some(y) = *y {
                executor.read(*id, y, &mut out).unwrap();
            }
            Ok::<f64, String>(value(&out))
        });
        found.unwrap()[0]
    }
    let cpu = |endpoint| CpuEngine::on_rank(1, endpoint).unwrap();
    let remote = move |endpoint| Remote::new(move || cpu(endpoint));
    // 2x + x + 2x.
    assert_eq!(lent([lender(true), keeper()], cpu), 15.0);
    assert_eq!(lent([lender(true), keeper()], remote), 15.0);
}

/// Two replicas of both stages, one in each direction, as in Chimera: each device holds the first stage of
/// one and the last of the other, and parameters are shared between devices.
#[test]
fn devices_hold_stages_of_several_replicas() {
    let first = {
        let b = Builder::new("first", DType::F64);
        b.output("h", b.data("x", DType::F64, [2, 3]).matmul(b.param("w", [3, 3])));
        b.finish().unwrap()
    };
    let last = {
        let b = Builder::new("last", DType::F64);
        b.loss("loss", b.boundary("h", [2, 3]).matmul(b.param("w", [3, 3])).sum_all());
        b.finish().unwrap()
    };
    let mut model = Model::new("both ways");
    let segments = [model.segment(first), model.segment(last)];
    let params = ["a", "b"].map(|name| {
        let (name, shape, init) = (name.to_owned(), vec![3, 3], Init::Constant(1.0));
        model.param(Param { name, shape, init, decay: true, dealt: 1 }).unwrap()
    });
    for replica in ["down", "up"] {
        for (stage, (segment, param)) in segments.iter().zip(params).enumerate() {
            let own = BTreeMap::from([("w".to_owned(), param)]);
            model.append(format!("{replica}.{stage}"), *segment, own).unwrap();
        }
    }
    let compiled = compile(&model, DType::F64, phalanx_autodiff::Recompute::None);
    // Micro-batch 0 goes down through instances 0 and 1, micro-batch 1 up through 2 and 3.
    let turn = |part, instance: usize| ScheduledRun { instance, part, microbatch: instance / 2 };
    let [f, bw] = [Part::F, Part::BW];
    let lists = [
        [turn(f, 0), turn(f, 3), turn(bw, 3), turn(bw, 0)],
        [turn(f, 2), turn(f, 1), turn(bw, 1), turn(bw, 2)],
    ];
    let ranks = [[0], [1]];
    let stage_groups: Vec<StageGroup<'_>> = (lists.iter().zip(&ranks))
        .map(|(turns, ranks)| StageGroup { ranks, ..StageGroup::alone(&compiled, turns) })
        .collect();
    let library = Arc::new(Library::new(ReferenceEngine::new().requirements()));
    let world = World::new(&model, stage_groups, library).unwrap();
    for stage_group in 0..2 {
        let training = TrainingScript {
            world: &world,
            at: RankPlace { stage_group, place: 0 },
            precision: Precision {
                weights: DType::F64,
                grads: DType::F64,
                state: DType::F64,
                split: false,
            },
            optimizer: Optimizer::sgd(0.0),
            clip: None,
            scaling: None,
        };
        let state = training.state().unwrap();
        let script = train_script(&training, &state).unwrap();
        check(&script).unwrap();
        let ties = script.actions.iter().filter(|a| matches!(a.kind, Kind::Reduce { .. }));
        assert_eq!(ties.count(), state.units.len(), "both devices add to every gradient");
        assert!(state.units.iter().all(|unit| unit.stage_groups == [0, 1]));
    }
}
