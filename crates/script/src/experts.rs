//! Where tokens and experts meet, decided between steps from logged counts.
//!
//! What ranks keep of experts is the same for all scripts; how they read it may change from step to step at no cost
//! (Tutel: Hwang et al., 2022). A step logs how many tokens chose each expert, summed over all ranks, and the rule is a
//! pure function of that log, in integers: every rank decides the same, and a replay decides as the run did.
//!
//! The rule of Tutel takes what moves less. With P elements of expert weights in a layer, of which each of n ranks has a
//! part, tokens of width d, and R rows of the busiest rank, for which the others wait, that rank moves 4·d·R elements in
//! a layer and step where rows travel to experts and return, forward and backward; and every rank 3·P for each micro-batch where
//! weights are gathered twice and their gradients scattered; both times (n−1)/n. The paper's r = 1 and r = 0.

use std::fmt;

use phalanx_ir::ops::Deal;
use phalanx_ir::random::Stream;

/// How a step reads the weights of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadLayout {
    /// Each rank reads those that it keeps, and tokens travel (r = 1).
    #[default]
    Own,
    /// Each rank reads all of them, and tokens stay (r = 0).
    All,
}

impl ReadLayout {
    /// The name in metrics and checkpoints.
    pub const fn name(self) -> &'static str {
        match self {
            ReadLayout::Own => "own",
            ReadLayout::All => "all",
        }
    }

    /// The layout of this name.
    pub fn named(name: &str) -> Option<Self> {
        [ReadLayout::Own, ReadLayout::All].into_iter().find(|own| own.name() == name)
    }
}

/// What a step logs of its experts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertRecord {
    /// The step, counted from 1.
    pub step: u64,
    /// How it read them.
    pub layout: ReadLayout,
    /// For each layer with experts: how many tokens chose each of them, over all ranks and micro-batches.
    pub chosen: Vec<Vec<u64>>,
}

/// The rule from logged steps to the next one. It is pure, so every rank decides the same.
pub trait ExpertPolicy: fmt::Debug + Send + Sync {
    /// How a step, counted from 1, reads experts; `last` is what the step before it has logged.
    fn next(&self, step: u64, last: Option<&ExpertRecord>) -> ReadLayout;
}

/// Takes the layout with which less moves, if choices stay as they were.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tutel {
    /// Among how many ranks the experts of a layer are divided.
    pub ranks: usize,
    /// Whether they are distributed round robin.
    pub dealt: bool,
    /// How many times all experts are kept, each time for other tokens.
    pub copies: usize,
    /// Ranks that have a part of the matrices of an expert each, and the same tokens.
    pub slices: usize,
    /// Micro-batches of a step.
    pub microbatches: usize,
    /// Inner width of an expert.
    pub ffn: usize,
}

impl Tutel {
    /// Elements that the busiest rank moves in a step with these choices, in multiples of the width of a token.
    pub fn moved(&self, layout: ReadLayout, chosen: &[Vec<u64>]) -> u64 {
        chosen.iter().map(|layer| self.moved_in(layout, layer)).sum()
    }

    fn moved_in(&self, layout: ReadLayout, chosen: &[u64]) -> u64 {
        let matrices = 3;
        match layout {
            ReadLayout::Own => 4 * self.busiest(chosen),
            ReadLayout::All => {
                let elements = matrices * chosen.len() * self.ffn / self.slices.max(1);
                (3 * elements * self.microbatches) as u64
            }
        }
    }

    /// Rows of the rank whose experts are chosen most, for the tokens of one copy.
    fn busiest(&self, chosen: &[u64]) -> u64 {
        let parts = if self.dealt { self.ranks } else { 1 };
        let deal = Deal { experts: chosen.len(), parts: parts.max(1), per: 1 };
        let each = (chosen.len() / self.ranks.max(1)).max(1);
        let mut rows = vec![0; chosen.len().div_ceil(each)];
        for (expert, count) in chosen.iter().enumerate() {
            rows[deal.place(expert) / each] += count;
        }
        rows.into_iter().fold(0, u64::max).div_ceil(self.copies.max(1) as u64)
    }
}

