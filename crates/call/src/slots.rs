//! Where the values of one program lie: in its inputs, in its outputs, or in its workspace.
//!
//! A view (a reshape) is the same memory with another type, and so is the result of `done` of a
//! collective. An op that may work in place takes the memory of an operand that it uses last. All
//! other values are packed into a workspace by their live ranges.

mod family;

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Instr, Op, OpDef, Program, Role, ValueId};

use crate::requirements::Requirements;
use family::Families;

/// Every buffer starts at a multiple of this many bytes: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// Where a value lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// In the view bound to this input.
    Input(usize),
    /// In the view bound to this output.
    Output(usize),
    /// At this offset of the workspace.
    Workspace(usize),
    /// Nowhere: nothing reads it, nor any other result of its instruction.
    Unused,
}

/// The slots of a program's values.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Slots {
    /// By value.
    pub by_value: Vec<Slot>,
    /// For each instruction: the offset of its scratch memory in the workspace, where it needs
    /// some.
    pub scratch: Vec<Option<usize>>,
    /// Outputs whose value lies elsewhere, as (output, value): they are copied at the end.
    pub copies: Vec<(usize, ValueId)>,
    /// Bytes from the workspace's start to its end.
    pub extent: usize,
    /// The largest sum of live workspace bytes at any instruction; gaps not counted.
    pub peak: usize,
    /// The live ranges of the workspace.
    pub live_ranges: Vec<LiveRange>,
}

/// A piece of the workspace and its live range, in instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveRange {
    /// Where it starts.
    pub offset: usize,
    /// Its bytes.
    pub bytes: usize,
    /// The instruction that first writes it.
    pub birth: usize,
    /// The last instruction that uses it.
    pub death: usize,
}

impl Slots {
    /// Finds a slot for every value, and the scratch memory that an engine asks for.
    pub fn assign_for(program: &Program, requirements: &dyn Requirements) -> Self {
        let mut classes = Classes::new(program);
        classes.join_views();
        for (value, into) in requirements.merged(program) {
            classes.join(into.index(), value.index());
        }
        for (value, index) in requirements.early(program) {
            let root = classes.root(value.index());
            classes.birth[root] = classes.birth[root].min(index);
        }
        classes.join_in_place();
        classes.pack(requirements)
    }
}

/// Values that share memory, as a union-find forest.
struct Classes<'a> {
    program: &'a Program,
    parent: Vec<usize>,
    last_use: Vec<Option<usize>>,
    birth: Vec<usize>,
    input: Vec<Option<usize>>,
    output: Vec<Option<usize>>,
    copies: Vec<(usize, ValueId)>,
}

impl<'a> Classes<'a> {
    fn new(program: &'a Program) -> Self {
        let n = program.values().len();
        let mut classes = Self {
            program,
            parent: (0..n).collect(),
            last_use: program.last_uses(),
            birth: vec![0; n],
            input: vec![None; n],
            output: vec![None; n],
            copies: Vec::new(),
        };
        for (i, port) in program.inputs().iter().enumerate() {
            classes.input[port.value.index()] = Some(i);
        }
        for (index, instr) in program.instrs().iter().enumerate() {
            for value in &instr.outputs {
                classes.birth[value.index()] = index;
            }
        }
        // A result that nothing reads still needs memory while its instruction writes the other
        // results.
        for (index, instr) in program.instrs().iter().enumerate() {
            if instr.outputs.iter().any(|v| classes.last_use[v.index()].is_some()) {
                for value in &instr.outputs {
                    classes.last_use[value.index()].get_or_insert(index);
                }
            }
        }
        let families = Families::new(program);
        for (o, port) in program.outputs().iter().enumerate() {
            let v = port.value.index();
            let taken = classes.input[v].is_some() || classes.output[v].is_some();
            if taken || !families.can_write(port) {
                classes.copies.push((o, port.value));
            } else {
                classes.output[v] = Some(o);
            }
        }
        classes
    }

    fn root(&self, mut v: usize) -> usize {
        while self.parent[v] != v {
            v = self.parent[v];
        }
        v
    }

    fn bytes(&self, v: usize) -> usize {
        self.program.values()[v].local_bytes(self.program.mesh())
    }

