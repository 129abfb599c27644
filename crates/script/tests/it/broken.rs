//! Scripts that are wrong in one place, each made from a good one by one edit.

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Axis, DType, Role};
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::ReferenceEngine;
use phalanx_script::{Action, BufferId, Kind, Lane, Run, Script, Write, check};
use phalanx_testing::{Rig, Setup, gpt};

/// Two micro-batches through a model whose embedding is tied to its head.
fn good() -> Script {
    let shape = BatchShape { batch: 1, seq: 4 };
    let gpt = gpt(AttentionKind::Flash, 0.0);
    let model = gpt.model(shape, DType::F32).unwrap();
    let setup = Setup { microbatches: 2, ..Setup::new(DType::F32) };
    let rig = Rig::new(ReferenceEngine::new(), &model, &setup);
    rig.plan().script.clone()
}

#[test]
fn the_script_is_good() {
    check(&good()).unwrap();
}

/// What is done to the script, and what the error must say.
type Case = (&'static str, fn(&mut Script), &'static str);

const CASES: [Case; 17] = [
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
        "lacks the contribution of parameter 0 of instance 0, micro-batch 1 (4 of 6 are there)",
    ),
    (
        "a user of a tied weight left out",
        |s| {
            s.actions.remove(at(s, "embed BW mb 0"));
            s.actions.remove(at(s, "embed BW mb 1"));
        },
        "lacks the contribution of parameter 0 of instance 0, micro-batch 0 (2 of 6 are there)",
    ),
    (
        "an update before the last contribution",
        |s| before(s, "update blocks.0.decay", "blocks.0 BW mb 1"),
        "lacks the contribution of parameter",
    ),
    (
        "a norm before the last contribution",
        |s| before(s, "norm and clip", "embed BW mb 1"),
        "lacks the contribution of parameter 0",
    ),
    (
        "an update of a partial sum",
        |s| s.partial.push((gradient(s, "blocks.0.decay"), vec![dp()])),
        "is still a partial sum over `dp`",
    ),
    (
        "a norm of a partial sum, reduced only afterwards",
        |s| {
            let unit = gradient(s, "blocks.0.decay");
            s.partial.push((unit, vec![dp()]));
            let place = at(s, "norm and clip") + 1;
            s.actions.insert(place, reduce(unit));
        },
        "is still a partial sum over `dp`",
    ),
    (
        "a sum over an axis twice",
        |s| {
            let unit = gradient(s, "blocks.0.decay");
            s.partial.push((unit, vec![dp()]));
            let place = at(s, "norm and clip");
            s.actions.insert(place, reduce(unit));
            s.actions.insert(place, reduce(unit));
        },
        "is not a partial sum over `dp`",
    ),
    (
        "a contribution after the sum over ranks",
        |s| {
            let unit = gradient(s, "blocks.0.decay");
            s.partial.push((unit, vec![dp()]));
            let place = at(s, "blocks.0 BW mb 1");
            s.actions.insert(place, reduce(unit));
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
        |s| drop(s.actions.remove(at(s, "update blocks.0.plain"))),
        "was formed, but nothing is updated by it",
    ),
    (
        "a write to a gradient that says nothing of what it contributes",
        |s| {
            let unit = gradient(s, "blocks.0.decay");
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
            let h = s.named("embed/h@mb0").unwrap();
            s.buffers[h.0].bytes -= 1;
        },
        "`h` needs 128 bytes of `embed/h@mb0`, which has 127",
    ),
    ("an edge that points forwards", |s| s.actions[2].after.push(4), "waits for action 4"),
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
    let unit = gradient(&script, "blocks.0.decay");
    script.partial.push((unit, vec![dp()]));
    let place = at(&script, "norm and clip");
    script.actions.insert(place, reduce(unit));
    check(&script).unwrap();
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
    let (Kind::Run(run) | Kind::Update { run, .. }) = &mut script.actions[index].kind else {
        panic!("`{label}` runs no program");
    };
    let program = &script.programs[run.program.0].program;
    // The table names outputs by number; the first gradient comes after the cotangent.
    if label.contains("BW") {
        assert_eq!(program.outputs()[1].role, Role::Gradient);
    }
    run
}

fn gradient(script: &Script, unit: &str) -> BufferId {
    script.named(&format!("{unit}/gradient")).unwrap()
}

/// Moves an action to just before another.
fn before(script: &mut Script, label: &str, other: &str) {
    let action = script.actions.remove(at(script, label));
    let place = at(script, other);
    script.actions.insert(place, action);
}

fn reduce(gradient: BufferId) -> Action {
    Action {
        label: "reduce".to_owned(),
        lane: Lane::Reduce,
        kind: Kind::Reduce { gradient, axes: vec![dp()] },
        after: vec![],
    }
}