impl ExpertPolicy for Tutel {
    fn next(&self, _step: u64, last: Option<&ExpertRecord>) -> ReadLayout {
        let Some(ExpertRecord { chosen, .. }) = last else { return ReadLayout::Own };
        match self.moved(ReadLayout::All, chosen) < self.moved(ReadLayout::Own, chosen) {
            true => ReadLayout::All,
            false => ReadLayout::Own,
        }
    }
}

/// Any layout, whatever was logged: of each two steps one takes each, in an order that is drawn. Numbers do not depend on
/// it, which a comparison with one rank shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnyLayout {
    /// What draws.
    pub seed: u64,
}

impl ExpertPolicy for AnyLayout {
    fn next(&self, step: u64, _last: Option<&ExpertRecord>) -> ReadLayout {
        let first = Stream::named(self.seed, "read layouts").below(step.saturating_sub(1) / 2, 2);
        match (first + step) % 2 {
            0 => ReadLayout::Own,
            _ => ReadLayout::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TUTEL: Tutel =
        Tutel { ranks: 4, dealt: false, copies: 1, slices: 1, microbatches: 1, ffn: 16 };

    fn record(chosen: &[u64]) -> ExpertRecord {
        ExpertRecord { step: 1, layout: ReadLayout::Own, chosen: vec![chosen.to_vec()] }
    }

    /// By hand: 8 experts of ffn 16 are 3 · 8 · 16 rows of weights, three times; 1,024 rows of tokens are 256 for each
    /// rank if choices are even, and there are four exchanges of the busiest rank's.
    #[test]
    fn the_layout_that_moves_less_is_taken() {
        let even = [128; 8];
        assert_eq!(TUTEL.moved(ReadLayout::Own, &[even.to_vec()]), 4 * 256);
        assert_eq!(TUTEL.moved(ReadLayout::All, &[even.to_vec()]), 3 * 3 * 8 * 16);
        assert_eq!(TUTEL.next(2, Some(&record(&even))), ReadLayout::Own);
        // The first rank has 288 of them: as much moves either way, and then tokens go.
        let skewed = [144, 144, 128, 128, 120, 120, 120, 120];
        assert_eq!(TUTEL.next(2, Some(&record(&skewed))), ReadLayout::Own);
        let more = [145, 144, 127, 128, 120, 120, 120, 120];
        assert_eq!(TUTEL.next(2, Some(&record(&more))), ReadLayout::All);
        assert_eq!(TUTEL.next(1, None), ReadLayout::Own);
        // Distributed round robin, the two busy experts are apart.
        let dealt = Tutel { dealt: true, ..TUTEL };
        assert_eq!(dealt.next(2, Some(&record(&more))), ReadLayout::Own);
        // Weights move once for each micro-batch, and less of them where ranks have slices.
        let small = Tutel { microbatches: 2, ..TUTEL };
        assert_eq!(small.next(2, Some(&record(&more))), ReadLayout::Own);
        let sliced = Tutel { slices: 2, ..TUTEL };
        assert_eq!(sliced.next(2, Some(&record(&even))), ReadLayout::All);
    }

    /// The more uneven choices are, the more rows travel; weights are as many as ever.
    #[test]
    fn skew_moves_rows_and_not_weights() {
        let mut last = 0;
        for skew in 0..100 {
            let chosen = [[228 + skew; 2], [128; 2], [128; 2], [28; 2]].as_flattened().to_vec();
            let own = TUTEL.moved(ReadLayout::Own, std::slice::from_ref(&chosen));
            assert!(own > last);
            assert_eq!(TUTEL.moved(ReadLayout::All, &[chosen]), 1152);
            last = own;
        }
    }

    #[test]
    fn any_layout_takes_both() {
        let any = AnyLayout { seed: 7 };
        let taken: Vec<ReadLayout> = (1..=20).map(|step| any.next(step, None)).collect();
        assert!(taken.chunks(2).all(|two| two[0] != two[1]), "{taken:?}");
        assert!(taken.windows(2).any(|two| two[0] == two[1]), "{taken:?}");
        let again: Vec<ReadLayout> = (1..=20).map(|step| any.next(step, None)).collect();
        assert_eq!(taken, again);
        for layout in [ReadLayout::Own, ReadLayout::All] {
            assert_eq!(ReadLayout::named(layout.name()), Some(layout));
        }
    }
}
