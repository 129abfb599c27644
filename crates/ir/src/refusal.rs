//! Why layouts do not fit a rule, and the diagnostic for the author of the program: what is wrong
//! in terms of operands, axes and factors, why it matters, and what to do instead.

use std::fmt;

use crate::layout::{Layout, Order};
use crate::mesh::{Axis, Mesh};
use crate::ops::{Op, OpDef};

/// The place of a layout in an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The operand of this number, from 0.
    Operand(usize),
    /// The result of this number, from 0.
    Result(usize),
}

/// Why layouts do not fit a rule. Operands and results are numbered from 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleError {
    /// The mesh has no such axis.
    UnknownAxis {
        /// The axis.
        axis: Axis,
    },
    /// Two operands shard one factor differently.
    Disagree {
        /// The factor.
        factor: String,
        /// The axes in which they differ.
        axes: Vec<Axis>,
        /// The first operand.
        first: usize,
        /// The operand that differs.
        second: usize,
    },
    /// One axis shards two factors.
    TwoFactors {
        /// The axis.
        axis: Axis,
        /// One factor.
        first: String,
        /// The other.
        second: String,
    },
    /// A factor that the kernel needs whole is sharded.
    Whole {
        /// The axis.
        axis: Axis,
        /// The factor.
        factor: String,
    },
    /// An axis covers the end of one factor and the start of the next.
    Straddle {
        /// The axis.
        axis: Axis,
        /// The operand or result.
        place: Place,
        /// The factor that ends inside the axis.
        factor: String,
        /// What is left of that factor.
        left: usize,
        /// The size of the axis.
        size: usize,
    },
    /// The shards do not divide a factor.
    Uneven {
        /// The axis.
        axis: Axis,
        /// The operand or result.
        place: Place,
        /// The factor.
        factor: String,
        /// What is left of it.
        left: usize,
        /// The size of the axis.
        size: usize,
        /// The padded extent that the shards would divide, where the factor may be padded.
        padded: Option<usize>,
    },
    /// One factor is padded to two extents.
    Padding {
        /// The factor.
        factor: String,
        /// Two places that have it, and their padded extents.
        places: [(Place, usize); 2],
    },
    /// A padded dim does not end with a whole number of its major factor's parts.
    SplitPadding {
        /// The operand or result.
        place: Place,
        /// The major factor.
        factor: String,
        /// The padded extent of the dim.
        padded: usize,
        /// The elements of one part of the major factor.
        minor: usize,
    },
    /// The padding of a factor would lie inside another factor.
    MinorPadding {
        /// The operand or result.
        place: Place,
        /// The padded factor.
        factor: String,
        /// Its size.
        size: usize,
        /// Its padded extent.
        padded: usize,
    },
    /// A compound dim whose elements are not in block order.
    Order {
        /// An axis of the dim.
        axis: Axis,
        /// The operand or result.
        place: Place,
        /// The order.
        order: Order,
    },
    /// A factor that the op needs in blocks is distributed in another order.
    Dealt {
        /// An axis that shards it.
        axis: Axis,
        /// The factor.
        factor: String,
        /// The order.
        order: Order,
    },
    /// A minor factor of a result's dim is sharded although the major one is not fully sharded.
    Minor {
        /// Which result.
        index: usize,
        /// The axes of the minor factor.
        axes: Vec<Axis>,
        /// An operand that has the minor factor.
        operand: Option<usize>,
        /// The minor factor.
        minor: String,
        /// The major factor.
        major: String,
        /// What one rank holds of the major factor.
        left: usize,
    },
    /// The operands that are partial over an axis are not one of the op's linear groups.
    NotLinear {
        /// The axis.
        axis: Axis,
        /// The operands that are partial over it.
        partial: Vec<usize>,
        /// What the op is linear in.
        groups: Vec<Vec<usize>>,
        /// How many operands there are.
        operands: usize,
    },
    /// An operand is partial over an axis that shards a factor of the op.
    PartialAndSharded {
        /// The axis.
        axis: Axis,
        /// The partial operand.
        operand: usize,
        /// The sharded factor.
        factor: String,
    },
    /// An operand that is added to the result has a different layout.
    Addend {
        /// The operand.
        operand: usize,
        /// The axes in which the two layouts differ.
        axes: Vec<Axis>,
        /// The layout it needs.
        expected: Layout,
    },
    /// A result is declared with a layout that differs from the one that follows from the operands.
    Result {
        /// Which result.
        index: usize,
        /// The axes in which the two layouts differ.
        axes: Vec<Axis>,
        /// The layout that follows.
        expected: Layout,
    },
}

