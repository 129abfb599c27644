//! Units: parameters packed into flat buffers, so that updates and collectives work on few, large
//! pieces.
//!
//! A unit is reduced, gathered and updated as a whole. So its parameters are sharded by the same
//! axes (ranks along them hold different blocks) and their gradients are partial sums over the same
//! axes.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_call::ALIGN;
use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::{Bounds, Factors, MatrixPlace};
use phalanx_ir::{Axis, DType, Instance, Layout, Mesh, Model, TensorType};
use phalanx_spmd::{Grouping, Share, UnitFacts};

use crate::build::{RankOnMesh, World};
use crate::error::ScriptError;
use crate::factored;
use crate::stage_group::StageGroup;

/// One parameter's place in its unit, on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// The parameter's number in the model.
    pub param: usize,
    /// Its first element in the unit.
    pub offset: usize,
    /// Its elements on one rank.
    pub elements: usize,
    /// Whether it has a gradient. Otherwise it does not change.
    pub trained: bool,
    /// Its first row among those of the unit, and how many it has in all.
    pub rows: [usize; 2],
    /// The same of its columns.
    pub columns: [usize; 2],
}

/// Parameters that are reduced, gathered and updated together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    /// The name, such as `blocks.3`.
    pub name: String,
    /// The parameters, those that decay first.
    pub members: Vec<Member>,
    /// Elements on one rank, padding included. Padding is zero and stays zero.
    pub elements: usize,
    /// How many of them, from the first one, decay.
    pub decays: usize,
    /// The axes that shard the parameters: ranks along them hold different blocks.
    pub blocks: Vec<Axis>,
    /// The axes over which the parameters' gradients are partial sums.
    pub partial: BTreeSet<Axis>,
    /// The stage groups that hold the parameters: several if they share them.
    pub stage_groups: Vec<usize>,
    /// What ranks keep of it, and when they exchange it.
    pub facts: UnitFacts,
    /// Its members as matrices.
    pub factors: Factors,
}

impl Unit {
    /// The axes along which other stage groups add to its gradient.
    pub(crate) fn shared(&self) -> BTreeSet<Axis> {
        if self.stage_groups.len() > 1 { BTreeSet::from([Axis::STAGES]) } else { BTreeSet::new() }
    }

    /// Where its members lie in each rank's block, for ops that treat each one separately. Members
    /// are numbered as here.
    pub fn bounds(&self) -> Bounds {
        let members = self.members.iter().map(|m| (m.offset, m.offset + m.elements));
        Bounds { members: members.collect(), block: self.elements }
    }

    /// The bytes of its gradient that nothing writes: its padding, and members without a gradient.
    pub fn without_gradient(&self, dtype: DType) -> Vec<Range<usize>> {
        let untrained = self.members.iter().filter(|m| !m.trained);
        let bytes =
            untrained.map(|m| m.offset * dtype.size()..(m.offset + m.elements) * dtype.size());
        let mut all: Vec<Range<usize>> = self.padding(dtype).into_iter().chain(bytes).collect();
        all.sort_by_key(|range| range.start);
        all
    }

    /// The bytes between and after its members, in elements of this type.
    pub fn padding(&self, dtype: DType) -> Vec<Range<usize>> {
        let starts = self.members.iter().skip(1).map(|m| m.offset).chain([self.elements]);
        (self.members.iter().zip(starts))
            .map(|(m, next)| (m.offset + m.elements) * dtype.size()..next * dtype.size())
            .filter(|range| !range.is_empty())
            .collect()
    }

    /// The type of the whole unit: every rank holds all of its block.
    pub fn whole(&self, dtype: DType, mesh: &Mesh) -> TensorType {
        self.typed(dtype, mesh, &[], BTreeSet::new())
    }

    /// The type of the unit in shards: ranks along the axes of its facts hold a part of their block each.
    pub fn shard(&self, dtype: DType, mesh: &Mesh) -> TensorType {
        self.typed(dtype, mesh, &self.facts.axes, BTreeSet::new())
    }

    /// The type of the part that a rank updates. If one rank updates for all, every rank has a slot for
    /// its own values, and those of the first one are the unit.
    pub fn updated(&self, dtype: DType, mesh: &Mesh) -> TensorType {
        match self.facts.state.share {
            Share::Whole => self.whole(dtype, mesh),
            Share::Shard => self.shard(dtype, mesh),
            Share::Root => self.slots(dtype, mesh),
        }
    }

