//! Which instructions compute and read each value of a program.

use crate::program::{Instr, Program, ValueId};

/// The edges of a program, by value.
#[derive(Debug)]
pub struct Graph<'a> {
    program: &'a Program,
    makers: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
    returned: Vec<bool>,
}

impl<'a> Graph<'a> {
    /// The edges of `program`.
    pub fn new(program: &'a Program) -> Self {
        let count = program.values().len();
        let mut graph = Self {
            program,
            makers: vec![None; count],
            readers: vec![Vec::new(); count],
            returned: vec![false; count],
        };
        for (index, instr) in program.instrs().iter().enumerate() {
            for value in &instr.outputs {
                graph.makers[value.index()] = Some(index);
            }
            for value in &instr.inputs {
                let readers = &mut graph.readers[value.index()];
                if readers.last() != Some(&index) {
                    readers.push(index);
                }
            }
        }
        for port in program.outputs() {
            graph.returned[port.value.index()] = true;
        }
        graph
    }

    /// The index of the instruction that computes a value; an input has none.
    pub fn maker(&self, value: ValueId) -> Option<usize> {
        self.makers[value.index()]
    }

    /// The instruction that computes a value, with its index.
    pub fn making(&self, value: ValueId) -> Option<(usize, &'a Instr)> {
        let index = self.maker(value)?;
        Some((index, &self.program.instrs()[index]))
    }

    /// The indices of the instructions that read a value, ascending, each once.
    pub fn readers(&self, value: ValueId) -> &[usize] {
        &self.readers[value.index()]
    }

    /// Whether the program returns a value.
    pub fn returned(&self, value: ValueId) -> bool {
        self.returned[value.index()]
    }

    /// Whether exactly these instructions (ascending) read a value and the program does not
    /// return it.
    pub fn read_only_by(&self, value: ValueId, readers: &[usize]) -> bool {
        !self.returned(value) && self.readers(value) == readers
    }
}
