//! Random programs, meshes and annotations: the cases on which partitioning is tested.
//!
//! A case is a pure function of its seed. Programs are small and use every family of ops; sizes are
//! often uneven; annotations are on any value. The choices of a case are made either by the
//! partitioner, or at random among the legal ones of every instruction, which finds far more. A
//! case that fails is made smaller as long as it still fails, and is reported with its seed.

mod dice;
mod recipe;
mod shrink;
mod steps;
mod trial;

use std::collections::BTreeMap;

use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Mesh, Program, ValueId};
use phalanx_reference::RefTensor;
use phalanx_spmd::Annotations;

pub use dice::Dice;
pub use recipe::Recipe;
pub use trial::{Chooser, Found, Tally, Trial, try_seeds};

/// A program with a mesh and annotations.
#[derive(Debug)]
pub struct Case {
    /// The forward program.
    pub forward: Program,
    /// The mesh.
    pub mesh: Mesh,
    /// The annotations of its values.
    pub annotations: Annotations,
    /// The same as text, a line for each value and axis.
    pub asked: Vec<String>,
}

/// Ids lie below this in every case; vocabularies are not smaller.
const IDS: usize = 5;

/// Numbers for every input of a joint program.
pub fn numbers(joint: &Program, seed: u64) -> BTreeMap<String, RefTensor> {
    let number = |name: &str, value: ValueId| {
        let (ty, stream) = (joint.ty(value), Stream::named(seed, name));
        match (ty.dtype, ty.shape.as_slice()) {
            (DType::I32, [5]) => RefTensor::from_i32(&[5], &[seed as i32, 2, 3, 4, 5]).unwrap(),
            (DType::I32, shape) => RefTensor::ids(shape, IDS as u32, stream),
            (dtype, shape) => {
                // Products keep the magnitude of their operands, so that nothing is
                // ill-conditioned.
                // The weights of a window are summed over all but their last dim.
                let inner = match shape {
                    [summed @ .., _] if shape.len() == 4 => summed.iter().product::<usize>() as f64,
                    [rows, _, ..] => *rows as f64,
                    _ => 1.0,
                };
                let values = RefTensor::normal(dtype, shape, stream).values();
                let small: Vec<f64> = values.iter().map(|x| 0.7 * x / inner.sqrt()).collect();
                RefTensor::new(dtype, shape, &small).unwrap()
            }
        }
    };
    joint.inputs().iter().map(|p| (p.name.clone(), number(&p.name, p.value))).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_ir::{Axis, Halo, OpDef, Order};
    use phalanx_passes::stream;

    use super::*;

    /// The cases often cover what they should cover.
    #[test]
    fn cases_reach_every_corner() {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        let mut ran = 0;
        for seed in 0..400 {
            let by = |chooser| Recipe::new(seed).and_then(|recipe| Trial::new(&recipe, chooser));
            let Ok(Trial { case, parts, .. }) = by(Chooser::Random) else { continue };
            ran += 1;
            let types = parts.program.values();
            let has = |name: &str| case.forward.instrs().iter().any(|i| i.op.name() == name);
            let axes: Vec<Axis> = case.mesh.axes().map(|(axis, _)| axis).collect();
            let blocks = stream(&parts.program, &axes).to_string();
            let in_blocks = |name: &str| blocks.contains(&format!("= {name}<"));
            // Few of the dice's choices for queries, keys and values fit each other.
            let ring = |chosen: Trial| {
                stream(&chosen.parts.program, &axes).to_string().contains("= turn<")
            };
            let dealt =
                |o: Order| types.iter().any(|ty| ty.layout.dims().iter().any(|d| d.order == o));
            let rows = |i: &phalanx_ir::Instr| !Halo::of(&parts.program, i).is_empty();
            let corners = [
                ("eight ranks", case.mesh.ranks() == 8),
                ("three axes", case.mesh.axes().count() == 3),
                ("a split axis", case.mesh.axes().any(|(axis, _)| axis.name().contains('.'))),
                (
                    "two axes on a dim",
                    types.iter().any(|ty| ty.layout.dims().iter().any(|d| d.axes.len() > 1)),
                ),
                ("padding", types.iter().any(|ty| ty.padded() != ty.shape)),
                ("a loss", case.forward.output_named("loss").is_some()),
                ("a rotation", has("rotary")),
                ("parts put together", has("concat")),
                ("products in blocks", in_blocks("broadcast_block") || in_blocks("reduce_block")),
                ("a window", has("conv2d") || has("max_pool") || has("mean_pool")),
                ("rows of neighbours", parts.program.instrs().iter().any(rows)),
                ("zigzag order", dealt(Order::Zigzag)),
                ("striped order", dealt(Order::Striped)),
                ("keys in a ring", has("attention") && by(Chooser::Partitioner).is_ok_and(ring)),
            ];
            for (corner, is) in corners {
                *seen.entry(corner).or_default() += usize::from(is);
            }
        }
        assert!(ran >= 360, "{ran}");
        for (corner, &count) in &seen {
            // Some need several choices to meet.
            let rare = ["rows of neighbours", "striped order", "keys in a ring"].contains(corner);
            let least = if rare { ran / 100 } else { ran / 20 };
            assert!(count >= least.max(1), "{corner} in {count} of {ran} cases: {seen:?}");
        }
        println!("{ran} {seen:?}");
    }

    /// A seed always gives the same case.
    #[test]
    fn a_seed_is_a_case() {
        let text = |seed| {
            let case = Recipe::new(seed).unwrap().case().unwrap();
            format!("{}{}{:?}", case.mesh, case.forward, case.asked)
        };
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }
}