    /// The type of values that are each rank's own along the axes of its facts.
    pub fn slots(&self, dtype: DType, mesh: &Mesh) -> TensorType {
        let own = self.shard(dtype, mesh);
        let elements = own.elements() * mesh.count(&self.facts.axes);
        TensorType::unit(dtype, elements).with_layout(own.layout)
    }

    /// Whether this rank updates the unit, or its part of it.
    pub fn updates(&self, ranks: RankOnMesh<'_>) -> bool {
        self.facts.updates(ranks.mesh, ranks.rank)
    }

    /// The type of its gradient as programs compute it.
    pub fn formed(&self, dtype: DType, mesh: &Mesh) -> TensorType {
        self.typed(dtype, mesh, &[], self.partial.clone())
    }

    fn typed(
        &self,
        dtype: DType,
        mesh: &Mesh,
        shards: &[Axis],
        partial: BTreeSet<Axis>,
    ) -> TensorType {
        let elements = self.elements * mesh.count(&self.blocks);
        let axes = [&self.blocks[..], shards].concat();
        let dims = vec![Sharding { axes, ..Sharding::default() }];
        let layout = Layout::new(dims, partial)
            .expect("a unit's blocks, shards and partial sums are over different axes");
        TensorType::unit(dtype, elements).with_layout(layout)
    }
}

/// Groups the parameters of a stage group's instances into units. Each member starts on a cache
/// line for every element type, and so does each shard of a unit.
pub(crate) fn units(
    world: &World<'_>,
    stage_group: usize,
    grads: DType,
) -> Result<Vec<Unit>, ScriptError> {
    let (model, StageGroup { mesh, sharing, .. }) = (world.model, world.stage_groups[stage_group]);
    let mut params = described(world, stage_group)?;
    params.retain(|p| p.stage_groups.contains(&stage_group));
    let held = |instance: usize| world.holds(stage_group, instance);
    let groups = match sharing.grouping {
        Grouping::Segments { per_unit } => by_instance(model, &params, held, per_unit),
        Grouping::Buckets { first, cap } => buckets(&params, grads.size(), first, cap),
    };
    let unit = |(name, group): (String, Vec<Described>)| {
        let facts = sharing.unit(&group[0].blocks);
        pack(name, &group, facts, mesh)
    };
    Ok(groups.into_iter().map(unit).collect())
}

/// What a unit needs to know of a parameter.
#[derive(Clone)]
struct Described {
    param: usize,
    decay: bool,
    trained: bool,
    /// Elements on one rank, padding included.
    elements: usize,
    matrix: MatrixPlace,
    blocks: Vec<Axis>,
    partial: BTreeSet<Axis>,
    /// The stage groups whose instances have it.
    stage_groups: Vec<usize>,
    /// Whether it is a unit of its own: these hold different instances, so that each would group it in its
    /// own way; or several instances share it, which take different micro-batches where a stage has replicas.
    tied: bool,
}

impl Described {
    fn alike(&self, other: &Self) -> bool {
        (&self.blocks, &self.partial, &self.stage_groups, self.tied)
            == (&other.blocks, &other.partial, &other.stage_groups, other.tied)
    }
}

/// The parameters that some instance has, in the model's order, in the layout that programs read;
/// whole if no program reads them.
fn described(world: &World<'_>, stage_group: usize) -> Result<Vec<Described>, ScriptError> {
    let (model, holders) = (world.model, &world.holders);
    let StageGroup { compiled, mesh, .. } = world.stage_groups[stage_group];
    let tied = |param: usize| {
        let uses = |i: &&Instance| i.params.values().any(|used| *used == param);
        let mut held = holders[param].iter().map(|&group| world.held(group));
        let first = held.next();
        let several = model.instances().iter().filter(uses).count() > 1;
        held.clone().any(|other| Some(other) != first) || (several && held.next().is_some())
    };
    let mut found: Vec<Option<Described>> = vec![None; model.params().len()];
    for instance in model.instances() {
        for (local, &param) in &instance.params {
            let Some(ty) = compiled.param_type(instance.segment, local) else { continue };
            let mut blocks: Vec<Axis> =
                ty.layout.dims().iter().flat_map(|d| d.axes.iter().copied()).collect();
            blocks.sort_by_key(|&axis| mesh.axes().position(|(a, _)| a == axis));
            let gradient = compiled.gradient_type(instance.segment, local);
            let (name, shape) = (&model.params()[param].name, &model.params()[param].shape);
            let matrix = factored::matrix((name, shape), Some(ty), &blocks, mesh)?;
            let own = Described {
                param,
                decay: model.params()[param].decay && gradient.is_some(),
                trained: gradient.is_some(),
                elements: ty.local_shape(mesh).iter().product(),
                matrix,
                blocks,
                // A parameter that is not trained has no gradient to sum.
                partial: gradient.map_or(BTreeSet::new(), |g| g.layout.partial().clone()),
                stage_groups: holders[param].clone(),
                tied: tied(param),
            };
            match &found[param] {
                Some(other) if !own.alike(other) || own.elements != other.elements => {
                    return Err(ScriptError::Schedule(format!(
                        "`{}` has different layouts in two segments: sharded by {:?} with a \
                        gradient partial over {:?} in one, but by {:?} and over {:?} in `{}`",
                        model.params()[param].name,
                        other.blocks,
                        other.partial,
                        own.blocks,
                        own.partial,
                        instance.name
                    )));
                }
                _ => found[param] = Some(own),
            }
        }
    }
    for &param in model.instances().iter().flat_map(|i| i.params.values()) {
        let (name, shape) = (&model.params()[param].name, &model.params()[param].shape);
        let matrix = factored::matrix((name, shape), None, &[], mesh)?;
        found[param].get_or_insert_with(|| Described {
            param,
            decay: false,
            trained: false,
            elements: model.params()[param].elements(),
            matrix,
            blocks: Vec::new(),
            partial: BTreeSet::new(),
            stage_groups: holders[param].clone(),
            tied: tied(param),
        });
    }
    Ok(found.into_iter().flatten().collect())
}

