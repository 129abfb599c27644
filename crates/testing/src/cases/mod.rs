//! Random programs, meshes and annotations: the cases on which partitioning is tried.
//!
//! A case is a pure function of its seed. Programs are small and use every family of ops; sizes are
//! often uneven; annotations are on any value. The choices of a case are made either by the
//! partitioner, or at random among the legal ones of every instruction, which finds far more. A case
//! that fails is made smaller as long as it fails, and told with its seed.

mod dice;
mod recipe;
mod shrink;
mod steps;
mod trial;

use std::collections::BTreeMap;

use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Mesh, Program, ValueId};
use phalanx_reference::Tensor;
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
    /// What is asked of its values.
    pub annotations: Annotations,
    /// The same in words, a line for each value and axis.
    pub asked: Vec<String>,
}

/// Ids lie below this in every case; vocabularies are not smaller.
const IDS: usize = 5;

/// Numbers for every input of a joint program.
pub fn numbers(joint: &Program, seed: u64) -> BTreeMap<String, Tensor> {
    let number = |name: &str, value: ValueId| {
        let (ty, stream) = (joint.ty(value), Stream::named(seed, name));
        match (ty.dtype, ty.shape.as_slice()) {
            (DType::I32, [5]) => Tensor::from_i32(&[5], &[seed as i32, 2, 3, 4, 5]).unwrap(),
            (DType::I32, shape) => Tensor::ids(shape, IDS as u32, stream),
            (dtype, shape) => {
                // Products keep the size of their operands, so that nothing is ill-conditioned.
                let inner = if shape.len() > 1 { shape[0] as f64 } else { 1.0 };
                let values = Tensor::normal(dtype, shape, stream).values();
                let small: Vec<f64> = values.iter().map(|x| 0.7 * x / inner.sqrt()).collect();
                Tensor::new(dtype, shape, &small).unwrap()
            }
        }
    };
    joint.inputs().iter().map(|p| (p.name.clone(), number(&p.name, p.value))).collect()
}
