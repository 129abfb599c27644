//! Planted bugs, to measure within how many cases the core property finds each.
//!
//! Some are in how ranks move blocks, some in how they compute on them, and some in the program:
//! what a partitioner would emit if it forgot a sum or took it too late. Those are planted once in
//! a program, at the first place that fits, and do not change the types: the numbers must reveal
//! them, not the verifier.

use std::collections::HashMap;

use phalanx_ir::ops::{Binary, BinaryKind, Collective, CollectiveKind};

use phalanx_ir::{Axis, Instr, Op, Phase, Program, Rewriter, Role, ValueId};

/// A planted bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Gathered blocks are put together in the reverse order.
    GatherOrder,
    /// Ranks take the blocks of a scattered sum in the reverse order.
    ScatterOrder,
    /// Exchanged blocks are put together in the reverse order.
    ExchangeOrder,
    /// An exchange cuts the dim that it should join, and joins the one that it should cut.
    ExchangeSwapped,
    /// Slices are taken in the reverse order.
    ShardOrder,
    /// A slice is taken by the coordinate along another axis of the same size.
    WrongSlice,
    /// A group is formed along another axis of the same size.
    WrongGroup,
    /// A permutation moves nothing.
    NoPermute,
    /// Every rank keeps what only the first should.
    PartialEverywhere,
    /// The last rank's summand is left out.
    ForgottenShare,
    /// The first rank's summand is added twice.
    DoubledShare,
    /// Padding is taken for elements that are zero.
    PaddingCounts,
    /// The mask of a dropout uses the local index of an element.
    LocalMask,
    /// Rotary embeddings use the local index of an element as its position.
    LocalPositions,
    /// Softmax, norms and cross-entropy look at the local part of a sharded dim alone.
    LocalStatistics,
    /// A sum is not taken.
    LostSum,
    /// A sum is taken twice.
    SumTwice,
    /// The product of two partial sums over one axis is summed after it was formed.
    ProductOfPartials,
    /// A function of a partial sum is summed after it was formed.
    FunctionOfPartial,
    /// A whole value is added to a partial sum, and the result is then summed.
    PartialPlusWhole,
    /// A partial sum is concatenated with whole values, and the result is then summed.
    PartialBesideWhole,
    /// The partial gradient of a parameter is taken for a complete one.
    GradientNotPartial,
    /// A collective over several axes takes them in the reverse order.
    MergedAxesReversed,
    /// A collective over one part of a split axis runs over the other.
    WrongPartOfAxis,
    /// A reader gets the value in the layout from before a reshard.
    StaleLayout,
    /// A step of a stream brings the block of the step before it once more.
    BlockTwice,
    /// The block of a step is summed on the rank that keeps the next one.
    BlockElsewhere,
    /// The block of a step is put where that of the first one belongs.
    BlockMisplaced,
    /// Shards in zigzag order are put together, and taken, as if they were blocks.
    ZigzagAsBlocks,
    /// Of the rows that a window reads of its neighbours, the outermost does not come.
    RowTooFew,
    /// The rows before a block come from the rank after it, and the other way round.
    RowsOfWrongNeighbour,
    /// Rows behind the last one of uneven heights count in windows.
    PaddingRows,
}

impl Bug {
    /// Whether it is in what products do block by block.
    pub fn is_of_streams(self) -> bool {
        matches!(self, Bug::BlockTwice | Bug::BlockElsewhere | Bug::BlockMisplaced)
    }

    /// A program that has the bug, or nothing if there is no place for it. Bugs that are in how
    /// programs are run leave every program as it is.
    pub(super) fn planted_in(self, program: &Program) -> Option<Program> {
        let sums = |c: &Collective| c.kind == CollectiveKind::AllReduce;
        match self {
            Bug::LostSum => first(program, |c| {
                sums(c).then(|| vec![Collective::new(CollectiveKind::Done, Vec::new())])
            }),
            Bug::SumTwice => first(program, |c| sums(c).then(|| vec![c.clone(), c.clone()])),
            Bug::MergedAxesReversed => first(program, |c| {
                let axes: Vec<Axis> = c.axes.iter().rev().copied().collect();
                (axes.len() > 1 && !sums(c)).then(|| vec![Collective { axes, ..c.clone() }])
            }),
            Bug::WrongPartOfAxis => first(program, |c| {
                let axes = vec![other_part(program, c)?];
                Some(vec![Collective { axes, ..c.clone() }])
            }),
            Bug::ProductOfPartials => late(program, |instr, summed| {
                let multiplies = is_binary(instr, BinaryKind::Mul) || is_matmul(instr);
                multiplies && instr.inputs.len() == 2 && summed == 2
            }),
            Bug::FunctionOfPartial => late(program, |instr, _| matches!(instr.op, Op::Unary(_))),
            Bug::PartialPlusWhole => {
                late(program, |instr, summed| is_binary(instr, BinaryKind::Add) && summed == 1)
            }
            Bug::PartialBesideWhole => late(program, |instr, summed| {
                matches!(instr.op, Op::Concat(_)) && summed < instr.inputs.len()
            }),
            Bug::GradientNotPartial => gradient_not_partial(program),
            Bug::StaleLayout => stale(program),
            _ => Some(program.clone()),
        }
    }
}

/// The program with the first collective that `instead` has something for replaced by that.
fn first(
    program: &Program,
    instead: impl Fn(&Collective) -> Option<Vec<Collective>>,
) -> Option<Program> {
    let mut found = program.instrs().iter().enumerate().filter_map(|(at, instr)| {
        let Op::Collective(c) = &instr.op else { return None };
        Some((at, instead(c)?))
    });
    let (at, chain) = found.next()?;
    let mut rewriter = Rewriter::new(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        if index != at {
            rewriter.keep(index);
            continue;
        }
        let mut from = instr.inputs[0];
        for c in &chain {
            rewriter.emit(c.clone(), &[from], &instr.outputs, instr.phase);
            from = instr.outputs[0];
        }
    }
    Some(rewriter.finish())
}

