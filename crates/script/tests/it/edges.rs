//! Edges between random layouts on random meshes, carried out on tensors of numbers.

use std::collections::BTreeMap;

use phalanx_ir::layout::Sharding;
use phalanx_ir::{Axis, DType, Layout, Mesh, Order, TensorType};
use phalanx_script::edge;
use phalanx_script::edge::bytes;
use phalanx_testing::cases::Dice;
use phalanx_testing::layouts::random_mesh;

/// What a block holds where nobody has written.
const NOTHING: i64 = -1;

#[test]
fn every_receiver_gets_its_block_exactly_once() {
    for seed in 0..4000 {
        let mut dice = Dice::new(seed);
        let shape: Vec<usize> = (0..1 + dice.below(3)).map(|_| 1 + dice.below(7)).collect();
        let (a, b) = (End::random(&shape, &mut dice), End::random(&shape, &mut dice));
        let what = format!("{seed}: {} on {}, {} on {}", a.ty, a.mesh, b.ty, b.mesh);
        let pieces = edge(&a.ty, &a.mesh, &a.ranks, &b.ty, &b.mesh, &b.ranks).unwrap();
        let (sent, expected) = (a.blocks(), b.blocks());
        let size: usize = b.ty.local_shape(&b.mesh).iter().product();
        let mut got: BTreeMap<usize, Vec<i64>> =
            b.ranks.iter().map(|&rank| (rank, vec![NOTHING; size])).collect();
        for piece in &pieces {
            let (source, target) = (&sent[&piece.from], got.get_mut(&piece.to).unwrap());
            let whole = piece.stretches.len() == 1 && piece.stretches[0].len == size;
            for stretch in &piece.stretches {
                for i in 0..stretch.len {
                    let (from, to) = (source[stretch.source + i], &mut target[stretch.target + i]);
                    assert_eq!(*to, NOTHING, "written twice, {what}");
                    assert!(whole || from != NOTHING, "padding sent, {what}");
                    *to = from;
                }
            }
        }
        // Padding that came along in a whole block is nothing too.
        assert_eq!(got, expected, "{what}");
        let mut ways: Vec<(usize, usize)> = pieces.iter().map(|p| (p.from, p.to)).collect();
        ways.sort_unstable();
        ways.dedup();
        assert_eq!(ways.len(), pieces.len(), "two messages of one pair, {what}");
        let moved = pieces.iter().filter(|p| p.from != p.to).flat_map(|p| &p.stretches);
        assert_eq!(bytes(&pieces, DType::F64), moved.map(|stretch| stretch.len * 8).sum::<usize>());
    }
}

/// Where each element has r holders and is wanted w times, nobody sends it more than its share,
/// rounded up.
#[test]
fn replicas_of_whole_blocks_are_evenly_busy() {
    for (holders, wanted) in (1..=8).flat_map(|h| (1..=8).map(move |w| (h, w))) {
        let ty = TensorType::new(DType::F32, [6]);
        let [mesh_a, mesh_b] = [holders, wanted].map(|n| Mesh::new([("tp", n)]).unwrap());
        let (from, to): (Vec<usize>, Vec<usize>) =
            ((0..holders).collect(), (holders..holders + wanted).collect());
        let pieces = edge(&ty, &mesh_a, &from, &ty, &mesh_b, &to).unwrap();
        let most = from.iter().map(|&rank| pieces.iter().filter(|p| p.from == rank).count()).max();
        assert_eq!(most, Some(wanted.div_ceil(holders)), "{holders} to {wanted}");
    }
}

/// One end: a type, its mesh, and which ranks of the world are in it.
struct End {
    ty: TensorType,
    mesh: Mesh,
    ranks: Vec<usize>,
}

impl End {
    fn random(shape: &[usize], dice: &mut Dice) -> Self {
        let mesh = random_mesh(dice);
        let mut axes: Vec<Axis> = mesh.axes().map(|(axis, _)| axis).collect();
        axes.sort_by_key(|_| dice.below(1000));
        let mut dims = vec![Sharding::default(); shape.len()];
        for axis in axes {
            if dice.percent(75) {
                dims[dice.below(shape.len())].axes.push(axis);
            }
        }
        let mut padded = Vec::new();
        for (dim, &size) in dims.iter_mut().zip(shape) {
            if !dim.axes.is_empty() && dice.percent(30) {
                dim.order = dice.pick(&[Order::Striped, Order::Zigzag]);
            }
            let twice = if dim.order == Order::Zigzag { 2 } else { 1 };
            let blocks = mesh.count(&dim.axes) * twice;
            let more = if dice.percent(20) { blocks } else { 0 };
            padded.push(size.next_multiple_of(blocks) + more);
        }
        let layout = Layout::new(dims, [].into()).unwrap();
        let ty = TensorType::new(DType::F64, shape).with_layout(layout);
        // Some worlds are so small that the ends share ranks.
        let world = mesh.ranks() + dice.below(12);
        let mut all: Vec<usize> = (0..world).collect();
        all.sort_by_key(|_| dice.below(1000));
        all.truncate(mesh.ranks());
        Self { ty: ty.with_padded(padded).unwrap(), mesh, ranks: all }
    }

    /// What every rank holds of the tensor whose elements are their own numbers.
    fn blocks(&self) -> BTreeMap<usize, Vec<i64>> {
        let size: usize = self.ty.local_shape(&self.mesh).iter().product();
        let block = |(position, &rank): (usize, &usize)| {
            let mut held = vec![NOTHING; size];
            for run in self.ty.local_runs(&self.mesh, position) {
                for i in 0..run.len {
                    held[run.local + i] = (run.global + i) as i64;
                }
            }
            (rank, held)
        };
        self.ranks.iter().enumerate().map(block).collect()
    }
}
