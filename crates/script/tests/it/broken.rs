//! Scripts that are wrong in one place, each made from a good one by one edit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use phalanx_call::NoScratch;
use phalanx_ir::ops::{AttentionKind, Collective, CollectiveKind};
use phalanx_ir::{Axis, Builder, DType, Init, Mesh, Model, Param, Phase, Program, Role};
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::ReferenceEngine;
use phalanx_script::action::Entry;
use phalanx_script::{
    Action, BufferId, BufferKey, HappensBefore, Kind, Lane, Library, Placed, ProgramId, RankPlace,
    Run, Script, Slots, StageGroup, StateKind, TrainingScript, Value, View, World, Write,
    accumulate, check, train_script,
};
use phalanx_testing::{Rig, Setup, compile, gpt};

/// Two micro-batches through a model whose embedding is tied to its head.
fn good() -> Script {
    let shape = BatchShape { batch: 1, seq: 4 };
    let gpt = gpt(AttentionKind::Flash, 0.0);
    let model = gpt.model(shape, DType::F32).unwrap();
    let setup = Setup { microbatches: 2, ..Setup::new(DType::F32) };
    let rig = Rig::new(ReferenceEngine::new(), &model, &setup);
    rig.script().clone()
}

#[test]
fn the_script_is_good() {
    check(&good()).unwrap();
}

/// What is done to the script, and what the error must say.
type Case = (&'static str, fn(&mut Script), &'static str);

const CASES: [Case; 25] = [
    (
        "an overwrite that loses what is there",
        |s| run(s, "blocks.0 BW mb 1").outputs[1].1 = Write::Overwrite,
        "loses the contribution of parameter",
    ),
    (
        "an add before the first write",
        |s| run(s, "blocks.0 BW mb 0").outputs[1].1 = Write::Add,
        "before anything was written there",
    ),
    (
        "a contribution that comes twice",
        |s| {
            let again = s.actions[at(s, "blocks.0 BW mb 1")].clone();
            let place = at(s, "norm and clip");
            s.actions.insert(place, again);
        },
        "already holds parameter",
    ),
    (
        "a micro-batch left out",
        |s| drop(s.actions.remove(at(s, "embed BW mb 1"))),
        "lacks the contribution of parameter `embed` of instance `embed`, micro-batch 1 (it has 4 \
        of 6)",
    ),
    (
        "a user of a tied weight left out",
        |s| {
            s.actions.remove(at(s, "embed BW mb 0"));
            s.actions.remove(at(s, "embed BW mb 1"));
        },
        "lacks the contribution of parameter `embed` of instance `embed`, micro-batch 0 (it has 2 \
        of 6)",
    ),
    (
        "an update before the last contribution",
        |s| before(s, "update blocks.0", "blocks.0 BW mb 1"),
        "lacks the contribution of parameter",
    ),
    (
        "a norm before the last contribution",
        |s| before(s, "norm and clip", "embed BW mb 1"),
        "lacks the contribution of parameter `embed`",
    ),
    ("an update of a partial sum", |s| partial(s, "blocks.0"), "is still a partial sum over `dp`"),
    (
        "a norm of a partial sum, reduced only afterwards",
        |s| {
            let unit = gradient(s, "blocks.0");
            partial(s, "blocks.0");
            let place = at(s, "norm and clip") + 1;
            let sum = reduce(s, unit);
            s.actions.insert(place, sum);
        },
        "is still a partial sum over `dp`",
    ),
    (
        "a sum over an axis twice",
        |s| {
            let unit = gradient(s, "blocks.0");
            partial(s, "blocks.0");
            let place = at(s, "norm and clip");
            for _ in 0..2 {
                let sum = reduce(s, unit);
                s.actions.insert(place, sum);
            }
        },
        "is not a partial sum over `dp`",
    ),
    (
        "a sum over ranks before the last contribution",
        |s| {
            let unit = gradient(s, "blocks.0");
            partial(s, "blocks.0");
            let place = at(s, "blocks.0 BW mb 1");
            let sum = reduce(s, unit);
            s.actions.insert(place, sum);
        },
        "lacks the contribution of parameter",
    ),
    (
        "a contribution after the sum over ranks",
        |s| {
            let unit = gradient(s, "blocks.0");
            partial(s, "blocks.0");
            let again = s.actions[at(s, "blocks.0 BW mb 1")].clone();
            let place = at(s, "norm and clip");
            let sum = reduce(s, unit);
            s.actions.splice(place..place, [sum, again]);
        },
        "was already summed over ranks",
    ),
    (
        "a contribution after the update",
        |s| {
            let again = s.actions[at(s, "blocks.0 BW mb 1")].clone();
            s.actions.push(again);
        },
        "was already used for an update",
    ),
    (
        "a gradient that nothing uses",
        |s| drop(s.actions.remove(at(s, "update head"))),
        "was computed, but no update uses it",
    ),
    (
        "a write to a gradient that says nothing of what it contributes",
        |s| {
            let unit = gradient(s, "blocks.0");
            let norm = run(s, "norm and clip");
            norm.outputs[0].0.buffer = unit;
        },
        "without saying what it contributes",
    ),
    (
        "a read of what nothing has written",
        |s| drop(s.actions.remove(at(s, "embed F mb 1"))),
        "reads `embed/h@mb1`, which nothing has written before it",
    ),
    (
        "a buffer that is too small",
        |s| {
            let h = embedded(s, 0);
            s.buffers[h.0].bytes -= 1;
        },
        "`h` needs 128 bytes of `embed/h@mb0`, which has 127",
    ),
    ("an edge that points forwards", |s| s.actions[2].after.push(4), "waits for action 4"),
    (
        "a gradient that is formed in another type than it is accumulated in",
        |s| s.accumulators[0].dtype = DType::Bf16,
        "is accumulated in bf16, but parameter `embed` of instance `head`, micro-batch 0 is f32",
    ),
    (
        "an update that does not read its gradient",
        |s| {
            let unit = gradient(s, "head");
            let other = gradient(s, "blocks.0");
            let inputs = &mut run(s, "update head").inputs;
            inputs.iter_mut().filter(|v| v.buffer == unit).for_each(|v| v.buffer = other);
        },
        "it does not read `head/gradient`",
    ),
    (
        "an update that reads another gradient too, before its last contribution",
        |s| {
            let other = gradient(s, "embed");
            before(s, "update head", "embed BW mb 1");
            run(s, "update head").inputs[2].buffer = other;
        },
        "`embed/gradient` lacks the contribution of parameter `embed`",
    ),
    (
        "an update that writes to a gradient",
        |s| {
            let unit = gradient(s, "blocks.0");
            run(s, "update blocks.0").outputs[1].0.buffer = unit;
        },
        "without saying what it contributes",
    ),
    (
        "a read after the release",
        |s| {
            let h = embedded(s, 0);
            let place = at(s, "blocks.0 BW mb 0");
            s.actions.insert(place, release(h));
        },
        "reads `embed/h@mb0`, which nothing has written before it",
    ),
    (
        "a release of what nothing has written",
        |s| {
            let h = embedded(s, 0);
            s.actions.insert(0, release(h));
        },
        "`embed/h@mb0`, which nothing has written before it",
    ),
    (
        "a release before the first use",
        |s| {
            let h = embedded(s, 1);
            let place = at(s, "blocks.0 F mb 1");
            s.actions.insert(place, release(h));
        },
        "(blocks.0 F mb 1) reads `embed/h@mb1`",
    ),
];

