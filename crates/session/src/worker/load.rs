//! How many tokens chose which expert, counted from what a step exposes.
//!
//! A rank counts its part of the tokens. Where several ranks hold the same counts, the first of them
//! counts; where each holds a summand, all do. So the sum over ranks is the count of the batch.

use std::collections::BTreeMap;

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_ir::{DType, ElementRun, Mesh, TensorType};
use phalanx_models::port;
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{BufferId, BufferKey, Source, Value};

use crate::command::StatePiece;

/// What a rank has counted in its last step.
#[derive(Default)]
pub(super) struct LoadCounter {
    /// Where the counts of a script lie, once it has run.
    places: Vec<(ScriptId, Vec<Place>)>,
    /// By instance, choices and then places: a count for each expert.
    counts: BTreeMap<(usize, bool), Vec<f64>>,
    bytes: Vec<u8>,
}

/// Counts of one micro-batch of an instance.
struct Place {
    buffer: BufferId,
    /// The instance, and whether these are the tokens that found a place.
    of: (usize, bool),
    dtype: DType,
    bytes: usize,
    experts: usize,
    runs: Vec<ElementRun>,
}

impl LoadCounter {
    /// Counts the step that a script has just run.
    pub(super) fn count<E: Engine>(
        &mut self,
        executor: &mut Executor<E>,
        script: ScriptId,
        at: &(Mesh, usize),
    ) -> Result<()> {
        let known = self.places.iter().position(|(own, _)| *own == script);
        let known = known.unwrap_or_else(|| {
            self.places.push((script, found(executor, script, at)));
            self.places.len() - 1
        });
        self.counts.values_mut().for_each(|counts| counts.fill(0.0));
        for place in &self.places[known].1 {
            self.bytes.resize(place.bytes, 0);
            executor.read(script, place.buffer, &mut self.bytes)?;
            let counts = self.counts.entry(place.of).or_insert_with(|| vec![0.0; place.experts]);
            for run in &place.runs {
                for i in 0..run.len {
                    let expert = (run.global + i) % place.experts;
                    counts[expert] += number(place.dtype, &self.bytes, run.local + i);
                }
            }
        }
        Ok(())
    }

    /// The counts; the number of a piece is twice the instance's, one more for found places.
    pub(super) fn pieces(&self) -> Vec<StatePiece> {
        let piece = |(&(instance, placed), counts): (&(usize, bool), &Vec<f64>)| StatePiece {
            first: 2 * instance + usize::from(placed),
            dtype: DType::F64,
            bytes: counts.iter().flat_map(|count| count.to_ne_bytes()).collect(),
        };
        self.counts.iter().map(piece).collect()
    }
}

/// The counts that a script exposes and this rank counts.
fn found<E: Engine>(
    executor: &Executor<E>,
    script: ScriptId,
    (mesh, rank): &(Mesh, usize),
) -> Vec<Place> {
    let script = executor.script(script);
    let place = |(index, buffer): (usize, &phalanx_script::Buffer)| {
        let BufferKey::Value(Value { instance, port, again: false, .. }) = &buffer.key else {
            return None;
        };
        let placed = match &**port {
            port::CHOSEN => false,
            port::PLACED => true,
            _ => return None,
        };
        let ty = script.written_type(BufferId(index))?;
        (buffer.source == Source::Result && counts(ty, mesh, *rank)).then(|| Place {
            buffer: BufferId(index),
            of: (*instance, placed),
            dtype: ty.dtype,
            bytes: buffer.bytes,
            experts: ty.shape.last().copied().unwrap_or(1),
            runs: ty.local_runs(mesh, *rank),
        })
    };
    script.buffers.iter().enumerate().filter_map(place).collect()
}

/// Whether a rank is the first of those that hold the same counts.
fn counts(ty: &TensorType, mesh: &Mesh, rank: usize) -> bool {
    let sharded = |axis| ty.layout.dims().iter().any(|dim| dim.axes.contains(&axis));
    let own = |axis| sharded(axis) || ty.layout.partial().contains(&axis);
    mesh.axes().all(|(axis, _)| own(axis) || mesh.coordinate(rank, axis) == 0)
}

/// A number of these bytes, in one of the types that counts have.
fn number(dtype: DType, bytes: &[u8], index: usize) -> f64 {
    let own = &bytes[index * dtype.size()..][..dtype.size()];
    match *own {
        [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => panic!("counts of experts are f32 or f64, not {dtype}"),
    }
}