/// The instruction that the error is about.
pub(crate) struct Case<'a> {
    /// The op.
    pub(crate) op: &'a Op,
    /// The mesh.
    pub(crate) mesh: &'a Mesh,
    /// Name and layout of each operand.
    pub(crate) operands: Vec<(String, &'a Layout)>,
}

impl RuleError {
    /// The mesh axis concerned, where one is.
    pub fn axis(&self) -> Option<Axis> {
        match self {
            RuleError::UnknownAxis { axis }
            | RuleError::TwoFactors { axis, .. }
            | RuleError::Whole { axis, .. }
            | RuleError::Straddle { axis, .. }
            | RuleError::Uneven { axis, .. }
            | RuleError::Order { axis, .. }
            | RuleError::Dealt { axis, .. }
            | RuleError::NotLinear { axis, .. }
            | RuleError::PartialAndSharded { axis, .. } => Some(*axis),
            RuleError::Disagree { axes, .. }
            | RuleError::Minor { axes, .. }
            | RuleError::Addend { axes, .. }
            | RuleError::Result { axes, .. } => axes.first().copied(),
            RuleError::Padding { .. }
            | RuleError::SplitPadding { .. }
            | RuleError::MinorPadding { .. } => None,
        }
    }

    /// What is wrong, in one sentence.
    pub(crate) fn what(&self, case: &Case<'_>) -> String {
        let said = match self {
            RuleError::NotLinear { axis, partial, groups, operands } => {
                not_linear(case, *axis, partial, groups, *operands)
            }
            RuleError::PartialAndSharded { axis, operand, factor } => format!(
                "operand {operand} is a partial sum over `{axis}`, which also shards factor \
                 `{factor}`"
            ),
            RuleError::TwoFactors { axis, first, second } => {
                format!("axis `{axis}` shards two factors, `{first}` and `{second}`")
            }
            RuleError::Disagree { factor, axes, first, second } => format!(
                "operands {first} and {second} shard factor `{factor}` differently ({})",
                quoted(axes)
            ),
            RuleError::Whole { axis, factor } => {
                format!("factor `{factor}` is sharded by `{axis}`, but the kernel needs all of it")
            }
            RuleError::Straddle { axis, place, factor, left, size } => format!(
                "axis `{axis}` ({size} ranks) of {place} covers the last {left} elements of \
                factor `{factor}` and part of the next factor"
            ),
            RuleError::Uneven { axis, place, factor, left, size, .. } => format!(
                "axis `{axis}` ({size} ranks) of {place} does not divide the {left} elements of \
                factor `{factor}`"
            ),
            RuleError::Padding { factor, places: [(first, a), (second, b)] } => {
                format!("{first} pads factor `{factor}` to {a}, but {second} pads it to {b}")
            }
            RuleError::SplitPadding { place, factor, padded, minor } => format!(
                "{place} is padded to {padded} elements, which is not a multiple of the {minor} \
                elements of one part of factor `{factor}`"
            ),
            RuleError::MinorPadding { place, factor, size, padded } => format!(
                "the padding of factor `{factor}` ({size} padded to {padded}) would lie inside \
                another factor in {place}"
            ),
            RuleError::Order { axis, place, order } => format!(
                "{place} is {} over `{axis}` on a dim made of several factors",
                order.name()
            ),
            RuleError::Dealt { axis, factor, order } => format!(
                "factor `{factor}` is {} over `{axis}`, but each rank needs one block of it",
                order.name()
            ),
            RuleError::Minor { index, axes, minor, major, left, .. } => format!(
                "factor `{minor}` is sharded by {}, but in result {index} it lies inside factor \
                 `{major}`, of which {left} are left",
                quoted(axes)
            ),
            RuleError::Addend { operand, expected, .. } => {
                format!(
                    "operand {operand} is added to the result and must have the layout {expected}"
                )
            }
            RuleError::Result { index, axes, expected } => format!(
                "result {index} has the layout {expected}, but the declared layout differs in {}",
                quoted(axes)
            ),
            RuleError::UnknownAxis { axis } => format!("the mesh has no axis `{axis}`"),
        };
        format!("{}: {said}", case.op.name())
    }

