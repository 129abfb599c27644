//! Rows that ranks need from their neighbours, where a dim that windows lie over is sharded.
//!
//! A rank that holds a block of an image's height computes the same block of the outputs. The windows at
//! its edges reach into the blocks before and after its own, so each rank first gets a few rows from both
//! neighbours: the halo. How many follows from the window alone ([`crate::OpDef::reaches`]), between whom
//! from the layout. Height comes before width, with the rows that came along: so corners come too.

use crate::dtype::DType;
use crate::mesh::{Axis, Mesh};
use crate::ops::OpDef;
use crate::program::{Instr, Program};

/// How far an instruction reads beyond a rank's block of an operand's dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach {
    /// The operand.
    pub operand: usize,
    /// Its dim.
    pub dim: usize,
    /// Elements before the block.
    pub before: usize,
    /// Elements after it.
    pub after: usize,
}

/// One dim of an operand, of which ranks get elements from their neighbours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Halo {
    /// What is read beyond the block.
    pub reach: Reach,
    /// The axes that shard the dim, major to minor.
    pub axes: Vec<Axis>,
    /// The operand's local shape, with what comes from neighbours along all dims.
    pub extended: Vec<usize>,
    /// The part of it that is sent and received along this dim is this large along every other dim.
    pub slab: Vec<usize>,
    /// The element type.
    pub dtype: DType,
}

impl Halo {
    /// What an instruction exchanges with neighbours, in order.
    pub fn of(program: &Program, instr: &Instr) -> Vec<Self> {
        let mesh = program.mesh();
        let cut = |reach: &Reach| {
            let ty = program.ty(instr.inputs[reach.operand]);
            reach.before + reach.after > 0 && mesh.count(ty.layout.axes(reach.dim)) > 1
        };
        let reaches: Vec<Reach> = instr.op.reaches().into_iter().filter(cut).collect();
        let halo = |(number, &reach): (usize, &Reach)| {
            let ty = program.ty(instr.inputs[reach.operand]);
            let own = |other: &&Reach| other.operand == reach.operand;
            let mut extended = ty.local_shape(mesh);
            let mut slab = extended.clone();
            for other in reaches.iter().filter(own) {
                extended[other.dim] += other.before + other.after;
            }
            for other in reaches[..number].iter().filter(own) {
                slab[other.dim] += other.before + other.after;
            }
            slab[reach.dim] = 1;
            Self {
                reach,
                axes: ty.layout.axes(reach.dim).to_vec(),
                extended,
                slab,
                dtype: ty.dtype,
            }
        };
        reaches.iter().enumerate().map(halo).collect()
    }

    /// Bytes of an operand with all that comes from neighbours.
    pub fn bytes(&self) -> usize {
        self.extended.iter().product::<usize>() * self.dtype.size()
    }

    /// Bytes that a rank gets from its neighbours along this dim; those at the ends have one.
    pub fn received(&self, mesh: &Mesh, rank: usize) -> usize {
        let (n, shard) = (mesh.count(&self.axes), mesh.shard(rank, &self.axes));
        let before = if shard > 0 { self.reach.before } else { 0 };
        let after = if shard + 1 < n { self.reach.after } else { 0 };
        (before + after) * self.slab.iter().product::<usize>() * self.dtype.size()
    }

    /// The operands of an instruction with room around them, one after the other from `start` on, each at a
    /// multiple of `align`.
    pub fn rooms(program: &Program, instr: &Instr, start: usize, align: usize) -> Vec<HaloRoom> {
        let mut rooms: Vec<HaloRoom> = Vec::new();
        for halo in Self::of(program, instr) {
            match rooms.last_mut() {
                Some(room) if room.operand == halo.reach.operand => room.halos.push(halo),
                last => {
                    let end = last.map_or(start, |room| room.end());
                    let (operand, at) = (halo.reach.operand, end.next_multiple_of(align));
                    rooms.push(HaloRoom { operand, at, halos: vec![halo] });
                }
            }
        }
        rooms
    }

    /// Bytes of scratch memory of all operands with a halo.
    pub fn scratch(program: &Program, instr: &Instr, align: usize) -> usize {
        let ends = Self::rooms(program, instr, 0, align).into_iter().map(|room| room.end());
        ends.fold(0, usize::max)
    }
}

/// An operand with room around it for what comes from neighbours: a block of images `[n, h, w, c]` inside a
/// larger one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HaloRoom {
    /// The operand.
    pub operand: usize,
    /// Its first byte among scratch memory.
    pub at: usize,
    /// What is exchanged, in order; at least one.
    pub halos: Vec<Halo>,
}

impl HaloRoom {
    /// The extents with all that comes from neighbours.
    pub fn shape(&self) -> &[usize] {
        &self.halos[0].extended
    }

    /// Which of them are no padding, if these are of the operand alone.
    pub fn valid(&self, own: &[usize]) -> Vec<usize> {
        let mut valid = own.to_vec();
        for Halo { reach, extended, .. } in &self.halos {
            valid[reach.dim] = extended[reach.dim];
        }
        valid
    }

    /// Where the operand itself lies: so many lines above it and columns before it.
    pub fn corner(&self) -> [usize; 2] {
        let mut corner = [0; 2];
        for Halo { reach, .. } in &self.halos {
            corner[reach.dim - 1] = reach.before;
        }
        corner
    }

    fn end(&self) -> usize {
        self.at + self.halos[0].bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn rows_come_from_both_neighbours_and_corners_with_them() {
        let program = text::parse(
            "mesh a=4 c=2
program t {
  x: data f32[2,8,6,3]{1:a 2:c}
  w: param f32[3,3,3,5]
  %1 = conv2d(x, w, size=3x3, stride=1x1, dilation=1x1, pad=1x1) : f32[2,8,6,5]{1:a 2:c}
}
",
        )
        .unwrap();
        crate::verify(&program).unwrap();
        let halos = Halo::of(&program, &program.instrs()[0]);
        assert_eq!(halos.len(), 2);
        // A rank has 2 of 8 rows and 3 of 6 columns.
        assert_eq!(halos[0].extended, [2, 4, 5, 3]);
        assert_eq!(
            (&halos[0].slab[..], &halos[1].slab[..]),
            (&[2, 1, 3, 3][..], &[2, 4, 1, 3][..])
        );
        let rooms = Halo::rooms(&program, &program.instrs()[0], 100, 64);
        assert_eq!((rooms.len(), rooms[0].at, rooms[0].corner()), (1, 128, [1, 1]));
        assert_eq!(rooms[0].valid(&[2, 2, 2, 3]), [2, 4, 5, 3]);
        assert_eq!(Halo::scratch(&program, &program.instrs()[0], 64), 2 * 4 * 5 * 3 * 4);
        let mesh = program.mesh();
        let rows: Vec<usize> = (0..8).map(|rank| halos[0].received(mesh, rank)).collect();
        let row = 2 * 3 * 3 * 4;
        assert_eq!(rows, [row, row, 2 * row, 2 * row, 2 * row, 2 * row, row, row]);
        assert!((0..8).all(|rank| halos[1].received(mesh, rank) == 2 * 4 * 3 * 4));
    }
}
