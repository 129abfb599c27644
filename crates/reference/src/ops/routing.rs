//! Choices of experts, the places that tokens get there, and rows that go and come back. Everything
//! is a loop over tokens, as the papers write it.

use phalanx_ir::ops::{Assign, Deal, Histogram, Queue, TopKGrad};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::{RefTensor, TensorData};

pub(super) fn top_k(k: usize, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (mut values, mut index) = (Vec::new(), Vec::new());
    for row in call.floats(0)?.chunks(call.width(0).max(1)) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        // A stable sort, so the lower index wins a tie; numbers come before what is none.
        order.sort_by(|&a, &b| {
            let (a, b) = (row[a], row[b]);
            b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        });
        values.extend(order[..k].iter().map(|&i| row[i]));
        index.extend(order[..k].iter().map(|&i| i as i32));
    }
    let (dtype, shape) = &call.outs[1];
    let index = RefTensor::from_data(*dtype, shape, TensorData::Int(index));
    Ok(vec![call.result(0, values), index])
}

pub(super) fn top_k_grad(op: &TopKGrad, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (index, dy, k) = (call.ints(0)?, call.floats(1)?, call.width(0).max(1));
    let mut dx = vec![0.0; call.elements(0)];
    for (i, (&at, dy)) in index.iter().zip(dy).enumerate() {
        let at = call.row(at, i, op.size)?;
        dx[i / k * op.size + at] += dy;
    }
    Ok(vec![call.result(0, dx)])
}

pub(super) fn assign(op: &Assign, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (index, k) = (call.ints(0)?, call.width(0));
    let stands: Vec<bool> = match call.ins.get(1) {
        Some(stands) => stands.values().iter().map(|&x| x != 0.0).collect(),
        None => vec![true; index.len()],
    };
    let tokens = call.shape(0)[call.shape(0).len() - 2];
    let none = op.experts * op.capacity;
    let mut slots = vec![none as i32; index.len()];
    for group in (0..index.len()).step_by((tokens * k).max(1)) {
        let mut taken = vec![0; op.experts];
        for choice in 0..k {
            for token in 0..tokens {
                let at = group + token * k + choice;
                let expert = usize::try_from(index[at]).unwrap_or(op.experts);
                if !stands[at] || expert >= op.experts {
                    continue;
                }
                if taken[expert] < op.capacity {
                    slots[at] = (expert * op.capacity + taken[expert]) as i32;
                }
                taken[expert] += 1;
            }
        }
    }
    Ok(vec![call.moved(TensorData::Int(slots))])
}

/// Every choice of the first expert, then every choice of the second and so on, each part for itself.
pub(super) fn queue(op: &Queue, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (index, shape, k) = (call.ints(0)?, call.shape(0), call.width(0));
    let stands = |at: usize| call.ins.get(1).is_none_or(|stands| stands.values()[at] != 0.0);
    let tokens = shape[shape.len() - 2];
    let (groups, room) = (index.len() / (tokens * k).max(1), op.room);
    let of_part = op.experts / op.parts;
    let mut slots = vec![(op.parts * room) as i32; index.len()];
    let mut counts = vec![0; call.elements(1)];
    for group in 0..groups {
        for part in 0..op.parts {
            let mut row = 0;
            for own in 0..of_part {
                for choice in 0..k {
                    for token in 0..tokens {
                        let at = (group * tokens + token) * k + choice;
                        let chosen = usize::try_from(index[at]) == Ok(part * of_part + own);
                        if chosen && stands(at) && row < room {
                            slots[at] = (part * room + row) as i32;
                            counts[(part * groups + group) * of_part + own] += 1;
                            row += 1;
                        }
                    }
                }
            }
        }
    }
    let ints = |i: usize, values| {
        let (dtype, shape) = &call.outs[i];
        RefTensor::from_data(*dtype, shape, TensorData::Int(values))
    };
    Ok(vec![ints(0, slots), ints(1, counts)])
}

