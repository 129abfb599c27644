//! Units: parameters packed into flat buffers, so that updates and collectives work on few, large
//! pieces.
//!
//! A unit is reduced, gathered and updated as a whole. So its parameters are sharded by the same
//! axes (ranks along them hold different blocks) and their gradients are partial sums over the same
//! axes.

mod grouping;

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_call::ALIGN;
use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::{Bounds, Factors, MatrixPlace};
use phalanx_ir::{Axis, DType, Instance, Layout, Mesh, Model, TensorType};
use phalanx_spmd::{Grouping, Share, UnitFacts};

use crate::build::{Compiled, RankOnMesh, World, is_apart};
use crate::error::ScriptError;
use crate::factored;
use crate::stage_group::StageGroup;
use grouping::{buckets, by_instance};

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

/// The unit of a parameter that is a unit alone.
pub(crate) fn alone(
    world: &World<'_>,
    stage_group: usize,
    param: usize,
) -> Result<Unit, ScriptError> {
    let StageGroup { mesh, sharing, .. } = world.stage_groups[stage_group];
    let mut own = described(world, stage_group)?;
    own.retain(|described| described.param == param);
    let facts = sharing.unit(&own[0].blocks);
    Ok(pack(world.model.params()[param].name.clone(), &own, facts, mesh))
}

/// The type as which a stage group's programs read a parameter; none if no program reads it.
pub(crate) fn layout<'c>(
    model: &Model,
    compiled: &'c Compiled,
    param: usize,
) -> Option<&'c TensorType> {
    model.instances().iter().find_map(|instance| {
        let (local, _) = instance.params.iter().find(|(_, own)| **own == param)?;
        compiled.param_type(instance.segment, local)
    })
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
    /// Itself, if these have different meshes: then it is a unit alone, because others may lie otherwise there.
    apart: Option<usize>,
}

impl Described {
    fn alike(&self, other: &Self) -> bool {
        (&self.blocks, &self.partial, &self.stage_groups, self.tied, self.apart)
            == (&other.blocks, &other.partial, &other.stage_groups, other.tied, other.apart)
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
                apart: is_apart(world, param).then_some(param),
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
            apart: is_apart(world, param).then_some(param),
        });
    }
    Ok(found.into_iter().flatten().collect())
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
