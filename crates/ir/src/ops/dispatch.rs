//! Tokens to the places that experts gave them, and back.
//!
//! Dispatched tokens are `[e, groups…, c, d]`: expert, groups, place in the expert's queue, width.
//! Expert parallelism moves a mesh axis from a group's dim to `e`, which is an ordinary all-to-all.
//! The two ops are each other's transpose. At most one (token, choice) of a group has a slot; a
//! slot that is no expert's stands for a token that was dropped.

use super::routing::{choices, slots_fit};
use super::{OpDef, Shaped};
use crate::attr::Attrs;
use crate::error::IrError;
use crate::program::ValueId;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Each token's row at its places, with zeros at places that nobody has: operands x `[…, t, d]`,
/// slot `i32[…, t, k]` and, optionally, gates `[…, t, k]` that rows are multiplied by. Result
/// `[e, …, c, d]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dispatch {
    /// How many experts there are.
    pub experts: usize,
    /// Places of each expert in each group.
    pub capacity: usize,
}

/// The sum of the rows at a token's places: operands y `[e, …, c, d]`, slot and, optionally, gates
/// as above. Result `[…, t, d]`, zeros for a token that has no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Combine;

/// The gradient of gates, a product of a token's row with the row at each of its places: operands
/// `[…, t, d]`, `[e, …, c, d]`, slot. Result `[…, t, k]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GateGrad;

/// Fails unless gates belong to the slots; they have the accumulator type of the rows.
fn gates_fit(rows: &TensorType, slot: &TensorType, gates: &[&TensorType]) -> Result<(), String> {
    match gates {
        [] => Ok(()),
        [gates] => {
            super::dtype_is("the gates", gates, rows.dtype.accumulator())?;
            super::shape_is("the gates", gates, &slot.shape)
        }
        _ => Err(format!("takes 2 or 3 operands, got {}", gates.len() + 2)),
    }
}

/// The group dims, places and width of dispatched rows.
fn cells(y: &TensorType) -> Result<(usize, &[usize], usize, usize), String> {
    match y.shape[..] {
        [experts, ref groups @ .., capacity, width] if y.dtype.is_float() => {
            slots_fit(experts, capacity)?;
            Ok((experts, groups, capacity, width))
        }
        _ => Err(format!("dispatched rows are {y}, expected a float of experts, places and width")),
    }
}

impl OpDef for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("experts", self.experts).with("capacity", self.capacity)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let [x, slot, gates @ ..] = ins else {
            return Err(format!("takes 2 or 3 operands, got {}", ins.len()));
        };
        slots_fit(self.experts, self.capacity)?;
        let (groups, tokens, _) = choices("the slot", slot)?;
        let (Some(&width), true) = (x.shape.last(), x.dtype.is_float()) else {
            return Err(format!("x is {x}, expected a float with a width"));
        };
        super::shape_is("x", x, &[groups, &[tokens, width]].concat())?;
        gates_fit(x, slot, gates)?;
        Ok(vec![(x.dtype, [&[self.experts], groups, &[self.capacity, width]].concat())])
    }

    /// With a part of the tokens, a rank fills their places alone: a partial sum. It may fill the
    /// places of some experts only.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        match ins.len() {
            2 => Rule::declare("... t d, ... t k -> e ... c d", ins, outs).linear(&[&[0]]),
            _ => Rule::declare("... t d, ... t k, ... t k -> e ... c d", ins, outs)
                .linear(&[&[0], &[2]]),
        }
        .whole("k c")
        .in_blocks("e")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        let rest: Vec<ValueId> = (1..g.inputs()).map(|i| g.input(i)).collect();
        g.set_to(0, Combine, &[&[dy], rest.as_slice()].concat())?;
        match rest[..] {
            [slot, _] => g.set_to(2, GateGrad, &[g.input(0), dy, slot]),
            _ => Ok(()),
        }
    }
}

impl OpDef for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let [y, slot, gates @ ..] = ins else {
            return Err(format!("takes 2 or 3 operands, got {}", ins.len()));
        };
        let (_, groups, _, width) = cells(y)?;
        let (of, tokens, _) = choices("the slot", slot)?;
        if of != groups {
            return Err(format!("dispatched rows are {y} and the slot is {slot}: other groups"));
        }
        gates_fit(y, slot, gates)?;
        Ok(vec![(y.dtype, [groups, &[tokens, width]].concat())])
    }

    /// With some experts, a rank sums the rows of these alone: a partial sum.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        match ins.len() {
            2 => Rule::declare("e ... c d, ... t k -> ... t d", ins, outs).linear(&[&[0]]),
            _ => Rule::declare("e ... c d, ... t k, ... t k -> ... t d", ins, outs)
                .linear(&[&[0], &[2]]),
        }
        .whole("k c")
        .in_blocks("e")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        let shape = &g.ty(g.input(0)).shape;
        let op = Dispatch { experts: shape[0], capacity: shape[shape.len() - 2] };
        let rest: Vec<ValueId> = (1..g.inputs()).map(|i| g.input(i)).collect();
        g.set_to(0, op, &[&[dy], rest.as_slice()].concat())?;
        match rest[..] {
            [slot, _] => g.set_to(2, GateGrad, &[dy, g.input(0), slot]),
            _ => Ok(()),
        }
    }
}

impl OpDef for GateGrad {
    fn name(&self) -> &'static str {
        "gate_grad"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 3)?;
        let (rows, y, slot) = (ins[0], ins[1], ins[2]);
        let (_, groups, _, width) = cells(y)?;
        let (of, tokens, _) = choices("the slot", slot)?;
        if of != groups {
            return Err(format!("dispatched rows are {y} and the slot is {slot}: other groups"));
        }
        super::shape_is("the rows", rows, &[groups, &[tokens, width]].concat())?;
        super::dtype_is("the rows", rows, y.dtype)?;
        Ok(vec![(y.dtype.accumulator(), slot.shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... t d, e ... c d, ... t k -> ... t k", ins, outs)
            .whole("k c")
            .in_blocks("e")
            .linear(&[&[0], &[1]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }
}
