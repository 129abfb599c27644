//! Copies values between named parameters and a rank's part of packed units. Values keep their
//! element type; some values of one parameter are copied at a time.

use std::borrow::Cow;
use std::ops::Range;

use phalanx_engine::Engine;
use phalanx_ir::{DType, Draw, ElementRun, Mesh, Model, Param, Stored, TensorType, halves};
use phalanx_models::initial_values;
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{HeldRange, Member, RankOnMesh, State, StateKind, StateOf, StateScalar};

use super::command::{StatePiece, StateRange};
use super::numbers::{encode, encode_all, on_all_cores, rounded};
use super::restore::StateSource;
use phalanx_error::{Error, Problem, Result};

/// Reads values of a parameter in ranges of row-major indices, one range after the other, as bytes
/// of an element type.
pub type ReadParam<'a> = dyn Fn(&Param, &[Range<usize>], DType) -> Result<Vec<u8>> + Sync + 'a;

/// The initial values that the seed determines.
pub fn initial(seed: u64) -> impl Fn(&Param, &[Range<usize>], DType) -> Result<Vec<u8>> + Sync {
    move |param, ranges, dtype| {
        let mut bytes = vec![0; count(ranges) * dtype.size()];
        on_all_cores(&mut bytes, dtype.size(), &|first, own| {
            let mut rest = own;
            let mut skip = first;
            for range in ranges {
                let start = range.start + skip.min(range.len());
                skip = skip.saturating_sub(range.len());
                let len = (range.end - start).min(rest.len() / dtype.size());
                let (head, tail) = rest.split_at_mut(len * dtype.size());
                encode_all(dtype, initial_values(param, seed, start..start + len), head);
                rest = tail;
            }
        });
        Ok(bytes)
    }
}

/// Reads parameters by name, for a session or an evaluation; each rank reads only the part that it
/// holds.
pub fn from_weights(
    weights: &dyn phalanx_models::hf::Weights,
) -> impl Fn(&Param, &[Range<usize>], DType) -> Result<Vec<u8>> + Sync {
    |param, ranges, dtype| match weights.layout(&param.name) {
        Ok(_) => Ok(weights.read_ranges(&param.name, ranges, dtype)?),
        Err(_) => Err(Error::refused(Problem::new(format!(
            "the weights have no parameter `{}`, which the model reads",
            param.name
        )))),
    }
}

/// Which part of which parameter lies where.
pub(crate) struct Store {
    params: Vec<Param>,
    /// For each parameter: the elements that this rank holds of it, in the order of its memory.
    runs: Vec<Vec<ElementRun>>,
    /// For each parameter: its unit and its place there; none if another rank has it.
    places: Vec<Option<(usize, Member)>>,
    /// The rank's replica.
    replica: usize,
    /// Whether masters are in halves, of which weights are the upper ones. They are read and written whole.
    split: bool,
}

impl Store {
    /// `types` says how programs read each parameter.
    pub(crate) fn new(
        model: &Model,
        types: Vec<Option<TensorType>>,
        state: &State,
        ranks: RankOnMesh<'_>,
        (replica, split): (usize, bool),
    ) -> Self {
        let RankOnMesh { mesh, rank } = ranks;
        let runs = |(ty, param): (Option<TensorType>, &Param)| match ty {
            Some(ty) => ty.local_runs(mesh, rank),
            None => whole(param).local_runs(&Mesh::single(), 0),
        };
        let params = model.params().to_vec();
        let runs = types.into_iter().zip(&params).map(runs).collect();
        let mut places = vec![None; params.len()];
        for (number, unit) in state.units.iter().enumerate() {
            for member in &unit.members {
                places[member.param] = Some((number, *member));
            }
        }
        Self { params, runs, places, replica, split }
    }

    /// The model's parameters.
    pub(crate) fn params(&self) -> &[Param] {
        &self.params
    }

