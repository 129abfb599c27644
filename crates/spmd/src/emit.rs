//! The partitioned program: every instruction with the layouts of its choices, and collectives
//! where a reader needs another layout.
//!
//! A value in another layout is made once per half and shared by all readers: once in the forward,
//! once in the backward (B and W together). The backward starts from one version of the forward:
//! what the forward gathered is gathered again, not kept.

use std::collections::HashMap;

use phalanx_autodiff::Joint;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Mesh, Op, Order, Phase, Program, Role, TensorType, ValueId};

use crate::error::SpmdError;
use crate::mask::{Grid, MaskLayout};
use crate::packed::{self, Packed};
use crate::plan::Plan;
use crate::reshard::{Move, Resharder};

/// Writes the program that a plan describes.
pub(crate) fn emit(
    joint: &Joint,
    mesh: &Mesh,
    plan: &Plan<'_>,
    resharder: &mut Resharder<'_>,
) -> Result<Joint, SpmdError> {
    let packed = packed::of(joint, |number| plan.net.nodes[number].rule.clone());
    let mut emitter = Emitter {
        joint,
        packed,
        plan,
        grid: plan.grid,
        resharder,
        types: Vec::new(),
        instrs: Vec::new(),
        makers: Vec::new(),
        versions: HashMap::new(),
    };
    let inputs: Vec<usize> = (joint.program.inputs().iter())
        .map(|port| {
            let lay = plan.input_layout(port.value.index());
            emitter.fresh(port.value.index(), &lay, None)
        })
        .collect::<Result<_, _>>()?;
    for (port, &new) in joint.program.inputs().iter().zip(&inputs) {
        let value = port.value.index();
        let lay = plan.input_layout(value);
        // An input is an input of every phase that reads it.
        for half in [Half::Forward, Half::Backward] {
            emitter.versions.insert((value, half), vec![(lay.clone(), new)]);
        }
    }
    for node in 0..joint.program.instrs().len() {
        emitter.node(node)?;
    }
    let outputs = (joint.program.outputs().iter())
        .map(|port| emitter.output(port.value.index(), port.role))
        .collect::<Result<Vec<usize>, SpmdError>>()?;
    emitter.program(mesh, &inputs, &outputs)
}

/// The two halves of a step: forward and backward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Half {
    Forward,
    Backward,
}

impl Half {
    fn of(phase: Phase) -> Self {
        if phase == Phase::F { Half::Forward } else { Half::Backward }
    }
}

struct Made {
    op: Op,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    phase: Phase,
    /// The instruction of the old program that it comes from; none for an inserted collective.
    old: Option<usize>,
}

struct Emitter<'a, 'b> {
    joint: &'a Joint,
    /// Of which values only the rows in front of their regions travel.
    packed: Vec<Option<Packed>>,
    plan: &'a Plan<'a>,
    grid: &'a Grid,
    resharder: &'a mut Resharder<'b>,
    types: Vec<TensorType>,
    instrs: Vec<Made>,
    /// The new instruction that makes each new value.
    makers: Vec<Option<usize>>,
    /// The new values of an old value in a half, by layout; the first is its original layout.
    versions: HashMap<(usize, Half), Vec<(MaskLayout, usize)>>,
}

impl Emitter<'_, '_> {
    fn node(&mut self, node: usize) -> Result<(), SpmdError> {
        let (n, strat) = (&self.plan.net.nodes[node], &self.plan.node_choices[node]);
        let instr = &self.joint.program.instrs()[node];
        let mut inputs = Vec::with_capacity(n.ins.len());
        for (operand, &value) in n.ins.iter().enumerate() {
            inputs.push(self.get(value, &strat.operand(n, operand), n.phase)?);
        }
        let index = self.instrs.len();
        let made: Vec<MaskLayout> = (0..n.outs.len()).map(|r| strat.result(n, r)).collect();
        let outputs = (n.outs.iter().zip(&made))
            .map(|(&value, lay)| self.fresh(value, lay, Some(index)))
            .collect::<Result<Vec<usize>, SpmdError>>()?;
        let half = Half::of(n.phase);
        for ((&value, lay), &new) in n.outs.iter().zip(&made).zip(&outputs) {
            self.versions.insert((value, half), vec![(lay.clone(), new)]);
        }
        let op = instr.op.clone();
        self.instrs.push(Made { op, inputs, outputs, phase: n.phase, old: Some(node) });
        for (&value, lay) in n.outs.iter().zip(&made) {
            let seen = self.plan.made_layout(value, lay);
            if seen != *lay {
                // An annotated value is a cut: readers see the annotated layout only. The original
                // version is kept too, for the gradient of the same op, which needs exactly that
                // one.
                self.get(value, &seen, n.phase)?;
                let versions = self.versions.get_mut(&(value, half)).expect("it was made above");
                let at = versions.iter().position(|(l, _)| *l == seen);
                versions.swap(0, at.expect("the layout that readers see was made above"));
            }
        }
        Ok(())
    }

