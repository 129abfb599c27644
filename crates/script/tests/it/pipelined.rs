//! What devices of a pipeline send each other, on random orders of turns.
//!
//! The scripts of all devices are put side by side, and "comes before" is worked out for every pair of
//! their actions from lanes, buffers and matching messages alone. A buffer that was sent may be used again
//! only behind something that comes after the receiver got it, without waiting for the send: else a
//! device would wait for another one's progress and not for data.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use phalanx_autodiff::Recompute;
use phalanx_call::NoScratch;
use phalanx_ir::ops::UnaryKind;
use phalanx_ir::{DType, Mesh, Model};
use phalanx_models::{Architecture, BatchShape, Mlp};
use phalanx_script::{
    Action, BufferId, Compiled, Kind, Lane, Library, Optimizer, Part, Precision, RankPlace,
    ScheduledRun, Script, StageGroup, TrainingScript, World, check_together, merge_adjacent,
    train_script,
};
use phalanx_spmd::Sharing;
use phalanx_testing::cases::Dice;
use phalanx_testing::compile;

/// Eight layers, an instance each.
static LAYERS: LazyLock<(Model, Compiled)> = LazyLock::new(|| {
    let mlp = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(3, vec![4; 7], 2) };
    let model = mlp.model(BatchShape { batch: 2, seq: 1 }, DType::F32).unwrap();
    let compiled = compile(&model, DType::F32, Recompute::None);
    (model, compiled)
});

static ALONE: (Mesh, Sharing) = (Mesh::single(), Sharing::none());

/// The scripts of devices of one rank each.
fn scripts(turns: &[Vec<ScheduledRun>]) -> Result<Vec<Script>, String> {
    let (model, compiled) = &*LAYERS;
    let ranks: Vec<[usize; 1]> = (0..turns.len()).map(|rank| [rank]).collect();
    let stage_group = |(turns, ranks)| {
        let (mesh, sharing) = (&ALONE.0, &ALONE.1);
        StageGroup { compiled, turns, mesh, sharing, ranks }
    };
    let lists = turns.iter().map(Vec::as_slice);
    let stage_groups: Vec<StageGroup<'_>> =
        lists.zip(ranks.iter().map(|r| r.as_slice())).map(stage_group).collect();
    let plain =
        Precision { weights: DType::F32, grads: DType::F32, state: DType::F32, split: false };
    let library = Arc::new(Library::new(Arc::new(NoScratch)));
    let world = World::new(model, stage_groups, library).map_err(|error| error.to_string())?;
    let script = |stage_group| {
        let training = TrainingScript {
            world: &world,
            at: RankPlace { stage_group, place: 0 },
            precision: plain,
            optimizer: Optimizer::sgd(0.0),
            clip: None,
            scaling: None,
        };
        let state = training.state().unwrap();
        train_script(&training, &state).map_err(|error| error.to_string())
    };
    (0..turns.len()).map(script).collect()
}

/// A random order in which devices take micro-batches through their chunks, made by letting one device
/// after the other do something that it can. Each stage takes micro-batches in order.
struct Random {
    /// By stage: its instances.
    stages: Vec<std::ops::Range<usize>>,
    stage_groups: usize,
    microbatches: usize,
    splits: bool,
}

impl Random {
    fn new(dice: &mut Dice) -> Self {
        let (stage_groups, chunks) = (2 + dice.below(3), 1 + dice.below(2));
        let (count, all) = (stage_groups * chunks, LAYERS.0.instances().len());
        let cut = |stage: usize| stage * all / count;
        let stages = (0..count).map(|stage| cut(stage)..cut(stage + 1)).collect();
        Self { stages, stage_groups, microbatches: 1 + dice.below(6), splits: dice.percent(50) }
    }