    /// Writes all state: what `source` has, each in its own element type, one parameter at a time;
    /// everything else, including padding, is set to zero.
    pub(crate) fn start<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        script: ScriptId,
        state: &State,
        source: &dyn StateSource,
    ) -> Result<()> {
        for (unit, buffers) in state.units.iter().zip(&state.buffers) {
            for (_, held) in buffers.all() {
                executor.clear(script, held.buffer)?;
            }
            // Masters come before weights, which are the same values, rounded.
            let mut kinds: Vec<(StateKind, &HeldRange)> = buffers.all().collect();
            kinds.sort_by_key(|(kind, _)| *kind != StateKind::Master);
            for member in &unit.members {
                let mut master = None;
                for &(kind, held) in &kinds {
                    self.take(executor, script, (member, kind, held), source, &mut master)?;
                }
            }
        }
        for StateScalar { scalar, buffer, dtype, initial } in &state.scalars {
            let mut bytes = vec![0; dtype.size()];
            let value = source.scalar(scalar)?.unwrap_or(*initial);
            encode(*dtype, &[value], &mut bytes);
            executor.write_at(script, *buffer, 0, &bytes)?;
        }
        Ok(())
    }

    /// Writes a member's values where a buffer holds them. Reads all pieces of a parameter with one
    /// call, because they may be next to each other in the file. What was read of a master is kept for
    /// the weights.
    fn take<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        script: ScriptId,
        (member, kind, held): (&Member, StateKind, &HeldRange),
        source: &dyn StateSource,
        master: &mut Option<(Vec<Range<usize>>, Vec<u8>)>,
    ) -> Result<()> {
        let placed = self.placed(member, held);
        let ranges: Vec<Range<usize>> = placed.iter().map(|piece| piece.global.clone()).collect();
        if ranges.is_empty() {
            return Ok(());
        }
        let size = held.dtype.size();
        let param = &self.params[member.param];
        let stored = self.stored(kind, held.dtype);
        if let Some(draw) = source.draw(param, kind)
            && draws(executor, script, (held, stored), &placed, draw)?
        {
            return Ok(());
        }
        let narrow = (kind, held.dtype) == (StateKind::Weights, DType::Bf16);
        let from = (source, self.replica);
        let values = match master.take().filter(|(of, _)| narrow && *of == ranges) {
            Some((_, full)) if stored.is_half() => Some(full),
            Some((_, full)) => Some(rounded(&full)),
            None => {
                let dtype = if stored.is_half() { DType::F32 } else { held.dtype };
                read_checked(from, param, kind, &ranges, dtype)?
            }
        };
        let Some(full) = values else { return Ok(()) };
        let values = match stored {
            Stored::As(_) => Cow::Borrowed(&full),
            Stored::Upper => Cow::Owned(halves::split_bytes(&full).0),
            Stored::Lower => Cow::Owned(halves::split_bytes(&full).1),
        };
        let mut rest = &values[..];
        // Pieces that follow one another in the buffer, as those of neighbouring rows, are written as one.
        for joined in placed.chunk_by(|a, b| a.at + a.global.len() == b.at) {
            let len: usize = joined.iter().map(|piece| piece.global.len()).sum();
            let (own, others) = rest.split_at(len * size);
            executor.write_at(script, held.buffer, joined[0].at * size, own)?;
            rest = others;
        }
        let is_full = held.dtype == DType::F32 || stored.is_half();
        if kind == StateKind::Master && is_full {
            *master = Some((ranges, full));
        }
        Ok(())
    }

    /// What a buffer of a kind of state holds: with split masters, weights are upper halves.
    fn stored(&self, kind: StateKind, dtype: DType) -> Stored {
        match kind {
            StateKind::Weights | StateKind::Older(_) | StateKind::Preview if self.split => {
                Stored::Upper
            }
            StateKind::Master if self.split => Stored::Lower,
            _ => Stored::As(dtype),
        }
    }

    /// What this rank holds of some values of a state.
    pub(crate) fn read<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        script: ScriptId,
        state: &State,
        range: &StateRange,
    ) -> Result<Vec<StatePiece>> {
        let mut pieces = Vec::new();
        for (held, placed) in self.within(state, range) {
            let count = placed.global.len();
            let mut read = |held: &HeldRange, at: usize| {
                let size = held.dtype.size();
                let mut bytes = vec![0; count * size];
                executor.read_at(script, held.buffer, at * size, &mut bytes).map(|()| bytes)
            };
            let (mut dtype, mut bytes) = (held.dtype, read(held, placed.at)?);
            if self.stored(range.kind, dtype) == Stored::Lower {
                let (weights, at) = self.upper(state, range, (held, &placed));
                (dtype, bytes) = (DType::F32, halves::join_bytes(&read(weights, at)?, &bytes));
            }
            pieces.push(StatePiece { first: placed.global.start, dtype, bytes });
        }
        Ok(pieces)
    }

    /// Stores this rank's part of new values of a state; the number of bytes fits the values.
    pub(crate) fn write<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        script: ScriptId,
        state: &State,
        range: &StateRange,
        bytes: &[u8],
    ) -> Result<()> {
        for (held, placed) in self.within(state, range) {
            let lower = self.stored(range.kind, held.dtype) == Stored::Lower;
            let size = if lower { DType::F32.size() } else { held.dtype.size() };
            let first = placed.global.start - range.elements.start;
            let own = &bytes[first * size..][..placed.global.len() * size];
            if !lower {
                executor.write_at(script, held.buffer, placed.at * size, own)?;
                continue;
            }
            let (weights, at) = self.upper(state, range, (held, &placed));
            let halves = halves::split_bytes(own);
            for (held, at, own) in [(weights, at, halves.0), (held, placed.at, halves.1)] {
                executor.write_at(script, held.buffer, at * held.dtype.size(), &own)?;
            }
        }
        Ok(())
    }

    /// Where the upper halves of some masters lie: weights are kept of at least as much as a rank updates.
    fn upper<'s>(
        &self,
        state: &'s State,
        range: &StateRange,
        (held, placed): (&HeldRange, &Placed),
    ) -> (&'s HeldRange, usize) {
        let (unit, _) =
            self.places[range.param].as_ref().expect("it holds a part of the parameter");
        let weights = &state.buffers[*unit].weights;
        let element = held.elements.start + placed.at - held.at;
        (weights, weights.at + element - weights.elements.start)
    }

    /// Where this rank holds some values of a state.
    fn within<'s>(&self, state: &'s State, range: &StateRange) -> Vec<(&'s HeldRange, Placed)> {
        let Some((unit, member)) = &self.places[range.param] else { return Vec::new() };
        let Some(held) = state.buffers[*unit].get(range.kind) else { return Vec::new() };
        let cut = |Placed { global, at }: Placed| {
            let start = global.start.max(range.elements.start);
            let end = global.end.min(range.elements.end);
            (start < end).then(|| Placed { global: start..end, at: at + start - global.start })
        };
        let placed = self.placed(member, held).into_iter().filter_map(cut);
        placed.map(|placed| (held, placed)).collect()
    }

    /// The elements of a member that a buffer holds: their indices in the whole parameter, and
    /// where in the buffer they lie.
    fn placed(&self, member: &Member, held: &HeldRange) -> Vec<Placed> {
        let placed = self.as_read(member, held);
        let param = &self.params[member.param];
        let Some(deal) = param.deal() else { return placed };
        let each = held.of.shape(&param.shape)[1..].iter().product();
        let own = |Placed { global, mut at }: Placed| {
            let placed = move |(start, len)| {
                at += len;
                Placed { global: start..start + len, at: at - len }
            };
            deal.runs(global, each).into_iter().map(placed)
        };
        placed.into_iter().flat_map(own).collect()
    }

    /// The same, by indices of the parameter as programs read it.
    fn as_read(&self, member: &Member, held: &HeldRange) -> Vec<Placed> {
        let (part, at) = held.part(member);
        if held.of != StateOf::Elements {
            return vec![Placed { global: part, at }];
        }
        let runs = self.runs[member.param].iter();
        runs.filter_map(|run| {
            let start = run.local.max(part.start);
            let end = (run.local + run.len).min(part.end);
            (start < end).then(|| {
                let global = run.global + (start - run.local);
                Placed { global: global..global + (end - start), at: at + start - part.start }
            })
        })
        .collect()
    }
}

