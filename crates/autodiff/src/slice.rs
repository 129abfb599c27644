//! Divides a joint graph into the programs that scripts run.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use phalanx_ir::ops::{CollectiveKind, Fused};
use phalanx_ir::{
    Graph, Instr, Op, OpDef, Phase, Port, Program, Rewriter, Role, TensorType, ValueId,
};

use crate::joint::Joint;

/// Which residuals the backward recomputes instead of reading what F kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Recompute {
    /// None: F keeps everything that the backward reads.
    #[default]
    None,
    /// The quadratic part of a materialised attention (Korthikanti et al., 2022); flash attention
    /// keeps nothing quadratic, so nothing changes there.
    Selective,
    /// All: F keeps only its inputs (Chen et al., 2016).
    Full,
}

impl Recompute {
    /// Every policy.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    fn remakes(self, graph: &Graph<'_>, value: ValueId) -> bool {
        match self {
            Recompute::None => false,
            Recompute::Full => true,
            Recompute::Selective => is_bulky(graph, value),
        }
    }
}

/// Whether a value is bulky, or made of a bulky one by an op that changes each row by itself: the
/// probabilities of scores.
fn is_bulky(graph: &Graph<'_>, value: ValueId) -> bool {
    let Some((_, instr)) = graph.making(value) else { return false };
    let result = instr.outputs.iter().position(|&v| v == value);
    let by_row = matches!(instr.op, Op::Scale(_) | Op::Cast(_) | Op::Softmax(_) | Op::Dropout(_));
    result.is_some_and(|result| instr.op.is_bulky(result))
        || (by_row && is_bulky(graph, instr.inputs[0]))
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        })
    }
}

impl FromStr for Recompute {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        (Recompute::ALL.into_iter().find(|r| r.to_string() == text))
            .ok_or_else(|| format!("`{text}` is not none, selective or full"))
    }
}

/// The programs of one segment.
#[derive(Clone, PartialEq, Debug)]
pub struct Phases {
    /// Forward.
    pub f: Program,
    /// Gradients of inputs.
    pub b: Program,
    /// Gradients of weights.
    pub w: Program,
    /// The unsplit backward.
    pub bw: Program,
    /// Forward and backward at once.
    pub fbw: Program,
}

impl Phases {
    /// What F keeps for the backward, by name: its residual outputs, and its boundary inputs that
    /// the backward reads. This is the memory of a micro-batch in flight.
    pub fn residuals(&self) -> Vec<(&str, &TensorType)> {
        let kept =
            self.f.outputs_with(Role::Residual).map(|p| (p.name.as_str(), self.f.ty(p.value)));
        let inputs =
            self.bw.inputs_with(Role::Boundary).map(|p| (p.name.as_str(), self.bw.ty(p.value)));
        kept.chain(inputs).collect()
    }
}

/// Divides a joint graph.
pub fn slice(joint: &Joint, recompute: Recompute) -> Phases {
    use Phase::{B, F, W};
    let cut = Cut::new(&joint.program, recompute);
    let none = BTreeSet::new();
    Phases {
        f: cut.program("F", &[F], &[], &cut.kept),
        b: cut.program("B", &[B], &cut.remade_for(&[B], &cut.handed), &cut.handed),
        w: cut.program("W", &[W], &cut.remade_in_w(), &none),
        bw: cut.program("BW", &[B, W], &cut.remade_for(&[B, W], &none), &none),
        fbw: cut.program("FBW", &[F, B, W], &[], &none),
    }
}

struct Cut<'a> {
    joint: &'a Program,
    graph: Graph<'a>,
    /// Values computed only from weights and constants: recomputed wherever they are read.
    free: Vec<bool>,
    /// Forward values that F keeps.
    kept: BTreeSet<ValueId>,
    /// Values that B passes to W besides those that F keeps.
    handed: BTreeSet<ValueId>,
}

