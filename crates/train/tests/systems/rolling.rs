//! Pipelines that do not drain between scripts: how busy their ranks are, where carried buffers lie, and what the checkers
//! find if something is carried too short.

use std::collections::BTreeSet;

use phalanx_script::{
    Buffer, BufferId, BufferKey, Class, Kind, Lane, Part, PlannedScript, RollPart, Script,
    ScriptKey, Source, check_classes,
};
use phalanx_session::{Planner, RankScript};
use phalanx_sim::{Durations, IssueRule, play};

use crate::support::{Laid, laid, llama};

fn pipeline(schedule: &str, pp: usize, m: usize, more: &[&str]) -> Laid {
    let own = [
        format!("parallel.schedule={schedule}"),
        format!("parallel.pp={pp}"),
        format!("train.microbatches={m}"),
        format!("train.batch_size={}", 2 * m),
    ];
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    laid(&llama(&[&own[..], &["model.layers=6", "optim.clip=none"], more].concat()), None)
}

fn row(laid: &Laid, part: RollPart) -> Vec<RankScript> {
    Planner::new(&laid.lowered).unwrap().scripts_of(ScriptKey::Roll(part)).unwrap()
}

/// A stage takes 1 for a forward and 2 for a backward, whatever its instances; nothing else takes time.
fn durations(classes: &[Class<'_>], begins: &[f64]) -> Durations {
    let mut given = Durations::given(classes, |_, _| 0.0);
    given.begins = begins.to_vec();
    for (class, own) in classes.iter().zip(&mut given.actions) {
        let turns = &class.script.turns;
        let held: BTreeSet<usize> = turns.iter().map(|(_, turn)| turn.instance).collect();
        for (action, turn) in turns {
            let time = match turn.part {
                Part::F => 1.0,
                Part::BW => 2.0,
                Part::FBW => 3.0,
                other => panic!("{other} is not a part of these schedules"),
            };
            own[*action].work = time / held.len() as f64;
        }
    }
    given
}

/// When each class of ranks ends each of so many scripts of a row, one played after the other: a rank begins the next one
/// as soon as it has ended its own.
fn ends(laid: &Laid, scripts: usize) -> Vec<Vec<f64>> {
    let parts = RollPart::ALL.map(|part| row(laid, part));
    let mut begins = vec![0.0; parts[0].len()];
    let mut all = Vec::new();
    for number in 0..scripts {
        let part = if number == 0 { 0 } else { 1 + usize::from(number + 1 == scripts) };
        let classes: Vec<Class<'_>> = parts[part].iter().map(RankScript::class).collect();
        let played = play(&classes, &durations(&classes, &begins), IssueRule::OneThread).unwrap();
        for (end, times) in begins.iter_mut().zip(&played.classes) {
            *end = times.iter().map(|times| times.ended).fold(*end, f64::max);
        }
        all.push(begins.clone());
    }
    all
}

/// N steps that follow each other take (N·m + p − 1)(tF + tB): the pipeline fills and drains once. In between no rank
/// waits at all: eight steps take eight times their work on every rank. Threads issue one action after the other here, as
/// executors do.
#[test]
fn a_row_fills_and_drains_once() {
    for (schedule, p, m) in
        [("pipedream", 2, 4), ("pipedream", 3, 4), ("pipedream-2bw", 2, 2), ("pipedream-2bw", 3, 3)]
    {
        let steps = 12;
        let laid = pipeline(schedule, p, m, &[]);
        let all = ends(&laid, steps);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let makespan = all[steps - 1].iter().copied().fold(0.0, f64::max);
        let expected = 3.0 * (steps * m + p - 1) as f64;
        assert!(close(makespan, expected), "{schedule} {p} {m}: {makespan}, {expected}");
        for (end, begin) in all[steps - 2].iter().zip(&all[steps - 10]) {
            let eight = end - begin;
            assert!(close(eight, 3.0 * (8 * m) as f64), "{schedule} {p} {m}: {eight}");
        }
    }
}

/// A group's backwards in one script are those of one step, or of as many as have as many micro-batches as there are
/// stages; and the scripts in the middle of a longer row are alike.
#[test]
fn scripts_in_the_middle_are_alike() {
    for (p, m, each) in [(3, 4, 1), (3, 2, 2), (3, 1, 3)] {
        let laid = pipeline("pipedream", p, m, &[]);
        for part in RollPart::ALL {
            for own in row(&laid, part) {
                let window = own.planned.script.window.unwrap();
                assert_eq!((window.part, window.microbatches), (part, each * m));
            }
        }
    }
}

/// Carried buffers lie at one place in all scripts of a row; what lies over them is used only while they hold nothing.
#[test]
fn carried_memory_is_shared_only_in_its_gap() {
    let laid = pipeline("pipedream", 3, 4, &[]);
    let [first, middle, last] = RollPart::ALL.map(|part| row(&laid, part));
    let mut shared = 0;
    for rank in 0..3 {
        let planned = &middle[rank].planned;
        let PlannedScript { script, memory, order } = &**planned;
        for carried in carried(script) {
            let place = memory.offsets[carried.0];
            for other in [&first[rank], &last[rank]] {
                let key = &script.buffers[carried.0].key;
                let Some(found) = other.planned.script.find(key) else { continue };
                assert_eq!(other.planned.memory.offsets[found.0], place);
            }
            let uses = |buffer: BufferId| -> Vec<usize> {
                let used = |action: &phalanx_script::Action| {
                    let all = action.reads().into_iter().chain(action.writes());
                    all.chain(action.ends()).any(|own| own == buffer)
                };
                let all = script.actions.iter().enumerate();
                all.filter(|(_, action)| used(action)).map(|(at, _)| at).collect()
            };
            let own = uses(carried);
            let writes = |at: &&usize| script.actions[**at].writes().contains(&carried);
            let from = *own.iter().find(writes).unwrap();
            let until: Vec<usize> = own.iter().copied().filter(|at| *at < from).collect();
            let end = place + script.buffers[carried.0].bytes;
            for (index, buffer) in script.buffers.iter().enumerate() {
                let theirs = memory.offsets[index]..memory.offsets[index] + buffer.bytes;
                let used = uses(BufferId(index));
                let apart = theirs.end <= place || end <= theirs.start;
                if apart || index == carried.0 || used.is_empty() || buffer.bytes == 0 {
                    continue;
                }
                shared += 1;
                let name = script.name(BufferId(index));
                let began = until.iter().all(|before| order.before(*before, used[0]));
                let ended = used.iter().all(|own| order.before(*own, from));
                assert!(began && ended, "{name} lies over {}", script.name(carried));
            }
        }
    }
    assert!(shared > 0, "no memory of a carried buffer is used in its gap");
}

fn carried(script: &Script) -> Vec<BufferId> {
    let all = script.buffers.iter().enumerate();
    all.filter(|(_, own)| own.source == Source::Carried).map(|(at, _)| BufferId(at)).collect()
}

/// Planted bugs: a carried buffer that is overwritten before its backward, one that is not filled again, one that nobody
/// says is carried, one that the last script does not find; and a message that is left to the next script.
#[test]
fn what_is_carried_too_short_is_found() {
    let laid = pipeline("pipedream", 3, 4, &[]);
    let middle = row(&laid, RollPart::Middle);
    let good = &middle[1].planned.script;
    phalanx_script::check(good).unwrap();
    let said = |script: &Script| phalanx_script::check(script).unwrap_err().to_string();
    let of_turn = |at: usize| good.turns.iter().find(|(own, _)| *own == at).map(|(_, turn)| *turn);
    // Of the micro-batch that is in flight when the script begins.
    let flies = |own: &BufferId| match &good.buffers[own.0].key {
        BufferKey::Value(value) => value.microbatch == 0,
        _ => false,
    };
    let backward = |at: usize| of_turn(at).is_some_and(|turn| turn.part == Part::BW);
    let for_backward = |own: &BufferId| {
        let mut readers = good.actions.iter().enumerate().filter(|(_, a)| a.reads().contains(own));
        readers.all(|(at, _)| backward(at))
    };
    let kept: Vec<BufferId> =
        carried(good).into_iter().filter(flies).filter(for_backward).collect();
    assert!(kept.len() > 2);
    // What a forward keeps for a micro-batch of this script goes where an older one still waits for its backward.
    let forward = |(at, action): (usize, &phalanx_script::Action)| {
        let turn = of_turn(at).filter(|turn| turn.part == Part::F && turn.microbatch < 4)?;
        let keeps = |index: &usize| {
            let buffer = action.run().unwrap().outputs[*index].0.buffer;
            let later = good.actions.iter().enumerate().skip(at + 1);
            let mut readers = later.filter(|(_, own)| own.reads().contains(&buffer));
            let reader = readers.next().and_then(|(reader, _)| of_turn(reader));
            good.buffers[buffer.0].bytes == good.buffers[kept[0].0].bytes
                && reader.is_some_and(|turn| turn.part == Part::BW)
        };
        let output = (0..action.run()?.outputs.len()).find(keeps)?;
        Some((at, output, turn))
    };
    let mut early = good.clone();
    let (at, output, _) = good.actions.iter().enumerate().find_map(forward).unwrap();
    early.actions[at].run_mut().unwrap().outputs[output].0.buffer = kept[0];
    assert!(said(&early).contains("is carried: it holds micro-batch"), "{}", said(&early));
    // What the next script reads goes elsewhere.
    let mut lost = good.clone();
    let spare = lost.buffer(Buffer { source: Source::Script, ..good.buffers[kept[0].0].clone() });
    let ahead = lost.turns.iter().find(|(_, turn)| turn.part == Part::F && turn.microbatch >= 4);
    let run = lost.actions[ahead.unwrap().0].run_mut().unwrap();
    let own = run.outputs.iter_mut().find(|(view, _)| kept.contains(&view.buffer)).unwrap();
    own.0.buffer = spare;
    let words = "at the end; the next script needs that it holds micro-batch";
    assert!(said(&lost).contains(words), "{}", said(&lost));
    // Without its mark it is a buffer that nothing has written.
    let mut unmarked = good.clone();
    unmarked.buffers[kept[0].0].source = Source::Script;
    assert!(said(&unmarked).contains("which nothing has written before it"), "{}", said(&unmarked));
    // The first script of a row finds nothing.
    let mut first = good.clone();
    first.window =
        first.window.map(|own| phalanx_script::RowWindow { part: RollPart::First, ..own });
    assert!(phalanx_script::check(&first).is_err());
    // A message that arrives for the next script must be taken by this one.
    let mut left: Vec<PlannedScript> = middle.iter().map(|own| (*own.planned).clone()).collect();
    let script = &mut left[1].script;
    let last = script.actions.iter().rposition(|own| matches!(own.kind, Kind::Receive { .. }));
    script.actions[last.unwrap()].kind = Kind::Release { buffer: kept[0] };
    script.actions[last.unwrap()].lane = Lane::Compute;
    let classes: Vec<Class<'_>> = left
        .iter()
        .map(|own| Class { script: &own.script, order: &own.order, others: Vec::new() })
        .collect();
    assert!(check_classes(&classes).is_err());
}

const STAGE: &str = "train.recompute=stage";

/// What `verify` takes together, as training does: rows of steps with shards, tensor-parallel ranks, tied weights and stages
/// that are computed again; and steps that go ahead of their norms, a whole block of them.
#[test]
fn verify_takes_steps_together() {
    let row = ["parallel.pp=3", "train.microbatches=4", "model.layers=3", "train.batch_size=8"];
    let two = "parallel.schedule=pipedream-2bw";
    let cases: [(bool, &[&str], usize); 6] = [
        (false, &["parallel.schedule=pipedream", "parallel.dp=2", "parallel.zero=3"], 4),
        (
            false,
            &["parallel.schedule=pipedream", "parallel.vertical_sync=true", "parallel.tp=2"],
            4,
        ),
        (false, &[two, "optim.clip=none", "parallel.dp=2", "parallel.zero=3"], 3),
        // Where keys have biases, whose gradient is zero but for rounding, Adam makes steps of the rounding.
        (true, &[two, "optim.clip=none", "optim.kind=sgd", "parallel.tp=2", STAGE], 4),
        (true, &[two, "optim.clip=0.05", "optim.kind=sgd"], 4),
        (
            false,
            &["parallel.schedule=zb-h1", "parallel.post_validation=true", "parallel.zero=2"],
            9,
        ),
    ];
    for (tied, case, steps) in cases {
        let sets = [&row[..], case].concat();
        let loaded = if tied { crate::support::gpt(&sets) } else { llama(&sets) };
        let found = phalanx_inspect::verify::verify(&loaded, steps).unwrap();
        assert!(found.ok, "{case:?}: {found:#?}");
    }
}
