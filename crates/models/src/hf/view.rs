//! Reads ranges of a parameter from the tensor that holds it: whole, as a part, or transposed.
//!
//! If the parameter is the whole tensor, a range is one contiguous part of the file; if it is a
//! part of the tensor, there is one contiguous part per row. If it is stored transposed, our rows
//! are columns of the file: then the smallest rectangle around all ranges is read, a few rows at a
//! time. A rank's part of a parameter is a rectangle that may begin and end inside a row, so at
//! most two extra rows are read. Besides the result, only one small buffer is used.

use std::ops::Range;

use phalanx_ir::DType;

use super::error::HfError;
use super::file::TensorFile;
use super::names::Storage;
use super::tensor::{Stored, WeightTensor, decode};

/// Bytes that are read at a time if they must be moved or converted; a longer row of a transposed
/// tensor is read whole.
const BUFFER: usize = 1 << 18;

/// A parameter in a file.
pub(super) struct View<'a> {
    pub(super) file: &'a TensorFile,
    /// The name of the tensor that holds it.
    pub(super) tensor: &'a str,
    pub(super) storage: Storage,
    /// The parameter's own shape.
    pub(super) shape: &'a [usize],
}

impl View<'_> {
    /// The values of all ranges, one after the other, as native-endian bytes of a float type.
    pub(super) fn read(&self, ranges: &[Range<usize>], dtype: DType) -> Result<Vec<u8>, HfError> {
        let elements: usize = self.shape.iter().product();
        if let Some(beyond) = ranges.iter().find(|range| range.end > elements) {
            let found = format!("shape {:?}", self.shape);
            let expected = format!("elements {beyond:?}");
            return Err(HfError::tensor(&self.file.path, self.tensor, found, expected));
        }
        let stored = self.file.stored(self.tensor)?;
        let (Storage::Whole | Storage::Part { .. }) = self.storage else {
            return self.turned(ranges, stored, dtype);
        };
        let mut out = Vec::with_capacity(count(ranges) * dtype.size());
        for range in ranges {
            let mut from = range.start;
            while from < range.end {
                let (at, room) = self.stretch(from);
                let len = room.min(range.end - from);
                self.append(at, len, stored, dtype, &mut out)?;
                from += len;
            }
        }
        Ok(out)
    }

    /// The position of an element in the tensor, and the length of the contiguous run that starts
    /// there.
    fn stretch(&self, element: usize) -> (usize, usize) {
        match self.storage {
            Storage::Part { part, of } => {
                let share = self.shape.last().copied().unwrap_or(1);
                let (row, col) = (element / share, element % share);
                ((row * of + part) * share + col, share - col)
            }
            Storage::Whole | Storage::Transposed | Storage::Matrix { .. } => (element, usize::MAX),
        }
    }

    /// Appends a contiguous part of the tensor.
    fn append(
        &self,
        at: usize,
        len: usize,
        stored: Stored,
        dtype: DType,
        out: &mut Vec<u8>,
    ) -> Result<(), HfError> {
        let size = stored.size();
        if is_native(stored, dtype) {
            let start = out.len();
            out.resize(start + len * size, 0);
            return self.file.read_at(self.tensor, at * size, &mut out[start..]);
        }
        let mut room = vec![0; len.min(BUFFER / size) * size];
        for from in (0..len).step_by(BUFFER / size) {
            let room = &mut room[..(len - from).min(BUFFER / size) * size];
            self.file.read_at(self.tensor, (at + from) * size, room)?;
            convert(room, stored, dtype, out);
        }
        Ok(())
    }

    /// The same for a matrix that is stored transposed.
    fn turned(
        &self,
        ranges: &[Range<usize>],
        stored: Stored,
        dtype: DType,
    ) -> Result<Vec<u8>, HfError> {
        let (height, width) = (self.shape[0], self.shape[1]);
        let pieces = pieces(ranges, width);
        let mut out = vec![0; count(ranges) * dtype.size()];
        let Some((rows, cols)) = rectangle(&pieces) else { return Ok(out) };
        let size = stored.size();
        let band = (BUFFER / (rows.len() * size)).max(1);
        let mut room = vec![0; band.min(cols.len()) * rows.len() * size];
        let mut values = Vec::new();
        for first in cols.clone().step_by(band) {
            let band = first..cols.end.min(first + band);
            let room = &mut room[..band.len() * rows.len() * size];
            if rows.len() == height {
                self.file.read_at(self.tensor, first * height * size, room)?;
            } else {
                for (col, room) in band.clone().zip(room.chunks_exact_mut(rows.len() * size)) {
                    self.file.read_at(self.tensor, (col * height + rows.start) * size, room)?;
                }
            }
            values.clear();
            convert(room, stored, dtype, &mut values);
            for Piece { row, cols, at } in &pieces {
                let own = cols.start.max(band.start)..cols.end.min(band.end);
                if own.is_empty() {
                    continue;
                }
                let to = (at + own.start - cols.start) * dtype.size();
                let to = &mut out[to..][..own.len() * dtype.size()];
                let from = (own.start - band.start) * rows.len() + row - rows.start;
                gather(dtype.size(), &values, from, rows.len(), to);
            }
        }
        Ok(out)
    }
}

/// Elements of one row, and where the first goes.
struct Piece {
    row: usize,
    cols: Range<usize>,
    at: usize,
}

/// Ranges of a matrix, cut where rows end.
fn pieces(ranges: &[Range<usize>], width: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for range in ranges {
        let mut from = range.start;
        while from < range.end {
            let (row, col) = (from / width, from % width);
            let len = (width - col).min(range.end - from);
            pieces.push(Piece { row, cols: col..col + len, at });
            (from, at) = (from + len, at + len);
        }
    }
    pieces
}

/// The rows and columns around all pieces.
fn rectangle(pieces: &[Piece]) -> Option<(Range<usize>, Range<usize>)> {
    let rows = pieces.iter().map(|p| p.row).min()?..pieces.iter().map(|p| p.row).max()? + 1;
    let cols =
        pieces.iter().map(|p| p.cols.start).min()?..pieces.iter().map(|p| p.cols.end).max()?;
    Some((rows, cols))
}

/// Fills `out` with every `step`-th element of `values`, starting at `from`; elements have `size`
/// bytes.
///
/// # Panics
/// If there are fewer, or if no float has that size.
pub(super) fn gather(size: usize, values: &[u8], from: usize, step: usize, out: &mut [u8]) {
    fn of<const N: usize>(values: &[u8], from: usize, step: usize, out: &mut [u8]) {
        let values = &values.as_chunks::<N>().0[from..];
        for (at, place) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
            *place = values[at * step];
        }
    }
    match size {
        2 => of::<2>(values, from, step, out),
        4 => of::<4>(values, from, step, out),
        8 => of::<8>(values, from, step, out),
        other => panic!("no float has {other} bytes"),
    }
}

fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Whether the stored bytes can be used in memory without conversion.
fn is_native(stored: Stored, dtype: DType) -> bool {
    stored.dtype() == dtype && cfg!(target_endian = "little")
}

fn convert(bytes: &[u8], stored: Stored, dtype: DType, out: &mut Vec<u8>) {
    if is_native(stored, dtype) {
        return out.extend_from_slice(bytes);
    }
    let values = WeightTensor { shape: Vec::new(), values: decode(stored, bytes) };
    out.extend(values.to_bytes(0..values.len(), dtype).expect("all values are there"));
}