    /// Merges class `b` into class `a`.
    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return;
        }
        self.parent[b] = a;
        self.last_use[a] = self.last_use[a].max(self.last_use[b]);
        self.birth[a] = self.birth[a].min(self.birth[b]);
        self.input[a] = self.input[a].or(self.input[b]);
        self.output[a] = match (self.output[a], self.output[b]) {
            (Some(first), Some(second)) => {
                self.copies.push((second, self.program.outputs()[second].value));
                Some(first)
            }
            (first, second) => first.or(second),
        };
    }

    /// A view has the memory of its operand, and the result of `done` that of its handle.
    fn join_views(&mut self) {
        for instr in self.program.instrs().iter().filter(|i| is_same_memory(i)) {
            let (a, b) = (self.root(instr.inputs[0].index()), self.root(instr.outputs[0].index()));
            // The memory of an input cannot also be that of an output: that output is copied at the
            // end. A gradient that is added to cannot hold anything else meanwhile, but it is
            // written only once, so its producer may write it directly instead of the view.
            if self.input[a].is_some()
                && let Some(output) = self.output[b].take()
            {
                self.copies.push((output, self.program.outputs()[output].value));
            }
            self.join(a, b);
        }
    }

    /// An op that may work in place takes the memory of an operand that it uses last.
    fn join_in_place(&mut self) {
        for (index, instr) in self.program.instrs().iter().enumerate() {
            for &(operand, result) in instr.op.in_place() {
                let (Some(x), Some(y)) = (instr.inputs.get(operand), instr.outputs.get(result))
                else {
                    continue;
                };
                let (a, b) = (self.root(x.index()), self.root(y.index()));
                let dies = self.last_use[a] == Some(index) && self.input[a].is_none();
                let read_twice =
                    instr.inputs.iter().filter(|v| self.root(v.index()) == a).count() > 1;
                let fresh = self.birth[b] == index && self.output[a].is_none();
                // Comparing only sizes would allow overwriting a broadcast operand that is still
                // needed.
                let shape = |v: ValueId| &self.program.ty(v).shape;
                let same = self.bytes(x.index()) == self.bytes(y.index()) && shape(*x) == shape(*y);
                if dies && !read_twice && fresh && same && !self.is_reserved(b) && a != b {
                    self.join(b, a);
                    break;
                }
            }
        }
    }

    /// Whether the class lies in an output whose memory must not be written before its final value:
    /// the output may be added to, or may share memory with a state operand that is still read.
    fn is_reserved(&self, root: usize) -> bool {
        self.output[root].is_some_and(|o| {
            let role = self.program.outputs()[o].role;
            matches!(role, Role::Gradient | Role::Cotangent | Role::State)
        })
    }

    fn pack(mut self, requirements: &dyn Requirements) -> Slots {
        let mut roots: Vec<usize> = (0..self.parent.len())
            .filter(|&v| self.parent[v] == v)
            .filter(|&v| self.input[v].is_none() && self.output[v].is_none())
            .filter(|&v| self.last_use[v].is_some())
            .collect();
        roots.sort_by_key(|&v| (usize::MAX - self.bytes(v), self.birth[v]));
        let mut wanted: Vec<(Option<usize>, Option<usize>, LiveRange)> = Vec::new();
        for &v in &roots {
            let death = self.last_use[v].unwrap_or(0);
            let life = LiveRange { offset: 0, bytes: self.bytes(v), birth: self.birth[v], death };
            wanted.push((Some(v), None, life));
        }
        for (index, instr) in self.program.instrs().iter().enumerate() {
            let bytes = requirements.scratch(self.program, instr);
            if bytes > 0 {
                let life = LiveRange { offset: 0, bytes, birth: index, death: index };
                wanted.push((None, Some(index), life));
            }
        }
        let mut by_value = vec![Slot::Unused; self.parent.len()];
        let mut scratch = vec![None; self.program.instrs().len()];
        let mut lives: Vec<LiveRange> = Vec::new();
        for (value, instr, mut life) in wanted {
            life.offset = lowest_gap(&lives, &life);
            lives.push(life);
            if let Some(v) = value {
                by_value[v] = Slot::Workspace(life.offset);
            }
            if let Some(i) = instr {
                scratch[i] = Some(life.offset);
            }
        }
        for v in 0..self.parent.len() {
            let root = self.root(v);
            by_value[v] = match (self.input[root], self.output[root]) {
                (Some(i), _) => Slot::Input(i),
                (None, Some(o)) => Slot::Output(o),
                (None, None) => by_value[root],
            };
        }
        let copies = std::mem::take(&mut self.copies);
        let extent = lives.iter().map(|b| b.offset + b.bytes).max().unwrap_or(0);
        let peak = peak(&lives, self.program.instrs().len());
        Slots {
            by_value,
            scratch,
            copies,
            extent: extent.next_multiple_of(ALIGN),
            peak,
            live_ranges: lives,
        }
    }
}

/// Whether the result of an instruction is its operand with another type.
fn is_same_memory(instr: &Instr) -> bool {
    let done = matches!(&instr.op, Op::Collective(c) if c.kind == CollectiveKind::Done);
    done || instr.op.is_view()
}