/// The part of a split axis that is as large as the one part that a collective is over.
fn other_part(program: &Program, c: &Collective) -> Option<Axis> {
    let [axis] = c.axes.as_slice() else { return None };
    let (whole, _) = axis.name().rsplit_once('.')?;
    let size = program.mesh().size(*axis);
    let parts = program.mesh().expand(whole).ok()?;
    parts.into_iter().find(|&part| part != *axis && program.mesh().size(part) == size)
}

fn is_binary(instr: &Instr, kind: BinaryKind) -> bool {
    matches!(&instr.op, Op::Binary(Binary { kind: has }) if *has == kind)
}

fn is_matmul(instr: &Instr) -> bool {
    matches!(instr.op, Op::Matmul(_))
}

/// The program in which the first reader of sums that suits reads them before they are taken, and
/// its result is summed instead. `suits` gets the reader, and how many of its operands are sums over
/// the axes of the first one.
fn late(program: &Program, suits: impl Fn(&Instr, usize) -> bool) -> Option<Program> {
    let mut sums: HashMap<ValueId, (&Instr, &Collective)> = HashMap::new();
    let mut found: Option<(usize, Collective)> = None;
    for (at, instr) in program.instrs().iter().enumerate() {
        if let Op::Collective(c) = &instr.op {
            if c.kind == CollectiveKind::AllReduce && !c.start {
                sums.insert(instr.outputs[0], (instr, c));
            }
            continue;
        }
        let Some(&(_, c)) = instr.inputs.iter().find_map(|v| sums.get(v)) else { continue };
        let alike = |v: &&ValueId| sums.get(v).is_some_and(|(_, other)| other.axes == c.axes);
        if suits(instr, instr.inputs.iter().filter(alike).count()) {
            found = Some((at, c.clone()));
            break;
        }
    }
    let (at, sum) = found?;
    let mut rewriter = Rewriter::new(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        if index != at {
            rewriter.keep(index);
            continue;
        }
        let operands: Vec<&(&Instr, &Collective)> = instr
            .inputs
            .iter()
            .filter_map(|v| sums.get(v))
            .filter(|s| s.1.axes == sum.axes)
            .collect();
        let as_it_is = Collective::new(CollectiveKind::Done, Vec::new());
        for (made, _) in &operands {
            rewriter.emit(as_it_is.clone(), &made.inputs, &made.outputs, made.phase);
        }
        rewriter.keep(index);
        let result = &instr.outputs[..1];
        rewriter.emit(sum.clone(), result, result, instr.phase);
        // Other readers get the sums as before.
        for (made, c) in &operands {
            rewriter.emit((*c).clone(), &made.inputs, &made.outputs, made.phase);
        }
    }
    Some(rewriter.finish())
}

fn gradient_not_partial(program: &Program) -> Option<Program> {
    let mut found = program.outputs().iter().enumerate().filter(|(_, port)| {
        port.role == Role::Gradient && !program.ty(port.value).layout.partial().is_empty()
    });
    let (at, _) = found.next()?;
    let mut wrong = Program::new(&program.name, program.mesh().clone());
    // The values of an emitted program are numbered as its text lists them, here too.
    for port in program.inputs() {
        wrong.input_like(port, program.ty(port.value).clone());
    }
    for instr in program.instrs() {
        let types = instr.outputs.iter().map(|&v| program.ty(v).clone()).collect();
        wrong.push_unchecked(instr.op.clone(), &instr.inputs, types, instr.phase);
    }
    for (i, port) in program.outputs().iter().enumerate() {
        let mut value = port.value;
        if i == at {
            let ty = program.ty(value);
            let whole = ty.with_layout(ty.layout.with_partial(Default::default()).ok()?);
            let as_it_is = Collective::new(CollectiveKind::Done, Vec::new());
            value = wrong.push_unchecked(as_it_is.into(), &[value], vec![whole], Phase::W)[0];
        }
        wrong.output_like(port, value);
    }
    Some(wrong)
}

/// Reads, from some place on, an earlier version of a value that has as many elements in another layout.
fn stale(program: &Program) -> Option<Program> {
    let mesh = program.mesh();
    // Of each value that a chain of collectives made: all that the chain made before.
    let mut before: HashMap<ValueId, Vec<ValueId>> = HashMap::new();
    let fits = |old: &ValueId, new: &ValueId| {
        let (a, b) = (program.ty(*old), program.ty(*new));
        a.layout != b.layout
            && a.layout.partial() == b.layout.partial()
            && a.local_shape(mesh) == b.local_shape(mesh)
    };
    let mut found = None;
    for (at, instr) in program.instrs().iter().enumerate() {
        if matches!(instr.op, Op::Collective(_)) {
            let mut chain = before.get(&instr.inputs[0]).cloned().unwrap_or_default();
            chain.push(instr.inputs[0]);
            before.insert(instr.outputs[0], chain);
            continue;
        }
        let old = |new: &ValueId| before.get(new)?.iter().find(|old| fits(old, new)).copied();
        if let Some(pair) = instr.inputs.iter().find_map(|new| Some((old(new)?, *new))) {
            found = Some((at, pair));
            break;
        }
    }
    let (at, (old, new)) = found?;
    let as_it_is = Collective::new(CollectiveKind::Done, Vec::new());
    let mut rewriter = Rewriter::new(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        if index == at {
            rewriter.emit(as_it_is.clone(), &[old], &[new], instr.phase);
        }
        rewriter.keep(index);
    }
    Some(rewriter.finish())
}