type Group = (String, Vec<Described>);

/// One unit per segment instance, or per a few instances of a repeated segment, for parameters with
/// the same layout; a shared parameter belongs to the first instance that reads it.
fn by_instance(
    model: &Model,
    params: &[Described],
    held: impl Fn(usize) -> bool,
    per_unit: usize,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut seen = BTreeSet::new();
    for run in together(model, held, per_unit) {
        let first = groups.len();
        let instance = &model.instances()[run.start];
        let own: BTreeSet<usize> =
            model.instances()[run].iter().flat_map(|i| i.params.values().copied()).collect();
        for described in params.iter().filter(|p| own.contains(&p.param)) {
            if !seen.insert(described.param) {
                continue;
            }
            // Parameters that different stage groups share are one unit in each of them, whichever
            // instances read them there.
            let from = if described.tied { 0 } else { first };
            match groups[from..].iter_mut().find(|(_, group)| group[0].alike(described)) {
                Some((_, group)) => group.push(described.clone()),
                None => groups.push((instance.name.clone(), vec![described.clone()])),
            }
        }
        // The others get their difference as a suffix, which is unique.
        for (name, group) in groups[first..].iter_mut().skip(1) {
            let cut = group[0].blocks.iter().map(|axis| format!("+cut.{axis}"));
            let summed = group[0].partial.iter().map(|axis| format!("+sum.{axis}"));
            let tied = group[0].tied.then(|| "+tied".to_owned());
            let suffix: String = cut.chain(summed).chain(tied).collect();
            *name += if suffix.is_empty() { "+whole" } else { &suffix };
        }
    }
    groups
}

