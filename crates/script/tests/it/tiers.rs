//! Buffers outside the device's memory: what may use them, and where they lie.

use phalanx_ir::{Builder, DType};
use phalanx_script::{
    Accumulator, Action, Buffer, BufferId, BufferKey, Category, HappensBefore, Kind, Lane, Placed,
    PlannedScript, Run, Script, Slots, Source, Tier, View, Write, check, plan,
};

fn buffer(script: &mut Script, bytes: usize, source: Source, tier: Tier) -> BufferId {
    let key = BufferKey::Own(format!("b{}", script.buffers.len()).into());
    let category = Category::Inputs;
    script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] })
}

fn copy(script: &mut Script, lane: Lane, from: BufferId, into: BufferId) {
    let label = format!("copy {}", script.actions.len());
    script.actions.push(Action { label, lane, kind: Kind::Copy { from, into }, after: vec![] });
}

/// A copy of 64 bytes to as many others, on some lane.
fn copied(from: Tier, into: Tier, bytes: usize, lane: Lane) -> Result<(), String> {
    let mut script = Script::default();
    let a = buffer(&mut script, 64, Source::State, from);
    let b = buffer(&mut script, bytes, Source::Result, into);
    copy(&mut script, lane, a, b);
    check(&script).map_err(|e| e.to_string())
}

#[test]
fn a_copy_goes_between_tiers_on_the_lane_of_its_direction() {
    use Tier::{Device, Disk, Host};
    for (from, into, lane) in [
        (Host, Device, Lane::Up),
        (Device, Host, Lane::Down),
        (Host, Disk, Lane::Disk),
        (Disk, Host, Lane::Disk),
        (Disk, Device, Lane::Disk),
    ] {
        assert_eq!(copied(from, into, 64, lane), Ok(()));
        let error = copied(from, into, 64, Lane::Compute).unwrap_err();
        assert!(error.contains(&format!("on the lane {lane:?}")), "{error}");
        let error = copied(from, into, 32, lane).unwrap_err();
        assert!(error.contains("64 and 32 bytes"), "{error}");
    }
    let error = copied(Host, Host, 64, Lane::Up).unwrap_err();
    assert!(error.contains("in the same tier"), "{error}");
}

#[test]
fn programs_use_the_device_alone() {
    let b = Builder::new("twice", DType::F32);
    b.output("y", b.data("x", DType::F32, [16]).scale(2.0));
    let program = b.finish().unwrap();
    let error = |tiers: [Tier; 2]| {
        let mut script = Script::default();
        let x = buffer(&mut script, 64, Source::State, tiers[0]);
        let y = buffer(&mut script, 64, Source::Result, tiers[1]);
        let view = |buffer| View { buffer, offset: 0 };
        let run = Run {
            program: script.program(Placed::new(program.clone(), Slots::default())),
            inputs: vec![view(x)],
            outputs: vec![(view(y), Write::Overwrite)],
            contributes: vec![],
        };
        let (label, lane, kind) = ("twice".to_owned(), Lane::Compute, Kind::Run(run));
        script.actions.push(Action { label, lane, kind, after: vec![] });
        check(&script).map_err(|e| e.to_string())
    };
    assert_eq!(error([Tier::Device; 2]), Ok(()));
    for (tiers, name) in [([Tier::Host, Tier::Device], "b0"), ([Tier::Device, Tier::Disk], "b1")] {
        let error = error(tiers).unwrap_err();
        assert!(error.contains(&format!("it uses `{name}`, which lies in the tier")), "{error}");
    }
}

#[test]
fn nothing_is_copied_into_a_gradient() {
    let mut script = Script::default();
    let from = buffer(&mut script, 64, Source::State, Tier::Host);
    let into = buffer(&mut script, 64, Source::State, Tier::Device);
    let (dtype, complete, shared) = (DType::F32, vec![], Default::default());
    script.accumulators.push(Accumulator {
        buffer: into,
        dtype,
        complete,
        brought: vec![],
        left: false,
        shared,
    });
    copy(&mut script, Lane::Up, from, into);
    let error = check(&script).unwrap_err().to_string();
    assert!(error.contains("which is a gradient buffer"), "{error}");
}

/// Every tier has an arena of its own, whose memory is used again once nobody needs it.
#[test]
fn tiers_are_planned_apart() {
    let mut script = Script::default();
    let state = buffer(&mut script, 64, Source::State, Tier::Host);
    let kept = buffer(&mut script, 64, Source::State, Tier::Device);
    for _ in 0..3 {
        let there = buffer(&mut script, 64, Source::Script, Tier::Device);
        let back = buffer(&mut script, 64, Source::Script, Tier::Host);
        copy(&mut script, Lane::Up, state, there);
        copy(&mut script, Lane::Down, there, back);
        let after = script.actions.len() - 1;
        copy(&mut script, Lane::Up, back, kept);
        script.actions[after + 1].after = vec![after];
    }
    let found = plan(&script).unwrap();
    assert_eq!((found.arena, found.arenas), (128, [128, 128, 0]));
    assert_eq!(found.peak(Category::Inputs), 128);
    assert_eq!(found.peak_in(Tier::Host, Category::Inputs), 128);
    assert_eq!(found.peak_in(Tier::Disk, Category::Inputs), 0);
    // What is checked and planned at once is the same.
    let planned = PlannedScript::new(script.clone(), None).unwrap();
    assert_eq!(planned.memory, found);
    let order = HappensBefore::of(&script).unwrap();
    let direct = |order: &HappensBefore, i| order.direct(i).collect::<Vec<_>>();
    assert!((0..9).all(|i| direct(&planned.order, i) == direct(&order, i)));
}
