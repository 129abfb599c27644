//! Elementwise ops, alone or in groups, chunk by chunk.
//!
//! A chunk of every operand passes through all steps of a group while it is in the first cache;
//! intermediate values never reach the arena. Each step rounds to its element type, so a group
//! gives the same bits as separate ops.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{BinaryKind, FusedArg, FusedStep};
use phalanx_ir::{DType, Op};

use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::cast::{CastScalar, cast};
use crate::kernels::elementwise::{self as kernel, ElementOperand};

/// Elements that pass through a group at a time: few enough for a dozen of them to stay in the
/// first cache.
const CHUNK: usize = 1024;

/// Bytes of one chunk of the widest type.
const SLOT: usize = CHUNK * 8;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let (steps, results) = match &op.instr.op {
        Op::Fused(fused) => (fused.steps.clone(), fused.results.clone()),
        single => {
            let args = (0..inputs.len()).map(FusedArg::Input).collect();
            (vec![FusedStep { op: single.clone(), args, dtype: outputs[0].dtype }], vec![0])
        }
    };
    let mut compiled: Vec<Step> = Vec::new();
    for step in &steps {
        let args: Vec<Arg> = (step.args.iter())
            .map(|arg| match *arg {
                FusedArg::Input(i) => Arg::Input(i),
                FusedArg::Step(i) => Arg::Step(i),
            })
            .collect();
        let mut dtypes = args.iter().rev().map(|arg| match arg {
            Arg::Input(i) => inputs[*i].dtype,
            Arg::Step(i) => compiled[*i].dtype,
        });
        // The type that the step computes in is that of its last operand; a condition comes first.
        let operand = dtypes.next().unwrap_or(step.dtype);
        if !(operand.is_float() || matches!(step.op, Op::Cast(_) | Op::Compare(_))) {
            return Err(op.unsupported(format!("it has no kernel for {operand}")));
        }
        compiled.push(Step { op: step.op.clone(), args, operand, dtype: step.dtype });
    }
    Ok(vec![Box::new(Group { inputs, outputs, steps: compiled, results })])
}

#[derive(Clone, Copy, Debug)]
enum Arg {
    Input(usize),
    Step(usize),
}

struct Step {
    op: Op,
    args: Vec<Arg>,
    operand: DType,
    dtype: DType,
}

struct Group {
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    steps: Vec<Step>,
    results: Vec<usize>,
}

impl Group {
    fn full(&self) -> usize {
        self.outputs[0].elements()
    }

    /// This worker's elements; groups over too few elements are not shared.
    fn own(&self, share: Share) -> std::ops::Range<usize> {
        let rows = self.outputs[0].own_rows(share);
        match self.full() {
            0..=256 => share.alone(self.full()),
            _ => self.outputs[0].of_rows(&rows),
        }
    }

    /// The longest piece in which every operand that is repeated is contiguous.
    fn piece(&self) -> usize {
        let lengths = self.inputs.iter().map(Var::elements).filter(|&n| n > 1);
        lengths.min().unwrap_or(1).clamp(1, CHUNK)
    }

    /// Bytes of chunk slots: one for each step.
    fn slots(&self) -> usize {
        self.steps.len() * SLOT
    }
}

impl Task for Group {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        let reads = self.inputs.iter().map(|var| {
            let same = var.elements() == self.full();
            if own.is_empty() {
                var.reads(0..0)
            } else if same {
                var.reads(own.clone())
            } else {
                var.reads_all()
            }
        });
        reads.chain(self.outputs.iter().map(|var| var.writes(own.clone()))).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        // SAFETY: no other slice of it is in use.
        let slots: &mut [u8] = unsafe { cx.scratch(self.slots()) };
        let period = (self.inputs.iter().map(Var::elements))
            .filter(|&n| n > 1 && n < self.full())
            .min()
            .unwrap_or(usize::MAX);
        let piece = self.piece();
        let mut at = own.start;
        while at < own.end {
            let border = if period == usize::MAX { own.end } else { (at / period + 1) * period };
            let end = (at + piece).min(border).min(own.end);
            self.chunk(cx, slots, at, end - at);
            at = end;
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.slots()
    }
}

impl Group {
    fn chunk(&self, cx: &Context<'_>, slots: &mut [u8], at: usize, len: usize) {
        for (index, step) in self.steps.iter().enumerate() {
            let (done, rest) = slots.split_at_mut(index * SLOT);
            let out = &mut rest[..len * step.dtype.size()];
            let chunk = Chunk { group: self, cx, done, at, len };
            chunk.step(step, out);
        }
        for (var, &step) in self.outputs.iter().zip(&self.results) {
            let bytes = &slots[step * SLOT..][..len * var.dtype.size()];
            self.store(cx, var, at, bytes);
        }
    }

    fn store(&self, cx: &Context<'_>, var: &Var, at: usize, bytes: &[u8]) {
        let size = var.dtype.size();
        // SAFETY: the elements are this worker's share of the result, and no operand slice is in
        // use any more.
        let target = unsafe {
            std::slice::from_raw_parts_mut(cx.ptr::<u8>(var).add(at * size), bytes.len())
        };
        if !cx.adds(var) {
            target.copy_from_slice(bytes);
            return;
        }
        match var.dtype {
            DType::F32 => add_into::<f32>(target, bytes),
            DType::F64 => add_into::<f64>(target, bytes),
            DType::Bf16 => add_into::<half::bf16>(target, bytes),
            DType::F16 => add_into::<half::f16>(target, bytes),
            // Only gradients are added to, and those are floats.
            _ => target.copy_from_slice(bytes),
        }
    }
}

