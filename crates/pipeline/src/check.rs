//! Checks that lists of turns do all work exactly once.
//!
//! On every stage each micro-batch has exactly one F, one B and one W, by one holder of the stage, in that
//! order, all with the same version of the weights. Empty micro-batches have all three or none on a stage. Every
//! error names the change that would fix it.

use std::collections::HashSet;

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::flow::{At, Index, Phase};
use crate::placement::{HeldStage, Placement};
use crate::turn::Turn;
use crate::words::counted;
use crate::written::Written;

/// Refuses second forwards in lists that a user wrote: they follow from what a stage keeps, and are
/// not part of a schedule.
pub(crate) fn listed(turns: &[Vec<Turn>], written: Written<'_>) -> Result<()> {
    for (stage_group, list) in turns.iter().enumerate() {
        if let Some(index) = list.iter().position(|turn| turn.part == Part::R) {
            let (at, turn) = (At { stage_group, index }, list[index].to_string());
            let why = "second forwards are added automatically".to_owned();
            let help = "usual fix: leave it out".to_owned();
            return Err(
                written.told(at, PipelineError::Turn { stage_group, index, turn, why, help })
            );
        }
    }
    Ok(())
}

/// The micro-batches that turns may name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Numbers {
    /// Those of a step, from 0.
    pub(crate) real: usize,
    /// Those after them that are empty: turns that compute on zeros.
    pub(crate) empty: usize,
}

/// Finds where every phase of every micro-batch runs.
pub(crate) fn complete(
    numbers: Numbers,
    placement: &Placement,
    turns: &[Vec<Turn>],
    written: Written<'_>,
) -> Result<Index> {
    if turns.len() != placement.stage_groups() {
        let (lists, stage_groups) = (counted(turns.len(), "stage group"), placement.stage_groups());
        return Err(PipelineError::Placement {
            what: format!("there are lists for {lists}, but stages for {stage_groups}"),
            help: format!("give {}, one for each stage group", counted(stage_groups, "list")),
        });
    }
    if numbers.real == 0 {
        return Err(PipelineError::Shape {
            what: "0 micro-batches".to_owned(),
            why: "a step needs at least one micro-batch".to_owned(),
            nearest: "1 micro-batch".to_owned(),
        });
    }
    Check { numbers, placement, turns, written }.index()
}

/// The input of the check.
struct Check<'a> {
    numbers: Numbers,
    placement: &'a Placement,
    turns: &'a [Vec<Turn>],
    written: Written<'a>,
}

/// Where the phases of one micro-batch on one stage were found so far.
type Done = [Option<At>; 3];