    /// The value in a layout; made in this phase if it does not exist yet.
    fn get(&mut self, value: usize, want: &MaskLayout, phase: Phase) -> Result<usize, SpmdError> {
        let half = Half::of(phase);
        self.cross(value, want, half);
        let versions = self.versions_in(value, half);
        if let Some(&(_, new)) = versions.iter().find(|(lay, _)| lay == want) {
            self.needed_in(new, phase);
            return Ok(new);
        }
        let info = &self.plan.net.values[value];
        let from = (versions.clone().into_iter())
            .map(|(lay, new)| {
                (self.resharder.cost(&lay, want, &info.padded, info.dtype.size()), lay, new)
            })
            .reduce(|best, other| if other.0 < best.0 { other } else { best });
        let (_, lay, mut at) = from.expect("a value has at least the version it began as");
        let way = self.resharder.way(&lay, want, &info.padded, info.dtype.size());
        let Some(moves) = way.map(|way| way.moves.clone()) else {
            return Err(self.unreachable(value, &lay, want));
        };
        self.needed_in(at, phase);
        for step in moves {
            let known = self.versions_in(value, half);
            if let Some(&(_, new)) = known.iter().find(|(lay, _)| *lay == step.to) {
                at = new;
                self.needed_in(at, phase);
                continue;
            }
            let counts = self.counts(value, &self.layout_of(value, at, half), &step, phase)?;
            let index = self.instrs.len();
            let new = self.fresh(value, &step.to, Some(index))?;
            let axes = step.axes.iter().map(|a| self.grid.name(a)).collect();
            let order = match step.kind {
                CollectiveKind::Shard { dim } | CollectiveKind::ReduceScatter { dim } => {
                    self.grid.order(step.to.dims[dim])
                }
                _ => Order::Block,
            };
            let op = Op::Collective(Collective { order, ..Collective::new(step.kind, axes) });
            let inputs = [at].into_iter().chain(counts).collect();
            self.instrs.push(Made { op, inputs, outputs: vec![new], phase, old: None });
            self.versions.entry((value, half)).or_default().push((step.to, new));
            at = new;
        }
        Ok(at)
    }

    /// The versions of a value in a half.
    fn versions_in(&self, value: usize, half: Half) -> &Vec<(MaskLayout, usize)> {
        self.versions.get(&(value, half)).unwrap_or_else(|| {
            let name = self.plan.value_name(value);
            panic!("{}: {name} is read before it is computed", self.joint.program.name)
        })
    }

    /// Brings a forward value into the backward: in the wanted layout if the forward has it and it
    /// is not larger than the original layout, else in the original one. A partial sum is not kept.
    fn cross(&mut self, value: usize, want: &MaskLayout, half: Half) {
        let key = (value, Half::Backward);
        if half == Half::Forward {
            return;
        }
        let known = self.versions.get(&key).map_or(0, Vec::len);
        let Some(forward) = self.versions.get(&(value, Half::Forward)) else { return };
        let has = |lay: &MaskLayout| {
            self.versions.get(&key).is_some_and(|v| v.iter().any(|(known, _)| known == lay))
        };
        let size = |lay: &MaskLayout| std::cmp::Reverse(lay.shards(self.grid));
        let whole = || forward.iter().filter(|(lay, _)| lay.partial == 0);
        let began = &forward[0];
        let home = if began.0.partial == 0 {
            began
        } else {
            // No reader in the forward needed it complete, so the backward sums it.
            whole().min_by_key(|(lay, _)| size(lay)).unwrap_or(began)
        };
        let exact = whole().find(|(lay, _)| lay == want && size(lay) <= size(&home.0));
        let take = match exact {
            Some(found) if !has(&found.0) => Some(found.clone()),
            None if known == 0 => Some(home.clone()),
            _ => None,
        };
        self.versions.entry(key).or_default().extend(take);
    }

    /// A collective that B needs belongs to B, even if W asked for it first: W may run later.
    fn needed_in(&mut self, new: usize, phase: Phase) {
        let mut needed = vec![new];
        while let Some(value) = needed.pop() {
            let Some(index) = self.makers[value] else { continue };
            let made = &mut self.instrs[index];
            if matches!(made.op, Op::Collective(_)) && made.phase > phase {
                made.phase = phase;
                needed.extend(&made.inputs);
            }
        }
    }