/// Lets the engine draw values where a buffer holds them; `false` if it does not.
fn draws<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    (held, stored): (&HeldRange, Stored),
    placed: &[Placed],
    draw: Draw,
) -> Result<bool> {
    for Placed { global, at } in placed {
        let (place, values) = ((held.buffer, at * held.dtype.size()), (stored, global.len()));
        if !executor.draw_at(script, place, values, (draw, global.start as u64))? {
            return Ok(false);
        }
    }
    Ok(true)
}

struct Placed {
    global: Range<usize>,
    at: usize,
}

/// Assembles values from the parts that ranks hold. Every value must be present.
pub(crate) fn assemble(
    name: &str,
    elements: &Range<usize>,
    pieces: impl Iterator<Item = StatePiece>,
) -> Result<(DType, Vec<u8>)> {
    let mut found: Option<(DType, Vec<u8>)> = None;
    let mut there = Vec::new();
    for StatePiece { first, dtype, bytes } in pieces {
        let size = dtype.size();
        let (_, whole) = found.get_or_insert_with(|| (dtype, vec![0; elements.len() * size]));
        whole[(first - elements.start) * size..][..bytes.len()].copy_from_slice(&bytes);
        there.push(first..first + bytes.len() / size);
    }
    let lost = |missing: usize| {
        Error::failed(Problem::new(format!(
            "no rank holds element {missing} of parameter `{name}`"
        )))
    };
    match (found, uncovered(elements, there)) {
        (Some(found), None) => Ok(found),
        (_, missing) => Err(lost(missing.unwrap_or(elements.start))),
    }
}

