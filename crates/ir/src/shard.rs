//! Which elements of a value a rank holds: from the layout alone, in contiguous runs.

use crate::layout::{LocalPart, Order};
use crate::mesh::Mesh;
use crate::types::TensorType;

/// Elements that lie together both in a rank's part of a value and in the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ElementRun {
    /// The index of the first one in the part, padding included.
    pub local: usize,
    /// Its index in the whole value, without padding.
    pub global: usize,
    /// How many there are.
    pub len: usize,
}

impl TensorType {
    /// The elements that a rank holds, padding left out, in the order of its memory. The layout
    /// must fit the type ([`TensorType::check`]).
    pub fn local_runs(&self, mesh: &Mesh, rank: usize) -> Vec<ElementRun> {
        let shape = self.local_shape(mesh);
        let valid = self.local_valid(mesh, rank);
        // Trailing dims that the rank holds whole are merged into one.
        let whole = |dim: usize| shape[dim] == self.shape[dim] && valid[dim] == self.shape[dim];
        let mut inner = self.shape.len();
        while inner > 0 && whole(inner - 1) {
            inner -= 1;
        }
        let width: usize = self.shape[inner..].iter().product();
        let Some(last) = inner.checked_sub(1) else {
            return vec![ElementRun { local: 0, global: 0, len: width }];
        };
        let mut runs = Vec::new();
        let mut index = vec![0; last];
        if valid[..last].contains(&0) {
            return runs;
        }
        loop {
            let position = |dims: &[usize], at: &[usize]| {
                at.iter().zip(dims).fold(0, |sum, (i, n)| sum * n + i)
            };
            let above: Vec<usize> =
                (0..last).map(|dim| self.global_index(mesh, rank, dim, index[dim])).collect();
            let local = position(&shape[..last], &index) * shape[last];
            let global = position(&self.shape[..last], &above) * self.shape[last];
            self.push_row(mesh, rank, last, [local, global, valid[last], width], &mut runs);
            let Some(dim) = (0..last).rev().find(|&d| index[d] + 1 < valid[d]) else { break };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
        runs
    }

    /// The global index of an element along one dim of a rank's part.
    pub fn global_index(&self, mesh: &Mesh, rank: usize, dim: usize, local: usize) -> usize {
        let LocalPart { order, shard, shards, extent } = self.part(dim, mesh, rank);
        order.global(local, shard, shards, extent)
    }

    /// The runs along one dim, from the start of its rows in part and whole.
    fn push_row(
        &self,
        mesh: &Mesh,
        rank: usize,
        dim: usize,
        [local, global, valid, width]: [usize; 4],
        runs: &mut Vec<ElementRun>,
    ) {
        let run = |from: usize, len: usize| ElementRun {
            local: (local + from) * width,
            global: (global + self.global_index(mesh, rank, dim, from)) * width,
            len: len * width,
        };
        match self.layout.dims()[dim].order {
            Order::Block if valid > 0 => runs.push(run(0, valid)),
            Order::Block => {}
            _ => runs.extend((0..valid).map(|i| run(i, 1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each element of the whole is held by as many ranks as replicate it, and where the layout's
    /// definition says.
    #[test]
    fn runs_cover_the_whole() {
        let mesh: Mesh = "a=2 b=3 c=2".parse().unwrap();
        for (text, copies) in [
            ("f32[4,6]{0:a 1:b}", 2),
            ("f32[4,6]{1:c,b}", 2),
            ("f32[5~6,7]{0:b}", 4),
            ("f32[2,7~12,3]{1:a,b}", 2),
            ("f32[8,5]{0:c@striped}", 6),
            ("f32[8]{0:c@zigzag}", 6),
            ("f32[3,8~12,2]{1:b,c@zigzag}", 2),
            ("f32[1~2,3]{0:a}", 6),
            ("f32[]", 12),
            ("f32[4,6]", 12),
        ] {
            let ty = TensorType::parse(text, &mesh).unwrap();
            ty.check(&mesh).unwrap();
            let mut count = vec![0; ty.elements()];
            for rank in 0..mesh.ranks() {
                let size: usize = ty.local_shape(&mesh).iter().product();
                let mut end = 0;
                for run in ty.local_runs(&mesh, rank) {
                    assert!(run.local >= end && run.len > 0, "{text}: {run:?}");
                    end = run.local + run.len;
                    (run.global..run.global + run.len).for_each(|i| count[i] += 1);
                }
                assert!(end <= size, "{text}");
            }
            assert!(count.iter().all(|&n| n == copies), "{text}: {count:?}");
        }
    }

    #[test]
    fn a_shard_of_columns_is_one_run_per_row() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let ty = TensorType::parse("f32[2,6]{1:tp}", &mesh).unwrap();
        let run = |local, global| ElementRun { local, global, len: 3 };
        assert_eq!(ty.local_runs(&mesh, 1), [run(0, 3), run(3, 9)]);
        // A rank may hold nothing but padding.
        let ty = TensorType::parse("f32[1~2,6]{0:tp}", &mesh).unwrap();
        assert_eq!(ty.local_runs(&mesh, 1), []);
    }
}