    /// Why it matters, and what to do instead.
    pub(crate) fn help(&self, case: &Case<'_>) -> Vec<String> {
        match self {
            RuleError::NotLinear { axis, partial, groups, .. } => {
                return partial_help(case, *axis, partial, groups);
            }
            RuleError::TwoFactors { axis, .. } => {
                return vec![
                    "each rank would compute only the diagonal blocks of the result".to_owned(),
                    format!("usual fix: gather one operand over `{axis}` first"),
                ];
            }
            RuleError::Minor { axes, operand, .. } => {
                let names: Vec<String> = axes.iter().map(Axis::to_string).collect();
                let operand = operand.and_then(|i| case.operands.get(i));
                let value = operand.map_or("the operand", |(name, _)| name.as_str());
                return vec![
                    "the result's layout would not describe the elements that its ranks hold"
                        .into(),
                    format!("usual fix: gather {value} first (all_gather<{}>)", names.join(",")),
                ];
            }
            _ => {}
        }
        vec![match self {
            RuleError::PartialAndSharded { axis, operand, .. } => {
                format!("usual fix: reduce operand {operand} over `{axis}` first")
            }
            RuleError::Disagree { .. } => "usual fix: bring one operand into the layout of the \
                                           other (all_gather, shard or all_to_all)"
                .to_owned(),
            RuleError::Whole { axis, .. } => format!("usual fix: gather it over `{axis}` first"),
            RuleError::Straddle { axis, left, size, .. } => {
                format!("usual fix: split `{axis}` as {left} × {}", size / left)
            }
            RuleError::Uneven { padded: Some(padded), .. } => {
                format!("usual fix: pad the factor to {padded} in every type that has it")
            }
            RuleError::Uneven { padded: None, .. } | RuleError::MinorPadding { .. } => {
                "only the major factor of a dim can be padded: other padding would lie between \
                 its elements"
                    .to_owned()
            }
            RuleError::Padding { places: [(_, a), (_, b)], .. } => {
                format!("the padded size must be the same in every layout: usual fix: {}", a.max(b))
            }
            RuleError::SplitPadding { padded, minor, .. } => {
                format!("usual fix: pad to {}", padded.next_multiple_of((*minor).max(1)))
            }
            RuleError::Order { axis, .. } | RuleError::Dealt { axis, .. } => {
                format!("usual fix: gather it over `{axis}`, or use block order")
            }
            RuleError::Addend { .. } => {
                "usual fix: reduce the product before adding, or reshard the addend".to_owned()
            }
            RuleError::Result { .. } => {
                "usual fix: add the collective that gives the declared layout".to_owned()
            }
            _ => format!("the mesh is: {}", case.mesh),
        }]
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Operand(i) => write!(f, "operand {i}"),
            Place::Result(i) => write!(f, "result {i}"),
        }
    }
}

fn quoted(axes: &[Axis]) -> String {
    axes.iter().map(|a| format!("`{a}`")).collect::<Vec<_>>().join(", ")
}

fn not_linear(
    case: &Case<'_>,
    axis: Axis,
    partial: &[usize],
    groups: &[Vec<usize>],
    operands: usize,
) -> String {
    let other = (0..operands).find(|i| !partial.contains(i));
    match other {
        Some(other) if groups.iter().any(|g| g.contains(&other)) => format!(
            "operand {} is a partial sum over `{axis}`, operand {other} is {} over `{axis}`",
            partial[0],
            case.operands[other].1.role(axis)
        ),
        _ if partial.len() > 1 => {
            format!("operands {partial:?} are all partial sums over `{axis}`")
        }
        _ => format!("operand {} is a partial sum over `{axis}`", partial[0]),
    }
}

fn partial_help(
    case: &Case<'_>,
    axis: Axis,
    partial: &[usize],
    groups: &[Vec<usize>],
) -> Vec<String> {
    let (name, ranks) = (case.op.name(), case.mesh.count(&[axis]));
    let reduce = reduce_first(&case.operands[partial[0]].0, &[axis]);
    match name {
        "add" | "sub" => vec![
            format!(
                "adding a replicated value to a partial sum would count it {ranks} times \
                 ({axis} = {ranks})"
            ),
            format!("{reduce}, or add the other operand on coordinate 0 only (to_partial<{axis}>)"),
        ],
        _ if case.op.is_update() => vec![
            format!(
                "each of the {ranks} ranks would update with only its own summand of the gradient"
            ),
            reduce,
        ],
        _ if groups.is_empty() => {
            vec![format!("{name} of a sum is not the sum of {name}"), reduce]
        }
        _ => vec![
            format!(
                "a product of two partial sums over `{axis}` would need products between ranks"
            ),
            reduce,
        ],
    }
}

/// The usual fix for a value that is a partial sum where it must not be.
pub(crate) fn reduce_first(value: &str, axes: &[Axis]) -> String {
    let names = axes.iter().map(Axis::to_string).collect::<Vec<_>>().join(",");
    format!("usual fix: reduce {value} first (all_reduce<{names}> or reduce_scatter<{names}>)")
}
