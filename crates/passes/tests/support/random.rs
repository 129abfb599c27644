//! Random programs over a few shapes: sums, products, elementwise functions, constants, phases.

use phalanx_ir::ops::{
    Binary, BinaryKind, Cast, Compare, CompareKind, Fill, Matmul, Op, Reduce, ReduceKind, Scale,
    Select, Unary, UnaryGrad, UnaryKind,
};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Mesh, Phase, Program, Role, TensorType, ValueId};

const SIZE: usize = 4;

/// A program of about sixty instructions; equal ones, sums of products and chains are frequent.
pub(crate) fn random_program(seed: u64) -> Program {
    let mut maker = Maker {
        stream: Stream::named(seed, "program"),
        drawn: 0,
        program: Program::new("random", Mesh::single()),
        squares: Vec::new(),
        rows: Vec::new(),
        phases: Vec::new(),
    };
    for i in 0..3 {
        maker.input(&format!("x{i}"), &[SIZE, SIZE]);
        maker.input(&format!("v{i}"), &[SIZE]);
    }
    for _ in 0..60 {
        maker.instruction();
    }
    for i in 0..8 {
        let value = maker.square();
        let name = format!("y{i}");
        maker.program.output(name, Role::Boundary, value);
    }
    let row = maker.row();
    maker.program.output("row", Role::Probe, row);
    maker.program.canonical()
}

struct Maker {
    stream: Stream,
    drawn: u64,
    program: Program,
    squares: Vec<ValueId>,
    rows: Vec<ValueId>,
    /// By value.
    phases: Vec<Phase>,
}

impl Maker {
    fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.stream.below(self.drawn, bound as u64) as usize
    }

    fn input(&mut self, name: &str, shape: &[usize]) {
        let ty = TensorType::new(DType::F64, shape);
        let value = self.program.input(name, Role::Boundary, ty);
        self.note(value, Phase::F);
    }

    fn note(&mut self, value: ValueId, phase: Phase) {
        self.phases.push(phase);
        match self.program.ty(value).shape.len() {
            2 => self.squares.push(value),
            _ => self.rows.push(value),
        }
    }

    /// Recent values more often, so that chains form.
    fn square(&mut self) -> ValueId {
        let count = self.squares.len();
        let index = match self.below(4) {
            0 => self.below(count),
            _ => count - 1 - self.below(count.min(5)),
        };
        self.squares[index]
    }

    fn row(&mut self) -> ValueId {
        let index = self.below(self.rows.len());
        self.rows[index]
    }

    /// Appends an instruction in the latest phase of its operands, or sometimes a later one.
    fn push(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> ValueId {
        let mut phase = (inputs.iter().map(|v| self.phases[v.index()])).max().unwrap_or_default();
        if self.below(8) == 0 {
            phase = phase.max([Phase::F, Phase::B, Phase::W][self.below(3)]);
        }
        let value = self.program.push(op.into(), inputs, phase).unwrap()[0];
        match self.program.ty(value).dtype {
            DType::F64 => self.note(value, phase),
            // Conditions and narrow values are read by the next instruction only.
            _ => self.phases.push(phase),
        }
        value
    }

    fn instruction(&mut self) {
        let (a, b) = (self.square(), self.square());
        let kind = [UnaryKind::Tanh, UnaryKind::Sigmoid, UnaryKind::Relu][self.below(3)];
        let by = [0.5, -0.0, 0.0, -1.0][self.below(4)];
        let binary = [BinaryKind::Add, BinaryKind::Mul, BinaryKind::Max][self.below(3)];
        match self.below(12) {
            0 => self.push(Unary { kind }, &[a]),
            1 => self.push(UnaryGrad { kind }, &[a, b]),
            2 => self.push(Scale { by }, &[a]),
            3 | 4 => {
                let kind = BinaryKind::Add;
                let product = self.push(product(), &[a, b]);
                let other = self.square();
                self.push(Binary { kind }, &[product, other])
            }
            5 => self.push(Binary { kind: binary }, &[a, b]),
            6 => {
                let row = self.row();
                self.push(Binary { kind: binary }, &[a, row])
            }
            7 => {
                let kind = CompareKind::Ge;
                let condition = self.push(Compare { kind }, &[a, b]);
                self.push(Select, &[condition, a, b])
            }
            8 => {
                let narrow = self.push(Cast { to: DType::Bf16 }, &[a]);
                self.push(Cast { to: DType::F64 }, &[narrow])
            }
            9 => self.push(Reduce { kind: ReduceKind::Sum, dims: vec![0], out: DType::F64 }, &[a]),
            10 if self.below(4) == 0 => {
                self.push(Fill { dtype: DType::F64, shape: vec![SIZE, SIZE], value: by }, &[])
            }
            10 => {
                let earlier = self.below(self.program.instrs().len().max(1));
                match self.program.instrs().get(earlier).cloned() {
                    Some(instr) if self.program.ty(instr.outputs[0]).dtype == DType::F64 => {
                        self.push(instr.op, &instr.inputs)
                    }
                    _ => a,
                }
            }
            _ => self.push(product(), &[a, b]),
        };
    }
}

fn product() -> Matmul {
    Matmul { spec: "ay,yz->az".parse().unwrap(), out: DType::F64, add: false }
}
