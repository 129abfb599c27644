//! Which pieces of a model go to which stage.
//!
//! A model is a chain of pieces: what comes before the repeated layers (an embedding), the layers,
//! and what comes after (a head). A stage is a run of neighbours in that chain. A pipeline is as
//! slow as its heaviest stage, so if costs are known, the chain is split so that the heaviest stage
//! is as light as possible; embedding and head count like everything else. Otherwise layers are
//! divided by their number.

use std::ops::Range;

use crate::error::{PipelineError, Result};
use crate::words::{counted, listed};

/// Splits a chain of `costs.len()` pieces into `stages` runs of neighbours, none of them empty.
///
/// The largest cost of a stage is as small as possible; among such splits the second largest, and
/// so on. Among equal splits each stage, from the first on, has as few pieces as possible: early
/// stages keep the most micro-batches, so the rest goes to late stages.
pub fn by_cost(costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>> {
    enough(("piece", costs.len()), stages, 1)?;
    if let Some(piece) = costs.iter().position(|cost| !cost.is_finite() || *cost < 0.0) {
        return Err(PipelineError::Costs {
            what: format!("the cost of piece {piece} is {}", costs[piece]),
            help: "a cost is a number, 0 or above".to_owned(),
        });
    }
    // The best splits of the rest of the chain from each piece on: into one stage, then into one
    // more each time. Adding the same first stage to two splits keeps their order, so the best
    // split of a chain is a first run and the best split of the rest.
    let whole = |start: usize| vec![costs[start..].iter().sum()];
    let mut loads: Vec<Vec<f64>> = (0..costs.len()).map(whole).collect();
    let mut ends = vec![vec![costs.len(); costs.len()]];
    for _ in 1..stages {
        let starts = 0..loads.len() - 1;
        let best = starts.map(|start| best_first_run(costs, &loads, start));
        let (more, first): (Vec<Vec<f64>>, Vec<usize>) = best.unzip();
        loads = more;
        ends.push(first);
    }
    let mut start = 0;
    let next = |ends: &Vec<usize>| {
        let run = start..ends[start];
        start = run.end;
        run
    };
    Ok(ends.iter().rev().map(next).collect())
}

/// Splits a chain of `pieces` by the number of `layers`, which are a run of the pieces: every stage
/// has the same number, and the first stages one more if the stages do not divide them. Pieces
/// before the layers belong to the first stage, pieces after them to the last.
pub fn by_count(layers: Range<usize>, pieces: usize, stages: usize) -> Result<Vec<Range<usize>>> {
    if layers.start > layers.end || layers.end > pieces {
        let start = layers.start.min(pieces);
        return Err(PipelineError::Shape {
            what: format!("there are no layers {layers:?} in a chain of {pieces} pieces"),
            why: "the layers must be a range of the pieces".to_owned(),
            nearest: format!("layers {start}..{}", layers.end.clamp(start, pieces)),
        });
    }
    enough(("layer", layers.len()), stages, 1)?;
    let (each, more) = (layers.len() / stages, layers.len() % stages);
    let cut = |stage: usize| match stage {
        0 => 0,
        _ if stage == stages => pieces,
        _ => layers.start + stage * each + stage.min(more),
    };
    Ok((0..stages).map(|stage| cut(stage)..cut(stage + 1)).collect())
}

/// Splits a chain of `pieces` into stages with these numbers of them.
pub fn given(counts: &[usize], pieces: usize, stages: usize) -> Result<Vec<Range<usize>>> {
    let sum = counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count));
    if counts.len() == stages && sum == pieces && counts.iter().all(|count| *count > 0) {
        let mut next = 0;
        let run = |count: &usize| {
            next += count;
            next - count..next
        };
        return Ok(counts.iter().map(run).collect());
    }
    enough(("piece", pieces), stages, 1)?;
    let even: Vec<usize> =
        by_count(0..pieces, pieces, stages)?.into_iter().map(|run| run.len()).collect();
    Err(PipelineError::Shape {
        what: format!(
            "{} is not a split of {} into {}",
            listed(counts),
            counted(pieces, "piece"),
            counted(stages, "stage")
        ),
        why: "each stage has at least one, and together they have all: layers, and what comes before and after \
              them"
            .to_owned(),
        nearest: listed(&even),
    })
}