    /// For a move of a value's regions from dim to dim: how many rows they have, of all regions that it takes from one
    /// rank to another. Nothing if not only rows are known to matter.
    fn counts(
        &mut self,
        value: usize,
        from: &MaskLayout,
        step: &Move,
        phase: Phase,
    ) -> Result<Option<usize>, SpmdError> {
        let CollectiveKind::AllToAll { from: dim, to } = step.kind else { return Ok(None) };
        let shape = |value: usize| &self.joint.program.values()[value].shape;
        let padded = |value: usize| &self.plan.net.values[value].padded != shape(value);
        let Some(packed) = &self.packed[value] else { return Ok(None) };
        let (regions, counts) = (packed.regions(), packed.counts);
        let whole = dim < regions && to < regions && from.dims[regions].is_empty();
        if !packed.is_in_order(shape(value).len()) || !whole || padded(value) || padded(counts) {
            return Ok(None);
        }
        let mut dims = from.dims[..=regions].to_vec();
        dims[dim] = dims[dim].without_suffix(step.axes.len());
        self.get(counts, &MaskLayout { dims, partial: 0 }, phase).map(Some)
    }

    /// The layout of a version of a value.
    fn layout_of(&self, value: usize, version: usize, half: Half) -> MaskLayout {
        let known = self.versions_in(value, half).iter();
        let own = known.filter(|(_, new)| *new == version).map(|(lay, _)| lay.clone()).next();
        own.unwrap_or_else(|| {
            let name = self.plan.value_name(value);
            panic!("{}: a version of {name} has no layout", self.joint.program.name)
        })
    }

    fn output(&mut self, value: usize, role: Role) -> Result<usize, SpmdError> {
        let net = self.plan.net;
        let made = match net.values[value].maker {
            Some((node, _)) => net.nodes[node].phase,
            // An input exists from the start.
            None => Phase::F,
        };
        let phase = match (role, made) {
            (Role::Gradient, Phase::F) => Phase::W,
            (Role::Cotangent, phase) => phase.max(Phase::B),
            (_, phase) => phase,
        };
        let half = Half::of(phase);
        let goal = self.plan.goals[value].iter().find(|g| g.partial == (role == Role::Gradient));
        let here = if self.versions.contains_key(&(value, half)) { half } else { Half::Forward };
        let has = self.versions_in(value, here)[0].0.clone();
        let want = match (role, goal) {
            (Role::Gradient | Role::Cotangent, Some(&goal)) => self.plan.goal_layout(goal, &has),
            _ => MaskLayout { partial: 0, ..has },
        };
        self.get(value, &want, phase)
    }

    fn fresh(
        &mut self,
        value: usize,
        lay: &MaskLayout,
        maker: Option<usize>,
    ) -> Result<usize, SpmdError> {
        let old = self.joint.program.ty(ValueId(value as u32));
        let padded = self.plan.net.values[value].padded.clone();
        self.types.push(old.with_padded(padded)?.with_layout(self.grid.layout(lay)));
        self.makers.push(maker);
        Ok(self.types.len() - 1)
    }

    fn unreachable(&self, value: usize, has: &MaskLayout, want: &MaskLayout) -> SpmdError {
        SpmdError::Unreachable {
            segment: self.joint.program.name.clone(),
            value: self.plan.value_name(value),
            from: self.grid.layout(has).to_string(),
            to: self.grid.layout(want).to_string(),
        }
    }

    /// The instructions as a program on the mesh.
    fn program(self, mesh: &Mesh, inputs: &[usize], outputs: &[usize]) -> Result<Joint, SpmdError> {
        let old = &self.joint.program;
        let mut program = Program::new(&old.name, mesh.clone());
        let mut map = vec![ValueId(u32::MAX); self.types.len()];
        for (port, &new) in old.inputs().iter().zip(inputs) {
            map[new] = program.input_like(port, self.types[new].clone());
        }
        let mut origins = Vec::with_capacity(self.instrs.len());
        // Inserted collectives shift the indices that origins refer to.
        let mut moved = vec![None; old.instrs().len()];
        for (index, made) in self.instrs.into_iter().enumerate() {
            let origin = made.old.and_then(|node| {
                moved[node] = Some(index);
                self.joint.origins[node]
            });
            let operands: Vec<ValueId> = made.inputs.iter().map(|&v| map[v]).collect();
            let types = made.outputs.iter().map(|&v| self.types[v].clone()).collect();
            let results = program.push_unchecked(made.op, &operands, types, made.phase);
            for (new, result) in made.outputs.iter().zip(results) {
                map[*new] = result;
            }
            origins.push(origin.and_then(|o| moved[o]));
        }
        for (port, &new) in old.outputs().iter().zip(outputs) {
            program.output_like(port, map[new]);
        }
        phalanx_ir::verify(&program)?;
        Ok(Joint { program, origins })
    }
}
