//! What stages keep of the micro-batches in flight, counted by hand.
//!
//! The simulator says what a device does one after the other, and the programs' ports say what each
//! run gives and what it reads. So each value is kept from the run that gives it to the last one that
//! reads it: most of a chunk until its B, what W needs until W. The largest sum over the timeline must
//! be what the planner plans and what a step writes.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_config::Loaded;
use phalanx_ir::{Port, Program, Role};
use phalanx_pipeline::{NamedSchedule, ScheduleShape, Timed, Times, TurnCosts, simulate, split};
use phalanx_script::{Category, Part, ScheduledRun, plan};
use phalanx_session::{Lowered, Parallel, Pipeline, PipelineOrder, StageSplit};

use crate::bits::trained;
use crate::support::{gpt, laid, llama, models, on, settings};

/// A pipeline of one rank for each stage.
fn pipeline(named: NamedSchedule, stage_groups: usize) -> Parallel {
    let pipeline = Pipeline {
        order: PipelineOrder::Named(named),
        split: StageSplit::Count,
        ..Pipeline::default()
    };
    Parallel { pipeline, ..on(&format!("pp={stage_groups}"), Vec::new()) }
}

/// By device: the turns of instances in the order of the simulator's timeline.
fn timeline(case: &Case<'_>) -> Vec<Vec<ScheduledRun>> {
    let (Case { named, stage_groups, microbatches, .. }, layers) = (*case, case.layers());
    let schedule = named.build(ScheduleShape::new(stage_groups, microbatches)).unwrap();
    let times = Times { f: 1.0, b: 1.0, w: 1.0 };
    let timeline = simulate(&schedule, &TurnCosts::even(times, 0.0).unwrap()).unwrap();
    // An embedding in front of the layers, and a head behind them.
    let stages = schedule.placement().stages();
    let stages = split::by_count(1..layers + 1, layers + 2, stages).unwrap();
    let stage_group = |turns: &Vec<Timed>| -> Vec<ScheduledRun> {
        let mut list: Vec<ScheduledRun> = Vec::new();
        for timed in turns {
            let (part, microbatch) = (timed.turn.part, timed.turn.microbatch);
            let of = |part| move |instance| ScheduledRun { instance, part, microbatch };
            let run = stages[timed.stage].clone();
            let again = case.recompute == "stage";
            // Then the head goes forward only when it goes back.
            let head = usize::from(again && run.end == layers + 2);
            let early = run.start..run.end - head;
            let fresh = list.last() == Some(&of(Part::F)(early.end - 1));
            match part {
                Part::F => list.extend(early.map(of(part))),
                Part::W => list.extend(run.rev().map(of(part))),
                _ => {
                    // A stage that kept nothing goes forward again first.
                    list.extend(early.clone().map(of(Part::R)).filter(|_| again && !fresh));
                    list.extend((early.end..run.end).map(of(Part::F)));
                    list.extend(run.rev().map(of(part)));
                }
            }
        }
        // What is empty goes through layers alone.
        list.retain(|run| run.microbatch < microbatches || (1..=layers).contains(&run.instance));
        list
    };
    timeline.stage_groups.iter().map(stage_group).collect()
}

/// The head's forward and its whole backward are one run where they follow each other, and nothing lies between.
fn with_turned_head(turns: &[ScheduledRun], head: usize) -> Vec<ScheduledRun> {
    let mut found: Vec<ScheduledRun> = Vec::new();
    for turn in turns {
        let turned = turn.part == Part::BW && turn.instance == head;
        match found.last_mut() {
            Some(last) if turned && *last == (ScheduledRun { part: Part::F, ..*turn }) => {
                last.part = Part::FBW;
            }
            _ => found.push(*turn),
        }
    }
    found
}

/// A value that is kept: its bytes, and the first and last of a device's turns that it is there at.
#[derive(Debug)]
struct Kept {
    bytes: usize,
    first: usize,
    last: usize,
}

