//! Choices of experts and places of tokens: workers take rows, or whole groups of tokens.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::{Assign, Deal, Histogram, Queue};

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::routing::{self, Choices};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let made = match &op.instr.op {
        Op::TopK(_) => {
            let (x, values, index) = (op.input(0), op.output(0), op.output(1));
            for_float!(op, x.dtype, T => task(Take::<T> { x, values, index, types: PhantomData }))?
        }
        Op::TopKGrad(_) => {
            let (index, dy, dx) = (op.input(0), op.input(1), op.output(0));
            for_float!(op, dy.dtype, T => task(Return::<T> { index, dy, dx, types: PhantomData }))?
        }
        Op::Assign(of) => {
            let stands = (op.instr.inputs.len() > 1).then(|| op.input(1));
            let (index, slots) = (op.input(0), op.output(0));
            task(Places { of: *of, choices: choices(&index), index, stands, slots })
        }
        Op::Queue(of) => {
            let stands = (op.instr.inputs.len() > 1).then(|| op.input(1));
            let (index, slots, counts) = (op.input(0), op.output(0), op.output(1));
            let part = op.part(op.instr.outputs[1], 0);
            let first = part.start();
            let first = first.ok_or_else(|| op.unsupported("parts are not sharded in blocks"))?;
            let choices = choices(&index);
            task(Queues { of: *of, choices, first, index, stands, slots, counts })
        }
        Op::Deal(of) => task(Dealt { of: *of, numbers: op.input(0), out: op.output(0) }),
        Op::Histogram(of) => {
            let (numbers, out, value) = (op.input(0), op.output(0), op.instr.outputs[0]);
            let part = op.part(value, out.shape.len() - 1);
            let first = part.start();
            let first = first.ok_or_else(|| op.unsupported("counts are not sharded in blocks"))?;
            let choices = choices(&numbers);
            for_float!(op, out.dtype, T => {
                task(Counts::<T> { of: *of, choices, first, numbers, out, types: PhantomData })
            })?
        }
        _ => return Err(op.unsupported("it does not choose")),
    };
    Ok(vec![made])
}

/// The tokens and choices of a group.
pub(super) fn choices(slots: &Var) -> Choices {
    let dims = slots.shape.len();
    let dim = |i: usize| [slots.shape[i], slots.valid[i]];
    Choices { tokens: dim(dims - 2), k: dim(dims - 1) }
}

/// The k largest of each row.
struct Take<T> {
    x: Var,
    values: Var,
    index: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Take<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.x.own_rows(share);
        let out = self.values.of_rows(&rows);
        vec![
            self.x.reads(self.x.of_rows(&rows)),
            self.values.writes(out.clone()),
            self.index.writes(out),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.x.own_rows(cx.share);
        let out = self.values.of_rows(&rows);
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (x, values, index) = unsafe {
            (
                cx.get::<T>(&self.x, self.x.of_rows(&rows)),
                cx.get_mut::<T>(&self.values, out.clone()),
                cx.get_mut::<i32>(&self.index, out),
            )
        };
        let size = [self.x.width(), self.x.valid_width()];
        let k = [self.values.width(), self.values.valid_width()];
        routing::top_k(x, size, k, values, index);
    }
}

/// Gradients to where elements were taken from.
struct Return<T> {
    index: Var,
    dy: Var,
    dx: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Return<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.dx.own_rows(share);
        let given = self.dy.of_rows(&rows);
        vec![
            self.index.reads(given.clone()),
            self.dy.reads(given),
            self.dx.writes(self.dx.of_rows(&rows)),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.dx.own_rows(cx.share);
        let given = self.dy.of_rows(&rows);
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (index, dy, dx) = unsafe {
            (
                cx.get::<i32>(&self.index, given.clone()),
                cx.get::<T>(&self.dy, given),
                cx.get_mut::<T>(&self.dx, self.dx.of_rows(&rows)),
            )
        };
        let k = [self.dy.width(), self.dy.valid_width()];
        routing::top_k_grad(index, dy, k, self.dx.width(), dx);
    }
}

/// A slot for each (token, choice).
struct Places {
    of: Assign,
    choices: Choices,
    index: Var,
    stands: Option<Var>,
    slots: Var,
}

impl Places {
    fn own(&self, share: Share) -> Range<usize> {
        own_groups(&self.index, self.choices, share).1
    }
}

