//! What a collective does to the type of its operand, or why it cannot act on it.

use std::fmt;

use super::{Collective, CollectiveKind};
use crate::dtype::DType;
use crate::error::IrError;
use crate::layout::{AxisRole, Layout, Order, Sharding};
use crate::mesh::{Axis, Mesh};
use crate::ops::OpDef;
use crate::types::TensorType;

/// A dim that shrinks to one of its blocks: how many elements it then has, and with their padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Resized {
    size: usize,
    padded: usize,
}

impl Resized {
    /// The type with the dim of that size.
    pub(super) fn sized(self, ty: &TensorType, dim: usize) -> Result<TensorType, IrError> {
        let (mut result, mut padded) = (ty.clone(), ty.padded().to_vec());
        (result.shape[dim], padded[dim]) = (self.size, self.padded);
        result.with_padded(padded)
    }
}

/// A collective and the operand whose layout it changes.
pub(super) struct Change<'a> {
    pub(super) collective: &'a Collective,
    pub(super) ty: &'a TensorType,
}

impl Change<'_> {
    pub(super) fn bad(&self, what: impl fmt::Display) -> IrError {
        IrError::operands(self.collective.name(), format!("{what} (operand {})", self.ty))
    }

    /// Fails unless the axes and dims exist.
    pub(super) fn can_begin(&self, mesh: &Mesh) -> Result<(), IrError> {
        let Collective { axes, .. } = self.collective;
        if let Some(&axis) = axes.iter().find(|&&a| mesh.size(a).is_none()) {
            return Err(self.bad(format!("there is no axis `{axis}` in the mesh ({mesh})")));
        }
        let dims = self.collective.dims();
        match dims.into_iter().find(|&dim| dim >= self.ty.shape.len()) {
            Some(dim) => Err(self.bad(format!("there is no dim {dim}"))),
            None => Ok(()),
        }
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
            CollectiveKind::TakeBlock { .. } | CollectiveKind::PutBlock { .. }
                if !axes.is_empty() =>
            {
                Err(self.bad("no rank gets anything from another, so it is over no axes"))
            }
            CollectiveKind::TakeBlock { .. }
            | CollectiveKind::PutBlock { .. }
            | CollectiveKind::Done => Ok(layout.clone()),
        }
    }

    /// The dim whose extent changes, and its new extent.
    pub(super) fn resized(&self, mesh: &Mesh) -> Result<Option<(usize, Resized)>, IrError> {
        let n = mesh.count(&self.collective.axes);
        Ok(match self.collective.kind {
            CollectiveKind::BroadcastBlock { dim, block } => {
                Some((dim, self.block(self.ty, dim, [block, n], mesh)?))
            }
            CollectiveKind::TakeBlock { dim, block, of } => {
                Some((dim, self.block(self.ty, dim, [block, of], mesh)?))
            }
            CollectiveKind::ReduceBlock { dim, block } => {
                self.is_one_of([block, n])?;
                if self.ty.padded() != self.ty.shape || self.collective.order != Order::Block {
                    return Err(
                        self.bad("only whole blocks in block order can be added to nothing")
                    );
                }
                let size = self.ty.shape[dim] * n;
                Some((dim, Resized { size, padded: size }))
            }
            _ => None,
        })
    }

    /// The type of the whole that this operand becomes a block of, which must be that of `rest`.
    pub(super) fn completed(&self, rest: &TensorType, mesh: &Mesh) -> Result<TensorType, IrError> {
        let (dim, block, of) = match self.collective.kind {
            CollectiveKind::ReduceBlock { dim, block } => {
                (dim, block, mesh.count(&self.collective.axes))
            }
            CollectiveKind::PutBlock { dim, block, of } => (dim, block, of),
            _ => return Err(self.bad("it has one operand")),
        };
        self.can_begin(mesh)?;
        if self.ty.pending || rest.pending {
            return Err(self.bad("an operand is still pending; wait for it with done first"));
        }
        let other = || self.bad(format!("it is not block {block} of {of} of {rest}"));
        if self.layout(mesh)? != rest.layout {
            return Err(other());
        }
        rest.check(mesh)?;
        self.in_pieces(rest, mesh)?;
        let sized = self.block(rest, dim, [block, of], mesh)?.sized(rest, dim)?;
        let cut = sized.layout.with_axes(dim, self.ty.layout.axes(dim).to_vec())?;
        let expected = sized.with_layout(cut.with_partial(self.ty.layout.partial().clone())?);
        match expected == *self.ty {
            true => Ok(rest.clone()),
            false => Err(other()),
        }
    }

    /// Fails unless these are the counts of the operand's regions, whole where the collective's axes were or will be.
    pub(super) fn counted(
        &self,
        counts: &TensorType,
        [from, to]: [usize; 2],
    ) -> Result<(), IrError> {
        let (ty, layout) = (self.ty, &self.ty.layout);
        let Some(regions) = ty.shape.len().checked_sub(2).filter(|n| from.max(to) < *n) else {
            return Err(self.bad("counts are of regions, and rows and their width do not move"));
        };
        let other = |why: &str| Err(self.bad(format!("the counts are {counts}: {why}")));
        let Some((_, of)) = counts.shape.split_last() else { return other("there are none") };
        if counts.dtype != DType::I32 || counts.pending || *of != ty.shape[..regions] {
            return other("expected i32, with a number for each run of each region");
        }
        if ty.padded() != ty.shape || counts.padded() != counts.shape {
            return other("regions cannot be padded");
        }
        let rest = self.cut(from)?;
        let axes = |dim: usize| if dim == from { rest.as_slice() } else { layout.axes(dim) };
        let fits = (0..regions).all(|dim| counts.layout.axes(dim) == axes(dim));
        let whole = counts.layout.axes(regions).is_empty() && counts.layout.partial().is_empty();
        match fits && whole && layout.axes(regions).is_empty() {
            true => Ok(()),
            false => {
                other("every rank needs those of all regions that it may get, and whole regions")
            }
        }
    }

    fn is_one_of(&self, [block, of]: [usize; 2]) -> Result<(), IrError> {
        match block < of {
            true => Ok(()),
            false => Err(self.bad(format!("there are {of} blocks, and {block} is none of them"))),
        }
    }

    /// The extent of one block of a dim. Ranks that share the dim by other axes each have a part of it.
    fn block(
        &self,
        whole: &TensorType,
        dim: usize,
        [block, of]: [usize; 2],
        mesh: &Mesh,
    ) -> Result<Resized, IrError> {
        self.is_one_of([block, of])?;
        let sharding = &whole.layout.dims()[dim];
        if sharding.order != Order::Block && !sharding.axes.is_empty() || sharding.turn > 0 {
            return Err(self.bad("only blocks of a dim in block order can be addressed"));
        }
        // Blocks over axes are at the minor end; what is left of the dim's axes stays.
        let own = mesh.count(&sharding.axes);
        let over = match self.collective.axes.is_empty() {
            true => own,
            false => own / mesh.count(&self.collective.axes),
        };
        let (size, padded) = (whole.shape[dim], whole.padded()[dim]);
        if !over.checked_mul(of).is_some_and(|blocks| padded.is_multiple_of(blocks)) {
            return Err(self.bad(format!("dim {dim} has {padded} elements, not {of} equal blocks")));
        }
        let (part, len) = (padded / over, padded / over / of);
        let valid = |shard: usize| size.saturating_sub(shard * part + block * len).min(len);
        Ok(Resized { size: (0..over).map(valid).sum(), padded: padded / of })
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use crate::{text, verify};

    fn check(x: &str, counts: &str, line: &str) -> Result<(), String> {
        let inputs = format!("x: boundary {x}\nc: data {counts}");
        let text =
            format!("mesh a=2 b=2\nprogram p {{\n{inputs}\n{line}\nreturn y: probe %1\n}}\n");
        let program = text::parse(&text).map_err(|e| e.to_string())?;
        assert_eq!(text::parse(&program.to_string()).unwrap(), program);
        verify(&program).map_err(|e| e.to_string())
    }

    #[test]
    fn rows_travel_with_counts_that_all_have() {
        let (x, counts) = ("f32[4,4,6,8]{1:a 3:b}", "i32[4,4,3]");
        let line = "%1 = all_to_all<a>(x, c, from=1, to=0) : f32[4,4,6,8]{0:a 3:b}";
        check(x, counts, line).unwrap();
        check("f32[4,4,6,8]{0:b 1:a}", "i32[4,4,1]{0:b}", &line.replace("{0:a 3:b}", "{0:b,a}"))
            .unwrap();
        for (x, counts, line, why) in [
            (x, "i32[4,4,3]{1:a}", line, "every rank needs those of all regions"),
            (x, "i32[4,4,3]{0:b}", line, "every rank needs those of all regions"),
            (x, "f32[4,4,3]", line, "expected i32, with a number for each run"),
            (x, "i32[4,2,3]", line, "expected i32, with a number for each run"),
            (x, "i32[4,4]", line, "expected i32, with a number for each run"),
            (
                "f32[4,4,6,8]{1:a 2:b}",
                counts,
                "%1 = all_to_all<a>(x, c, from=1, to=0) : f32[4,4,6,8]{0:a 2:b}",
                "and whole regions",
            ),
            (
                x,
                counts,
                "%1 = all_to_all<b>(x, c, from=3, to=0) : f32[4,4,6,8]{0:b 1:a}",
                "rows and their width do not move",
            ),
            (x, counts, "%1 = all_gather<a>(x, c, dim=1) : f32[4,4,6,8]{3:b}", "operands"),
        ] {
            let error = check(x, counts, line).unwrap_err();
            assert!(error.contains(why), "{counts}, {line}: {error}");
        }
    }
}