    fn turns(&self, dice: &mut Dice) -> Vec<Vec<ScheduledRun>> {
        let count = self.stages.len();
        // By stage: how many micro-batches are through F, B and W.
        let mut done = vec![[0_usize; 3]; count];
        let mut lists = vec![Vec::new(); self.stage_groups];
        loop {
            let mut able = Vec::new();
            for stage in 0..count {
                let [f, b, w] = done[stage];
                let came = if stage == 0 { self.microbatches } else { done[stage - 1][0] };
                let back = if stage + 1 == count { f } else { done[stage + 1][1].min(f) };
                able.extend((f < came).then_some((stage, 0)));
                able.extend((b < back).then_some((stage, 1)));
                able.extend((self.splits && w < b).then_some((stage, 2)));
            }
            if able.is_empty() {
                return lists
                    .iter()
                    .map(|l| merge_adjacent(l, LAYERS.0.instances().len()))
                    .collect();
            }
            let (stage, phase) = able[dice.below(able.len())];
            let microbatch = done[stage][phase];
            done[stage][phase] += 1;
            let part = [Part::F, if self.splits { Part::B } else { Part::BW }, Part::W][phase];
            let turn = |instance| ScheduledRun { instance, part, microbatch };
            let run = self.stages[stage].clone();
            let list: &mut Vec<ScheduledRun> = &mut lists[stage % self.stage_groups];
            match part {
                Part::F => list.extend(run.map(turn)),
                _ => list.extend(run.rev().map(turn)),
            }
        }
    }

    /// Whether some pair of devices needs values in another order than they are made in.
    fn crosses(&self, turns: &[Vec<ScheduledRun>]) -> bool {
        let place = |stage_group: usize, instance: usize, microbatch: usize, forward: bool| {
            let wanted = |turn: &ScheduledRun| {
                let passes = match turn.part {
                    Part::F => forward,
                    Part::W => false,
                    Part::FBW => true,
                    _ => !forward,
                };
                passes && (turn.instance, turn.microbatch) == (instance, microbatch)
            };
            turns[stage_group].iter().position(wanted).unwrap()
        };
        let mut channels: BTreeMap<(usize, usize, bool), Vec<(usize, usize)>> = BTreeMap::new();
        for stage in 1..self.stages.len() {
            let (a, b) = ((stage - 1) % self.stage_groups, stage % self.stage_groups);
            let (before, behind) = (self.stages[stage].start - 1, self.stages[stage].start);
            for m in 0..self.microbatches {
                let there = (place(a, before, m, true), place(b, behind, m, true));
                let back = (place(b, behind, m, false), place(a, before, m, false));
                channels.entry((a, b, true)).or_default().push(there);
                channels.entry((b, a, false)).or_default().push(back);
            }
        }
        channels.into_values().any(|mut pairs| {
            pairs.sort_unstable();
            pairs.windows(2).any(|pair| pair[0].1 > pair[1].1)
        })
    }
}

/// An action of a script, by the number of the script and its own.
type Node = (usize, usize);

/// "Comes before" over the actions of all devices.
struct Order {
    places: BTreeMap<Node, usize>,
    /// By place: all that come before it, as bits.
    before: Vec<Vec<u64>>,
    /// By send: its receive.
    received: BTreeMap<Node, Node>,
}

impl Order {
    fn of(scripts: &[Script]) -> Self {
        let received = matched(scripts);
        let mut direct: BTreeMap<Node, Vec<Node>> = BTreeMap::new();
        for (stage_group, script) in scripts.iter().enumerate() {
            for (index, action) in script.actions.iter().enumerate() {
                let earlier = (0..index).filter(|&i| orders(&script.actions[i], action));
                direct.insert((stage_group, index), earlier.map(|i| (stage_group, i)).collect());
            }
        }
        for (&send, &receive) in &received {
            direct.entry(receive).or_default().push(send);
        }
        // What all do together ends on none before it has begun on all.
        let named = |label: &str| -> Vec<Node> {
            let of = |(stage_group, script): (usize, &Script)| (stage_group, at(script, label));
            scripts.iter().enumerate().map(of).collect()
        };
        for norm in named("norm and clip") {
            direct.entry(norm).or_default().extend(named("sums"));
        }
        Self::closed(direct, received)
    }

    fn closed(mut direct: BTreeMap<Node, Vec<Node>>, received: BTreeMap<Node, Node>) -> Self {
        let words = direct.len().div_ceil(64);
        let mut order = Self { places: BTreeMap::new(), before: Vec::new(), received };
        while !direct.is_empty() {
            let ready: Vec<Node> = (direct.iter())
                .filter(|(_, needs)| needs.iter().all(|n| order.places.contains_key(n)))
                .map(|(node, _)| *node)
                .collect();
            assert!(!ready.is_empty(), "actions wait for each other: {:?}", direct.keys());
            for node in ready {
                let mut bits = vec![0_u64; words];
                for need in direct.remove(&node).unwrap() {
                    let place = order.places[&need];
                    bits[place / 64] |= 1 << (place % 64);
                    bits.iter_mut().zip(&order.before[place]).for_each(|(own, more)| *own |= more);
                }
                order.places.insert(node, order.before.len());
                order.before.push(bits);
            }
        }
        order
    }

