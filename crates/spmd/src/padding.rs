//! Padding: one padded extent per class of dims that factors join.
//!
//! The annotations say how many shards a dim is cut into; where that does not divide its size, the
//! dim is padded to a multiple, and with it every dim that shares its factor, so that the number is
//! the same in every layout of every value. Only the major factor of a compound dim can be padded:
//! three heads of four elements on two ranks become four heads.

use phalanx_ir::rule::{FactorKind, Rule};
use phalanx_ir::text::value_name;
use phalanx_ir::{Instr, Op, Port, Program, ValueId};

use crate::error::SpmdError;
use crate::mask::Grid;
use crate::net::carrier;
use crate::pins::{Pins, differentiated};

/// The padded extents of every value.
pub(crate) fn padding(
    program: &Program,
    rules: &[Rule],
    pins: &Pins,
    grid: &Grid,
) -> Result<Vec<Vec<usize>>, SpmdError> {
    let mut shards: Vec<Vec<usize>> =
        program.values().iter().map(|ty| vec![1; ty.shape.len()]).collect();
    for (value, shards) in shards.iter_mut().enumerate() {
        for lay in [pins.read_layout(value), pins.stored_layout(value)].into_iter().flatten() {
            for (n, axes) in shards.iter_mut().zip(lay.dims) {
                *n = lcm(*n, grid.parts(axes));
            }
        }
    }
    let mut classes: Vec<Class> =
        program.instrs().iter().zip(rules).map(|(instr, rule)| places(instr, rule)).collect();
    classes.extend(alike(program));
    // Counts and extents only grow and are bounded, so both reach a fixed point.
    while classes.iter().fold(false, |any, class| join_shards(class, &mut shards) | any) {}
    let mut padded: Vec<Vec<usize>> = (program.values().iter().zip(&shards))
        .map(|(ty, n)| ty.shape.iter().zip(n).map(|(size, &n)| size.next_multiple_of(n)).collect())
        .collect();
    let join = |class: &Class, padded: &mut [Vec<usize>]| join_extents(class, &shards, padded);
    // If dims cannot agree, extents would grow forever; the check below reports it.
    for _ in 0..padded.len() {
        if !classes.iter().fold(false, |any, class| join(class, &mut padded) | any) {
            break;
        }
    }
    check(program, rules, &classes, &padded)?;
    Ok(padded)
}

/// Dims that are joined, by factor.
type Class = Vec<Precedence>;

/// Gradients and cotangents have the layout of what they belong to.
fn alike(program: &Program) -> Vec<Class> {
    let of = |port: &Port| Some((port.value, differentiated(program, port)?.value));
    let pairs = program.outputs().iter().filter_map(of);
    pairs
        .map(|(gradient, of)| {
            let dims = program.ty(of).shape.iter().enumerate();
            let place =
                |value, (dim, &size)| Precedence { value, dim, factor: dim, size, minor: 1 };
            dims.flat_map(|d| [place(gradient, d), place(of, d)]).collect()
        })
        .collect()
}

/// A dim, the factor that its padding belongs to with its size, and the elements of its minor ones.
struct Precedence {
    value: ValueId,
    dim: usize,
    factor: usize,
    size: usize,
    minor: usize,
}

/// The shards that a factor must divide into because of one dim. Shards beyond the size of its
/// major factor go on to the minor factors, and need no padding.
fn wanted(place: &Precedence, shards: &[Vec<usize>]) -> usize {
    let n = shards[place.value.index()][place.dim];
    if place.minor > 1 && n.is_multiple_of(place.size.max(1)) { 1 } else { n }
}

/// Gives all dims of a factor the shards of each; whether any changed.
fn join_shards(places: &[Precedence], shards: &mut [Vec<usize>]) -> bool {
    let mut all = vec![1; factors(places)];
    for place in places {
        all[place.factor] = lcm(all[place.factor], wanted(place, shards));
    }
    let mut changed = false;
    for place in places {
        let n = &mut shards[place.value.index()][place.dim];
        let new = lcm(*n, all[place.factor]);
        changed |= new != *n;
        *n = new;
    }
    changed
}

