//! Kinds of distances between a query and a key (Raffel et al., 2020), and the bias of scores by them.
//!
//! Near distances are kinds of their own; farther ones share one, the more the farther they are, evenly in
//! their logarithm.

use phalanx_ir::{DType, IrError, Tensor};

use crate::check::Check;

/// How distances are divided into kinds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distances {
    pub(crate) buckets: usize,
    /// From this distance on, all are alike.
    pub(crate) far: usize,
    /// Whether a query sees keys behind it, which have half of the kinds. Otherwise it does not see them at all.
    pub(crate) both_ways: bool,
}

impl Distances {
    /// Both halves have near kinds, and the farthest is beyond them.
    pub(crate) fn check(check: &Check, buckets: usize, far: usize) -> Result<(), IrError> {
        check.that(buckets >= 4 && buckets.is_multiple_of(4), || {
            let near = buckets.next_multiple_of(4).max(4);
            format!("buckets = {buckets}: it must be a multiple of 4; nearest that works: {near}")
        })?;
        check.that(far > buckets / 2, || {
            format!(
                "far = {far} is among the {} distances that have a kind of their own; nearest that works: {}",
                buckets / 2,
                buckets / 2 + 1
            )
        })
    }

    /// The bias of each head's scores, `[heads, length, length]`, from `[buckets, heads]`.
    ///
    /// A ring of 2·length numbers has one for each distance, from 0 up, then from the most negative to −1. Written
    /// down again and again, and cut into lines that are one number shorter than the ring, it begins one place
    /// earlier in each line: line i is what query i adds to the scores of keys 0, 1, ….
    pub(crate) fn bias<'b>(self, table: Tensor<'b>, length: usize) -> Tensor<'b> {
        let (heads, around) = (table.shape()[1], 2 * length);
        let ring = self.ring(table, length).transpose(&[1, 0]);
        let again = ring.broadcast([heads, length, around], &[1]);
        let flat = again.reshape([heads, length * around]).slice(1, 0, length * (around - 1));
        flat.reshape([heads, length, around - 1]).slice(2, 0, length)
    }

    /// For each place of the ring: the table's row of its kind, or what hides a key.
    fn ring<'b>(self, table: Tensor<'b>, length: usize) -> Tensor<'b> {
        let (b, heads) = (table.builder(), table.shape()[1]);
        let kind = |place: usize| match place {
            near if near < length => self.kind(near as isize),
            other => self.kind(other as isize - 2 * length as isize),
        };
        let mut parts = Vec::new();
        let mut place = 0;
        while place < 2 * length {
            let own = kind(place);
            let same = (place..2 * length).take_while(|&next| kind(next) == own).count();
            parts.push(match own {
                Some(row) => table.slice(0, row, 1).reshape([heads]).broadcast([same, heads], &[0]),
                None => b.constant(table.dtype(), [same, heads], hidden(table.dtype())),
            });
            place += same;
        }
        b.concat(&parts, 0)
    }

    /// The kind of a distance, key minus query; none if the key is hidden.
    fn kind(self, distance: isize) -> Option<usize> {
        let (kinds, first) = match (self.both_ways, distance > 0) {
            (false, true) => return None,
            (false, false) => (self.buckets, 0),
            (true, behind) => (self.buckets / 2, if behind { self.buckets / 2 } else { 0 }),
        };
        let (steps, near) = (distance.unsigned_abs(), kinds / 2);
        if steps < near {
            return Some(first + steps);
        }
        let times_near = |steps: usize| (steps as f64 / near as f64).ln();
        let beyond = times_near(steps) / times_near(self.far) * (kinds - near) as f64;
        // What is a whole number is one whatever logarithms are rounded to.
        Some(first + (near + (beyond + 1e-9) as usize).min(kinds - 1))
    }
}

/// A score that is zero after a softmax, in a type that may have a small range.
fn hidden(dtype: DType) -> f64 {
    if dtype == DType::F16 { -6e4 } else { -1e30 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `transformers` computes, over thousands of distances (`tools/oracle/t5.py`).
    #[test]
    fn kinds_of_distances_are_those_of_transformers() {
        let own = std::env::var_os("CARGO_MANIFEST_DIR");
        let own = own.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let file = std::path::Path::new(&own).join("../../tests/fixtures/t5_kinds.json");
        let text = std::fs::read_to_string(file).expect("it is part of the source");
        let rows: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let number = |value: &serde_json::Value| value.as_i64().expect("it is a number") as isize;
        let rows = rows.as_array().expect("it is a list");
        assert_eq!(rows.len(), 10);
        for row in rows {
            let [buckets, far] = ["buckets", "far"].map(|key| number(&row[key]) as usize);
            let both_ways = row["both_ways"] == true;
            let runs: Vec<[isize; 2]> = (row["runs"].as_array().expect("it is a list").iter())
                .map(|run| [number(&run[0]), number(&run[1])])
                .collect();
            let ends = runs.iter().skip(1).map(|run| run[0]).chain([3001]);
            for (&[first, kind], end) in runs.iter().zip(ends) {
                for distance in first..end {
                    // Later keys are hidden from a query that sees one way.
                    let seen = both_ways || distance <= 0;
                    let found = Distances { buckets, far, both_ways }.kind(distance);
                    assert_eq!(found, seen.then_some(kind as usize), "{row}: {distance}");
                }
            }
        }
    }

    /// By hand from the paper's rule, for 32 kinds up to 128 both ways: 8 near ones, then ⌊8 + 8·log₁₆(d/8)⌋.
    #[test]
    fn kinds_of_distances_are_the_published_ones() {
        let both = Distances { buckets: 32, far: 128, both_ways: true };
        for (distance, kind) in [
            (0, 0),
            (-1, 1),
            (-7, 7),
            (-8, 8),
            (-11, 8),
            (-12, 9),
            (-15, 9),
            (-16, 10),
            (-31, 11),
            (-32, 12),
            (-64, 14),
            (-90, 14),
            (-91, 15),
            (-1000, 15),
            (1, 17),
            (7, 23),
            (8, 24),
            (127, 31),
        ] {
            assert_eq!(both.kind(distance), Some(kind), "{distance}");
        }
        let back = Distances { both_ways: false, ..both };
        for (distance, kind) in [(-1, 1), (-15, 15), (-16, 16), (-31, 21), (-113, 31), (-500, 31)] {
            assert_eq!(back.kind(distance), Some(kind), "{distance}");
        }
        assert_eq!(back.kind(1), None);
    }
}