#[test]
fn broken_scripts_are_refused() {
    for (name, edit, expected) in CASES {
        let mut script = good();
        edit(&mut script);
        match check(&script) {
            Ok(()) => panic!("{name} is accepted"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(expected), "{name}: {text}");
            }
        }
    }
}

/// The edits above are wrong for the reasons given: their right counterparts are accepted.
#[test]
fn a_partial_gradient_that_is_summed_once_is_accepted() {
    let mut script = good();
    let unit = gradient(&script, "blocks.0");
    partial(&mut script, "blocks.0");
    let place = at(&script, "norm and clip");
    let sum = reduce(&mut script, unit);
    script.actions.insert(place, sum);
    check(&script).unwrap();
}

/// A release after the last use is accepted, and the buffer may be written and read again.
#[test]
fn a_buffer_that_is_released_may_be_written_again() {
    let mut script = good();
    let h = embedded(&script, 0);
    let norm = at(&script, "norm and clip");
    let again = at(&script, "embed F mb 0");
    let (write, read) = (script.actions[again].clone(), script.actions[again + 1].clone());
    assert!(read.reads().contains(&h) && write.writes().contains(&h));
    script.actions.splice(norm..norm, [release(h), write, read, release(h)]);
    check(&script).unwrap();
    let order = HappensBefore::of(&script).unwrap();
    assert!(order.before(norm, norm + 1) && order.before(norm + 2, norm + 3));
    script.actions.remove(norm + 1);
    check(&script).unwrap_err();
}

/// A boundary value that no segment on the way to the loss reads.
#[test]
fn a_boundary_value_that_leads_nowhere_is_refused() {
    let b = Builder::new("first", DType::F32);
    let x = b.data("x", DType::F32, [2, 3]).matmul(b.param("w", [3, 3]));
    b.output("used", x);
    b.output("astray", x.tanh());
    let first = b.finish().unwrap();
    let b = Builder::new("last", DType::F32);
    b.loss("loss", b.boundary("used", [2, 3]).sum_all());
    let mut model = Model::new("astray");
    let segments = [model.segment(first), model.segment(b.finish().unwrap())];
    let (shape, init) = (vec![3, 3], Init::Constant(1.0));
    let w =
        model.param(Param { name: "w".to_owned(), shape, init, decay: true, dealt: 1 }).unwrap();
    model.append("first", segments[0], BTreeMap::from([("w".to_owned(), w)])).unwrap();
    model.append("last", segments[1], BTreeMap::new()).unwrap();
    let setup = Setup::new(DType::F32);
    let (compiled, turns) = (compile(&model, DType::F32, setup.recompute), accumulate(2, 1));
    let library = Arc::new(Library::new(Arc::new(NoScratch)));
    let world = World::new(&model, vec![StageGroup::alone(&compiled, &turns)], library).unwrap();
    let training = TrainingScript {
        world: &world,
        at: RankPlace::default(),
        precision: setup.precision,
        optimizer: setup.optimizer,
        clip: None,
        scaling: None,
    };
    let text = train_script(&training, &training.state().unwrap()).unwrap_err().to_string();
    assert!(text.contains("`first` returns the boundary value `astray`"), "{text}");
    assert!(text.contains("as a probe"), "{text}");
}

