//! Scripts that are played with given durations, against the simulator of schedules and closed forms.

use std::time::Duration;

use phalanx_inspect::explain::step_drawing;
use phalanx_inspect::trace::Replay;
use phalanx_ir::random::Stream;
use phalanx_pipeline::{NamedSchedule, Times, TurnCosts, simulate};
use phalanx_runtime::TimedAction;
use phalanx_script::{Action, Class, Kind, Lane, Part, ScriptKey};
use phalanx_session::{Planner, RankScript, Timetable, Trace, Traced};
use phalanx_sim::{Durations, IssueRule, Playback, play};

use crate::support::{Laid, laid, llama};

/// The instance after the embedding and eight layers. It is not always the same turn that its forward belongs to.
const HEAD: usize = 9;

/// How long an instance takes: more the farther it is from the input, so that stages differ.
fn of_instance(instance: usize, part: Part) -> f64 {
    let one = 1.0 + instance as f64;
    match part {
        Part::F | Part::R => one,
        Part::B => 2.0 * one,
        Part::W => 0.5 * one,
        Part::BW => 2.5 * one,
        Part::FBW => 3.5 * one,
    }
}

/// The part and instance of a turn take what they take, instances that are left out nothing; anything else takes what
/// `rest` says.
fn durations(classes: &[Class<'_>], without: &[usize], rest: impl Fn(&Action) -> f64) -> Durations {
    let mut given = Durations::given(classes, |_, action| rest(action));
    for (class, own) in classes.iter().zip(&mut given.actions) {
        for (action, turn) in &class.script.turns {
            own[*action].work = match without.contains(&turn.instance) {
                true => 0.0,
                false => of_instance(turn.instance, turn.part),
            };
        }
    }
    given
}

fn classes(laid: &Laid) -> Vec<RankScript> {
    let planner = Planner::new(&laid.lowered).unwrap();
    planner.steps().unwrap().remove(&ScriptKey::Train).unwrap()
}

fn played(laid: &Laid, rule: IssueRule, head: bool, rest: impl Fn(&Action) -> f64) -> Playback {
    played_without(laid, rule, if head { &[] } else { &[HEAD] }, rest)
}

fn played_without(
    laid: &Laid,
    rule: IssueRule,
    without: &[usize],
    rest: impl Fn(&Action) -> f64,
) -> Playback {
    let scripts = classes(laid);
    let classes: Vec<Class<'_>> = scripts.iter().map(RankScript::class).collect();
    play(&classes, &durations(&classes, without, rest), rule).unwrap()
}

fn pipeline(schedule: NamedSchedule, pp: usize, more: &[&str]) -> Laid {
    let (schedule, pp) = (format!("parallel.schedule={schedule}"), format!("parallel.pp={pp}"));
    let own = ["model.layers=8", "train.microbatches=8", "train.batch_size=16", &schedule, &pp];
    laid(&llama(&[&own, more].concat()), None)
}

/// If nothing but turns takes time, the script of a schedule takes what the schedule takes.
#[test]
fn scripts_take_what_their_schedules_take() {
    for schedule in NamedSchedule::ALL {
        let laid = pipeline(schedule, 4, &[]);
        let timetable = Timetable::new(&laid.lowered).unwrap();
        // A tick on zeros has layers alone.
        let without: &[usize] = if timetable.schedule.has_empty() { &[0, HEAD] } else { &[HEAD] };
        let stage = |stage: &std::ops::Range<usize>| {
            let own = || stage.clone().filter(|instance| !without.contains(instance));
            let sum = |part: Part| own().map(|instance| of_instance(instance, part)).sum();
            Times { f: sum(Part::F), b: sum(Part::B), w: sum(Part::W) }
        };
        let costs = TurnCosts::uneven(timetable.stages.iter().map(stage).collect(), 0.0).unwrap();
        let expected = simulate(&timetable.schedule, &costs).unwrap().makespan;
        for rule in [IssueRule::Lanes, IssueRule::OneThread] {
            let found = played_without(&laid, rule, without, |_| 0.0).makespan;
            assert_eq!(found, expected, "{schedule}, {rule:?}");
        }
    }
}

/// What schedules do not know: gathers, sums and updates.
#[test]
fn gathers_sums_and_updates_take_their_time() {
    let update = |action: &Action| match action.kind {
        Kind::Update { .. } => 3.0,
        _ => 0.0,
    };
    let updates = |laid: &Laid| {
        let one = |own: &RankScript| {
            let actions = own.planned.script.actions.iter();
            actions.filter(|action| matches!(action.kind, Kind::Update { .. })).count()
        };
        classes(laid).iter().map(one).max().unwrap() as f64
    };
    // The norm needs all gradients, so updates begin when the last stage has finished.
    let laid_out = pipeline(NamedSchedule::OneFOneB, 2, &[]);
    let turns = played(&laid_out, IssueRule::Lanes, true, |_| 0.0).makespan;
    let found = played(&laid_out, IssueRule::Lanes, true, update).makespan;
    assert_eq!(found, turns + 3.0 * updates(&laid_out));
    // ZeRO-3 gathers the first unit before anything else; a gather is one unit ahead of its use, so if all
    // take less than the turns between, only the first is seen.
    let gather = |action: &Action| match action.lane {
        Lane::Gather => 0.25,
        _ => 0.0,
    };
    let sharded = pipeline(NamedSchedule::OneFOneB, 2, &["parallel.dp=2", "parallel.zero=3"]);
    let turns = played(&sharded, IssueRule::Lanes, true, |_| 0.0).makespan;
    let found = played(&sharded, IssueRule::Lanes, true, gather).makespan;
    assert_eq!(found, turns + 0.25);
    // A gather that takes longer than all turns of a unit delays each of them.
    let slow = played(&sharded, IssueRule::Lanes, true, |action| 400.0 * gather(action)).makespan;
    let scripts = classes(&sharded);
    let gathers = scripts[0].planned.script.actions.iter();
    let gathers = gathers.filter(|action| action.lane == Lane::Gather).count();
    assert!(slow >= 100.0 * gathers as f64, "{gathers} gathers, {slow}");
}

/// A pipeline without a flush is drawn as a row of three scripts: all their turns, on one clock, and where steps end.
#[test]
fn a_row_of_steps_is_drawn() {
    let of = |sets: &[&str]| step_drawing(&llama(&[sets, &["optim.clip=none"]].concat())).unwrap();
    let row = ["parallel.schedule=pipedream-2bw", "parallel.pp=2", "train.microbatches=4"];
    let drawing = of(&[&row[..], &["parallel.dp=2", "parallel.zero=1"]].concat());
    let count = |words: &str| drawing.matches(words).count();
    // Two stage groups, three steps of four micro-batches, forwards and backwards.
    assert_eq!(count("<title>F of micro-batch") + count("<title>BW of micro-batch"), 2 * 3 * 4 * 2);
    assert!(drawing.contains("F of micro-batch 11,"));
    assert_eq!(count("stroke-dasharray"), 2 * 2 + 1);
    assert!(drawing.contains(">ranks 0–1<") && drawing.contains(">ranks 2–3<"));
    assert!(drawing.contains("weights after update 1"));
    // Others have one step.
    let flushed = of(&["parallel.pp=2", "train.microbatches=4"]);
    assert!(!flushed.contains("stroke-dasharray") && !flushed.contains("micro-batch 4,"));
}

/// What was played, as if it had been measured: milliseconds.
fn as_trace(laid: &Laid, scripts: Vec<RankScript>, played: &Playback) -> Trace {
    let mut ranks = vec![Vec::new(); laid.lowered.ranks()];
    for (own, times) in scripts.iter().zip(&played.classes) {
        let script = &own.planned.script;
        let called = script.actions.iter().zip(times).enumerate();
        let called = called.filter(|(_, (action, _))| action.ends().is_none());
        ranks[script.rank] = called
            .map(|(number, (action, times))| {
                let [issued, started, ended] = [times.issued, times.started, times.ended]
                    .map(|ms| Duration::from_secs_f64(ms / 1e3));
                let lane = action.lane;
                Traced {
                    label: action.label.clone(),
                    turn: None,
                    peers: Vec::new(),
                    value: None,
                    bytes: 0,
                    times: TimedAction { action: number, lane, issued, started, ended },
                    kernels: Vec::new(),
                }
            })
            .collect();
    }
    Trace { step: 1, timetable: Timetable::new(&laid.lowered).unwrap(), ranks, scripts }
}

/// Whatever actions take, a replay finds their durations from when they began and ended, without what they waited,
/// and with these the step takes as long again.
#[test]
fn a_replay_gives_the_step_of_any_durations() {
    let layouts: [&[&str]; 4] = [
        &[],
        &["parallel.tp=2"],
        &["parallel.dp=2", "parallel.zero=3"],
        &["parallel.dp=2", "parallel.tp=2", "parallel.zero=2", "train.recompute=full"],
    ];
    for (number, schedule) in NamedSchedule::ALL.into_iter().enumerate() {
        // Two of the layouts for each schedule, in turns.
        for layout in [layouts[number % 4], layouts[(number + 1) % 4]] {
            let (name, what) =
                (format!("parallel.schedule={schedule}"), format!("{schedule}, {layout:?}"));
            let own = ["model.layers=4", "parallel.pp=2", "train.microbatches=4", &name];
            let laid = laid(&llama(&[&own, layout].concat()), None);
            let scripts = classes(&laid);
            let own: Vec<Class<'_>> = scripts.iter().map(RankScript::class).collect();
            let drawn = |class: usize, action: &Action| {
                let drawn = Stream::named(class as u64, &action.label).below(number as u64, 900);
                // Nothing is called when memory is free again.
                if action.ends().is_some() { 0.0 } else { 1.0 + drawn as f64 / 100.0 }
            };
            let given = Durations::given(&own, drawn);
            let played = play(&own, &given, IssueRule::OneThread).unwrap();
            let replay = Replay::new(&as_trace(&laid, scripts.clone(), &played)).unwrap();
            assert!(replay.error().abs() < 1e-6, "{what}: {} of {}", replay.error(), replay.step);
            let mut busy = 0.0;
            for (at, (class, found)) in own.iter().zip(&replay.durations.actions).enumerate() {
                for (number, action) in class.script.actions.iter().enumerate() {
                    if action.lane != Lane::Compute || action.ends().is_some() {
                        continue;
                    }
                    let (found, given) = (found[number].work, given.actions[at][number].work);
                    assert!((found - given).abs() < 1e-3, "{what}: {}: {found}", action.label);
                    busy += found;
                }
            }
            // What ranks wait for each other is in no duration.
            let waits = busy / own.len() as f64 / replay.step;
            assert!(waits < 0.95 || schedule != NamedSchedule::Naive, "{what}: {waits}");
        }
    }
}