impl<'a> Cut<'a> {
    fn new(joint: &'a Program, recompute: Recompute) -> Self {
        let mut free = vec![false; joint.values().len()];
        for port in joint.inputs_with(Role::Param) {
            free[port.value.index()] = true;
        }
        for instr in joint.instrs() {
            let all_free = instr.inputs.iter().all(|v| free[v.index()]);
            for value in &instr.outputs {
                free[value.index()] = all_free;
            }
        }
        let (kept, handed) = (BTreeSet::new(), BTreeSet::new());
        let mut cut = Self { joint, graph: Graph::new(joint), free, kept, handed };
        cut.kept = cut.kept_under(recompute);
        cut.handed = (cut.read_by_w().into_iter())
            .filter(|&v| !cut.is_constant(v) && !cut.kept.contains(&v))
            .filter(|&v| cut.made_by(v).is_some())
            .collect();
        cut
    }

    fn made_by(&self, value: ValueId) -> Option<&'a Instr> {
        self.graph.making(value).map(|(_, instr)| instr)
    }

    fn is_constant(&self, value: ValueId) -> bool {
        self.made_by(value).is_some_and(|instr| instr.inputs.iter().all(|&v| self.is_constant(v)))
    }

    /// The values that the instructions of some phases read but do not compute, and the outputs of
    /// these phases: a gradient or cotangent may itself be a forward value.
    fn reads(&self, phases: &[Phase]) -> BTreeSet<ValueId> {
        let instrs = self.joint.instrs().iter();
        let own = |v: &ValueId| self.made_by(*v).is_some_and(|i| phases.contains(&i.phase));
        let read =
            instrs.filter(|i| phases.contains(&i.phase)).flat_map(|i| i.inputs.iter().copied());
        let leaving = self.outputs(phases, &BTreeSet::new());
        read.chain(leaving.into_iter().map(|port| port.value)).filter(|v| !own(v)).collect()
    }

    /// What must be kept so that every forward value that the backward reads is available: the
    /// value itself or, if it is recomputed, the operands of its instruction, and so on. A view is
    /// always recomputed: keeping it and its operand would keep the same numbers twice.
    fn kept_under(&self, recompute: Recompute) -> BTreeSet<ValueId> {
        let mut kept = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let read = self.reads(&[Phase::B, Phase::W]);
        let mut stack: Vec<ValueId> = read.iter().copied().collect();
        while let Some(value) = stack.pop() {
            let Some(instr) = self.made_by(value).filter(|_| !self.free[value.index()]) else {
                continue;
            };
            if !seen.insert(value) {
                continue;
            }
            let remade = instr.op.is_view()
                || recompute.remakes(&self.graph, value)
                || self.is_cheap(instr, value, &read);
            if remade {
                stack.extend(&instr.inputs);
            } else {
                kept.insert(value);
            }
        }
        kept
    }

    /// Whether a value is an elementwise function of one value that the backward reads anyway, and
    /// is itself read only elementwise. Then it is recomputed where it is read, in the same fused
    /// loop, and needs no memory: for example SiLU of the gate in a gated layer.
    fn is_cheap(&self, instr: &Instr, value: ValueId, read: &BTreeSet<ValueId>) -> bool {
        let &[operand] = instr.inputs.as_slice() else {
            return false;
        };
        let at_hand = self.made_by(operand).is_none() || read.contains(&operand);
        let elementwise = |i: &Instr| Fused::accepts(&i.op);
        let readers = self.graph.readers(value).iter().map(|&i| &self.joint.instrs()[i]);
        let mut readers = readers.filter(|i| i.phase != Phase::F);
        elementwise(instr) && at_hand && readers.all(elementwise)
    }

    /// Forward instructions that the backward phases run again, in order, for the values that they
    /// read and pass on.
    fn remade_for(&self, phases: &[Phase], handed: &BTreeSet<ValueId>) -> Vec<usize> {
        let mut instrs = BTreeSet::new();
        let mut stack: Vec<ValueId> = self.reads(phases).union(handed).copied().collect();
        while let Some(value) = stack.pop() {
            let Some((index, instr)) = self.graph.making(value) else {
                continue;
            };
            if self.kept.contains(&value) || instr.phase != Phase::F || !instrs.insert(index) {
                continue;
            }
            stack.extend(&instr.inputs);
        }
        instrs.into_iter().collect()
    }

    /// Instructions of earlier phases that even W runs again: views, gathers and constants. W reads
    /// no weights, so all other values come from F or B.
    fn remade_in_w(&self) -> Vec<usize> {
        let mut instrs = BTreeSet::new();
        let mut stack: Vec<ValueId> = self.reads(&[Phase::W]).into_iter().collect();
        while let Some(value) = stack.pop() {
            let settled = self.kept.contains(&value) || self.handed.contains(&value);
            if let Some((index, instr)) = self.graph.making(value).filter(|_| !settled) {
                instrs.insert(index);
                stack.extend(&instr.inputs);
            }
        }
        instrs.into_iter().collect()
    }

    /// The values that W reads, each followed back through views and gathers: the shard is kept and
    /// gathered again, not the whole value. But not back to a weight, which W must not read.
    fn read_by_w(&self) -> BTreeSet<ValueId> {
        let source = |mut value: ValueId| {
            while let Some(instr) = self.made_by(value).filter(|i| i.op.is_view() || gathers(i)) {
                if self.free[instr.inputs[0].index()] && !self.is_constant(instr.inputs[0]) {
                    break;
                }
                value = instr.inputs[0];
            }
            value
        };
        self.reads(&[Phase::W]).into_iter().map(source).collect()
    }

    /// A program of the instructions of `phases`, after the forward instructions `remade`;
    /// `leaving` are values that it must return.
    fn program(
        &self,
        suffix: &str,
        phases: &[Phase],
        remade: &[usize],
        leaving: &BTreeSet<ValueId>,
    ) -> Program {
        let own = |instr: &Instr| phases.contains(&instr.phase);
        let instrs: Vec<(usize, &Instr)> = (self.joint.instrs().iter().enumerate())
            .filter(|(i, instr)| own(instr) || remade.contains(i))
            .collect();
        // A clone may also recompute a result that was kept; then the kept one is read.
        let made: BTreeSet<ValueId> = (instrs.iter())
            .flat_map(|(_, i)| i.outputs.iter().map(|v| (*v, own(i))))
            .filter(|(v, own)| *own || !self.kept.contains(v))
            .map(|(v, _)| v)
            .collect();
        let outputs = self.outputs(phases, leaving);
        let mut read: BTreeSet<ValueId> =
            instrs.iter().flat_map(|(_, i)| i.inputs.iter().copied()).collect();
        read.extend(outputs.iter().map(|port| port.value));

        let mut rewriter = Rewriter::with_inputs(self.joint, |p| read.contains(&p.value));
        for &value in read.difference(&made).filter(|&&v| self.graph.maker(v).is_some()) {
            rewriter.input(&residual_name(value), Role::Residual, value);
        }
        for (index, instr) in instrs {
            // A clone belongs to the phase that runs it.
            rewriter.keep_in(if own(instr) { instr.phase } else { phases[0] }, index);
        }
        let mut program = rewriter.finish_with(&outputs);
        program.name = format!("{}.{suffix}", self.joint.name);
        program
    }

    /// An output belongs to the phase that computes its value. An output that only passes a value
    /// through (for example the cotangent of an identity) belongs to the phase of its kind.
    fn outputs(&self, phases: &[Phase], leaving: &BTreeSet<ValueId>) -> Vec<Port> {
        let mut outputs = Vec::new();
        for port in self.joint.outputs() {
            let maker = self.made_by(port.value).map_or(Phase::F, |i| i.phase);
            let phase = match port.role {
                Role::Cotangent => maker.max(Phase::B),
                Role::Gradient if maker == Phase::F => Phase::W,
                _ => maker,
            };
            if phases.contains(&phase) {
                outputs.push(port.clone());
            }
        }
        let residual =
            |&value| Port { name: residual_name(value), value, role: Role::Residual, of: None };
        outputs.extend(leaving.iter().map(residual));
        outputs
    }
}

/// Whether an instruction gathers a shard into the whole value, or the reverse: then it is enough
/// to keep or pass on its operand.
fn gathers(instr: &Instr) -> bool {
    let Op::Collective(collective) = &instr.op else { return false };
    matches!(collective.kind, CollectiveKind::AllGather { .. } | CollectiveKind::Shard { .. })
}

fn residual_name(value: ValueId) -> String {
    format!("r{}", value.0)
}