/// Refuses fewer layers than stages; there are devices × chunks stages.
pub fn enough_layers(layers: usize, stage_groups: usize, chunks: usize) -> Result<()> {
    enough(("layer", layers), stage_groups, chunks)
}

fn enough((what, count): (&str, usize), stage_groups: usize, chunks: usize) -> Result<()> {
    let stages = stage_groups.saturating_mul(chunks);
    if (1..=count).contains(&stages) {
        return Ok(());
    }
    let many = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let cut = |p: usize, v: usize| match chunks {
        1 => many(p, "stage"),
        _ => format!("{p}·{v} = {}", many(p.saturating_mul(v), "stage")),
    };
    let mut nearest = Vec::new();
    if stages == 0 {
        nearest.push("1 stage".to_owned());
    } else {
        // The same chunks in fewer stage groups, fewer chunks in the same groups, or a longer
        // model.
        let fewer = [(count / chunks, chunks), (stage_groups, count / stage_groups)];
        nearest.extend(fewer.into_iter().filter(|&(p, v)| p * v > 0).map(|(p, v)| cut(p, v)));
        nearest.push(many(stages, what));
    }
    Err(PipelineError::Shape {
        what: format!("{} can't be cut into {}", many(count, what), cut(stage_groups, chunks)),
        why: "every stage needs at least one; there are stage groups · chunks stages".to_owned(),
        nearest: nearest.join(", or "),
    })
}

/// Where the first run from a piece ends, if the rest is split in the best way into one stage less;
/// and the loads of all stages, the largest first.
fn best_first_run(costs: &[f64], behind: &[Vec<f64>], start: usize) -> (Vec<f64>, usize) {
    let mut best: Option<(Vec<f64>, usize)> = None;
    let mut load = 0.0;
    for end in start + 1..behind.len() {
        load += costs[end - 1];
        match &best {
            // The first run only grows.
            Some((loads, _)) if load > loads[0] => break,
            Some((loads, _)) if !with(&behind[end], load).lt(loads.iter().copied()) => {}
            _ => best = Some((with(&behind[end], load).collect(), end)),
        }
    }
    best.unwrap_or_default()
}

