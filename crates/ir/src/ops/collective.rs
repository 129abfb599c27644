//! Collectives: instructions that change layouts.
//!
//! They act on a list of axes, at the minor end of a dim, and say what they do to the type:
//! gathering removes a suffix of a dim's axes, reducing turns partial into replicated or sharded,
//! all-to-all moves a suffix from one dim to another. A collective may be split into `start`, which
//! gives a pending handle, and `done`, which waits for it: both buffers live until then.

use super::{Op, OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::mesh::{Axis, Mesh};
use crate::rule::Rule;
use crate::types::{Form, TensorType};
use crate::vjp::Vjp;

/// What a collective does to a layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveKind {
    /// S → R: removes the axes from the minor end of a dim.
    AllGather {
        /// The dim.
        dim: usize,
    },
    /// P → S: sums, and appends the axes at the minor end of a dim.
    ReduceScatter {
        /// The dim.
        dim: usize,
    },
    /// P → R: sums.
    AllReduce,
    /// Moves the axes from the minor end of one dim to the minor end of another.
    AllToAll {
        /// The dim that becomes whole.
        from: usize,
        /// The dim that becomes sharded.
        to: usize,
    },
    /// R → S: each rank keeps its block; free.
    Shard {
        /// The dim.
        dim: usize,
    },
    /// R → P: rank 0 of the axes keeps the value, the others hold zero; free.
    ToPartial,
    /// Replaces the axes of a dim by as many shards in another order: one block from one peer.
    Permute {
        /// The dim; the collective's axes are its new ones.
        dim: usize,
    },
    /// Waits for a started collective.
    Done,
}

/// A collective over axes; `start` makes it give a pending handle.
#[derive(Clone, PartialEq, Debug)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// The axes, major to minor.
    pub axes: Vec<Axis>,
    /// Whether it only starts, to be waited for by `done`.
    pub start: bool,
}

const NAMES: [(&str, &str); 7] = [
    ("all_gather", "all_gather_start"),
    ("reduce_scatter", "reduce_scatter_start"),
    ("all_reduce", "all_reduce_start"),
    ("all_to_all", "all_to_all_start"),
    ("shard", "shard_start"),
    ("to_partial", "to_partial_start"),
    ("permute", "permute_start"),
];

pub(super) fn read(
    name: &str,
    axes: Vec<Axis>,
    attrs: &mut AttrReader,
) -> Option<Result<Op, String>> {
    if name == "done" {
        return Some(Ok(Collective { kind: CollectiveKind::Done, axes, start: false }.into()));
    }
    let index = NAMES.iter().position(|(plain, start)| name == *plain || name == *start)?;
    let kind = (|| {
        Ok(match index {
            0 => CollectiveKind::AllGather { dim: attrs.take("dim")? },
            1 => CollectiveKind::ReduceScatter { dim: attrs.take("dim")? },
            2 => CollectiveKind::AllReduce,
            3 => CollectiveKind::AllToAll { from: attrs.take("from")?, to: attrs.take("to")? },
            4 => CollectiveKind::Shard { dim: attrs.take("dim")? },
            5 => CollectiveKind::ToPartial,
            _ => CollectiveKind::Permute { dim: attrs.take("dim")? },
        })
    })();
    let start = name == NAMES[index].1;
    Some(kind.map(|kind| Collective { kind, axes, start }.into()))
}

impl Collective {
    fn index(&self) -> Option<usize> {
        Some(match self.kind {
            CollectiveKind::AllGather { .. } => 0,
            CollectiveKind::ReduceScatter { .. } => 1,
            CollectiveKind::AllReduce => 2,
            CollectiveKind::AllToAll { .. } => 3,
            CollectiveKind::Shard { .. } => 4,
            CollectiveKind::ToPartial => 5,
            CollectiveKind::Permute { .. } => 6,
            CollectiveKind::Done => return None,
        })
    }