/// The lowest offset at which it overlaps nothing that is alive at the same time.
fn lowest_gap(placed: &[LiveRange], life: &LiveRange) -> usize {
    let mut others: Vec<&LiveRange> =
        placed.iter().filter(|b| b.birth <= life.death && life.birth <= b.death).collect();
    others.sort_by_key(|b| b.offset);
    let mut at = 0;
    for other in others {
        if at + life.bytes <= other.offset {
            break;
        }
        at = at.max((other.offset + other.bytes).next_multiple_of(ALIGN));
    }
    at
}

fn peak(lives: &[LiveRange], instrs: usize) -> usize {
    (0..=instrs)
        .map(|i| lives.iter().filter(|b| b.birth <= i && i <= b.death).map(|b| b.bytes).sum())
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoScratch;
    use phalanx_ir::{Builder, DType};

    fn assigned(program: &Program) -> Slots {
        Slots::assign_for(program, &NoScratch)
    }

    #[test]
    fn reshapes_share_and_elementwise_ops_work_in_place() {
        let b = Builder::new("t", DType::F32);
        let x = b.data("x", DType::F32, [8, 16]);
        let y = x.matmul(b.param("w", [16, 32])).reshape([8, 4, 8]).relu().tanh();
        b.output("y", y);
        let program = b.finish().unwrap();
        let slots = assigned(&program);
        let places: Vec<Slot> = slots.by_value[2..].to_vec();
        assert_eq!(places, [Slot::Output(0); 4], "the product is written where the output goes");
        assert_eq!(slots.extent, 0);
    }

    #[test]
    fn a_value_that_is_read_again_keeps_its_memory() {
        let b = Builder::new("t", DType::F32);
        let x = b.data("x", DType::F32, [8, 16]).scale(2.0);
        b.output("y", x.relu() * x);
        let program = b.finish().unwrap();
        let slots = assigned(&program);
        assert_ne!(slots.by_value[1], slots.by_value[2]);
        assert_eq!(slots.peak, 8 * 16 * 4);
    }

    #[test]
    fn an_output_that_is_an_input_is_copied() {
        let b = Builder::new("t", DType::F32);
        let x = b.data("x", DType::F32, [8]);
        b.output("y", x.reshape([2, 4]));
        let program = b.finish().unwrap();
        let slots = assigned(&program);
        assert_eq!(slots.copies, [(0, program.outputs()[0].value)]);
        assert_eq!(slots.by_value, [Slot::Input(0); 2]);
    }

    /// With accumulation, the memory of a gradient holds the old sum plus the new value, which
    /// other readers or outputs of the value must not see.
    #[test]
    fn a_gradient_that_has_other_readers_is_copied() {
        let gradients = |both: bool, read: bool, reshaped: bool| {
            let b = Builder::new("t", DType::F32);
            let x = b.data("x", DType::F32, [8, 16]);
            let g = x.matmul(b.param("w", [16, 4]));
            let other = if reshaped { g.reshape([32]) } else { g };
            b.port("g", Role::Gradient, g);
            if both {
                b.port("h", Role::Gradient, other);
            }
            if read {
                b.output("y", other.relu());
            }
            let program = b.finish().unwrap();
            let slots = assigned(&program);
            let copied: Vec<usize> = slots.copies.iter().map(|(o, _)| *o).collect();
            let product = program.outputs()[0].value;
            (copied, slots.by_value[product.index()])
        };
        assert_eq!(gradients(false, false, false), (vec![], Slot::Output(0)));
        for reshaped in [false, true] {
            let (copied, place) = gradients(true, false, reshaped);
            assert_eq!(copied, [0, 1]);
            assert!(matches!(place, Slot::Workspace(_)), "{place:?}");
            let (copied, place) = gradients(false, true, reshaped);
            assert_eq!(copied, [0]);
            assert!(!matches!(place, Slot::Output(0)), "{place:?}");
        }
    }

    #[test]
    fn what_lives_together_does_not_overlap() {
        let b = Builder::new("t", DType::F32);
        let x = b.data("x", DType::F32, [16, 16]);
        let mut sum = x.matmul(x);
        let mut parts = vec![sum];
        for _ in 0..6 {
            sum = sum.matmul(x);
            parts.push(sum);
        }
        for part in parts {
            sum = sum.matmul(part);
        }
        b.output("y", sum);
        let slots = assigned(&b.finish().unwrap());
        for (i, a) in slots.live_ranges.iter().enumerate() {
            for b in &slots.live_ranges[..i] {
                let together = a.birth <= b.death && b.birth <= a.death;
                let overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
                assert!(!(together && overlap));
            }
        }
        assert!(slots.extent >= slots.peak);
    }
}
