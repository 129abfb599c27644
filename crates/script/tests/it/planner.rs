//! The planner's promises on random scripts, each against the plainest possible computation.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_call::NoScratch;
use phalanx_ir::DType;
use phalanx_models::{Architecture, BatchShape, Purpose};
use phalanx_reference::ReferenceEngine;
use phalanx_script::{
    Action, BufferId, BufferKey, Category, HappensBefore, Inference, Lane, Library, MemoryPlan,
    Number, Plan, RankPlace, Script, Source, StageGroup, World, eval_script, forward, plan,
    plan_with_state,
};
use phalanx_testing::{Rig, Setup, compile, mlp};

use crate::random;

const SCRIPTS: u64 = 400;

#[test]
fn the_order_is_that_of_lanes_buffers_and_edges() {
    for seed in 0..SCRIPTS {
        let script = random::script(seed);
        let order = HappensBefore::of(&script).unwrap();
        let expected = Order::of(&script);
        for b in 0..script.actions.len() {
            for a in 0..script.actions.len() {
                assert_eq!(order.before(a, b), expected.before(a, b), "script {seed}: {a}, {b}");
            }
        }
    }
}

/// Waiting for the direct predecessors is waiting for all, and none of them is named in vain.
#[test]
fn direct_predecessors_imply_all_others_and_not_each_other() {
    for seed in 0..SCRIPTS {
        let script = random::script(seed);
        let order = HappensBefore::of(&script).unwrap();
        let expected = Order::of(&script);
        for b in 0..script.actions.len() {
            let direct: Vec<usize> = order.direct(b).collect();
            for a in 0..script.actions.len() {
                let reached = direct.iter().any(|&d| d == a || expected.before(a, d));
                assert_eq!(reached, expected.before(a, b), "script {seed}: {a}, {b}");
            }
            let implied = |a: usize| direct.iter().any(|&d| expected.before(a, d));
            assert!(!direct.iter().any(|&a| implied(a)), "script {seed}: {b} after {direct:?}");
        }
    }
}

/// However many actions touch the same buffers, each waits for few: on one lane, for one.
#[test]
fn thousands_of_actions_wait_for_few() {
    let actions = 5000;
    let mut script = random::script_of(3, actions);
    let edges = |script: &Script| -> usize {
        let order = HappensBefore::of(script).unwrap();
        (0..actions).map(|i| order.direct(i).len()).sum()
    };
    assert!(edges(&script) < 4 * actions, "{} edges", edges(&script));
    // Twice as many actions take twice the memory, not four times.
    let size = |actions| HappensBefore::of(&random::script_of(3, actions)).unwrap().size();
    assert!(size(2 * actions) < 5 * size(actions) / 2, "{} {}", size(actions), size(2 * actions));
    script.actions.iter_mut().for_each(|a| a.lane = phalanx_script::Lane::Compute);
    assert_eq!(edges(&script), actions - 1);
}

/// Pieces of the arena that overlap are used one wholly before the other, whatever runs late.
#[test]
fn memory_is_shared_only_in_order() {
    let mut shared = 0;
    for seed in 0..SCRIPTS {
        let script = random::script(seed);
        let plan = plan(&script).unwrap();
        let before = Order::of(&script);
        let pieces = pieces(&script, &plan);
        for (i, a) in pieces.iter().enumerate() {
            assert!(a.offset + a.bytes <= plan.arena, "script {seed}");
            for b in &pieces[..i] {
                let overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
                if !overlap {
                    continue;
                }
                shared += 1;
                assert!(!a.persists && !b.persists, "script {seed}");
                let all = |x: &Piece, y: &Piece| {
                    (x.uses.iter()).all(|&u| y.uses.iter().all(|&v| before.before(u, v)))
                };
                assert!(all(a, b) || all(b, a), "script {seed}: {a:?} and {b:?}");
            }
        }
    }
    assert!(shared > 1000, "only {shared} pairs share memory");
}