/// The first element that is in none of these ranges. Ranges may overlap, because ranks hold
/// copies.
fn uncovered(elements: &Range<usize>, mut there: Vec<Range<usize>>) -> Option<usize> {
    there.sort_by_key(|range| range.start);
    let mut next = elements.start;
    for range in there {
        if range.start > next {
            break;
        }
        next = next.max(range.end);
    }
    (next < elements.end).then_some(next)
}

fn read_checked(
    (source, replica): (&dyn StateSource, usize),
    param: &Param,
    kind: StateKind,
    ranges: &[Range<usize>],
    dtype: DType,
) -> Result<Option<Vec<u8>>> {
    let expected = count(ranges);
    let Some(values) = source.read((param, replica), kind, ranges, dtype)? else { return Ok(None) };
    if values.len() == expected * dtype.size() {
        return Ok(Some(values));
    }
    Err(Error::refused(Problem::new(format!(
        "`{kind}` of parameter `{}` of shape {:?} has {} values, and not {expected}",
        param.name,
        param.shape,
        values.len() / dtype.size(),
    ))))
}

fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

fn whole(param: &Param) -> TensorType {
    TensorType::new(DType::F32, param.shape.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(elements: Range<usize>) -> StatePiece {
        let bytes = elements.clone().flat_map(|i| (i as f32).to_ne_bytes()).collect();
        StatePiece { first: elements.start, dtype: DType::F32, bytes }
    }

    #[test]
    fn pieces_in_any_order_and_twice_are_put_together() {
        let pieces = [piece(6..9), piece(3..5), piece(4..7), piece(3..5)];
        let (dtype, bytes) = assemble("w", &(3..9), pieces.into_iter()).unwrap();
        assert_eq!((dtype, bytes), (DType::F32, piece(3..9).bytes));
    }

    #[test]
    fn the_first_element_that_nobody_holds_is_named() {
        for (pieces, missing) in [
            (vec![], 3),
            (vec![piece(4..9)], 3),
            (vec![piece(3..5), piece(6..9)], 5),
            (vec![piece(6..8), piece(3..6), piece(4..5)], 8),
        ] {
            let error = assemble("w", &(3..9), pieces.into_iter()).unwrap_err().to_string();
            assert!(error.contains(&format!("element {missing} of parameter `w`")), "{error}");
        }
    }
}
