//! Which experts a token goes to, and which place it gets there.
//!
//! Tokens come in groups, `[…, t]`: places are counted within a group, so what is dropped is a
//! property of the model and not of how many ranks there are. Everything is indices: an expert's
//! number and a place per (token, choice), never a mask over all experts and places.

use std::ops::Range;

use super::{Op, OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// The `k` largest elements of each row and their indices, the largest first: operand `[…, e]`,
/// results `[…, k]` twice. The lower index wins a tie; a NaN is smaller than every number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TopK {
    /// How many are taken.
    pub k: usize,
}

/// Puts each element of dy where it was taken from, with zeros elsewhere: operands index, dy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TopKGrad {
    /// Elements of a row that they were taken from.
    pub size: usize,
}

/// Gives each (token, choice) a slot, `expert · capacity + place`: operands index `i32[…, t, k]`
/// and, optionally, whether each choice stands, `bool[…, t, k]`.
///
/// All first choices of a group get places before its second ones, and earlier tokens before later
/// ones. Who finds no place, or has no expert, gets the slot `experts · capacity`, which no expert
/// has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Assign {
    /// How many experts there are.
    pub experts: usize,
    /// Places of each expert in each group.
    pub capacity: usize,
}

/// Packs the choices of a group: experts are divided into parts, and in the region that a part has, rows
/// of its first expert come first, then those of the second and so on, each in the order in which
/// [`Assign`] gives places. Operands as there; results a slot for each (token, choice),
/// `part · room + row`, and how many rows each expert has, `i32[parts, …, e / parts]`.
///
/// Who finds no room in a region, or has no expert, gets the slot `parts · room`, which there is not; counts are those
/// of rows that found some. With the room of [`Queue::worst`] all do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    /// How many experts there are.
    pub experts: usize,
    /// Into how many parts they are divided, in their order.
    pub parts: usize,
    /// Rows of a region.
    pub room: usize,
}

impl Queue {
    /// With room for the worst choices: a token chooses no expert twice, so it has at most so many rows in a part.
    pub fn worst(experts: usize, parts: usize, [tokens, k]: [usize; 2]) -> Self {
        Self { experts, parts, room: tokens * k.min(experts / parts.max(1)) }
    }
}

/// The places of experts that are distributed round robin to `parts` ranks: operand `i32[…, t, k]`, of which each number is an
/// expert times `per` and a rest. The first rank has the experts 0, n, 2n …, then come those of the second, and so on:
/// the result has [`Deal::place`] in place of the expert, and the same rest. Numbers that are no expert's stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deal {
    /// How many experts there are.
    pub experts: usize,
    /// To how many ranks they are distributed.
    pub parts: usize,
    /// What numbers are divided by.
    pub per: usize,
}

impl Deal {
    /// The place of an expert among all, rank by rank.
    pub fn place(&self, expert: usize) -> usize {
        expert % self.parts * (self.experts / self.parts) + expert / self.parts
    }

    /// The expert at a place.
    pub fn expert(&self, place: usize) -> usize {
        let each = self.experts / self.parts;
        place % each * self.parts + place / each
    }

    /// Consecutive elements of a parameter as programs read it, where an expert has so many: for each run that is
    /// consecutive in the parameter's own order, its first element there, and how many follow.
    pub fn runs(&self, elements: Range<usize>, each: usize) -> Vec<(usize, usize)> {
        let mut runs = Vec::new();
        let mut next = elements.start;
        while next < elements.end {
            let (place, inside) = (next / each, next % each);
            let len = (each - inside).min(elements.end - next);
            runs.push((self.expert(place) * each + inside, len));
            next += len;
        }
        runs
    }

    /// What becomes of a number.
    pub fn apply(&self, number: i32) -> i32 {
        let own = number.unsigned_abs() as usize;
        match number >= 0 && own / self.per < self.experts {
            true => (self.place(own / self.per) * self.per + own % self.per) as i32,
            false => number,
        }
    }
}

/// How often each number comes among those of a group, after division by `per`: operand
/// `i32[…, t, k]`, result `[…, e]`. With `per` 1 it counts the choices of experts, with the
/// capacity the places that are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Histogram {
    /// How many numbers are counted, from zero on.
    pub size: usize,
    /// What numbers are divided by.
    pub per: usize,
    /// The element type of the counts.
    pub out: DType,
}

/// Reads one of these ops back; none for other names.
pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Option<Result<Op, String>> {
    let read: fn(&mut AttrReader) -> Result<Op, String> = match name {
        "top_k" => |attrs| Ok(TopK { k: attrs.take("k")? }.into()),
        "top_k_grad" => |attrs| Ok(TopKGrad { size: attrs.take("size")? }.into()),
        "assign" => |attrs| {
            let experts = attrs.take("experts")?;
            Ok(Assign { experts, capacity: attrs.take("capacity")? }.into())
        },
        "queue" => |attrs| {
            let (experts, parts) = (attrs.take("experts")?, attrs.take("parts")?);
            Ok(Queue { experts, parts, room: attrs.take("room")? }.into())
        },
        "deal" => |attrs| {
            let (experts, parts) = (attrs.take("experts")?, attrs.take("parts")?);
            Ok(Deal { experts, parts, per: attrs.take("per")? }.into())
        },
        "histogram" => |attrs| {
            let (size, per) = (attrs.take("size")?, attrs.take("per")?);
            Ok(Histogram { size, per, out: attrs.take("out")? }.into())
        },
        _ => return None,
    };
    Some(read(attrs))
}