impl Check<'_> {
    fn index(&self) -> Result<Index> {
        let (stages, Numbers { real, empty }) = (self.placement.stages(), self.numbers);
        if stages.saturating_mul(real) > self.turns.iter().map(Vec::len).sum() {
            return Err(self.first_missing());
        }
        let microbatches = real + empty;
        let mut places: Vec<Done> = vec![[None; 3]; stages.saturating_mul(microbatches)];
        let mut holders: Vec<Option<At>> = vec![None; places.len()];
        // The first replica that a micro-batch is seen in: where something is missing, it is likely missing there.
        let mut replicas: Vec<Option<usize>> = vec![None; microbatches];
        for (stage_group, list) in self.turns.iter().enumerate() {
            for (index, turn) in list.iter().enumerate() {
                let at = At { stage_group, index };
                let held = self.legal(at, turn)?;
                replicas[turn.microbatch].get_or_insert(held.replica);
                let cell = held.stage * microbatches + turn.microbatch;
                let first = *holders[cell].get_or_insert(at);
                let other = &self.turns[first.stage_group][first.index];
                if (first.stage_group, other.chunk) != (stage_group, turn.chunk) {
                    return Err(self.elsewhere(
                        at,
                        turn,
                        held.stage,
                        [first.stage_group, other.chunk],
                    ));
                }
                self.note(&mut places[cell], at, turn)?;
            }
        }
        let whole = |(cell, done): (usize, &Done)| match done {
            [Some(f), Some(b), Some(w)] => Ok(Some([*f, *b, *w])),
            [None, None, None] if cell % microbatches >= real => Ok(None),
            _ => {
                let (stage, microbatch) = (cell / microbatches, cell % microbatches);
                let held = HeldStage { stage, replica: replicas[microbatch].unwrap_or(0) };
                Err(self.missing(held, microbatch, done))
            }
        };
        let places = places.iter().enumerate().map(whole).collect::<Result<_>>()?;
        Ok(Index::new(places, microbatches, stages))
    }

    /// What the turn works on, if it exists.
    fn legal(&self, at: At, turn: &Turn) -> Result<HeldStage> {
        let Turn { microbatch, chunk, .. } = *turn;
        let refuse = |why: &str, help: String| Err(self.wrong(at, turn, why, help));
        if microbatch >= self.numbers.real + self.numbers.empty {
            let why = format!(
                "there is no micro-batch {microbatch}, only 0 to {}",
                self.numbers.real - 1
            );
            let more = microbatch.saturating_add(1);
            return refuse(&why, format!("usual fix: leave it out, or {more} micro-batches"));
        }
        self.placement.held(at.stage_group, chunk).map_or_else(
            || {
                let chunks = self.placement.chunks(at.stage_group);
                let why = format!(
                    "there is no chunk {chunk}: stage group {} holds {chunks}",
                    at.stage_group
                );
                refuse(&why, format!("nearest that work: chunk {}", chunks.saturating_sub(1)))
            },
            Ok,
        )
    }

    /// A micro-batch that changes from one holder of a stage to another.
    fn elsewhere(&self, at: At, turn: &Turn, stage: usize, first: [usize; 2]) -> PipelineError {
        let [stage_group, chunk] = first;
        let why = format!(
            "stage {stage} of its micro-batch is on chunk {chunk} of stage group {stage_group}, which keeps \
             what the backward needs"
        );
        let help = format!("usual fix: give it to chunk {chunk} of stage group {stage_group}");
        self.wrong(at, turn, &why, help)
    }

    /// Records what the turn does, if it is done for the first time and not too early.
    fn note(&self, done: &mut Done, at: At, turn: &Turn) -> Result<()> {
        let phases = Phase::of(turn.part);
        if let Some(twice) = phases.iter().find(|phase| done[**phase as usize].is_some()) {
            return Err(self.twice(done, *twice, at, turn));
        }
        for phase in phases {
            done[*phase as usize] = Some(at);
            let Some(before) = (*phase as usize).checked_sub(1) else { continue };
            let Some(earlier) = done[before] else {
                return Err(self.early(*phase, Phase::ALL[before], at, turn));
            };
            let first = &self.turns[earlier.stage_group][earlier.index];
            if first.version != turn.version {
                let (place, version) = (self.written.place(earlier, first), first.version);
                let why = format!(
                    "it reads version {} of the weights, but {place} read version {version} for \
                     the same micro-batch",
                    turn.version
                );
                let help = format!("nearest that work: version {version} for both");
                return Err(self.wrong(at, turn, &why, help));
            }
        }
        Ok(())
    }

    /// The error for work that is done twice, with what to remove.
    fn twice(&self, done: &Done, twice: Phase, at: At, turn: &Turn) -> PipelineError {
        let first = done[twice as usize].unwrap_or(at);
        let first = self.written.place(first, &self.turns[first.stage_group][first.index]);
        let why = format!(
            "{} of micro-batch {} is done twice; first by {first}",
            twice.name(),
            turn.microbatch
        );
        let left: String = Phase::of(turn.part)
            .iter()
            .filter(|phase| done[**phase as usize].is_none())
            .map(|phase| phase.name())
            .collect();
        let help = match left.as_str() {
            "" => format!("usual fix: leave out one of the two, this or {first}"),
            left => format!("usual fix: write {left} instead of {}", turn.part),
        };
        self.wrong(at, turn, &why, help)
    }

    /// The error for work that is done before what it needs.
    fn early(&self, phase: Phase, needed: Phase, at: At, turn: &Turn) -> PipelineError {
        let (name, micro) = (needed.name(), turn.microbatch);
        let why = format!("{} of micro-batch {micro} comes before its {name}", phase.name());
        let does = |other: &Turn| {
            (other.microbatch, other.chunk) == (micro, turn.chunk)
                && Phase::of(other.part).contains(&needed)
        };
        let list = &self.turns[at.stage_group];
        let help = match list.iter().position(does) {
            Some(index) => {
                let later = At { stage_group: at.stage_group, index };
                format!("usual fix: move it after {}", self.written.place(later, &list[index]))
            }
            None => {
                let lost = Turn { part: alone(needed), ..*turn };
                let both = if needed == Phase::B { ", or write BW instead of W" } else { "" };
                format!("usual fix: add {lost} to stage group {} before it{both}", at.stage_group)
            }
        };
        self.wrong(at, turn, &why, help)
    }

    /// The first missing work, if there are fewer turns than stages times micro-batches. The
    /// numbers in short lists may be huge, so nothing of their size is allocated here.
    fn first_missing(&self) -> PipelineError {
        let worked = |(stage_group, list): (usize, &Vec<Turn>)| -> Vec<(usize, usize)> {
            let held = |turn: &Turn| self.placement.held(stage_group, turn.chunk);
            list.iter().filter_map(|turn| Some((held(turn)?.stage, turn.microbatch))).collect()
        };
        let worked: HashSet<(usize, usize)> =
            self.turns.iter().enumerate().flat_map(worked).collect();
        let cells = |s| (0..self.numbers.real).map(move |m| (s, m));
        let mut cells = (0..self.placement.stages()).flat_map(cells);
        let (stage, microbatch) = cells.find(|cell| !worked.contains(cell)).unwrap_or_default();
        self.missing(HeldStage { stage, replica: 0 }, microbatch, &[None; 3])
    }

    /// The error for the missing phases of a micro-batch, of which some may be done.
    fn missing(&self, held: HeldStage, microbatch: usize, done: &Done) -> PipelineError {
        let first = HeldStage { replica: 0, ..held };
        let found = self.placement.find(held).or_else(|| self.placement.find(first));
        let (stage_group, chunk) = found.unwrap_or_default();
        let turn = |part| Turn { part, microbatch, chunk, version: 0 };
        let place = |at: At| self.written.place(at, &self.turns[at.stage_group][at.index]);
        let (phase, at, help) = match *done {
            [None, ..] => {
                let (f, bw) = (turn(Part::F), turn(Part::BW));
                ("F", None, format!("add {f} and {bw} to stage group {stage_group}"))
            }
            [Some(f), None, _] => {
                let (bw, place) = (turn(Part::BW), place(f));
                ("B", Some(f), format!("add {bw} to stage group {stage_group} after {place}"))
            }
            [_, Some(b), _] => {
                let (w, place) = (turn(Part::W), place(b));
                let help = format!("write BW instead of B at {place}, or add {w} after it");
                ("W", Some(b), help)
            }
        };
        let (stage, last) = (held.stage, self.numbers.real - 1);
        let help = format!("usual fix: {help}");
        let error =
            PipelineError::Missing { stage, stage_group, chunk, phase, microbatch, last, help };
        match at {
            Some(at) => self.written.told(at, error),
            None => error,
        }
    }

    fn wrong(&self, at: At, turn: &Turn, why: &str, help: String) -> PipelineError {
        let (At { stage_group, index }, turn, why) = (at, turn.to_string(), why.to_owned());
        self.written.told(at, PipelineError::Turn { stage_group, index, turn, why, help })
    }
}

/// The part that does one phase.
fn alone(phase: Phase) -> Part {
    match phase {
        Phase::F => Part::F,
        Phase::B => Part::B,
        Phase::W => Part::W,
    }
}
