//! What each rank holds between steps: layers, weights, gradients, optimizer state, tokens.
//!
//! Everything is a share of the whole model or batch, as intervals between 0 and 1, so that a picture of
//! many ranks shows at a glance what is replicated and what is sharded.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_error::Result;
use phalanx_ir::{Model, Role};
use phalanx_script::{Part, State, StateKind, StateOf, Unit};
use phalanx_session::{Lowered, Planner};

/// The most ranks that are looked at.
const MOST: usize = 64;

/// What ranks hold.
pub(super) struct Holdings {
    /// The instances of the model, in order.
    pub(super) layers: Vec<String>,
    /// The ranks, or the first of them.
    pub(super) ranks: Vec<RankHoldings>,
    /// How many ranks there are beyond these.
    pub(super) more: usize,
}

/// What one rank holds.
pub(super) struct RankHoldings {
    /// Its place on the mesh, such as `dp=1 tp=0`.
    pub(super) place: String,
    /// For each instance: whether the rank runs it.
    pub(super) layers: Vec<bool>,
    /// Shares of all parameters, in the model's order.
    pub(super) weights: Vec<Range<f64>>,
    /// The same of their gradients.
    pub(super) gradients: Vec<Range<f64>>,
    /// The same of the optimizer's state.
    pub(super) optimizer: Vec<Range<f64>>,
    /// For each expert of a layer: whether the rank has it; nothing if no layer has experts.
    pub(super) experts: Vec<bool>,
    /// Its part of a batch: of the sequences, and of their tokens.
    pub(super) tokens: [Range<f64>; 2],
}

impl Holdings {
    pub(super) fn new(lowered: &Lowered, planner: &Planner<'_>) -> Result<Self> {
        let mesh = lowered.whole_mesh()?;
        let (model, all) = (&lowered.model, lowered.ranks());
        let ranks = (0..all.min(MOST)).map(|rank| {
            let state = planner.state(rank)?;
            let shares = |kind| shares(lowered, rank, &state, kind);
            let held: BTreeSet<usize> = lowered.instances_of(rank);
            let axes = mesh.axes();
            let place = axes.map(|(axis, _)| format!("{axis}={}", mesh.coordinate(rank, axis)));
            Ok(RankHoldings {
                place: place.collect::<Vec<_>>().join(" "),
                layers: (0..model.instances().len()).map(|i| held.contains(&i)).collect(),
                weights: shares(StateKind::Weights),
                gradients: shares(StateKind::Gradient),
                optimizer: shares(StateKind::Optimizer(0)),
                experts: experts(lowered, rank),
                tokens: tokens(lowered, rank),
            })
        });
        let ranks = ranks.collect::<Result<Vec<RankHoldings>>>()?;
        let layers = model.instances().iter().map(|instance| instance.name.clone()).collect();
        Ok(Self { layers, more: all - ranks.len(), ranks })
    }
}

/// The share of a whole that intervals cover.
pub(super) fn covered(intervals: &[Range<f64>]) -> f64 {
    intervals.iter().map(|interval| interval.end - interval.start).sum()
}

/// What a rank holds of one kind of state. A parameter takes room in proportion to its elements. Blocks of
/// tensor parallelism and shards of units are drawn one after the other inside it, whatever dim they cut.
fn shares(lowered: &Lowered, rank: usize, state: &State, kind: StateKind) -> Vec<Range<f64>> {
    let starts = starts(&lowered.model);
    let mut found = Vec::new();
    for (unit, buffers) in state.units.iter().zip(&state.buffers) {
        let Some(held) = buffers.get(kind) else { continue };
        let (block, blocks) = block(lowered, rank, unit);
        // A whole gradient is summed in place: it is complete in the rank's part, but takes all memory.
        let whole = kind == StateKind::Gradient && !unit.facts.gradient.is_shard();
        for member in &unit.members {
            let elements = if whole { 0..member.elements } else { held.part(member).0 };
            if elements.is_empty() {
                continue;
            }
            let (from, to) = (starts[member.param], starts[member.param + 1]);
            if held.of != StateOf::Elements {
                // All ranks keep the numbers of all rows and columns.
                found.push(from..to);
                continue;
            }
            let at = |element: usize| {
                let inside = element as f64 / member.elements as f64;
                from + (to - from) * (block as f64 + inside) / blocks as f64
            };
            found.push(at(elements.start)..at(elements.end));
        }
    }
    found.sort_by(|a, b| a.start.total_cmp(&b.start));
    found
}

/// Where each parameter starts among all, and where the last one ends.
fn starts(model: &Model) -> Vec<f64> {
    let total = model.elements() as f64;
    let mut sum = 0;
    let mut starts = vec![0.0];
    for param in model.params() {
        sum += param.elements();
        starts.push(sum as f64 / total);
    }
    starts
}

/// Which of how many blocks of a unit's parameters a rank holds.
fn block(lowered: &Lowered, rank: usize, unit: &Unit) -> (usize, usize) {
    let at = lowered.at(rank);
    (at.mesh.shard(at.rank, &unit.blocks), at.mesh.count(&unit.blocks))
}