/// The dims of a group's tokens and their choices: […], t, k.
pub(super) fn choices<'a>(
    what: &str,
    ty: &'a TensorType,
) -> Result<(&'a [usize], usize, usize), String> {
    super::dtype_is(what, ty, DType::I32)?;
    match ty.shape[..] {
        [ref groups @ .., tokens, k] if k > 0 => Ok((groups, tokens, k)),
        _ => Err(format!("{what} is {ty}, expected dims of tokens and of choices, none empty")),
    }
}

/// The index, if what follows it says which choices stand.
fn standing<'a>(ins: &[&'a TensorType]) -> Result<&'a TensorType, String> {
    let [index, stands @ ..] = ins else {
        return Err("takes the index".to_owned());
    };
    choices("the index", index)?;
    match stands {
        [] => {}
        [stands] => {
            super::dtype_is("whether a choice stands", stands, DType::Bool)?;
            super::shape_is("whether a choice stands", stands, &index.shape)?;
        }
        _ => return Err(format!("takes 1 or 2 operands, got {}", ins.len())),
    }
    Ok(index)
}

/// Fails unless every slot of every expert, and the one that is none, has a number.
pub(super) fn slots_fit(experts: usize, capacity: usize) -> Result<(), String> {
    let slots = experts.checked_mul(capacity).filter(|&n| n > 0 && i32::try_from(n).is_ok());
    slots.map(|_| ()).ok_or_else(|| {
        format!("{experts} experts of {capacity} places: slots are 1 to {} in number", i32::MAX)
    })
}

impl OpDef for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("k", self.k)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let x = ins[0];
        let (Some((&size, rows)), true) = (x.shape.split_last(), x.dtype.is_float()) else {
            return Err(format!("operand is {x}, expected a float with at least one dim"));
        };
        if self.k == 0 || self.k > size {
            return Err(format!("k = {} of {size} elements; at least 1, at most all", self.k));
        }
        let shape = [rows, &[self.k]].concat();
        Ok(vec![(x.dtype, shape.clone()), (DType::I32, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... e -> ... k, ... k", ins, outs).whole("e k")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let shape = &g.ty(g.input(0)).shape;
        g.set_to(0, TopKGrad { size: shape[shape.len() - 1] }, &[g.output(1), g.dy()?])
    }
}

impl OpDef for TopKGrad {
    fn name(&self) -> &'static str {
        "top_k_grad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("size", self.size)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        super::dtype_is("the index", ins[0], DType::I32)?;
        super::shape_is("dy", ins[1], &ins[0].shape)?;
        let (Some((_, rows)), true) = (ins[1].shape.split_last(), ins[1].dtype.is_float()) else {
            return Err(format!("dy is {}, expected a float with at least one dim", ins[1]));
        };
        Ok(vec![(ins[1].dtype, [rows, &[self.size]].concat())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... k, ... k -> ... e", ins, outs).whole("e k").linear(&[&[1]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(1, "second derivatives are not formed"))
    }
}

impl OpDef for Assign {
    fn name(&self) -> &'static str {
        "assign"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("experts", self.experts).with("capacity", self.capacity)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let index = standing(ins)?;
        slots_fit(self.experts, self.capacity)?;
        Ok(vec![(DType::I32, index.shape.clone())])
    }

    /// Places are counted over all tokens of a group, so a rank needs all of them.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let text =
            if ins.len() == 2 { "... t k, ... t k -> ... t k" } else { "... t k -> ... t k" };
        Rule::declare(text, ins, outs).whole("t k")
    }

    fn vjp(&self, _g: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}

impl OpDef for Queue {
    fn name(&self) -> &'static str {
        "queue"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("experts", self.experts).with("parts", self.parts).with("room", self.room)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let index = standing(ins)?;
        let (groups, ..) = choices("the index", index)?;
        let Self { experts, parts, room } = *self;
        if parts == 0 || experts == 0 || !experts.is_multiple_of(parts) {
            return Err(format!("{experts} experts in {parts} parts: they must divide evenly"));
        }
        slots_fit(parts, room)?;
        let counts = [&[parts], groups, &[experts / parts]].concat();
        Ok(vec![(DType::I32, index.shape.clone()), (DType::I32, counts)])
    }

    /// As for [`Assign`]; a rank may count the rows of some parts alone.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let text = match ins.len() {
            2 => "... t k, ... t k -> ... t k, s ... e",
            _ => "... t k -> ... t k, s ... e",
        };
        Rule::declare(text, ins, outs).whole("t k e").branch(0, "s")
    }

    fn vjp(&self, _g: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}

impl OpDef for Deal {
    fn name(&self) -> &'static str {
        "deal"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("experts", self.experts).with("parts", self.parts).with("per", self.per)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        choices("the operand", ins[0])?;
        let Self { experts, parts, per } = *self;
        if parts == 0 || !experts.is_multiple_of(parts) {
            return Err(format!("{experts} experts for {parts} ranks: they must divide evenly"));
        }
        slots_fit(experts, per)?;
        Ok(vec![(DType::I32, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... -> ...", ins, outs)
    }

    fn vjp(&self, _g: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}

impl OpDef for Histogram {
    fn name(&self) -> &'static str {
        "histogram"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("size", self.size).with("per", self.per).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let (groups, ..) = choices("the operand", ins[0])?;
        if self.per == 0 || !self.out.is_float() {
            return Err(format!("per = {} and out = {}", self.per, self.out));
        }
        slots_fit(self.size, self.per)?;
        Ok(vec![(self.out, [groups, &[self.size]].concat())])
    }

    /// Counts of a part of the tokens are a partial sum; a rank may count some numbers only.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... t k -> ... e", ins, outs).whole("k").in_blocks("e")
    }

    fn vjp(&self, _g: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