/// Distributed by hand: the experts of each rank, one rank after the other.
pub(super) fn deal(op: &Deal, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let of = |rank: usize| (rank..op.experts).step_by(op.parts);
    let places: Vec<usize> = (0..op.parts).flat_map(of).collect();
    let dealt = |&number: &i32| {
        let own = usize::try_from(number).ok();
        let place = own.and_then(|own| places.iter().position(|expert| *expert == own / op.per));
        place.map_or(number, |place| (place * op.per) as i32 + number % op.per as i32)
    };
    let dealt = call.ints(0)?.iter().map(dealt).collect();
    let (dtype, shape) = &call.outs[0];
    Ok(vec![RefTensor::from_data(*dtype, shape, TensorData::Int(dealt))])
}

pub(super) fn histogram(op: &Histogram, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let shape = call.shape(0);
    let group: usize = shape[shape.len() - 2..].iter().product();
    let mut counts = vec![0.0; call.elements(0)];
    for (i, &number) in call.ints(0)?.iter().enumerate() {
        if let Ok(number) = usize::try_from(number)
            && number / op.per < op.size
        {
            counts[i / group * op.size + number / op.per] += 1.0;
        }
    }
    Ok(vec![call.result(0, counts)])
}

/// Where the rows of tokens lie among dispatched ones.
struct Places<'a> {
    slot: &'a [i32],
    groups: usize,
    tokens: usize,
    k: usize,
    experts: usize,
    capacity: usize,
}

impl<'a> Places<'a> {
    /// From the slots, which are operand `i`, and the shape of dispatched rows.
    fn new(call: &Call<'a>, i: usize, cells: &[usize]) -> Result<Self, ReferenceError> {
        let shape = call.shape(i);
        let [experts, .., capacity, _] = *cells else {
            return Err(call.wrong(i, "slots of dispatched rows"));
        };
        let [ref groups @ .., tokens, k] = *shape else {
            return Err(call.wrong(i, "slots of tokens and choices"));
        };
        let groups = groups.iter().product();
        Ok(Self { slot: call.ints(i)?, groups, tokens, k, experts, capacity })
    }

    /// For each (token, choice) that has a place: its number, its token's row, and the row of its
    /// place.
    fn each(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        self.slot.iter().enumerate().filter_map(|(at, &slot)| {
            let slot = usize::try_from(slot).ok().filter(|s| *s < self.experts * self.capacity)?;
            let (row, group) = (at / self.k, at / self.k / self.tokens);
            let (expert, place) = (slot / self.capacity, slot % self.capacity);
            Some((at, row, (expert * self.groups + group) * self.capacity + place))
        })
    }
}

/// Both directions: the rows of tokens to their places, or back.
fn moved(
    call: &Call<'_>,
    cells: &[usize],
    to_cells: bool,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (from, width, places) = (call.floats(0)?, call.width(0), Places::new(call, 1, cells)?);
    let gates = if call.ins.len() > 2 { Some(call.floats(2)?) } else { None };
    let mut out = vec![0.0; call.elements(0)];
    for (at, row, cell) in places.each() {
        let (source, target) = if to_cells { (row, cell) } else { (cell, row) };
        let gate = gates.map_or(1.0, |gates| gates[at]);
        for i in 0..width {
            out[target * width + i] += gate * from[source * width + i];
        }
    }
    Ok(vec![call.result(0, out)])
}

pub(super) fn dispatch(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    moved(call, &call.outs[0].1, true)
}

pub(super) fn combine(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    moved(call, call.shape(0), false)
}

pub(super) fn gate_grad(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (rows, y, width) = (call.floats(0)?, call.floats(1)?, call.width(0));
    let mut out = vec![0.0; call.elements(0)];
    for (at, row, cell) in Places::new(call, 2, call.shape(1))?.each() {
        out[at] = (0..width).map(|i| rows[row * width + i] * y[cell * width + i]).sum();
    }
    Ok(vec![call.result(0, out)])
}
