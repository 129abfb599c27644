//! Which ranks take part in a call, in which order.

use std::fmt;
use std::sync::Arc;

use crate::error::CommError;

/// An ordered list of distinct global ranks; its order is the order of blocks and of reductions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(Arc<[usize]>);

impl Group {
    /// The group of these ranks, in this order; at least one, none twice.
    pub fn new(ranks: impl Into<Vec<usize>>) -> Result<Self, CommError> {
        let ranks: Vec<usize> = ranks.into();
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        if ranks.is_empty() || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(CommError::BadGroup { ranks });
        }
        Ok(Self(ranks.into()))
    }

    /// All ranks of a world, in their own order.
    pub fn world(ranks: usize) -> Self {
        Self((0..ranks).collect())
    }

    /// Two ranks that are not the same.
    pub(crate) fn pair(from: usize, to: usize) -> Self {
        Self([from, to].into())
    }

    /// The global ranks, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        &self.0
    }

    /// The place of a rank in the group; fails if the rank cannot use the group.
    pub(crate) fn place_of(&self, rank: usize, world: usize) -> Result<usize, CommError> {
        let refuse =
            |problem| CommError::NotMember { rank, world, group: self.to_string(), problem };
        if self.ranks().iter().any(|&rank| rank >= world) {
            return Err(refuse("it contains a rank that does not exist"));
        }
        self.index_of(rank).ok_or_else(|| refuse("it is not a member"))
    }

    /// How many ranks there are.
    #[allow(clippy::len_without_is_empty, reason = "a group is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The place of a global rank in the group.
    pub fn index_of(&self, rank: usize) -> Option<usize> {
        self.0.iter().position(|&member| member == rank)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "[{}]", ranks.join(","))
    }
}

/// A group that an endpoint knows; valid only for the endpoint that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub(crate) u32);

impl GroupId {
    /// All ranks in their own order, which every endpoint knows from the start.
    pub const WORLD: GroupId = GroupId(0);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_and_doubles_are_refused() {
        let group = Group::new([3, 0, 2]).unwrap();
        assert_eq!(group.to_string(), "[3,0,2]");
        assert_eq!((group.index_of(2), group.index_of(1)), (Some(2), None));
        assert_ne!(group, Group::new([0, 2, 3]).unwrap());
        let error = Group::new([1, 2, 1]).unwrap_err().to_string();
        assert!(error.contains("[1, 2, 1]"), "{error}");
        assert!(Group::new([]).is_err());
    }
}