/// The largest sum of what is kept at a turn of a device.
fn most_kept(lowered: &Lowered, loaded: &Loaded, turns: &[ScheduledRun]) -> usize {
    let model = &models(loaded).train;
    let segment = |instance: usize| model.instances()[instance].segment;
    let program =
        |turn: &ScheduledRun| lowered.compiled().program(segment(turn.instance), turn.part);
    let forward = |instance: usize| lowered.compiled().program(segment(instance), Part::F);
    let bytes = |p: &Program, port: &Port| p.ty(port.value).local_bytes(p.mesh());
    // The instance before this one that gives a value.
    let giver = |instance: usize, name: &str| {
        let gives = |i: &usize| forward(*i).outputs_with(Role::Boundary).any(|p| p.name == name);
        (0..instance).rev().find(gives).unwrap()
    };
    // The last turn before this one that went forward through an instance.
    let made = |instance: usize, mb: usize, now: usize| {
        let forward = |t: &ScheduledRun| {
            (t.instance, t.microbatch) == (instance, mb) && matches!(t.part, Part::F | Part::R)
        };
        turns[..now].iter().rposition(forward)
    };
    let first_pass = |instance: usize, mb: usize| {
        let of = |t: &ScheduledRun| (t.instance, t.part, t.microbatch) == (instance, Part::F, mb);
        turns.iter().position(of).unwrap()
    };
    // By instance, name, micro-batch, and the turn that made it.
    let mut kept: BTreeMap<(usize, &str, usize, Option<usize>), Kept> = BTreeMap::new();
    for (now, turn) in turns.iter().enumerate() {
        let (own, mb) = (program(turn), turn.microbatch);
        for port in own.inputs_with(Role::Residual) {
            // A forward gives it, or the backward whose weights' gradients come later.
            let gives = |t: &ScheduledRun| {
                (t.instance, t.microbatch) == (turn.instance, mb)
                    && program(t).outputs_with(Role::Residual).any(|p| p.name == port.name)
            };
            let made = turns[..now].iter().rposition(gives).unwrap();
            let fresh = Kept { bytes: bytes(own, port), first: made, last: now };
            kept.entry((turn.instance, &port.name, mb, Some(made))).or_insert(fresh).last = now;
        }
        // A backward that reads what the instance before gave keeps it alive since then; or, if it
        // came from another device, since its own forward. So does a second forward with what comes
        // from a first one.
        for port in own.inputs_with(Role::Boundary) {
            let giver = giver(turn.instance, &port.name);
            let made = made(giver, mb, now);
            let again = made.is_some_and(|at| turns[at].part == Part::R);
            if matches!(turn.part, Part::F | Part::FBW) || (turn.part == Part::R && again) {
                continue;
            }
            let first = made.unwrap_or_else(|| first_pass(turn.instance, mb));
            let fresh = Kept { bytes: bytes(own, port), first, last: now };
            kept.entry((giver, &port.name, mb, made)).or_insert(fresh).last = now;
        }
    }
    let at = |now: usize| {
        let there = kept.values().filter(|k| (k.first..=k.last).contains(&now));
        there.map(|k| k.bytes).sum::<usize>()
    };
    (0..turns.len()).map(at).max().unwrap()
}

/// A pipeline on the ranks of a configuration, in which each device has as many.
#[derive(Clone, Copy)]
struct Case<'a> {
    named: NamedSchedule,
    stage_groups: usize,
    microbatches: usize,
    recompute: &'a str,
    /// What lies on the ranks of a device.
    inside: &'a [&'a str],
}

impl Case<'_> {
    fn loaded(&self) -> Loaded {
        let mut sets = vec![
            format!("model.layers={}", self.layers()),
            format!("train.microbatches={}", self.microbatches),
            format!("train.batch_size={}", 2 * self.microbatches),
            format!("train.recompute={}", self.recompute),
            format!("parallel.pp={}", self.stage_groups),
            format!("parallel.schedule={}", self.named),
            "parallel.split=count".to_owned(),
        ];
        sets.extend(self.inside.iter().map(|set| (*set).to_owned()));
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        // Stages that update at different times share no weights.
        let tied = self.recompute == "full" && self.named != NamedSchedule::PipeDream;
        if tied { gpt(&sets) } else { llama(&sets) }
    }

    fn layers(&self) -> usize {
        2 * self.stage_groups * self.named.usual_chunks()
    }

    /// What a timeline counts is what is planned and what is written.
    fn check(&self) {
        let Self { named, stage_groups, recompute, inside, .. } = *self;
        let what = format!("{named}, {stage_groups} devices of {inside:?}, recompute {recompute}");
        let (loaded, layers) = (self.loaded(), self.layers());
        let lowered = Lowered::new(&models(&loaded), settings(&loaded, None)).unwrap();
        let timeline = timeline(self);
        // Weights that are gathered for each run let no head turn around at once.
        let turned = |turns: &Vec<ScheduledRun>| match inside.contains(&"parallel.zero=3") {
            true => turns.clone(),
            false => with_turned_head(turns, layers + 1),
        };
        let counted: Vec<usize> =
            timeline.iter().map(|t| most_kept(&lowered, &loaded, &turned(t))).collect();
        let each = lowered.ranks() / stage_groups;
        let expected: Vec<usize> = (0..lowered.ranks()).map(|rank| counted[rank / each]).collect();
        let planned = |rank: usize| {
            let script = lowered.plan(rank).unwrap().script;
            plan(&script).unwrap().peak(Category::Residuals)
        };
        assert_eq!((0..lowered.ranks()).map(planned).collect::<Vec<_>>(), expected, "{what}");
        let written = trained(&loaded, None, 1).observe().unwrap();
        let written: Vec<usize> = (written.iter())
            .map(|o| o.peaks.iter().find(|(c, _)| *c == Category::Residuals).unwrap().1)
            .collect();
        assert_eq!(written, expected, "{what}");
    }
}

