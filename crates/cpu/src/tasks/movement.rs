//! Ops that move elements without computing.

use std::ops::Range;

use phalanx_call::Slot;
use phalanx_engine::EngineError;
use phalanx_ir::ops::BinaryKind;
use phalanx_ir::{DType, Op};

use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::CpuElement;
use crate::kernels::elementwise::{ElementOperand, binary_in_place};
use crate::kernels::movement;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let out = op.output(0);
    let kind = match &op.instr.op {
        Op::Fill(fill) => Kind::Fill(fill.value),
        Op::Transpose(t) if t.perm.len() > movement::MAX_DIMS => {
            return Err(op.unsupported(format!("more than {} dims", movement::MAX_DIMS)));
        }
        Op::Transpose(t) => Kind::Permute(t.perm.clone()),
        Op::Slice(s) => Kind::Slice { dim: s.dim, start: s.start },
        Op::Pad(p) => Kind::Join { dim: p.dim, first: p.before },
        Op::Concat(c) => Kind::Join { dim: c.dim, first: 0 },
        Op::Broadcast(b) => Kind::Repeat(strides(&out.shape, &b.dims)),
        _ => return Err(op.unsupported("it does not move elements")),
    };
    Ok(vec![Box::new(Move { kind, inputs, out })])
}

/// A copy of a value into another output, or its addition to what is there.
pub(crate) fn copy(from: Var, to: Var) -> Box<dyn Task> {
    Box::new(Move { kind: Kind::Copy, inputs: vec![from], out: to })
}

/// A copy of this many bytes from the first input to the first output, in any tier.
pub(crate) fn copy_bytes(bytes: usize) -> Box<dyn Task> {
    let shape = vec![bytes, 1];
    let of = |slot| Var { slot, dtype: DType::Bool, shape: shape.clone(), valid: shape.clone() };
    copy(of(Slot::Input(0)), of(Slot::Output(0)))
}

/// Any of the moves.
pub(super) fn moved(kind: Kind, inputs: Vec<Var>, out: &Var) -> Box<dyn Task> {
    Box::new(Move { kind, inputs, out: out.clone() })
}

pub(super) enum Kind {
    Fill(f64),
    Permute(Vec<usize>),
    Slice {
        dim: usize,
        start: usize,
    },
    /// Parts one after the other along a dim, from index `first`; zeros elsewhere.
    Join {
        dim: usize,
        first: usize,
    },
    /// A part of the result along a dim, from index `start`; the rest of it stays.
    Put {
        dim: usize,
        start: usize,
    },
    /// For each index of the result along a dim, the index of the operand.
    Pick {
        dim: usize,
        places: Vec<usize>,
    },
    /// Repetition: the stride of each dim of the result in the operand, 0 where it is repeated.
    Repeat(Vec<usize>),
    Copy,
}

struct Move {
    kind: Kind,
    inputs: Vec<Var>,
    out: Var,
}

impl Move {
    fn own(&self, share: Share) -> Range<usize> {
        match self.out.elements() {
            n @ 0..=256 => share.alone(n),
            _ => self.out.of_rows(&self.out.own_rows(share)),
        }
    }

    fn bytes<T: bytemuck::Pod + Default>(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        if own.is_empty() {
            return;
        }
        // SAFETY: the task declared these accesses, and the types have the elements' sizes.
        let (first, out) = unsafe { (own.start, cx.get_mut::<T>(&self.out, own)) };
        // SAFETY: as above.
        let input =
            |i: usize| unsafe { cx.get::<T>(&self.inputs[i], 0..self.inputs[i].elements()) };
        let inner = |dim: usize| self.out.shape[dim + 1..].iter().product::<usize>();
        match &self.kind {
            Kind::Permute(perm) => {
                movement::permute(input(0), &self.inputs[0].shape, perm, first, out);
            }
            Kind::Slice { dim, .. } | Kind::Join { dim, .. } if self.is_padded(*dim) => {
                self.around_padding(&input, *dim, first, out);
            }
            Kind::Slice { dim, start } => {
                let from = [self.inputs[0].shape[*dim], inner(*dim)];
                movement::slice(input(0), from, *start, self.out.shape[*dim], first, out);
            }
            Kind::Join { dim, first: start } => {
                let parts: usize = self.inputs.iter().map(|v| v.shape[*dim]).sum();
                if parts < self.out.shape[*dim] {
                    out.fill(T::default());
                }
                let mut at = *start;
                for (i, var) in self.inputs.iter().enumerate() {
                    let into = [self.out.shape[*dim], inner(*dim)];
                    movement::join_part(input(i), into, at, var.shape[*dim], first, out);
                    at += var.shape[*dim];
                }
            }
            Kind::Put { dim, start } => {
                let (part, into) =
                    (self.inputs[0].shape[*dim], [self.out.shape[*dim], inner(*dim)]);
                movement::join_part(input(0), into, *start, part, first, out);
            }
            Kind::Pick { dim, places } => {
                let from = [self.inputs[0].shape[*dim], inner(*dim)];
                movement::pick(input(0), from, places, first, out);
            }
            Kind::Repeat(strides) => repeat(input(0), &self.out.shape, strides, first, out),
            Kind::Copy => out.copy_from_slice(&input(0)[first..first + out.len()]),
            Kind::Fill(_) => {}
        }
    }

