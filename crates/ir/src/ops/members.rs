//! Members of a packed unit: one number for each parameter inside it.
//!
//! A unit is flat and does not know the parameters that it packs, which is enough for updates that
//! treat all elements in the same way. Some do not (LAMB and LARS: the norm of a parameter scales
//! its update), so these two ops know where members lie: one computes a number per member, the
//! other takes one. Both use places in a rank's block, as decay does, so they mean the same on
//! every shard.

use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Where the members of a unit lie. Elements between, before and after them belong to no member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Where each member begins and ends in a block, in elements; in order, and without overlap.
    pub members: Vec<(usize, usize)>,
    /// Elements of a block: ranks may hold different blocks of a unit, all packed in the same way.
    pub block: usize,
}

impl Bounds {
    /// The member of the element with this index in the whole unit, and how many elements from it
    /// on belong to the same member (or also to none).
    pub fn at(&self, element: usize) -> (Option<usize>, usize) {
        let at = element % self.block;
        let next = self.members.partition_point(|&(_, end)| end <= at);
        match self.members.get(next) {
            Some(&(begin, end)) if begin <= at => (Some(next), end - at),
            Some(&(begin, _)) => (None, begin - at),
            None => (None, self.block - at),
        }
    }

    /// Fails unless the operand is a flat value of such blocks.
    fn check(&self, unit: &TensorType) -> Result<(), String> {
        let Self { members, block } = self;
        let ends = [0].into_iter().chain(members.iter().map(|m| m.1));
        let mut borders = ends.zip(members);
        if let Some((_, (begin, end))) = borders.find(|(last, m)| m.0 < *last || m.1 < m.0) {
            return Err(format!(
                "the member from {begin} to {end} overlaps another one or ends before it begins"
            ));
        }
        match members.last() {
            None => return Err("there are no members".to_owned()),
            Some((_, end)) if end > block => {
                return Err(format!("the last member ends at {end} of a block of {block}"));
            }
            Some(_) => {}
        }
        match unit.shape[..] {
            [elements] if *block > 0 && elements.is_multiple_of(*block) => Ok(()),
            _ => Err(format!("{unit} is not a unit of blocks of {block} elements")),
        }
    }

    fn attrs(&self) -> Attrs {
        let (begins, ends): (Vec<usize>, Vec<usize>) = self.members.iter().copied().unzip();
        Attrs::new().list("begins", &begins).list("ends", &ends).with("block", self.block)
    }

    pub(super) fn read(attrs: &mut AttrReader) -> Result<Self, String> {
        let (begins, ends) = (attrs.take_list("begins")?, attrs.take_list("ends")?);
        if begins.len() != ends.len() {
            return Err(format!("{} members begin and {} end", begins.len(), ends.len()));
        }
        Ok(Self { members: begins.into_iter().zip(ends).collect(), block: attrs.take("block")? })
    }
}

/// The sum of squares of each member of a unit, as a vector in the unit's accumulator type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberSquares {
    /// Where the members lie.
    pub bounds: Bounds,
}

/// A unit with each member multiplied by its own factor; elements of no member do not change.
///
/// Operands are the unit and a vector of factors in the unit's accumulator type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberScale {
    /// Where the members lie.
    pub bounds: Bounds,
}

impl OpDef for MemberSquares {
    fn name(&self) -> &'static str {
        "member_squares"
    }

    fn attrs(&self) -> Attrs {
        self.bounds.attrs()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        self.bounds.check(ins[0])?;
        Ok(vec![(ins[0].dtype.accumulator(), vec![self.bounds.members.len()])])
    }

    /// As for the sum of all squares: shards give a partial sum, and a partial sum is refused.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("x -> k", ins, outs).whole("k")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "use square and sum where a gradient is needed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn gives_units(&self) -> bool {
        false
    }
}

impl OpDef for MemberScale {
    fn name(&self) -> &'static str {
        "member_scale"
    }

    fn attrs(&self) -> Attrs {
        self.bounds.attrs()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        self.bounds.check(ins[0])?;
        super::shape_is("the factors", ins[1], &[self.bounds.members.len()])?;
        super::dtype_is("the factors", ins[1], ins[0].dtype.accumulator())?;
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    /// Every rank needs all factors. It is not linear in them: elements of no member do not change.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("x, k -> x", ins, outs).whole("k").linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "updates end a step; use mul where a gradient is needed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Two members and an empty one, with gaps before, between and behind them, in two blocks.
    #[test]
    fn every_element_has_its_member() {
        let bounds = Bounds { members: vec![(1, 3), (3, 3), (4, 6)], block: 8 };
        let of = |e: usize| bounds.at(e).0;
        let block = [None, Some(0), Some(0), None, Some(2), Some(2), None, None];
        assert_eq!((0..16).map(of).collect::<Vec<_>>(), [block, block].concat());
        for element in 0..16 {
            let (member, same) = bounds.at(element);
            assert!(same > 0 && (element..element + same).all(|e| of(e) == member), "{element}");
        }
    }

    #[test]
    fn bounds_that_mean_nothing_are_refused() {
        let unit = |elements| TensorType::unit(DType::F32, elements);
        let check = |members: &[(usize, usize)], block, elements| {
            MemberSquares { bounds: Bounds { members: members.to_vec(), block } }
                .infer(&[&unit(elements)])
                .is_ok()
        };
        assert!(check(&[(0, 3), (3, 8)], 8, 16));
        assert!(!check(&[(0, 4), (3, 8)], 8, 16), "one lies over another");
        assert!(!check(&[(4, 8), (0, 3)], 8, 16), "not in order");
        assert!(!check(&[(3, 2)], 8, 16), "ends before it begins");
        assert!(!check(&[(0, 9)], 8, 16), "ends behind its block");
        assert!(!check(&[], 8, 16), "no members");
        assert!(!check(&[(0, 0)], 0, 0), "no block");
        assert!(!check(&[(0, 3)], 8, 12), "one block and a half");
    }
}