/// Large ones first, each as low as it can lie: found here by trying every offset where another ends.
#[test]
fn every_room_is_as_low_as_it_can_be() {
    let long = (0..8).map(|seed| random::script_of(seed, 160));
    let mut sharing = 0;
    for (number, script) in (0..SCRIPTS).map(random::script).chain(long).enumerate() {
        // Every other script finds its state in another one's arena, with space between.
        let mut base = (number % 2 == 1).then(|| plan(&script).unwrap());
        base.iter_mut().flat_map(|b| &mut b.offsets).for_each(|offset| *offset *= 2);
        let plan = plan_with_state(&script, base.as_ref()).unwrap();
        let before = Order::of(&script);
        let mut queue = pieces(&script, &plan);
        let fixed = |piece: &Piece| base.is_some() && piece.is_state;
        queue.sort_by_key(|p| (!fixed(p), !p.persists, usize::MAX - p.bytes));
        for (i, piece) in queue.iter().enumerate().filter(|(_, p)| !fixed(p)) {
            let over = |x: &Piece, y: &Piece| {
                (x.uses.iter()).all(|&u| y.uses.iter().all(|&v| before.before(u, v)))
            };
            let apart = |other: &Piece| {
                !piece.persists && !other.persists && (over(piece, other) || over(other, piece))
            };
            let (free, others): (Vec<&Piece>, Vec<&Piece>) =
                queue[..i].iter().partition(|other| apart(other));
            let end = |other: &&Piece| (other.offset + other.bytes).next_multiple_of(64);
            let ends = others.iter().map(end).chain([0]);
            let fits =
                |at: &usize| (others.iter()).all(|o| at + piece.bytes <= o.offset || end(o) <= *at);
            assert_eq!(Some(piece.offset), ends.filter(fits).min(), "script {number}: {piece:?}");
            sharing += usize::from(free.iter().any(|o| o.offset == piece.offset));
        }
    }
    assert!(sharing > 1000, "only {sharing} begin where another did");
}

#[test]
fn peaks_are_sums_of_what_is_alive() {
    for seed in 0..SCRIPTS {
        let script = random::script(seed);
        let plan = plan(&script).unwrap();
        let mut peaks: BTreeMap<Category, usize> = BTreeMap::new();
        let mut largest = 0;
        for now in 0..script.actions.len() {
            let mut live: BTreeMap<Category, usize> = BTreeMap::new();
            for (index, buffer) in script.buffers.iter().enumerate() {
                let uses = uses(&script, index);
                let alive = match buffer.source {
                    Source::Script => {
                        uses.iter().any(|u| *u <= now) && uses.iter().any(|u| *u >= now)
                    }
                    _ => true,
                };
                if alive {
                    *live.entry(buffer.category).or_default() += buffer.bytes;
                }
            }
            let slots = script.programs[script.actions[now].run().unwrap().program.0].slots();
            largest = largest.max(live.values().sum::<usize>() + slots.extent);
            *live.entry(Category::Workspace).or_default() += slots.peak;
            for (category, bytes) in live {
                let peak = peaks.entry(category).or_default();
                *peak = bytes.max(*peak);
            }
        }
        for category in Category::ALL {
            let expected = peaks.get(&category).copied().unwrap_or(0);
            assert_eq!(plan.peak(category), expected, "script {seed}: {category}");
        }
        // What is alive at once can't share memory.
        assert!(plan.arena >= largest, "script {seed}");
    }
}

/// An evaluation beside training finds the weights where they are and touches no other state.
#[test]
fn a_second_script_leaves_the_state_alone() {
    let shape = BatchShape { batch: 4, seq: 1 };
    let build = |purpose| mlp().build(shape, DType::F32, purpose).unwrap();
    let setup = Setup::new(DType::F32);
    let rig = Rig::new(ReferenceEngine::new(), &build(Purpose::Train), &setup);
    let train = rig.script();
    let plan = Plan::new(rig.state().clone()).unwrap();
    let trained = plan_with_state(train, Some(plan.base())).unwrap();
    let evaluated = build(Purpose::Evaluate);
    let compiled = compile(&evaluated, DType::F32, setup.recompute);
    let turns = forward(0..evaluated.instances().len(), 2);
    let library = Arc::new(Library::new(Arc::new(NoScratch)));
    let stage_groups = vec![StageGroup::alone(&compiled, &turns)];
    let world = World::new(&evaluated, stage_groups, library).unwrap();
    let weights = setup.precision.weights;
    let forward = Inference { world: &world, at: RankPlace::default(), weights };
    let script = eval_script(&forward, rig.state()).unwrap();
    let beside = plan_with_state(&script, Some(plan.base())).unwrap();
    let state: Vec<usize> =
        (0..train.buffers.len()).filter(|&i| train.buffers[i].source == Source::State).collect();
    assert!(state.len() > 10);
    for &i in &state {
        assert_eq!(script.buffers[i].key, train.buffers[i].key);
        assert_eq!(
            (beside.offsets[i], trained.offsets[i]),
            (plan.base().offsets[i], beside.offsets[i])
        );
    }
    for piece in pieces(&script, &beside).iter().filter(|p| !p.is_state) {
        for &i in &state {
            let (offset, bytes) = (beside.offsets[i], train.buffers[i].bytes);
            let overlap = piece.offset < offset + bytes && offset < piece.offset + piece.bytes;
            assert!(!overlap, "{}", train.name(BufferId(i)));
        }
    }
    let loss = script.find(&BufferKey::Number(Number::Loss)).unwrap();
    assert!(state.iter().all(|&i| i != loss.0));
}

