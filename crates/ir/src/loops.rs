//! A matrix product as loops over strided memory: which letters become one index, and which indices
//! an engine's library of products gets.

use crate::ops::Spec;

/// Consecutive letters that are merged into one index in every tensor that has them: its extent,
/// and its stride in a, b and the result (0 where absent).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedLoop {
    /// How many steps it takes: for inner letters, over valid elements alone.
    pub size: usize,
    /// The extent of the letters, padding included.
    pub extent: usize,
    /// In a, b and the result.
    pub strides: [usize; 3],
}

/// The loops of a product: one row, column and inner index for the library, the rest around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductLoops {
    /// Over rows of the result.
    pub rows: StridedLoop,
    /// Over its columns.
    pub cols: StridedLoop,
    /// Over what is summed.
    pub inner: StridedLoop,
    /// Loops over batches, and over rows and columns that could not be merged.
    pub outer: Vec<StridedLoop>,
    /// Loops over inner letters that could not be merged: products that add up.
    pub sums: Vec<StridedLoop>,
}

impl StridedLoop {
    /// A loop of one step.
    pub const NONE: Self = Self { size: 1, extent: 1, strides: [0, 0, 0] };
}

impl ProductLoops {
    /// The loops of a product of row-major tensors: of a, b and the result, with the valid extents of
    /// a.
    pub fn new(spec: &Spec, shapes: [&[usize]; 3], valid: &[usize]) -> Self {
        let (letters, extents) = (spec.letters(), spec.extents());
        let axis = |letter: char| {
            let mut axis = StridedLoop::NONE;
            for (tensor, (names, shape)) in letters.iter().zip(shapes).enumerate() {
                if let Some(dim) = names.find(letter) {
                    axis.extent = shape[dim];
                    axis.strides[tensor] = shape[dim + 1..].iter().product();
                }
            }
            // Sums use only valid elements; other results may be computed from padding.
            axis.size = match letters[0].find(letter) {
                Some(dim) if extents.inner.contains(&letter) => valid[dim],
                _ => axis.extent,
            };
            axis
        };
        let merged = |group: &[char]| merge(group.iter().map(|&c| axis(c)));
        let mut outer = merged(&extents.batch);
        let one = |group: &[char], rest: &mut Vec<StridedLoop>| {
            let mut axes = merged(group);
            let largest = (0..axes.len()).max_by_key(|&i| axes[i].size);
            let chosen = largest.map_or(StridedLoop::NONE, |i| axes.remove(i));
            rest.extend(axes);
            chosen
        };
        let rows = one(&extents.rows, &mut outer);
        let cols = one(&extents.cols, &mut outer);
        let mut sums = Vec::new();
        let inner = one(&extents.inner, &mut sums);
        Self { rows, cols, inner, outer, sums }
    }

    /// Whether it is one product of two matrices, of which something is summed.
    pub fn is_plain(&self) -> bool {
        self.outer.is_empty() && self.sums.is_empty() && self.inner.size > 0
    }
}

/// Merges neighbouring axes where one index can cover both in every tensor.
fn merge(axes: impl Iterator<Item = StridedLoop>) -> Vec<StridedLoop> {
    let mut out: Vec<StridedLoop> = Vec::new();
    for axis in axes {
        match out.last_mut() {
            // The valid elements of the minor one would not be evenly spaced.
            Some(last)
                if axis.size == axis.extent
                    && ((0..3).all(|t| last.strides[t] == axis.strides[t] * axis.extent)
                        || axis.extent == 1) =>
            {
                if axis.extent > 1 {
                    *last = StridedLoop {
                        size: last.size * axis.size,
                        extent: last.extent * axis.extent,
                        strides: axis.strides,
                    };
                }
            }
            Some(last) if last.extent == 1 && last.size == 1 => *last = axis,
            _ => out.push(axis),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_letters_become_one_loop() {
        let spec: Spec = "bsd,de->bse".parse().unwrap();
        let loops = ProductLoops::new(&spec, [&[2, 3, 4], &[4, 5], &[2, 3, 5]], &[2, 3, 4]);
        let row = StridedLoop { size: 6, extent: 6, strides: [4, 0, 5] };
        assert_eq!(loops.rows, row);
        assert!(loops.is_plain());
        // Batches go around the matrices, and padding is not summed.
        let spec: Spec = "bshd,bthd->bhst".parse().unwrap();
        let shapes: [&[usize]; 3] = [&[2, 3, 4, 6], &[2, 5, 4, 6], &[2, 4, 3, 5]];
        let loops = ProductLoops::new(&spec, shapes, &[2, 3, 4, 5]);
        assert_eq!(loops.outer.len(), 2);
        assert_eq!((loops.inner.size, loops.inner.extent), (5, 6));
        assert!(!loops.is_plain());
    }
}
