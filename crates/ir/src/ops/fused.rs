//! A group of elementwise ops that engines run together, so that intermediate values are never
//! stored.
//!
//! Every step still rounds to its element type: a group gives the same bits as separate ops.

use super::{Op, OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Where a step finds an operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FusedArg {
    /// An operand of the group.
    Input(usize),
    /// The result of an earlier step.
    Step(usize),
}

/// One elementwise op of a group.
#[derive(Clone, PartialEq, Debug)]
pub struct FusedStep {
    /// The op; elementwise, with one result.
    pub op: Op,
    /// Its operands.
    pub args: Vec<FusedArg>,
    /// The element type of its result.
    pub dtype: DType,
}

/// Elementwise ops over one shape. Operands may have fewer dims, aligned at the right; results all
/// have the full shape.
#[derive(Clone, PartialEq, Debug)]
pub struct Fused {
    /// The ops in order.
    pub steps: Vec<FusedStep>,
    /// The steps whose results are stored, in order of the group's results.
    pub results: Vec<usize>,
    /// The operand that has the full shape.
    pub full: usize,
}

impl Fused {
    /// Whether an op may be part of a group.
    pub fn accepts(op: &Op) -> bool {
        matches!(
            op,
            Op::Unary(_)
                | Op::UnaryGrad(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Select(_)
                | Op::Scale(_)
                | Op::Shift(_)
                | Op::Cast(_)
        )
    }

    fn body(&self) -> String {
        let arg = |a: &FusedArg| match a {
            FusedArg::Input(i) => format!("i{i}"),
            FusedArg::Step(i) => format!("s{i}"),
        };
        let steps: Vec<String> = (self.steps.iter())
            .map(|step| {
                let mut inner: Vec<String> = step.args.iter().map(arg).collect();
                inner.extend(step.op.attrs().iter().map(|(k, v)| format!("{k}:{v}")));
                format!("{}({})/{}", step.op.name(), inner.join("|"), step.dtype)
            })
            .collect();
        steps.join(";")
    }
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<Fused, String> {
    let body: String = attrs.take("body")?;
    let steps = body.split(';').map(read_step).collect::<Result<_, _>>()?;
    Ok(Fused { steps, results: attrs.take_list("results")?, full: attrs.take("full")? })
}

fn read_step(text: &str) -> Result<FusedStep, String> {
    let bad = || format!("`{text}` is not a step such as mul(s0|i1)/f32");
    let (name, rest) = text.split_once('(').ok_or_else(bad)?;
    let (inner, dtype) = rest.split_once(")/").ok_or_else(bad)?;
    let mut args = Vec::new();
    let mut pairs = Vec::new();
    for part in inner.split('|') {
        if let Some(pair) = part.split_once(':') {
            pairs.push(pair);
        } else if let Some(i) = part.strip_prefix('i') {
            args.push(FusedArg::Input(i.parse().map_err(|_| bad())?));
        } else if let Some(i) = part.strip_prefix('s') {
            args.push(FusedArg::Step(i.parse().map_err(|_| bad())?));
        } else {
            return Err(bad());
        }
    }
    let mut attrs = AttrReader::new(pairs);
    let op = Op::read(name, Vec::new(), &mut attrs)?;
    attrs.finish()?;
    if !Fused::accepts(&op) {
        return Err(format!("`{name}` is not elementwise and cannot be fused"));
    }
    Ok(FusedStep { op, args, dtype: dtype.parse()? })
}

impl OpDef for Fused {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new()
            .with("body", self.body())
            .list("results", &self.results)
            .with("full", self.full)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let full = ins.get(self.full).ok_or("no operand has the full shape")?;
        if let Some(other) = ins.iter().find(|ty| !full.shape.ends_with(&ty.shape)) {
            return Err(format!("operand {other} is not repeated along leading dims of {full}"));
        }
        if self.results.is_empty() {
            return Err("a group needs at least one result".to_owned());
        }
        let mut types: Vec<TensorType> = Vec::new();
        for step in &self.steps {
            let operands = (step.args.iter())
                .map(|arg| match arg {
                    FusedArg::Input(i) => ins.get(*i).copied(),
                    FusedArg::Step(i) => types.get(*i),
                })
                .collect::<Option<Vec<&TensorType>>>()
                .ok_or("a step reads an operand that does not exist")?;
            let (dtype, shape) = step.op.infer(&operands)?.swap_remove(0);
            if dtype != step.dtype {
                return Err(format!("{} gives {dtype}, not {}", step.op.name(), step.dtype));
            }
            types.push(TensorType::new(dtype, shape));
        }
        (self.results.iter())
            .map(|&i| match types.get(i) {
                Some(ty) if ty.shape == full.shape => Ok((ty.dtype, ty.shape.clone())),
                _ => Err(format!("step {i} does not give the full shape")),
            })
            .collect()
    }

    /// Groups are formed after layouts are decided, from ops that were checked one by one; the rule
    /// checks only what still matters: all operands have the same layout and none is partial.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "groups are formed after gradients"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    /// The engine reads each chunk of every operand before it writes that chunk of a result, so the
    /// first result may use the memory of any operand of its size.
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 0), (2, 0), (3, 0)]
    }
    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}