#[derive(Debug)]
struct Piece {
    offset: usize,
    bytes: usize,
    uses: Vec<usize>,
    persists: bool,
    /// Whether it outlives the script.
    is_state: bool,
}

/// Everything that has a place: buffers that are used, and workspaces.
fn pieces(script: &Script, plan: &MemoryPlan) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, buffer) in script.buffers.iter().enumerate() {
        let uses = uses(script, index);
        let persists = buffer.source != Source::Script;
        if persists || !uses.is_empty() {
            let is_state = buffer.source == Source::State;
            let (offset, bytes) = (plan.offsets[index], buffer.bytes);
            pieces.push(Piece { offset, bytes, uses, persists, is_state });
        }
    }
    for (index, action) in script.actions.iter().enumerate() {
        let extent = script.programs[action.run().unwrap().program.0].slots().extent;
        assert_eq!(plan.workspaces[index].is_some(), extent > 0);
        if let Some(offset) = plan.workspaces[index] {
            let uses = vec![index];
            pieces.push(Piece { offset, bytes: extent, uses, persists: false, is_state: false });
        }
    }
    pieces
}

fn uses(script: &Script, buffer: usize) -> Vec<usize> {
    let actions = script.actions.iter().enumerate();
    let used = |action: &Action| {
        let run = action.run().unwrap();
        let outputs = run.outputs.iter().map(|(view, _)| view);
        (run.inputs.iter().chain(outputs)).any(|v| v.buffer.0 == buffer)
    };
    actions.filter(|(_, a)| used(a)).map(|(i, _)| i).collect()
}

/// Happens-before by its definition, for every pair, closed by Warshall's algorithm.
struct Order {
    actions: usize,
    pairs: Vec<bool>,
}

impl Order {
    fn of(script: &Script) -> Self {
        let n = script.actions.len();
        let mut order = Self { actions: n, pairs: vec![false; n * n] };
        for b in 0..n {
            for a in 0..b {
                order.pairs[a * n + b] = orders(script, a, b);
            }
        }
        for middle in 0..n {
            for a in 0..n {
                for b in 0..n {
                    let through = order.before(a, middle) && order.before(middle, b);
                    order.pairs[a * n + b] |= through;
                }
            }
        }
        order
    }

    fn before(&self, a: usize, b: usize) -> bool {
        self.pairs[a * self.actions + b]
    }
}

/// Whether the earlier action `a` and the later one `b` share a lane, an edge, or a buffer that
/// one of them writes.
fn orders(script: &Script, a: usize, b: usize) -> bool {
    let (first, second) = (&script.actions[a], &script.actions[b]);
    let conflict = (0..script.buffers.len()).any(|i| {
        let touches = |action: &Action| {
            let run = action.run().unwrap();
            let writes = run.outputs.iter().any(|(v, _)| v.buffer.0 == i);
            (writes, writes || run.inputs.iter().any(|v| v.buffer.0 == i))
        };
        let ((wa, ta), (wb, tb)) = (touches(first), touches(second));
        ta && tb && (wa || wb)
    });
    // Messages do not wait for those before them.
    let lane = first.lane == second.lane && !matches!(first.lane, Lane::Send | Lane::Receive);
    lane || conflict || second.after.contains(&a)
}