    /// Whether something along a dim is padding, which lies after each part of a join and after
    /// what a slice may take.
    fn is_padded(&self, dim: usize) -> bool {
        let padded = |var: &Var| var.valid[dim] < var.shape[dim];
        padded(&self.out) || self.inputs.iter().any(padded)
    }

    /// A slice or a join, one index of the dim after the other, with zeros for padding.
    fn around_padding<'a, T: Copy + Default + 'a>(
        &self,
        input: &dyn Fn(usize) -> &'a [T],
        dim: usize,
        first: usize,
        out: &mut [T],
    ) {
        let inner = self.out.shape[dim + 1..].iter().product::<usize>();
        for (i, out) in out.iter_mut().enumerate() {
            let (line, column) = ((first + i) / inner, (first + i) % inner);
            let (outer, index) = (line / self.out.shape[dim], line % self.out.shape[dim]);
            let found = self.source(dim, index).map(|(part, index)| {
                input(part)[(outer * self.inputs[part].shape[dim] + index) * inner + column]
            });
            *out = found.unwrap_or_default();
        }
    }

    /// Which operand, and which index of its dim, an index of the result's dim comes from.
    fn source(&self, dim: usize, index: usize) -> Option<(usize, usize)> {
        match self.kind {
            Kind::Slice { start, .. } => {
                (index < self.out.valid[dim]).then_some((0, start + index))
            }
            Kind::Join { first, .. } => {
                let mut rest = index.checked_sub(first)?;
                for (part, var) in self.inputs.iter().enumerate() {
                    if rest < var.valid[dim] {
                        return Some((part, rest));
                    }
                    rest -= var.valid[dim];
                }
                None
            }
            _ => None,
        }
    }

    fn fill(&self, cx: &Context<'_>, value: f64) {
        let own = self.own(cx.share);
        // SAFETY: the task declared the access, and the types are the value's.
        unsafe {
            match self.out.dtype {
                DType::F64 => cx.get_mut(&self.out, own).fill(value),
                DType::F32 => cx.get_mut(&self.out, own).fill(value as f32),
                DType::Bf16 => cx.get_mut(&self.out, own).fill(half::bf16::from_f64(value)),
                DType::F16 => cx.get_mut(&self.out, own).fill(half::f16::from_f64(value)),
                DType::I32 => cx.get_mut(&self.out, own).fill(value as i32),
                DType::U16 => cx.get_mut(&self.out, own).fill(value as u16),
                DType::Bool => cx.get_mut(&self.out, own).fill(u8::from(value != 0.0)),
            }
        }
    }

    fn add<T: CpuElement>(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        // SAFETY: the task declared these accesses; an output overlaps no other value.
        unsafe {
            let from = cx.get::<T>(&self.inputs[0], own.clone());
            let out = cx.get_mut::<T>(&self.out, own);
            binary_in_place(BinaryKind::Add, out, ElementOperand::Chunk(from));
        }
    }
}

impl Task for Move {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        let reads = |var: &Var| match self.kind {
            _ if own.is_empty() => var.reads(0..0),
            Kind::Copy => var.reads(own.clone()),
            _ => var.reads_all(),
        };
        let mut accesses: Vec<Access> = self.inputs.iter().map(reads).collect();
        accesses.push(self.out.writes(own));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        match (&self.kind, self.out.dtype) {
            (Kind::Fill(value), _) => self.fill(cx, *value),
            (Kind::Copy, DType::F32) if cx.adds(&self.out) => self.add::<f32>(cx),
            (Kind::Copy, DType::F64) if cx.adds(&self.out) => self.add::<f64>(cx),
            (Kind::Copy, DType::Bf16) if cx.adds(&self.out) => self.add::<half::bf16>(cx),
            (Kind::Copy, DType::F16) if cx.adds(&self.out) => self.add::<half::f16>(cx),
            (_, dtype) => match dtype.size() {
                8 => self.bytes::<u64>(cx),
                4 => self.bytes::<u32>(cx),
                2 => self.bytes::<u16>(cx),
                _ => self.bytes::<u8>(cx),
            },
        }
    }
}

fn strides(shape: &[usize], repeated: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for dim in (0..shape.len()).rev().filter(|d| !repeated.contains(d)) {
        strides[dim] = stride;
        stride *= shape[dim];
    }
    strides
}

/// The elements of a repetition from number `first` on.
fn repeat<T: Copy>(x: &[T], shape: &[usize], strides: &[usize], first: usize, out: &mut [T]) {
    for (i, out) in out.iter_mut().enumerate() {
        let mut rest = first + i;
        let mut at = 0;
        for dim in (0..shape.len()).rev() {
            at += rest % shape[dim] * strides[dim];
            rest /= shape[dim];
        }
        *out = x[at];
    }
}