/// The loads with one more, the largest first.
fn with(loads: &[f64], load: f64) -> impl Iterator<Item = f64> {
    let (larger, smaller) = loads.split_at(loads.partition_point(|&other| other >= load));
    larger.iter().copied().chain([load]).chain(smaller.iter().copied())
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use phalanx_ir::random::Stream;

    use super::*;

    fn sizes(runs: &[Range<usize>]) -> Vec<usize> {
        runs.iter().map(Range::len).collect()
    }

    fn text<T>(result: Result<T>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn layers_are_dealt_by_number() -> Result<()> {
        // An embedding in front, a norm and a head behind, eight layers.
        assert_eq!(by_count(1..9, 11, 2)?, [0..5, 5..11]);
        assert_eq!(by_count(1..9, 11, 3)?, [0..4, 4..7, 7..11]);
        assert_eq!(by_count(1..9, 11, 8)?[6..], [7..8, 8..11]);
        assert_eq!(sizes(&by_count(0..5, 5, 1)?), [5]);
        for (layers, stages) in (1..20).flat_map(|n| (1..=n).map(move |s| (n, s))) {
            let runs = by_count(0..layers, layers, stages)?;
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
            let expected = |s| layers / stages + usize::from(s < layers % stages);
            assert_eq!(sizes(&runs), (0..stages).map(expected).collect::<Vec<_>>());
        }
        Ok(())
    }

    #[test]
    fn the_heaviest_stage_is_as_light_as_can_be() -> Result<()> {
        // A head as heavy as three layers, an embedding that costs next to nothing.
        let costs = [0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0];
        assert_eq!(by_cost(&costs, 2)?, [0..6, 6..9]);
        assert_eq!(sizes(&by_cost(&costs, 3)?), [4, 3, 2]);
        // The rest goes to the late stages, also if a cost has no exact binary form.
        assert_eq!(sizes(&by_cost(&[0.1; 8], 3)?), [2, 3, 3]);
        assert_eq!(sizes(&by_cost(&[1.0; 10], 4)?), [2, 2, 3, 3]);
        // The heaviest stage is the last in any case; the others are evened out all the same.
        assert_eq!(sizes(&by_cost(&[1.0, 1.0, 1.0, 1.0, 9.0], 3)?), [2, 2, 1]);
        assert_eq!(sizes(&by_cost(&[0.0; 4], 2)?), [1, 3]);
        assert_eq!(sizes(&by_cost(&[5.0], 1)?), [1]);
        Ok(())
    }

    /// Every cut of small chains, by the rule in its plainest form.
    #[test]
    fn cuts_are_those_of_an_exhaustive_search() -> Result<()> {
        let stream = Stream::named(4, "chains");
        for case in 0..600 {
            let draw = |index: u64, below: u64| stream.below(case * 100 + index, below);
            let pieces = 1 + draw(0, 9) as usize;
            let stages = 1 + draw(1, pieces as u64) as usize;
            // Whole numbers, so that sums in any order are exact and ties are many.
            let most = [3, 10, 100][draw(2, 3) as usize];
            let costs: Vec<f64> = (0..pieces).map(|i| draw(3 + i as u64, most) as f64).collect();
            let sorted_loads = |runs: &Vec<Range<usize>>| {
                let load = |run: &Range<usize>| costs[run.clone()].iter().sum::<f64>() as u64;
                let mut loads: Vec<u64> = runs.iter().map(load).collect();
                loads.sort_unstable_by(|a, b| b.cmp(a));
                loads
            };
            let best = (every_cut(0, pieces, stages).into_iter())
                .min_by_key(|runs| (sorted_loads(runs), sizes(runs)));
            assert_eq!(Some(by_cost(&costs, stages)?), best, "{costs:?} into {stages}");
        }
        Ok(())
    }

    fn every_cut(start: usize, end: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
        if stages == 1 {
            return vec![once(start..end).collect()];
        }
        let first_ends = start + 1..=end + 1 - stages;
        let cuts = first_ends.flat_map(|cut| {
            let behind = every_cut(cut, end, stages - 1).into_iter();
            behind.map(move |rest| once(start..cut).chain(rest).collect())
        });
        cuts.collect()
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        for (found, words) in [
            (
                text(by_count(1..9, 10, 12)),
                ["8 layers can't be cut into 12 stages", "8 stages, or 12 layers"],
            ),
            (
                text(by_cost(&[1.0, 1.0], 3)),
                ["2 pieces can't be cut into 3 stages", "2 stages, or 3 pieces"],
            ),
            (text(by_cost(&[], 1)), ["0 pieces can't be cut into 1 stage", "work: 1 piece"]),
            (text(by_count(0..4, 4, 0)), ["4 layers can't be cut into 0 stages", "work: 1 stage"]),
            (text(by_count(2..9, 8, 2)), ["no layers 2..9 in a chain of 8 pieces", "layers 2..8"]),
            (text(by_cost(&[1.0, f64::NAN], 1)), ["the cost of piece 1 is NaN", "0 or above"]),
            (text(by_cost(&[-1.0, 1.0], 1)), ["the cost of piece 0 is -1", "0 or above"]),
            (
                text(enough_layers(8, 3, 4)),
                [
                    "8 layers can't be cut into 3·4 = 12 stages",
                    "2·4 = 8 stages, or 3·2 = 6 stages, or 12 layers",
                ],
            ),
            (text(enough_layers(3, 4, 2)), ["4·2 = 8 stages", "work: 1·2 = 2 stages, or 8 layers"]),
            (text(enough_layers(3, 0, 2)), ["0·2 = 0 stages", "work: 1 stage"]),
        ] {
            assert!(words.iter().all(|words| found.contains(words)), "{found}");
        }
        assert_eq!(enough_layers(12, 3, 4), Ok(()));
    }
}
