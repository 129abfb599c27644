//! Errors of meshes, layouts, instructions and program text.

use crate::mesh::Axis;
use crate::verify::VerifyError;

/// All errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IrError {
    /// An axis name that cannot be written in a layout.
    #[error(
        "`{name}` cannot be the name of a mesh axis: use 1 to {longest} letters, digits, `_` or \
        `.`, starting with a letter (and not `P`, which marks partial sums)"
    )]
    AxisName {
        /// What was given.
        name: String,
        /// The longest name allowed.
        longest: usize,
    },
    /// An axis with no ranks.
    #[error("axis `{axis}` has size 0: every axis needs at least one rank")]
    EmptyAxis {
        /// The axis.
        axis: Axis,
    },
    /// The same name twice in one mesh.
    #[error("axis `{axis}` appears twice in the mesh; remove one, or give the second another name")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
    },
    /// An axis and a part of it in one mesh.
    #[error(
        "the mesh has both `{whole}` and its part `{part}`; of a split axis, write only the parts"
    )]
    AxisAndPart {
        /// The whole axis.
        whole: Axis,
        /// The part.
        part: Axis,
    },
    /// A split whose parts do not multiply to the axis.
    #[error("axis `{axis}` has {size} ranks and cannot be split into {}", product(parts))]
    Split {
        /// The axis.
        axis: Axis,
        /// Its size.
        size: usize,
        /// The parts asked for.
        parts: Vec<usize>,
    },
    /// A name that no axis of the mesh has.
    #[error("there is no axis `{name}` in the mesh ({mesh})")]
    UnknownAxis {
        /// The name.
        name: String,
        /// The mesh's text.
        mesh: String,
    },
    /// A mesh text that is not `name=size`.
    #[error("`{part}` is not `axis=size` (write a mesh as `dp=2 tp=4`)")]
    MeshText {
        /// The part that could not be read.
        part: String,
    },
    /// A layout that uses an axis twice, or a dim that does not exist.
    #[error("layout {layout}: {what}")]
    Layout {
        /// The layout's text.
        layout: String,
        /// What is wrong with it.
        what: String,
    },
    /// A layout that is not possible for a value of this shape.
    #[error("{ty}: {what}")]
    TypeLayout {
        /// The type's text.
        ty: String,
        /// The axis concerned.
        axis: Axis,
        /// What does not fit, with the values.
        what: String,
    },
    /// An op applied to operands whose shapes or element types do not fit.
    #[error("{op}: {what}")]
    Operands {
        /// The op's name.
        op: String,
        /// What does not fit, with the values.
        what: String,
    },
    /// An instruction whose layouts do not type-check.
    #[error(transparent)]
    Verify(#[from] Box<VerifyError>),
    /// Program text that cannot be parsed.
    #[error("line {line}: {what}")]
    Text {
        /// The line, from 1.
        line: usize,
        /// What was expected and what was found.
        what: String,
    },
    /// An op that has no gradient was asked for one.
    #[error("{op} has no gradient with respect to operand {operand}; {help}")]
    NoGradient {
        /// The op's name.
        op: String,
        /// The operand asked for.
        operand: usize,
        /// What would work.
        help: String,
    },
    /// A model whose segments do not fit together.
    #[error("model {model}: {what}")]
    Model {
        /// The model's name.
        model: String,
        /// What does not fit.
        what: String,
    },
}

impl IrError {
    /// An operand error of a named op.
    pub fn operands(op: &str, what: impl Into<String>) -> Self {
        Self::Operands { op: op.to_owned(), what: what.into() }
    }
}

fn product(parts: &[usize]) -> String {
    let text: Vec<String> = parts.iter().map(usize::to_string).collect();
    format!("{} = {}", text.join(" × "), parts.iter().product::<usize>())
}