    /// The type of the result, or why the collective can't act on this operand.
    pub fn result(&self, ty: &TensorType, mesh: &Mesh) -> Result<TensorType, IrError> {
        let layout = &ty.layout;
        let bad = |what: String| IrError::operands(self.name(), format!("{what} (operand {ty})"));
        if ty.form == Form::Pending && self.kind != CollectiveKind::Done {
            return Err(bad("the operand is still pending; wait for it with done first".into()));
        }
        if let Some(&axis) = self.axes.iter().find(|&&a| mesh.size(a).is_none()) {
            return Err(bad(format!("no axis `{axis}` in the mesh ({mesh})")));
        }
        if let Some(dim) = self.dims().into_iter().find(|&d| d >= ty.shape.len()) {
            return Err(bad(format!("there is no dim {dim}")));
        }
        let cut = |dim: usize| -> Result<Vec<Axis>, IrError> {
            layout.axes(dim).strip_suffix(self.axes.as_slice()).map(<[Axis]>::to_vec).ok_or_else(|| {
                bad(format!(
                    "{:?} is not the minor end of dim {dim}, which is sharded by {:?}; gather the \
                     minor axes first, or permute the dim",
                    self.axes,
                    layout.axes(dim)
                ))
            })
        };
        let appended = |dim: usize| [layout.axes(dim), &self.axes].concat();
        let unpartial = || {
            let mut partial = layout.partial().clone();
            for axis in &self.axes {
                if !partial.remove(axis) {
                    return Err(bad(format!(
                        "the operand is {} over `{axis}`, not a partial sum",
                        layout.role(*axis)
                    )));
                }
            }
            layout.with_partial(partial)
        };
        let new = match self.kind {
            CollectiveKind::AllGather { dim } => layout.with_axes(dim, cut(dim)?)?,
            CollectiveKind::AllReduce => unpartial()?,
            CollectiveKind::ReduceScatter { dim } => unpartial()?.with_axes(dim, appended(dim))?,
            CollectiveKind::AllToAll { from, to } => {
                layout.with_axes(from, cut(from)?)?.with_axes(to, appended(to))?
            }
            CollectiveKind::Shard { dim } => layout.with_axes(dim, appended(dim))?,
            CollectiveKind::ToPartial => {
                let added = layout.partial().iter().chain(&self.axes).copied();
                layout.with_partial(added.collect())?
            }
            CollectiveKind::Permute { dim } => {
                if mesh.count(&self.axes) != mesh.count(layout.axes(dim)) {
                    return Err(bad(format!("dim {dim} would change its number of shards")));
                }
                layout.with_axes(dim, self.axes.clone())?
            }
            CollectiveKind::Done => {
                if ty.form != Form::Pending {
                    return Err(bad("done waits for a started collective".into()));
                }
                layout.clone()
            }
        };
        let form = match (self.start, ty.form) {
            (true, _) => Form::Pending,
            (false, Form::Pending) => Form::Tensor,
            (false, form) => form,
        };
        Ok(TensorType { layout: new, form, ..ty.clone() })
    }

    fn dims(&self) -> Vec<usize> {
        match self.kind {
            CollectiveKind::AllGather { dim }
            | CollectiveKind::ReduceScatter { dim }
            | CollectiveKind::Shard { dim }
            | CollectiveKind::Permute { dim } => vec![dim],
            CollectiveKind::AllToAll { from, to } => vec![from, to],
            CollectiveKind::AllReduce | CollectiveKind::ToPartial | CollectiveKind::Done => vec![],
        }
    }
}

impl OpDef for Collective {
    fn name(&self) -> &'static str {
        match self.index() {
            None => "done",
            Some(index) if self.start => NAMES[index].1,
            Some(index) => NAMES[index].0,
        }
    }

    fn attrs(&self) -> Attrs {
        match self.kind {
            CollectiveKind::AllToAll { from, to } => Attrs::new().with("from", from).with("to", to),
            _ => self.dims().first().map_or_else(Attrs::new, |d| Attrs::new().with("dim", d)),
        }
    }

    fn axes(&self) -> &[Axis] {
        &self.axes
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    /// Collectives change layouts, so they have no rule; [`Collective::result`] types them.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "gradients are formed before a program is partitioned"))
    }

    fn accepts_units(&self) -> bool {
        true
    }
}