fn release(buffer: BufferId) -> Action {
    let kind = Kind::Release { buffer };
    Action { label: "release".to_owned(), lane: Lane::Gather, kind, after: vec![] }
}

/// Makes every contribution to a unit's gradient a partial sum over `dp`: each program that gives one
/// becomes another of the same ports, whose outputs come from nowhere.
fn partial(script: &mut Script, unit: &str) {
    let buffer = gradient(script, unit);
    for index in 0..script.actions.len() {
        let Some(run) = script.actions[index].run().cloned() else { continue };
        let adds = |o: usize| {
            run.contributes.iter().any(|(c, _)| *c == o) && run.outputs[o].0.buffer == buffer
        };
        if !(0..run.outputs.len()).any(adds) {
            continue;
        }
        let old = script.programs[run.program.0].program().clone();
        let mut new = Program::new("partial", Mesh::new([("dp", 2)]).unwrap());
        for port in old.inputs() {
            new.input(&port.name, port.role, old.ty(port.value).clone());
        }
        for (o, port) in old.outputs().iter().enumerate() {
            let mut ty = old.ty(port.value).clone();
            if adds(o) {
                ty.layout = ty.layout.with_partial(BTreeSet::from([dp()])).unwrap();
            }
            let op = old.instrs()[0].op.clone();
            let value = new.push_unchecked(op, &[], vec![ty], Phase::W)[0];
            new.output(&port.name, port.role, value);
        }
        let program = ProgramId(script.programs.len());
        let placed = Placed::new(new, Slots::default());
        script.programs.push(Entry { placed, ranks: [0].into() });
        let Some(run) = script.actions[index].run_mut() else {
            panic!("it runs a program");
        };
        run.program = program;
    }
}

fn dp() -> Axis {
    Axis::new("dp").unwrap()
}

fn at(script: &Script, label: &str) -> usize {
    let mut actions = script.actions.iter();
    actions.position(|a| a.label == label).unwrap()
}

fn run<'s>(script: &'s mut Script, label: &str) -> &'s mut Run {
    let index = at(script, label);
    let Some(run) = script.actions[index].run_mut() else {
        panic!("`{label}` runs no program");
    };
    let program = script.programs[run.program.0].program();
    // The table names outputs by number; the first gradient comes after the cotangent.
    if label.contains("BW") {
        assert_eq!(program.outputs()[1].role, Role::Gradient);
    }
    run
}

fn gradient(script: &Script, unit: &str) -> BufferId {
    let unit = script.names.units.iter().position(|name| name == unit).unwrap();
    script.find(&BufferKey::state(unit, StateKind::Gradient)).unwrap()
}

/// What the embedding gives of a micro-batch.
fn embedded(script: &Script, microbatch: usize) -> BufferId {
    let value = Value { instance: 0, port: "h".into(), microbatch, again: false };
    script.find(&BufferKey::Value(value)).unwrap()
}

/// Moves an action to just before another.
fn before(script: &mut Script, label: &str, other: &str) {
    let action = script.actions.remove(at(script, label));
    let place = at(script, other);
    script.actions.insert(place, action);
}

/// Sums a gradient over `dp` where it lies.
fn reduce(script: &mut Script, gradient: BufferId) -> Action {
    let mesh = Mesh::new([("dp", 2)]).unwrap();
    let b = Builder::on("reduce", DType::F32, mesh);
    let elements = script.buffers[gradient.0].bytes / 4;
    let formed = b.typed("formed", Role::Gradient, &format!("f32[*{elements}]{{P:dp}}"));
    let kind = CollectiveKind::AllReduce;
    let sum = b.apply(Collective::new(kind, vec![dp()]), &[formed]);
    b.port("gradient", Role::Gradient, sum);
    let view = View { buffer: gradient, offset: 0 };
    let run = Run {
        program: script.program(Placed::new(b.finish().unwrap(), Slots::default())),
        inputs: vec![view],
        outputs: vec![(view, Write::Overwrite)],
        contributes: vec![],
    };
    Action {
        label: "reduce".to_owned(),
        lane: Lane::Reduce,
        kind: Kind::Reduce { run, from: gradient, into: gradient },
        after: vec![],
    }
}