fn add_into<T: CpuElement>(target: &mut [u8], bytes: &[u8]) {
    let (target, values) = (bytemuck::cast_slice_mut::<u8, T>(target), bytemuck::cast_slice(bytes));
    kernel::binary_in_place(BinaryKind::Add, target, ElementOperand::Chunk(values));
}

/// One chunk on its way through the steps.
struct Chunk<'a> {
    group: &'a Group,
    cx: &'a Context<'a>,
    done: &'a [u8],
    at: usize,
    len: usize,
}

impl Chunk<'_> {
    fn step(&self, step: &Step, out: &mut [u8]) {
        match (&step.op, step.operand) {
            (Op::Cast(_), _) => self.cast(step, out),
            (_, DType::F32) => self.float::<f32>(step, out),
            (_, DType::F64) => self.float::<f64>(step, out),
            (_, DType::Bf16) => self.float::<half::bf16>(step, out),
            (_, DType::F16) => self.float::<half::f16>(step, out),
            (Op::Compare(c), DType::I32) => {
                let (a, b) = (self.operand::<i32>(step.args[0]), self.operand(step.args[1]));
                kernel::compare(c.kind, a, b, out);
            }
            (Op::Compare(c), _) => {
                let (a, b) = (self.operand::<u8>(step.args[0]), self.operand(step.args[1]));
                kernel::compare(c.kind, a, b, out);
            }
            (op, dtype) => unreachable!("the compiler refuses {op:?} of {dtype}"),
        }
    }

    fn float<T: CpuElement + kernel::Ordered>(&self, step: &Step, out: &mut [u8]) {
        if let Op::Compare(c) = &step.op {
            let (a, b) = (self.operand::<T>(step.args[0]), self.operand(step.args[1]));
            return kernel::compare(c.kind, a, b, out);
        }
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        let arg = |i: usize| self.operand::<T>(step.args[i]);
        let constant = |x: f64| T::Acc::from_f64(x);
        match &step.op {
            Op::Unary(u) => match arg(0) {
                ElementOperand::Chunk(x) => kernel::unary(u.kind, x, out),
                ElementOperand::Scalar(x) => {
                    out.fill(x);
                    let mut one = [x];
                    kernel::unary(u.kind, &[x], &mut one);
                    out.fill(one[0]);
                }
            },
            Op::UnaryGrad(u) => {
                kernel::unary_gradient(u.kind, self.slice(arg(0)), self.slice(arg(1)), out);
            }
            Op::Binary(b) => kernel::binary(b.kind, arg(0), arg(1), out),
            Op::Select(_) => {
                let mask = self.slice(self.operand::<u8>(step.args[0]));
                kernel::select(mask, arg(1), arg(2), out);
            }
            Op::Scale(s) => kernel::scale(self.slice(arg(0)), constant(s.by), out),
            Op::Shift(s) => kernel::add_constant(self.slice(arg(0)), constant(s.by), out),
            _ => {}
        }
    }

    fn cast(&self, step: &Step, out: &mut [u8]) {
        match step.operand {
            DType::F64 => self.cast_from::<f64>(step, out),
            DType::F32 => self.cast_from::<f32>(step, out),
            DType::Bf16 => self.cast_from::<half::bf16>(step, out),
            DType::F16 => self.cast_from::<half::f16>(step, out),
            DType::I32 => self.cast_from::<i32>(step, out),
            _ => self.cast_from::<u8>(step, out),
        }
    }

    fn cast_from<S: CastScalar + bytemuck::Pod>(&self, step: &Step, out: &mut [u8]) {
        let x = self.slice(self.operand::<S>(step.args[0]));
        match step.dtype {
            DType::F64 => cast(x, bytemuck::cast_slice_mut::<u8, f64>(out)),
            DType::F32 => cast(x, bytemuck::cast_slice_mut::<u8, f32>(out)),
            DType::Bf16 => cast(x, bytemuck::cast_slice_mut::<u8, half::bf16>(out)),
            DType::F16 => cast(x, bytemuck::cast_slice_mut::<u8, half::f16>(out)),
            DType::I32 => cast(x, bytemuck::cast_slice_mut::<u8, i32>(out)),
            _ => {
                for (out, x) in out.iter_mut().zip(x) {
                    *out = u8::from(x.to_f64() != 0.0);
                }
            }
        }
    }

    /// An operand's part of this chunk: a slice, or one number for all of it.
    fn operand<T: bytemuck::Pod>(&self, arg: Arg) -> ElementOperand<'_, T> {
        match arg {
            Arg::Step(i) => {
                let bytes = &self.done[i * SLOT..][..self.len * size_of::<T>()];
                ElementOperand::Chunk(bytemuck::cast_slice(bytes))
            }
            Arg::Input(i) => {
                let var = &self.group.inputs[i];
                let n = var.elements();
                if n == 1 && self.len > 1 {
                    // SAFETY: the task declared that it reads the operand.
                    return ElementOperand::Scalar(unsafe { self.cx.get::<T>(var, 0..1)[0] });
                }
                let start = if n == self.group.full() { self.at } else { self.at % n };
                // SAFETY: as above; a chunk never crosses the end of a repeated operand, and
                // results are stored only when no operand is in use any more.
                ElementOperand::Chunk(unsafe { self.cx.get(var, start..start + self.len) })
            }
        }
    }

    /// The slice of an operand that is never a single number for many elements.
    fn slice<'s, T>(&self, operand: ElementOperand<'s, T>) -> &'s [T] {
        match operand {
            ElementOperand::Chunk(slice) => slice,
            ElementOperand::Scalar(_) => &[],
        }
    }
}
