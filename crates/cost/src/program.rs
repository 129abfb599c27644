//! The time of a whole program on each rank.

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Axis, Program, Role};

use crate::hardware::Hardware;
use crate::work::{Transfer, Work};

/// Seconds of a verified program on each rank: its instructions, one after the other.
pub fn seconds(program: &Program, hardware: &Hardware) -> f64 {
    program.instrs().iter().map(|instr| hardware.seconds(&Work::of(program, instr))).sum()
}

/// The sums of gradients over ranks that a program leaves to the script that runs it: an all-reduce
/// for each, or something that moves the same number of bytes.
pub fn reductions(program: &Program) -> impl Iterator<Item = Transfer> {
    let mesh = program.mesh();
    program.outputs_with(Role::Gradient).filter_map(move |port| {
        let ty = program.ty(port.value);
        let axes: Vec<Axis> = ty.layout.partial().iter().copied().collect();
        let bytes = ty.local_bytes(mesh) as f64;
        let sum = || Transfer::collective(&CollectiveKind::AllReduce, mesh.count(&axes), bytes);
        (!axes.is_empty()).then(sum)
    })
}
