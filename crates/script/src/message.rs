//! Which elements of a buffer a message carries: those of the pieces of an edge.

use phalanx_call::Block;

use crate::edge::EdgePiece;

/// The elements of a piece of an edge, as they lie on one side. Stretches of the same length that
/// are evenly spaced on both sides become one block.
pub(crate) fn blocks(piece: &EdgePiece, sending: bool) -> Vec<Block> {
    let mut blocks: Vec<[Block; 2]> = Vec::new();
    for stretch in &piece.stretches {
        let (ends, len) = ([stretch.source, stretch.target], stretch.len);
        if let Some(sides) = blocks.last_mut().filter(|sides| sides[0].len == len) {
            let steps = [0, 1].map(|side| ends[side].checked_sub(last(&sides[side])));
            let even = (0..2).all(|side| match (sides[side].rows, steps[side]) {
                (1, Some(step)) => step >= len,
                (_, step) => step == Some(sides[side].stride),
            });
            if even {
                for (block, step) in sides.iter_mut().zip(steps) {
                    block.stride = step.unwrap_or(block.stride);
                    block.rows += 1;
                }
                continue;
            }
        }
        blocks.push(ends.map(|first| Block { first, stride: len, rows: 1, len }));
    }
    blocks.into_iter().map(|[source, target]| if sending { source } else { target }).collect()
}

/// The first element of a block's last row.
fn last(block: &Block) -> usize {
    block.first + (block.rows - 1) * block.stride
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_ir::random::Stream;

    use super::*;
    use crate::edge::Stretch;

    /// The elements of blocks, one after the other.
    fn elements(blocks: &[Block]) -> Vec<usize> {
        let row = |b: &Block, row: usize| {
            let first = b.first + row * b.stride;
            first..first + b.len
        };
        let rows = |b: &Block| (0..b.rows).map(|r| row(b, r)).collect::<Vec<_>>();
        blocks.iter().flat_map(rows).flatten().collect()
    }

    fn both(stretches: Vec<Stretch>) -> [Vec<Block>; 2] {
        let piece = EdgePiece { from: 0, to: 1, stretches };
        [true, false].map(|sending| blocks(&piece, sending))
    }

    #[test]
    fn evenly_spaced_stretches_travel_as_one_block() {
        let stretch = |i: usize| Stretch { source: 3 + 20 * i, target: 10 * i, len: 10 };
        let [source, target] = both((0..4).map(stretch).collect());
        assert_eq!(source, [Block { first: 3, stride: 20, rows: 4, len: 10 }]);
        assert_eq!(target, [Block { first: 0, stride: 10, rows: 4, len: 10 }]);
        // Another spacing on either side, or another length, begins a new block.
        let more = [(83, 40, 10), (103, 60, 10), (123, 70, 5)];
        let more = more.map(|(source, target, len)| Stretch { source, target, len });
        let [source, target] = both((0..4).map(stretch).chain(more).collect());
        assert_eq!((source.len(), target.len()), (3, 3));
        assert_eq!((source[0].rows, source[1].rows, source[2].rows), (5, 1, 1));
        let one = both(vec![Stretch { source: 7, target: 9, len: 3 }]);
        assert_eq!(one, [7, 9].map(|first| vec![Block { first, stride: 3, rows: 1, len: 3 }]));
    }

    /// Both ends make the same calls, and these carry what the stretches say, in their order.
    #[test]
    fn blocks_hold_the_elements_of_their_stretches() {
        let stream = Stream::named(7, "blocks");
        let mut joined = 0;
        for case in 0..2000_u64 {
            let draw = |i: usize, below: u64| stream.below(case * 1000 + i as u64, below) as usize;
            let (mut source, mut target) = (draw(0, 9), draw(1, 9));
            let stretch = |i: usize| {
                let len = 1 + draw(4 * i + 2, 3);
                let stretch = Stretch { source, target, len };
                // Few different gaps, so that some follow each other evenly.
                source += len + draw(4 * i + 3, 2);
                target += len + draw(4 * i + 4, 2) * 4;
                stretch
            };
            let stretches: Vec<Stretch> = (1..2 + draw(999, 12)).map(stretch).collect();
            let of = |first: fn(&Stretch) -> usize| -> Vec<usize> {
                stretches.iter().flat_map(|r| first(r)..first(r) + r.len).collect()
            };
            let expected = [of(|r| r.source), of(|r| r.target)];
            let found = both(stretches.clone());
            assert_eq!([0, 1].map(|side| elements(&found[side])), expected, "case {case}");
            let calls = |side: usize| found[side].iter().map(|b| (b.rows, b.len));
            assert!(calls(0).eq(calls(1)), "case {case}");
            joined += stretches.len() - found[0].len();
        }
        assert!(joined > 2000, "{joined}");
    }
}