impl Task for Places {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        let stands = self.stands.iter().map(|stands| stands.reads(own.clone()));
        stands.chain([self.index.reads(own.clone()), self.slots.writes(own.clone())]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        // SAFETY: the task declared these accesses; the scratch memory is used once.
        let (index, slots, taken) = unsafe {
            (
                cx.get::<i32>(&self.index, own.clone()),
                cx.get_mut::<i32>(&self.slots, own.clone()),
                cx.scratch::<i32>(self.of.experts),
            )
        };
        let stands: &[u8] = match &self.stands {
            // SAFETY: as above.
            Some(stands) => unsafe { cx.get(stands, own) },
            None => &[],
        };
        routing::assign(index, stands, self.choices, self.of.capacity, taken, slots);
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.of.experts * size_of::<i32>()
    }
}

/// A slot for each (token, choice) in packed rows, and how many rows each expert has.
struct Queues {
    of: Queue,
    choices: Choices,
    /// The first part that is counted here.
    first: usize,
    index: Var,
    stands: Option<Var>,
    slots: Var,
    counts: Var,
}

impl Queues {
    /// The counts of some groups, for each part that is here.
    fn counted(&self, groups: &Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let (each, parts) = (self.counts.width(), self.counts.shape[0]);
        let of_part = self.counts.rows() / parts.max(1);
        let groups = groups.clone();
        (0..parts).map(move |part| {
            let first = part * of_part;
            (first + groups.start) * each..(first + groups.end) * each
        })
    }
}

impl Task for Queues {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (groups, own) = own_groups(&self.index, self.choices, share);
        let stands = self.stands.iter().map(|stands| stands.reads(own.clone()));
        let slots = [self.index.reads(own.clone()), self.slots.writes(own.clone())];
        let counts = self.counted(&groups).map(|range| self.counts.writes(range));
        stands.chain(slots).chain(counts).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let (groups, _) = own_groups(&self.index, self.choices, cx.share);
        let (size, experts) = (self.choices.group(), self.of.experts);
        let of_part = experts / self.of.parts;
        let room = self.of.room;
        // SAFETY: the scratch memory is used once.
        let (counts, next) = unsafe { cx.scratch::<i32>(2 * experts) }.split_at_mut(experts);
        for group in groups {
            let own = group * size..(group + 1) * size;
            // SAFETY: the task declared these accesses.
            let (index, slots) = unsafe {
                (
                    cx.get::<i32>(&self.index, own.clone()),
                    cx.get_mut::<i32>(&self.slots, own.clone()),
                )
            };
            let stands: &[u8] = match &self.stands {
                // SAFETY: as above.
                Some(stands) => unsafe { cx.get(stands, own) },
                None => &[],
            };
            let both = [&mut *counts, &mut *next];
            routing::queue(index, stands, self.choices, [of_part, room], both, slots);
            for (part, range) in self.counted(&(group..group + 1)).enumerate() {
                // SAFETY: as above.
                let to = unsafe { cx.get_mut::<i32>(&self.counts, range) };
                // Padding has no rows.
                to.fill(0);
                let first = (self.first + part) * of_part;
                if let Some(own) = counts.get(first..first + of_part) {
                    to[..of_part].copy_from_slice(own);
                }
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        2 * self.of.experts * size_of::<i32>()
    }
}

/// The places of distributed experts.
struct Dealt {
    of: Deal,
    numbers: Var,
    out: Var,
}

impl Task for Dealt {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.out.elements());
        vec![self.numbers.reads(own.clone()), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.out.elements());
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (numbers, out) = unsafe {
            (cx.get::<i32>(&self.numbers, own.clone()), cx.get_mut::<i32>(&self.out, own))
        };
        out.iter_mut().zip(numbers).for_each(|(out, number)| *out = self.of.apply(*number));
    }
}

/// How often each number comes.
struct Counts<T> {
    of: Histogram,
    choices: Choices,
    /// The first number that is counted here.
    first: usize,
    numbers: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Counts<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (groups, own) = own_groups(&self.numbers, self.choices, share);
        vec![self.numbers.reads(own), self.out.writes(self.out.of_rows(&groups))]
    }

    fn run(&self, cx: &Context<'_>) {
        let (groups, own) = own_groups(&self.numbers, self.choices, cx.share);
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (numbers, out) = unsafe {
            (
                cx.get::<i32>(&self.numbers, own),
                cx.get_mut::<T>(&self.out, self.out.of_rows(&groups)),
            )
        };
        let (Histogram { size, per, .. }, held) = (self.of, [self.first, self.out.width()]);
        routing::histogram(numbers, self.choices, per, size, held, out);
    }
}

/// A worker's groups, and the elements of their tokens' choices.
fn own_groups(var: &Var, choices: Choices, share: Share) -> (Range<usize>, Range<usize>) {
    let group = choices.group();
    let groups = share.of(var.elements() / group.max(1));
    (groups.clone(), groups.start * group..groups.end * group)
}