/// Which experts of a layer a rank has; of the layer with most, if some have more than others.
fn experts(lowered: &Lowered, rank: usize) -> Vec<bool> {
    let (compiled, at) = (lowered.compiled_of(rank), lowered.at(rank));
    let instances = lowered.model.instances().iter();
    let types = instances.flat_map(|instance| {
        let own = instance.params.keys().filter(|local| local.starts_with("experts."));
        own.filter_map(|local| {
            let param = &lowered.model.params()[instance.params[local]];
            compiled.param_type(instance.segment, local).map(|ty| (ty, param.deal()))
        })
    });
    // Their weights are a matrix for each expert; a router has one for all.
    let matrices = types.filter(|(ty, _)| ty.shape.len() == 3);
    let Some((ty, deal)) = matrices.max_by_key(|(ty, _)| ty.shape[0]) else { return Vec::new() };
    let part = ty.part(0, at.mesh, at.rank);
    let expert = |place: usize| deal.map_or(place, |deal| deal.expert(place));
    let held: BTreeSet<usize> = (0..part.len()).map(|i| expert(part.global(i))).collect();
    (0..ty.shape[0]).map(|expert| held.contains(&expert)).collect()
}

/// The part of a batch that a rank works on, by the first data that a program of its mesh reads.
fn tokens(lowered: &Lowered, rank: usize) -> [Range<f64>; 2] {
    let (compiled, at) = (lowered.compiled_of(rank), lowered.at(rank));
    let segments = 0..lowered.model.segments().len();
    let mut types = segments.filter_map(|segment| {
        let program = compiled.program(segment, Part::F);
        program.inputs_with(Role::Data).next().map(|port| program.ty(port.value).clone())
    });
    let Some(ty) = types.next() else { return [0.0..1.0, 0.0..1.0] };
    [0, 1].map(|dim| match ty.shape.len() > dim {
        true => {
            let part = ty.part(dim, at.mesh, at.rank);
            let (shard, shards) = (part.shard as f64, part.shards as f64);
            shard / shards..(shard + 1.0) / shards
        }
        false => 0.0..1.0,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use phalanx_config::Sources;
    use phalanx_session::Settings;
    use phalanx_session::network::{Network, load};

    fn holdings(sets: &[&str]) -> Holdings {
        holdings_of("tiny", sets)
    }

    fn holdings_of(preset: &str, sets: &[&str]) -> Holdings {
        let sources = sets.iter().fold(Sources::default().preset(preset), |s, set| s.set(*set));
        let loaded = load(&sources).unwrap();
        let models = Network::new(&loaded).unwrap().models(&loaded.config, false).unwrap();
        let lowered = Lowered::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
        Holdings::new(&lowered, &Planner::new(&lowered).unwrap()).unwrap()
    }

    fn all(held: &Holdings, of: fn(&RankHoldings) -> &Vec<Range<f64>>) -> Vec<f64> {
        held.ranks.iter().map(|rank| (covered(of(rank)) * 1000.0).round() / 1000.0).collect()
    }

    /// The stages of ZeRO, as in the table of the paper.
    #[test]
    fn zero_shards_more_with_each_stage() {
        for (stage, weights, gradients, optimizer) in
            [(0, 1.0, 1.0, 1.0), (1, 1.0, 1.0, 0.25), (2, 1.0, 0.25, 0.25), (3, 0.25, 0.25, 0.25)]
        {
            let held = holdings(&["parallel.dp=4", &format!("parallel.zero={stage}")]);
            let near = |found: Vec<f64>, expected: f64| {
                let close = |share: &f64| (share - expected).abs() < 0.02;
                assert!(found.iter().all(close), "ZeRO-{stage}: {found:?}, not {expected}");
            };
            near(all(&held, |r| &r.weights), weights);
            near(all(&held, |r| &r.gradients), gradients);
            near(all(&held, |r| &r.optimizer), optimizer);
            let batch: Vec<f64> = held.ranks.iter().map(|r| r.tokens[0].start).collect();
            assert_eq!(batch, [0.0, 0.25, 0.5, 0.75]);
        }
    }

    /// Eight experts on four ranks, and on two of them that are neighbours.
    #[test]
    fn ranks_have_their_experts() {
        let of = |sets: &[&str]| -> Vec<Vec<usize>> {
            let own = |rank: &RankHoldings| {
                let all = rank.experts.iter().enumerate();
                all.filter(|(_, held)| **held).map(|(expert, _)| expert).collect()
            };
            holdings_of("tiny-moe", sets).ranks.iter().map(own).collect()
        };
        let four = of(&["parallel.dp=4", "parallel.ep=4"]);
        assert_eq!(four, [[0, 1], [2, 3], [4, 5], [6, 7]]);
        let two = of(&["parallel.dp=4", "parallel.ep=2"]);
        assert_eq!(two, [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]);
        let dealt =
            of(&["parallel.dp=4", "parallel.ep=4", "parallel.expert_placement=round-robin"]);
        assert_eq!(dealt, [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(of(&["parallel.dp=2"]), [[0, 1, 2, 3, 4, 5, 6, 7]; 2]);
        assert!(holdings(&["parallel.dp=2"]).ranks[0].experts.is_empty());
    }

    #[test]
    fn stages_hold_layers_and_context_ranks_hold_tokens() {
        let sets = ["parallel.pp=2", "parallel.cp=2", "train.microbatches=2"];
        let held = holdings(&sets);
        assert_eq!((held.ranks.len(), held.more, held.layers.len()), (4, 0, 10));
        let layers = |rank: usize| held.ranks[rank].layers.iter().filter(|held| **held).count();
        assert_eq!(layers(0) + layers(3), 10);
        assert_eq!(
            (held.ranks[0].tokens[1].clone(), held.ranks[1].tokens[1].clone()),
            (0.0..0.5, 0.5..1.0)
        );
        assert_eq!(held.ranks[1].place, "pp=0 cp=1");
    }
}
