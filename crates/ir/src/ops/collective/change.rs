//! What a collective does to the type of its operand, or why it cannot act on it.

use std::fmt;

use super::{Collective, CollectiveKind};
use crate::error::IrError;
use crate::layout::{AxisRole, Layout, Order, Sharding};
use crate::mesh::{Axis, Mesh};
use crate::ops::OpDef;
use crate::types::TensorType;

/// A collective and the operand whose layout it changes.
pub(super) struct Change<'a> {
    pub(super) collective: &'a Collective,
    pub(super) ty: &'a TensorType,
}

impl Change<'_> {
    pub(super) fn bad(&self, what: impl fmt::Display) -> IrError {
        IrError::operands(self.collective.name(), format!("{what} (operand {})", self.ty))
    }

    pub(super) fn layout(&self, mesh: &Mesh) -> Result<Layout, IrError> {
        let (layout, axes) = (&self.ty.layout, &self.collective.axes);
        match self.collective.kind {
            CollectiveKind::AllGather { dim } => layout.with_axes(dim, self.cut(dim)?),
            CollectiveKind::AllReduce => self.summed(),
            CollectiveKind::ReduceScatter { dim } => {
                self.summed().and_then(|layout| self.dealt(&layout, dim))
            }
            CollectiveKind::AllToAll { from, to } => {
                layout.with_axes(from, self.cut(from)?)?.with_axes(to, self.appended(to)?)
            }
            CollectiveKind::Shard { dim } => {
                self.needs(AxisRole::Replicated)?;
                self.dealt(layout, dim)
            }
            CollectiveKind::ToPartial => {
                // On a partial sum it would zero the summands of other ranks, on a shard their
                // data.
                self.needs(AxisRole::Replicated)?;
                layout.with_partial(layout.partial().iter().chain(axes).copied().collect())
            }
            CollectiveKind::Permute { dim } => {
                self.in_blocks(dim, &[])?;
                if mesh.count(axes) != mesh.count(layout.axes(dim)) {
                    return Err(self.bad(format!("dim {dim} would change its number of shards")));
                }
                layout.with_axes(dim, axes.clone())
            }
            CollectiveKind::Turn { dim } => {
                if axes.is_empty() || layout.axes(dim) != axes.as_slice() {
                    return Err(self.bad(format!(
                        "dim {dim} is sharded by {:?}, and blocks can be passed on along all its \
                         axes only",
                        layout.axes(dim)
                    )));
                }
                Ok(layout.turned(dim, mesh))
            }
            CollectiveKind::BroadcastBlock { dim, .. } => layout.with_axes(dim, self.cut(dim)?),
            CollectiveKind::ReduceBlock { dim, .. } => {
                self.summed().and_then(|layout| self.dealt(&layout, dim))
            }
            CollectiveKind::Done => Ok(layout.clone()),
        }
    }

    /// The dim whose extent changes, and its new extent.
    pub(super) fn resized(&self, mesh: &Mesh) -> Result<Option<(usize, usize)>, IrError> {
        let (dim, block, grows) = match self.collective.kind {
            CollectiveKind::BroadcastBlock { dim, block } => (dim, block, false),
            CollectiveKind::ReduceBlock { dim, block } => (dim, block, true),
            _ => return Ok(None),
        };
        let n = mesh.count(&self.collective.axes);
        if block >= n {
            return Err(self.bad(format!("there are {n} blocks, and {block} is none of them")));
        }
        if self.ty.padded() != self.ty.shape || self.collective.order != Order::Block {
            return Err(self.bad("only whole blocks in block order can be addressed"));
        }
        let extent = self.ty.shape[dim];
        match grows {
            true => Ok(Some((dim, extent * n))),
            false if extent.is_multiple_of(n) => Ok(Some((dim, extent / n))),
            false => {
                Err(self.bad(format!("dim {dim} has {extent} elements, not {n} equal blocks")))
            }
        }
    }

    /// The axes of a dim without the collective's, which must be its minor end.
    fn cut(&self, dim: usize) -> Result<Vec<Axis>, IrError> {
        let (axes, own) = (self.ty.layout.axes(dim), &self.collective.axes);
        let rest = axes.strip_suffix(own.as_slice()).ok_or_else(|| {
            self.bad(format!(
                "{own:?} is not the minor end of dim {dim}, which is sharded by {axes:?}; gather \
                 the minor axes first, or permute the dim"
            ))
        })?;
        self.in_blocks(dim, rest)?;
        Ok(rest.to_vec())
    }

    /// A layout with the collective's axes at the minor end of a dim. If the dim was whole, they deal
    /// its elements in the collective's order.
    fn dealt(&self, layout: &Layout, dim: usize) -> Result<Layout, IrError> {
        let (own, wanted) = (&layout.dims()[dim], self.collective.order);
        let with = layout.with_axes(dim, self.appended(dim)?)?;
        match own.axes.is_empty() {
            true => Ok(with.with_order(dim, wanted)),
            false if own.order == wanted => Ok(with),
            false => Err(self.bad(format!(
                "dim {dim} is in {} order, and its new shards would be in {} order",
                own.order.name(),
                wanted.name()
            ))),
        }
    }

    /// The axes of a dim with the collective's at the minor end.
    fn appended(&self, dim: usize) -> Result<Vec<Axis>, IrError> {
        let axes = self.ty.layout.axes(dim);
        self.in_blocks(dim, axes)?;
        Ok([axes, &self.collective.axes].concat())
    }

    /// Fails if axes stay on a dim in striped order: a part of its axes then does not hold the parts
    /// of the others together, so all axes must change at once.
    fn in_blocks(&self, dim: usize, staying: &[Axis]) -> Result<(), IrError> {
        let Sharding { order, turn, .. } = self.ty.layout.dims()[dim];
        if turn > 0 {
            let what =
                format!("the blocks of dim {dim} are not at home; pass them on until they are");
            return Err(self.bad(what));
        }
        // Zigzag over several axes, gathered over the minor ones, is zigzag over the others.
        if order != Order::Striped || staying.is_empty() {
            return Ok(());
        }
        Err(self.bad(format!(
            "dim {dim} is {} and can change only as a whole, but {staying:?} would stay; gather or \
             move all of {:?}",
            order.name(),
            self.ty.layout.axes(dim)
        )))
    }

    /// Fails unless the collective can be split into this many calls.
    pub(super) fn in_pieces(&self, result: &TensorType, mesh: &Mesh) -> Result<(), IrError> {
        let Collective { kind, pieces, .. } = self.collective;
        if *pieces == 1 {
            return Ok(());
        }
        use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
        let known = matches!(kind, AllGather { .. } | ReduceScatter { .. } | AllReduce);
        let elements = |ty: &TensorType| ty.local_bytes(mesh) / ty.dtype.size();
        let most = elements(self.ty).min(elements(result));
        match known && self.ty.shape.len() == 1 && (1..=most).contains(pieces) {
            true => Ok(()),
            false => Err(self.bad(format!(
                "it cannot be split into {pieces} pieces; for flat values 1 to {most} pieces are \
                possible: at most one per element of a shard"
            ))),
        }
    }

    fn summed(&self) -> Result<Layout, IrError> {
        self.needs(AxisRole::Partial)?;
        let mut partial = self.ty.layout.partial().clone();
        partial.retain(|axis| !self.collective.axes.contains(axis));
        self.ty.layout.with_partial(partial)
    }

    /// Fails unless every axis of the collective does this to the operand.
    fn needs(&self, role: AxisRole) -> Result<(), IrError> {
        let layout = &self.ty.layout;
        match self.collective.axes.iter().find(|&&a| layout.role(a) != role) {
            None => Ok(()),
            Some(&axis) => {
                let found = layout.role(axis);
                Err(self.bad(format!("the operand is {found} over `{axis}`, not {role}")))
            }
        }
    }
}