/// The instances of each unit: at most `most` consecutive instances of one segment.
fn together(model: &Model, held: impl Fn(usize) -> bool, most: usize) -> Vec<Range<usize>> {
    let instances = model.instances();
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in (0..instances.len()).filter(|&number| held(number)) {
        match runs.last_mut() {
            Some(run)
                if run.end == number
                    && run.len() < most
                    && instances[run.start].segment == instances[number].segment =>
            {
                run.end = number + 1;
            }
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

/// Buckets in the order in which gradients complete, the reverse of the parameters': a bucket is
/// closed once it has `cap` bytes, the one that is reduced first once it has `first`. Stages must
/// pack shared parameters in the same way, so these are one bucket of any size.
fn buckets(params: &[Described], size: usize, first: usize, cap: usize) -> Vec<Group> {
    let mut closed: Vec<Vec<Described>> = Vec::new();
    let mut open: Vec<Vec<Described>> = Vec::new();
    for described in params.iter().rev() {
        let at = match open.iter().position(|group| group[0].alike(described)) {
            Some(at) => {
                open[at].push(described.clone());
                at
            }
            None => {
                open.push(vec![described.clone()]);
                open.len() - 1
            }
        };
        let bytes: usize = open[at].iter().map(|p| p.elements * size).sum();
        let full = bytes >= if closed.is_empty() { first } else { cap };
        if full && described.stage_groups.len() < 2 {
            closed.push(open.remove(at));
        }
    }
    closed.extend(open);
    closed.into_iter().enumerate().map(|(i, group)| (format!("bucket.{i}"), group)).collect()
}

fn pack(name: String, group: &[Described], facts: UnitFacts, mesh: &Mesh) -> Unit {
    let shards = mesh.count(&facts.axes);
    // A cache line in the narrowest type; in wider types it is more.
    let line = ALIGN / 2;
    let mut group: Vec<&Described> = group.iter().collect();
    if group[0].stage_groups.len() > 1 {
        group.sort_by_key(|described| described.param);
    }
    let mut unit = Unit {
        name,
        members: Vec::new(),
        elements: 0,
        decays: 0,
        blocks: group[0].blocks.clone(),
        partial: group[0].partial.clone(),
        stage_groups: group[0].stage_groups.clone(),
        facts,
        factors: Factors {
            members: Vec::new(),
            block: 0,
            grid: group[0].blocks.iter().map(|axis| mesh.count(&[*axis])).collect(),
        },
    };
    for decay in [true, false] {
        for described in group.iter().filter(|p| p.decay == decay) {
            let Described { param, elements, trained, .. } = **described;
            let offset = unit.elements;
            let before = unit.factors.totals();
            let matrix = MatrixPlace { begin: offset, ..described.matrix.clone() };
            unit.factors.members.push(matrix);
            let after = unit.factors.totals();
            let [rows, columns] = [0, 1].map(|i| [before[i], after[i] - before[i]]);
            unit.members.push(Member { param, offset, elements, trained, rows, columns });
            unit.elements += elements.next_multiple_of(line);
        }
        if decay {
            unit.decays = unit.elements;
        }
    }
    unit.elements = unit.elements.next_multiple_of(line * shards);
    unit.factors.block = unit.elements;
    unit
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn param(param: usize, elements: usize, partial: &str) -> Described {
        let partial = partial.split_whitespace().map(|a| Axis::new(a).unwrap()).collect();
        let (blocks, stage_groups) = (vec![], vec![0]);
        let (decay, trained, tied) = (true, true, false);
        let shape = vec![elements, 1];
        let (tile, sizes, moves) = (shape.clone(), shape, vec![vec![]; 2]);
        let matrix = MatrixPlace { begin: 0, tile, sizes, moves };
        Described { param, decay, trained, elements, matrix, blocks, partial, stage_groups, tied }
    }

    fn sizes(params: &[Described], first: usize, cap: usize) -> Vec<Vec<usize>> {
        let groups = buckets(params, 4, first, cap);
        groups.iter().map(|(_, group)| group.iter().map(|p| p.param).collect()).collect()
    }

    /// The rule of DDP by hand: from the last parameter back; a bucket is closed by the parameter
    /// with which it reaches its cap, so it may hold more; the first one's cap is smaller.
    #[test]
    fn buckets_close_once_they_reach_their_cap() {
        // In MiB of f32 gradients: 10, 20, 4, 30, 0.5, 0.25, 0.75.
        let mib = [10.0, 20.0, 4.0, 30.0, 0.5, 0.25, 0.75];
        let params: Vec<Described> = (mib.iter().enumerate())
            .map(|(i, mib)| param(i, (mib * MIB as f64) as usize / 4, "dp"))
            .collect();
        let expected = vec![vec![6, 5], vec![4, 3], vec![2, 1, 0]];
        assert_eq!(sizes(&params, MIB, 25 * MIB), expected);
        // Exactly the cap closes it; one element less does not.
        let exact: Vec<Described> = (0..4).map(|i| param(i, MIB / 4, "dp")).collect();
        assert_eq!(sizes(&exact, MIB, 2 * MIB), vec![vec![3], vec![2, 1], vec![0]]);
        let below: Vec<Described> = (0..4).map(|i| param(i, MIB / 4 - 1, "dp")).collect();
        assert_eq!(sizes(&below, MIB, 2 * MIB), vec![vec![3, 2], vec![1, 0]]);
    }

    #[test]
    fn what_is_summed_over_other_axes_has_buckets_of_its_own() {
        let params =
            [param(0, 8, "dp"), param(1, 8, "dp tp"), param(2, 8, "dp"), param(3, 8, "dp")];
        assert_eq!(sizes(&params, 64, 64), vec![vec![3, 2], vec![1], vec![0]]);
        let names: Vec<String> = buckets(&params, 4, 64, 64).into_iter().map(|g| g.0).collect();
        assert_eq!(names, ["bucket.0", "bucket.1", "bucket.2"]);
    }
}