/// The schedules whose order does not depend on measured times.
fn known() -> impl Iterator<Item = NamedSchedule> {
    NamedSchedule::ALL.into_iter().filter(|named| *named != NamedSchedule::ZbAuto)
}

#[test]
fn residuals_are_those_of_the_chunks_in_flight() {
    // Two directions need an even number of stage groups.
    let more = |named: NamedSchedule| if named.goes_both_ways() { 4 } else { 3 };
    for (named, stage_groups, microbatches) in known().flat_map(|n| [(n, 2, 4), (n, more(n), 6)]) {
        for recompute in ["none", "selective", "full", "stage"] {
            // Where every backward follows its forward there is nothing to run again.
            if (named, recompute) != (NamedSchedule::Naive, "stage") {
                Case { named, stage_groups, microbatches, recompute, inside: &[] }.check();
            }
        }
    }
}

/// Whatever the ranks of a device share out among themselves, each keeps its part and nothing beside it.
#[test]
fn ranks_of_a_device_keep_their_parts_of_it() {
    let tensor = ["parallel.tp=2"];
    let sequence = ["parallel.tp=2", "parallel.sp=true"];
    let context = ["parallel.cp=2"];
    let gradients = ["parallel.dp=2", "parallel.zero=2"];
    let weights = ["parallel.dp=2", "parallel.zero=3"];
    let all = ["parallel.dp=2", "parallel.tp=2", "parallel.zero=1"];
    for named in known() {
        for inside in [&tensor[..], &sequence, &context, &gradients, &weights, &all] {
            for recompute in ["none", "selective"] {
                Case { named, stage_groups: 2, microbatches: 4, recompute, inside }.check();
            }
        }
    }
}

/// Where a backward is one piece and every device has as many layers, a device that holds neither end of
/// the model keeps as many equal shares as the simulator counts micro-batches in flight.
#[test]
fn shares_are_as_many_as_the_simulator_counts() {
    let (stage_groups, microbatches) = (4, 8);
    for named in [
        NamedSchedule::GPipe,
        NamedSchedule::Vectorised,
        NamedSchedule::OneFOneB,
        NamedSchedule::Naive,
    ] {
        let loaded = llama(&["model.layers=4", "train.microbatches=8", "train.batch_size=8"]);
        let parallel = Some(pipeline(named, stage_groups));
        let lowered = Lowered::new(&models(&loaded), settings(&loaded, parallel)).unwrap();
        let layer = models(&loaded).train.instances()[1].segment;
        let program = |part| lowered.compiled().program(layer, part);
        let bytes = |p: &Program, port: &Port| p.ty(port.value).local_bytes(p.mesh());
        let (f, bw) = (program(Part::F), program(Part::BW));
        let residuals: usize = f.outputs_with(Role::Residual).map(|p| bytes(f, p)).sum();
        let inputs: usize = bw.inputs_with(Role::Boundary).map(|p| bytes(bw, p)).sum();
        let schedule = named.build(ScheduleShape::new(stage_groups, microbatches)).unwrap();
        let times = Times { f: 1.0, b: 1.0, w: 1.0 };
        let counted = simulate(&schedule, &TurnCosts::even(times, 0.0).unwrap()).unwrap();
        let names: BTreeSet<usize> = counted.peak_in_flight.iter().copied().collect();
        assert!(named != NamedSchedule::OneFOneB || names == BTreeSet::from([1, 2, 3, 4]));
        for stage_group in 1..stage_groups - 1 {
            let script = lowered.plan(stage_group).unwrap().script;
            let peak = plan(&script).unwrap().peak(Category::Residuals);
            let whole = counted.peak_in_flight[stage_group] * (residuals + inputs);
            assert_eq!(peak, whole, "{named}, {stage_group}");
        }
    }
}

/// However many micro-batches pass, a device of 1F1B holds a few of them: the memory of what was received
/// and sent is used again. Only the batch itself is there as a whole.
#[test]
fn memory_does_not_grow_with_micro_batches() {
    let arena = |microbatches: usize| {
        let sets = [
            "parallel.pp=2".to_owned(),
            format!("train.microbatches={microbatches}"),
            format!("train.batch_size={}", 2 * microbatches),
        ];
        let loaded = llama(&sets.each_ref().map(String::as_str));
        let memory = laid(&loaded, None).memory;
        // Every buffer of the batch starts on a line of its own.
        let inputs = memory.live_ranges.len() * 64 + memory.peak(Category::Inputs);
        (memory.arena, inputs)
    };
    let ((few, _), (many, inputs)) = (arena(8), arena(32));
    assert!(many <= few + inputs, "{few} bytes with 8, {many} with 32, of which inputs {inputs}");
}