/// Gives all dims of a factor the same padded extent; whether any changed.
fn join_extents(places: &[Precedence], shards: &[Vec<usize>], padded: &mut [Vec<usize>]) -> bool {
    let mut extents = vec![0; factors(places)];
    for place in places {
        let own = padded[place.value.index()][place.dim].div_ceil(place.minor.max(1));
        let extent = own.max(place.size).next_multiple_of(wanted(place, shards));
        extents[place.factor] = extents[place.factor].max(extent);
    }
    let mut changed = false;
    for place in places {
        let own = &mut padded[place.value.index()][place.dim];
        let new = (*own).max(extents[place.factor] * place.minor);
        changed |= new != *own;
        *own = new;
    }
    changed
}

/// How many factors the places have.
fn factors(places: &[Precedence]) -> usize {
    places.iter().map(|p| p.factor + 1).max().unwrap_or(0)
}

fn places(instr: &Instr, rule: &Rule) -> Class {
    let sides =
        rule.inputs.iter().zip(&instr.inputs).chain(rule.outputs.iter().zip(&instr.outputs));
    let dims = sides.flat_map(|(dims, &v)| dims.iter().enumerate().map(move |(i, d)| (v, i, d)));
    dims.filter_map(|(value, dim, factors)| {
        let at = carrier(rule, factors)?;
        let minor = factors[at + 1..].iter().map(|&f| rule.factors[f].size).product();
        let (factor, size) = (factors[at], rule.factors[factors[at]].size);
        Some(Precedence { value, dim, factor, size, minor })
    })
    .collect()
}

fn check(
    program: &Program,
    rules: &[Rule],
    classes: &[Class],
    padded: &[Vec<usize>],
) -> Result<(), SpmdError> {
    for ((instr, rule), places) in program.instrs().iter().zip(rules).zip(classes) {
        let moves = matches!(instr.op, Op::Reshape(_));
        let mut extents: Vec<Option<usize>> = vec![None; rule.factors.len()];
        for &Precedence { value, dim, factor, minor, .. } in places {
            let (size, padded) = (program.ty(value).shape[dim], padded[value.index()][dim]);
            let opaque = moves && rule.factors[factor].kind == FactorKind::Whole && padded != size;
            let extent = padded / minor.max(1);
            let agrees = *extents[factor].get_or_insert(extent) == extent;
            let what = if !padded.is_multiple_of(minor.max(1)) {
                format!("it consists of parts of {minor} elements, which cannot be split")
            } else if opaque {
                "a reshape moves its elements to other places".to_owned()
            } else if !agrees {
                "the dims that share its factor would need another padding".to_owned()
            } else {
                continue;
            };
            let (segment, value) = (program.name.clone(), value_name(program, value));
            return Err(SpmdError::Padding { segment, value, dim, size, padded, what });
        }
        minor_is_even(program, instr, rule, &extents)?;
    }
    Ok(())
}

/// Fails if a padded factor is minor to another factor in some dim: its padding would lie between
/// the elements of that one.
fn minor_is_even(
    program: &Program,
    instr: &Instr,
    rule: &Rule,
    extents: &[Option<usize>],
) -> Result<(), SpmdError> {
    let sides =
        rule.inputs.iter().zip(&instr.inputs).chain(rule.outputs.iter().zip(&instr.outputs));
    for (dims, &value) in sides {
        for (dim, factors) in dims.iter().enumerate() {
            let Some(at) = carrier(rule, factors) else { continue };
            for &f in &factors[at + 1..] {
                // A factor that is never the padded one of a dim has no padded extent.
                let size = rule.factors[f].size;
                if let Some(padded) = extents[f].filter(|&padded| padded > size) {
                    let what = format!(
                        "{padded} is the padded size of a part of {size} elements, and the \
                        padding would not be at the end"
                    );
                    let size = program.ty(value).shape[dim];
                    let (segment, value) = (program.name.clone(), value_name(program, value));
                    return Err(SpmdError::Padding { segment, value, dim, size, padded, what });
                }
            }
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
