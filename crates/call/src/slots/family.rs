//! Which values are views of one value, and how often it is read.

use phalanx_ir::{OpDef, Port, Program, Role};

/// Families of values: one value and all its views. A family is identified by its origin, the value
/// that is not a view.
pub(super) struct Families<'a> {
    program: &'a Program,
    /// For each value: the origin that it is a view of, directly or through other views.
    origin: Vec<usize>,
    /// For each value: the instruction that computes it, and which of its results it is.
    maker: Vec<Option<(usize, usize)>>,
    /// For each origin: how many instructions read the family, views within it not counted.
    readers: Vec<usize>,
    /// For each origin: how many outputs return the family.
    returned: Vec<usize>,
}

impl<'a> Families<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        let n = program.values().len();
        let mut origin: Vec<usize> = (0..n).collect();
        let (mut maker, mut readers, mut returned) = (vec![None; n], vec![0; n], vec![0; n]);
        for (index, instr) in program.instrs().iter().enumerate() {
            let view = super::is_same_memory(instr);
            for (result, value) in instr.outputs.iter().enumerate() {
                maker[value.index()] = Some((index, result));
                if view {
                    origin[value.index()] = origin[instr.inputs[0].index()];
                }
            }
            for value in instr.inputs.iter().filter(|_| !view) {
                readers[origin[value.index()]] += 1;
            }
        }
        for port in program.outputs() {
            returned[origin[port.value.index()]] += 1;
        }
        Self { program, origin, maker, readers, returned }
    }

    /// Whether the instruction that computes an output's value can write it directly into the
    /// output. A gradient output may be added to: then it holds a sum, so nothing else may read the
    /// value from it.
    pub(super) fn can_write(&self, port: &Port) -> bool {
        if !matches!(port.role, Role::Gradient | Role::Cotangent) {
            return true;
        }
        let origin = self.origin[port.value.index()];
        let accumulates = self.maker[origin]
            .is_none_or(|(instr, result)| self.program.instrs()[instr].op.accumulates(result));
        accumulates && self.readers[origin] == 0 && self.returned[origin] == 1
    }
}
