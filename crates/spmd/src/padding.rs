//! Padding: one padded extent per class of dims that factors join.
//!
//! The annotations say how many shards a dim is cut into; where that does not divide its size, the
//! dim is padded to a multiple, and with it every dim that shares its factor, so that the number is
//! the same in every layout of every value. Only the major factor of a compound dim can be padded:
//! three heads of four elements on two ranks become four heads.

use phalanx_ir::rule::{FactorKind, Rule};
use phalanx_ir::text::value_name;
use phalanx_ir::{Op, Program, ValueId};

use crate::error::SpmdError;
use crate::lay::Grid;
use crate::net::carrier;
use crate::pins::Pins;

/// The padded extents of every value.
pub(crate) fn padding(
    program: &Program,
    rules: &[Rule],
    pins: &Pins,
    grid: &Grid,
) -> Result<Vec<Vec<usize>>, SpmdError> {
    let mut multiples: Vec<Vec<usize>> =
        program.values().iter().map(|ty| vec![1; ty.shape.len()]).collect();
    for side in [&pins.read, &pins.stored] {
        for (multiple, pin) in multiples.iter_mut().zip(side) {
            for (m, &axes) in multiple.iter_mut().zip(pin.iter().flat_map(|p| &p.dims)) {
                *m = lcm(*m, grid.count(axes));
            }
        }
    }
    // Multiples only grow, and each class settles after at most as many rounds as it has dims.
    while spread(program, rules, &mut multiples) {}
    let padded: Vec<Vec<usize>> = (program.values().iter().zip(&multiples))
        .map(|(ty, m)| ty.shape.iter().zip(m).map(|(n, &m)| n.next_multiple_of(m)).collect())
        .collect();
    check(program, rules, &padded)?;
    Ok(padded)
}

/// Carries multiples through every instruction once; whether any changed.
fn spread(program: &Program, rules: &[Rule], multiples: &mut [Vec<usize>]) -> bool {
    let mut changed = false;
    for (instr, rule) in program.instrs().iter().zip(rules) {
        let places = places(instr, rule);
        let mut wanted = vec![1; rule.factors.len()];
        for &(value, dim, factor, minor) in &places {
            let (m, size) = (multiples[value.index()][dim], rule.factors[factor].size);
            // Shards of a compound that exhaust the major factor go on to the minor ones.
            let beyond = minor > 1 && m.is_multiple_of(size);
            wanted[factor] = lcm(wanted[factor], if beyond { 1 } else { m });
        }
        for &(value, dim, factor, minor) in &places {
            let (want, size) = (wanted[factor], rule.factors[factor].size);
            let even = size.is_multiple_of(want);
            let m = &mut multiples[value.index()][dim];
            let new = if minor > 1 && even { *m } else { lcm(*m, want * minor) };
            changed |= new != *m;
            *m = new;
        }
    }
    changed
}

/// Every dim of every operand and result, with the factor that its padding belongs to and the
/// elements of that factor's minor ones.
fn places(instr: &phalanx_ir::Instr, rule: &Rule) -> Vec<(ValueId, usize, usize, usize)> {
    let sides =
        rule.inputs.iter().zip(&instr.inputs).chain(rule.outputs.iter().zip(&instr.outputs));
    let dims = sides.flat_map(|(dims, &v)| dims.iter().enumerate().map(move |(i, d)| (v, i, d)));
    dims.filter_map(|(value, dim, factors)| {
        let at = carrier(rule, factors)?;
        let minor = factors[at + 1..].iter().map(|&f| rule.factors[f].size).product();
        Some((value, dim, factors[at], minor))
    })
    .collect()
}

fn check(program: &Program, rules: &[Rule], padded: &[Vec<usize>]) -> Result<(), SpmdError> {
    for (instr, rule) in program.instrs().iter().zip(rules) {
        let moves = matches!(instr.op, Op::Reshape(_));
        for (value, dim, factor, minor) in places(instr, rule) {
            let (size, padded) = (program.ty(value).shape[dim], padded[value.index()][dim]);
            let cut = !padded.is_multiple_of(minor.max(1));
            let opaque = moves && rule.factors[factor].kind == FactorKind::Whole;
            if padded == size || !(cut || opaque) {
                continue;
            }
            let what = match cut {
                true => format!("it is made of parts of {minor} elements, which stay whole"),
                false => "a reshape moves its elements to other places".to_owned(),
            };
            return Err(SpmdError::Padding {
                segment: program.name.clone(),
                value: value_name(program, value),
                dim,
                size,
                padded,
                what,
            });
        }
    }
    Ok(())
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.max(1) / x * b.max(1)
}