    fn before(&self, a: Node, b: Node) -> bool {
        let (a, b) = (self.places[&a], self.places[&b]);
        self.before[b][a / 64] >> (a % 64) & 1 == 1
    }

    /// Every sent buffer is free again only when its receiver surely has it, and no later than that
    /// is known.
    fn frees_in_time(&self, scripts: &[Script]) -> Result<usize, String> {
        let mut early = 0;
        for (&(stage_group, send), &receive) in &self.received {
            let actions = &scripts[stage_group].actions;
            let Kind::Send { buffer, .. } = actions[send].kind else { unreachable!() };
            let frees = |a: &Action| a.ends() == Some(buffer);
            let free = actions.iter().position(frees).ok_or("a sent buffer is never free")?;
            if !self.before(receive, (stage_group, free)) {
                return Err(format!(
                    "device {stage_group} frees `{}` too early",
                    actions[send].label
                ));
            }
            let norm = at(&scripts[stage_group], "norm and clip");
            early += usize::from(free < norm);
            // The runs between the send and its end, but the last, do not know yet.
            let runs = (send..free).filter(|&i| matches!(actions[i].kind, Kind::Run(_)));
            let runs: Vec<usize> = runs.collect();
            let known = |run: &&usize| self.before(receive, (stage_group, **run));
            if let Some(run) = runs.iter().rev().skip(1).find(known) {
                let (send, run) = (&actions[send].label, &actions[*run].label);
                return Err(format!("`{send}` could be free after `{run}`"));
            }
        }
        Ok(early)
    }
}

/// Whether a later action of a script comes after an earlier one for its lane or its buffers. That a
/// send reads a buffer holds nobody up here.
fn orders(first: &Action, second: &Action) -> bool {
    let messages = [Lane::Send, Lane::Receive];
    let lane = first.lane == second.lane && !messages.contains(&first.lane);
    let changes =
        |a: &Action| -> Vec<BufferId> { a.writes().into_iter().chain(a.ends()).collect() };
    let shared = |a: &[BufferId], b: &[BufferId]| a.iter().any(|x| b.contains(x));
    let reads = if first.lane == Lane::Send { vec![] } else { first.reads() };
    let (old, new) = (changes(first), changes(second));
    lane || shared(&old, &second.reads()) || shared(&old, &new) || shared(&reads, &new)
}

/// By send, the receive that takes its messages: channels deliver in order.
fn matched(scripts: &[Script]) -> BTreeMap<Node, Node> {
    let mut channels: BTreeMap<(usize, usize, u32), [Vec<Node>; 2]> = BTreeMap::new();
    for (stage_group, script) in scripts.iter().enumerate() {
        for (index, action) in script.actions.iter().enumerate() {
            let (key, end) = match &action.kind {
                Kind::Send { messages, .. } => {
                    ((stage_group, messages[0].peer, messages[0].channel), 0)
                }
                Kind::Receive { messages, .. } => {
                    ((messages[0].peer, stage_group, messages[0].channel), 1)
                }
                _ => continue,
            };
            channels.entry(key).or_default()[end].push((stage_group, index));
        }
    }
    let mut found = BTreeMap::new();
    for [sends, receives] in channels.into_values() {
        assert_eq!(sends.len(), receives.len());
        found.extend(sends.into_iter().zip(receives));
    }
    found
}

fn at(script: &Script, label: &str) -> usize {
    script.actions.iter().position(|a| a.label == label).unwrap()
}

#[test]
fn sent_buffers_are_free_when_their_receiver_has_them() {
    let (mut crossed, mut early, mut late) = (0, 0, 0);
    for seed in 0..400 {
        let mut dice = Dice::new(seed);
        let random = Random::new(&mut dice);
        let turns = random.turns(&mut dice);
        crossed += usize::from(random.crosses(&turns));
        let made = scripts(&turns).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        check_together(&made).unwrap();
        let order = Order::of(&made);
        // What travels under a name arrives under it.
        for (&(a, send), &(b, receive)) in &order.received {
            let (sent, got) = (&made[a].actions[send].label, &made[b].actions[receive].label);
            assert_eq!(sent.strip_prefix("send "), got.strip_prefix("receive "), "seed {seed}");
        }
        let found = order.frees_in_time(&made).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        early += found;
        late += order.received.len() - found;
    }
    assert!(crossed > 20 && early > 500 && late > 500, "{crossed}, {early}, {late}");
}

