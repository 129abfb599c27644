//! Which values are one value under several shapes, and who looks at it.

use phalanx_ir::{OpDef, Port, Program, Role};

/// Values that are one value under several shapes, known by the value that all others are views of.
pub(super) struct Families<'a> {
    program: &'a Program,
    /// By value: the value that it is a view of, in one step or several.
    origin: Vec<usize>,
    /// By value: the instruction that makes it, and as which of its results.
    maker: Vec<Option<(usize, usize)>>,
    /// By origin: how many instructions read the family, views within it not counted.
    readers: Vec<usize>,
    /// By origin: how many outputs return the family.
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

    /// Whether the instruction that makes an output's value can write it where the output goes. A
    /// gradient's place may have to be added to: then it holds the sum with what was there, so
    /// nothing else may look for the value in it.
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
