//! Turns, and the few functions with which schedules are written.
//!
//! A rule such as "just enough forwards to fill the pipeline, then one forward, one backward" reads
//! `fwd(0..k).then(weave([fwd(k..m), bwd(0..m)]))`: lists of turns are made for ranges of
//! micro-batches, concatenated, and interleaved.

use std::fmt;
use std::ops::Range;

use phalanx_script::Part;

/// One item of a stage group's list: a part of a chunk for a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Turn {
    /// Which program is run.
    pub part: Part,
    /// The micro-batch.
    pub microbatch: usize,
    /// Which of the stage group's chunks.
    pub chunk: usize,
    /// Which version of the weights it reads; schedules that flush have only version 0.
    pub version: usize,
}

/// A list of turns while a rule builds it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Turns(Vec<Option<Turn>>);

/// Forwards of these micro-batches.
pub fn fwd(microbatches: Range<usize>) -> Turns {
    turns(Part::F, microbatches)
}

/// Whole backwards of these micro-batches.
pub fn bwd(microbatches: Range<usize>) -> Turns {
    turns(Part::BW, microbatches)
}

/// Gradients of the inputs alone, which the stage before waits for.
pub fn b(microbatches: Range<usize>) -> Turns {
    turns(Part::B, microbatches)
}

/// Gradients of the weights alone, which no other stage waits for.
pub fn w(microbatches: Range<usize>) -> Turns {
    turns(Part::W, microbatches)
}

/// Takes one turn from each list, round after round; a list that is empty is skipped.
pub fn weave<const N: usize>(lists: [Turns; N]) -> Turns {
    let rounds = lists.iter().map(|list| list.0.len()).max().unwrap_or(0);
    let round = |k| lists.iter().filter_map(move |list| list.0.get(k).copied().flatten());
    Turns((0..rounds).flat_map(round).map(Some).collect())
}

impl Turns {
    /// These turns on another chunk than the first.
    pub fn on(mut self, chunk: usize) -> Self {
        self.0.iter_mut().flatten().for_each(|turn| turn.chunk = chunk);
        self
    }

    /// These turns for every `each`-th micro-batch, the first of which is `first`.
    pub fn every(mut self, each: usize, first: usize) -> Self {
        let turns = self.0.iter_mut().flatten();
        turns.for_each(|turn| turn.microbatch = first + each * turn.microbatch);
        self
    }

    /// These turns, then those.
    pub fn then(mut self, other: Turns) -> Self {
        self.0.extend(other.0);
        self
    }

    /// These turns, which start only after a number of rounds of [`weave`].
    pub fn late(mut self, rounds: usize) -> Self {
        self.0.splice(0..0, std::iter::repeat_n(None, rounds));
        self
    }

    /// The first turns, and the rest.
    pub fn split(mut self, first: usize) -> (Self, Self) {
        let rest = self.0.split_off(first.min(self.0.len()));
        (self, Turns(rest))
    }

    /// The turns of micro-batches below `m`.
    pub fn below(mut self, m: usize) -> Self {
        self.0.retain(|turn| turn.is_none_or(|turn| turn.microbatch < m));
        self
    }

    /// The finished list.
    pub fn list(self) -> Vec<Turn> {
        self.0.into_iter().flatten().collect()
    }
}

impl FromIterator<Turns> for Turns {
    fn from_iter<I: IntoIterator<Item = Turns>>(lists: I) -> Self {
        lists.into_iter().fold(Turns::default(), Turns::then)
    }
}

impl fmt::Display for Turn {
    /// `BW3`, and `BW3.1` on chunk 1.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.part, self.microbatch)?;
        match self.chunk {
            0 => Ok(()),
            chunk => write!(f, ".{chunk}"),
        }
    }
}

fn turns(part: Part, microbatches: Range<usize>) -> Turns {
    let turn = |microbatch| Some(Turn { part, microbatch, chunk: 0, version: 0 });
    Turns(microbatches.map(turn).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(turns: Turns) -> String {
        turns.list().iter().map(Turn::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn lists_are_woven_round_by_round() {
        let turns = fwd(0..1).then(weave([b(0..3), w(0..3).late(1), fwd(1..3)]));
        assert_eq!(text(turns), "F0 B0 F1 B1 W0 F2 B2 W1 W2");
    }

    #[test]
    fn a_late_list_alone_is_just_the_list() {
        assert_eq!(text(w(0..2).late(5).on(1)), "W0.1 W1.1");
        let (first, rest) = fwd(0..3).split(5);
        assert_eq!((text(first), text(rest)), ("F0 F1 F2".to_owned(), String::new()));
    }
}