/// A buffer that is used again as soon as it is sent would be overwritten under the receiver's hands.
#[test]
fn a_planted_early_end_is_found() {
    let mut found = 0;
    for seed in 0..40 {
        let mut dice = Dice::new(seed);
        let turns = Random::new(&mut dice).turns(&mut dice);
        let Ok(mut made) = scripts(&turns) else { continue };
        let actions = &mut made[0].actions;
        let first = actions.iter().position(|a| a.lane == Lane::Send).unwrap();
        let Kind::Send { buffer, .. } = actions[first].kind else { unreachable!() };
        let free = actions.iter().position(|a| a.ends() == Some(buffer)).unwrap();
        let end = actions.remove(free);
        actions.insert(first + 1, end);
        let told = Order::of(&made).frees_in_time(&made).unwrap_err();
        assert!(told.contains("frees `send "), "seed {seed}: {told}");
        found += 1;
    }
    assert!(found > 10, "{found}");
}

fn list(turns: &[(Part, std::ops::Range<usize>, usize)]) -> Vec<ScheduledRun> {
    let one = |(part, run, microbatch): &(Part, std::ops::Range<usize>, usize)| {
        let turn = |instance| ScheduledRun { instance, part: *part, microbatch: *microbatch };
        let there: Vec<ScheduledRun> = run.clone().map(turn).collect();
        if *part == Part::F { there } else { there.into_iter().rev().collect() }
    };
    turns.iter().flat_map(one).collect()
}

#[test]
fn devices_that_wait_for_each_other_are_refused() {
    use Part::{BW, F};
    // One takes a micro-batch there and back; the other wants both there before either comes back.
    let first = list(&[(F, 0..4, 0), (BW, 0..4, 0), (F, 0..4, 1), (BW, 0..4, 1)]);
    let second = list(&[(F, 4..8, 0), (F, 4..8, 1), (BW, 4..8, 0), (BW, 4..8, 1)]);
    let told = scripts(&[first.clone(), second]).unwrap_err();
    assert_eq!(
        told,
        "schedule: stage group 0 waits forever before BW of instance 3, micro-batch 0"
    );
    let second = list(&[(F, 4..8, 0), (BW, 4..8, 0), (F, 4..8, 1), (BW, 4..8, 1)]);
    scripts(&[first.clone(), second.clone()]).unwrap();
    let told = scripts(&[first.clone(), second[..12].to_vec()]).unwrap_err();
    assert_eq!(told, "schedule: no stage group runs `layers.4` of micro-batch 1");
    let told = scripts(&[[&first[..], &first[..4]].concat(), second.clone()]).unwrap_err();
    assert_eq!(told, "schedule: `layers.0` runs the Forward of micro-batch 0 twice");
    // Gradients come back in another order than they are wanted in: the first is taken early.
    let second = list(&[(F, 4..8, 0), (F, 4..8, 1), (BW, 4..8, 1), (BW, 4..8, 0)]);
    let first = list(&[(F, 0..4, 0), (F, 0..4, 1), (BW, 0..4, 0), (BW, 0..4, 1)]);
    check_together(&scripts(&[first, second]).unwrap()).unwrap();
}

/// Whatever the order, a head that turns around at once does everything once, and nothing else moves.
#[test]
fn merging_keeps_every_turn_and_its_order() {
    let instances = LAYERS.0.instances().len();
    let mut turned = 0;
    for seed in 0..400 {
        let mut dice = Dice::new(seed);
        let random = Random::new(&mut dice);
        let merged = random.turns(&mut dice).concat();
        let mut passed: BTreeMap<(usize, usize), String> = BTreeMap::new();
        for ScheduledRun { instance, part, microbatch } in &merged {
            assert!(*part != Part::FBW || *instance + 1 == instances, "seed {seed}");
            turned += usize::from(*part == Part::FBW);
            passed.entry((*instance, *microbatch)).or_default().push_str(&part.to_string());
        }
        assert_eq!(passed.len(), instances * random.microbatches, "seed {seed}");
        assert!(passed.values().all(|parts| parts == "FBW"), "seed {seed}: {passed:?}");
        // Merging once more changes nothing.
        assert_eq!(merge_adjacent(&merged, instances), merged, "seed {seed}");
    }
    assert!(turned > 100, "{turned}");
}
