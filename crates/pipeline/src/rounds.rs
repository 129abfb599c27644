//! When a table updates its weights: each stage every `round` micro-batches, and as late as its versions say.
//!
//! In a table with rounds, version v ≥ 0 is what the weights of a stage are after v updates of the step, and version −a what they
//! were a updates before it. A micro-batch of update u that reads version v is u − v updates late, and all micro-batches of
//! a stage must be equally late: that is the rule that scripts follow ([`Updates`]). A version can be read once
//! enough backwards of its stage are over.
//!
//! Where stages have several holders, these take micro-batches in turn, and an update takes as many from each of them as a stage with
//! one holder takes for its own. Where pipelines go both ways, an update takes the micro-batches of both.

use std::collections::BTreeMap;

use phalanx_script::Updates;

use crate::error::{PipelineError, Result};
use crate::flow::{At, Phase};
use crate::placement::{HeldStage, common};
use crate::schedule::Schedule;
use crate::words::counted;

/// A turn of a table, with the version that it reads, and the micro-batches that an update of its stage takes.
#[derive(Clone, Copy)]
pub(crate) struct VersionRead {
    pub(crate) line: usize,
    pub(crate) at: At,
    pub(crate) version: i64,
    pub(crate) round: usize,
}

/// The updates of a table in which every row says how many micro-batches one takes.
pub(crate) fn updates(schedule: &Schedule, reads: &[VersionRead]) -> Result<Updates> {
    let rounds = Rounds { schedule, reads };
    let (round, holders) = rounds.sizes()?;
    let updates = Updates {
        holders,
        ..Updates::new(schedule.microbatches(), round, vec![0; schedule.placement().stages()])
    };
    rounds.in_turn(&updates)?;
    rounds.in_order(&updates)?;
    // Where the versions of a stage are not equally late, stages may change them together.
    let together = common(&updates.holders);
    let apart = rounds.delays(&updates);
    let synced = Updates { together, ..updates.clone() };
    match (apart, rounds.delays(&synced)) {
        (Err(_), Ok(delays)) if together > 1 => Ok(Updates { delays, ..synced }),
        // Neither fits: what is wrong is told by the reading under which more rows are right.
        (Err(apart), Err(synced)) if together > 1 => {
            Err(if row(&synced) > row(&apart) { synced } else { apart })
        }
        (apart, _) => Ok(Updates { delays: apart?, ..updates }),
    }
}

/// The row of a table that an error is about.
fn row(error: &PipelineError) -> usize {
    match error {
        PipelineError::Csv { line, .. } => *line,
        _ => 0,
    }
}

struct Rounds<'a> {
    schedule: &'a Schedule,
    reads: &'a [VersionRead],
}

impl Rounds<'_> {
    /// The micro-batches of a round, and the rounds that an update takes, by stage.
    fn sizes(&self) -> Result<(usize, Vec<usize>)> {
        let placement = self.schedule.placement();
        let holders = match placement.goes_both_ways() {
            true => vec![1; placement.stages()],
            false => placement.holders(),
        };
        let [first, ..] = self.reads else { return Ok((1, holders)) };
        let count = holders[self.schedule.stage(first.at)];
        let round = first.round / count;
        let step = self.schedule.microbatches();
        let whole = first.round > 0 && first.round == round * count;
        if !whole || !step.is_multiple_of(first.round) {
            let fits = |near: &usize| step.is_multiple_of(*near) && near.is_multiple_of(count);
            let near = (1..=step).rev().filter(fits).find(|near| *near <= first.round.max(count));
            let what = match whole || count == 1 {
                true => format!(
                    "round {} does not divide the {} of the step",
                    first.round,
                    counted(step, "micro-batch")
                ),
                false => format!("round {} is not a multiple of {count} holders", first.round),
            };
            let why = "an update takes the gradients of so many micro-batches";
            let near = near.map_or_else(
                || counted(step.next_multiple_of(count), "micro-batch"),
                |near| format!("round {near}"),
            );
            return refuse(first.line, what, format!("{why}\n  nearest that work: {near}"));
        }
        for read in self.reads {
            let stage = self.schedule.stage(read.at);
            let taken = round * holders[stage];
            if read.round == taken {
                continue;
            }
            let known = self.schedule.stage(first.at);
            let help = format!(
                "line {} says that an update of stage {known} takes {}, and with as many holders as it has stage {stage} takes \
                 {taken}\n  nearest that work: round {taken}",
                first.line, first.round
            );
            return refuse(read.line, format!("round {} differs", read.round), help);
        }
        match (0..holders.len()).find(|stage| !step.is_multiple_of(round * holders[*stage])) {
            None => Ok((round, holders)),
            Some(stage) => {
                let taken = round * holders[stage];
                let own = |read: &&VersionRead| self.schedule.stage(read.at) == stage;
                let line = self.reads.iter().find(own).map_or(first.line, |read| read.line);
                refuse(
                    line,
                    format!(
                        "round {taken} does not divide the {} of the step",
                        counted(step, "micro-batch")
                    ),
                    format!(
                        "an update takes the gradients of so many micro-batches\n  nearest that work: {}",
                        counted(step.next_multiple_of(taken), "micro-batch")
                    ),
                )
            }
        }
    }

    /// Holders of a stage take rounds in the order of their numbers.
    fn in_turn(&self, updates: &Updates) -> Result<()> {
        for read in self.reads {
            let turn = self.schedule.turn(read.at);
            let held = self.schedule.placement().held(read.at.stage_group, turn.chunk);
            let Some(HeldStage { stage, replica }) = held else { continue };
            let (round, count) = (updates.round_of(turn.microbatch), updates.holders[stage]);
            if count == 1 || round % count == replica {
                continue;
            }
            let other = round % count;
            return refuse(
                read.line,
                format!(
                    "micro-batch {} of stage {stage} is taken by holder {replica}",
                    turn.microbatch
                ),
                format!(
                    "the {count} holders of the stage take {} in turn\n  nearest that work: holder {other} (replica {other})",
                    counted(updates.round, "micro-batch")
                ),
            );
        }
        Ok(())
    }

    /// Every stage group ends its backwards in the order of its updates.
    fn in_order(&self, updates: &Updates) -> Result<()> {
        let mut before: BTreeMap<(usize, usize), (usize, usize)> = BTreeMap::new();
        for read in self.reads {
            let turn = self.schedule.turn(read.at);
            if !Phase::of(turn.part).contains(&Phase::W) {
                continue;
            }
            let stage = self.schedule.stage(read.at);
            let update = updates.of(stage, turn.microbatch);
            let known = before.insert((read.at.stage_group, stage), (update, read.line));
            let Some((later, line)) = known.filter(|(later, _)| *later > update) else { continue };
            return refuse(
                read.line,
                format!(
                    "stage {stage} would make update {} before update {}",
                    later + 1,
                    update + 1
                ),
                format!(
                    "each begins with the weights that the one before it made\n  \
                     usual fix: move line {} before line {line}",
                    read.line
                ),
            );
        }
        Ok(())
    }

    /// How many updates late each stage is.
    fn delays(&self, updates: &Updates) -> Result<Vec<usize>> {
        let schedule = self.schedule;
        // By stage: how late it is, and where that was written first.
        let mut late: Vec<Option<(usize, usize)>> = vec![None; updates.delays.len()];
        for read in self.reads {
            let (stage, microbatch) = (schedule.stage(read.at), schedule.turn(read.at).microbatch);
            // Without a delay it would be this one.
            let update = updates.version(stage, microbatch);
            let Ok(delay) = usize::try_from(update - read.version) else {
                return refuse(
                    read.line,
                    format!(
                        "micro-batch {microbatch} reads version {}, but belongs to update {}",
                        read.version,
                        update + 1
                    ),
                    format!(
                        "it would read what its own gradient makes\n  nearest that work: version {update}"
                    ),
                );
            };
            match late[stage] {
                None => late[stage] = Some((delay, read.line)),
                Some((known, _)) if known == delay => {}
                Some((known, line)) => {
                    return refuse(
                        read.line,
                        format!(
                            "micro-batch {microbatch} of stage {stage} reads weights that are {delay} updates late"
                        ),
                        format!(
                            "line {line} says that the stage is {known} late\n  nearest that work: version {}",
                            update - known as i64
                        ),
                    );
                }
            }
            self.exists(*read, stage, read.version.max(0) as usize * updates.taken_by(stage))?;
        }
        Ok(late.into_iter().map(|late| late.map_or(0, |(delay, _)| delay)).collect())
    }

    /// The backwards of the first micro-batches, so many, make the version that a turn reads: those of its own stage group come before
    /// it. That those of others come before it, too, is seen when all of them run.
    fn exists(&self, read: VersionRead, stage: usize, needed: usize) -> Result<()> {
        let here = |other: &&VersionRead| other.at.stage_group == read.at.stage_group;
        let ends = self.reads.iter().filter(here);
        let ends = ends.filter(|other| makes(self.schedule, other.at, stage, needed));
        let later = ends.filter(|other| other.at.index > read.at.index);
        let Some(last) = later.max_by_key(|other| other.at.index) else { return Ok(()) };
        let microbatch = self.schedule.turn(read.at).microbatch;
        refuse(
            read.line,
            format!("micro-batch {microbatch} reads version {} before it exists", read.version),
            format!(
                "its update needs the backwards of micro-batches 0 to {}\n  \
                 usual fix: move line {} after line {}",
                needed - 1,
                read.line,
                last.line
            ),
        )
    }
}

fn refuse<T>(line: usize, what: String, help: String) -> Result<T> {
    Err(PipelineError::Csv { line, what, help })
}

/// Whether a turn ends the backward of one of the first micro-batches on a stage.
fn makes(schedule: &Schedule, at: At, stage: usize, first: usize) -> bool {
    let turn = schedule.turn(at);
    let ends = Phase::of(turn.part).contains(&Phase::W);
    schedule.stage(at) == stage && turn.microbatch < first && ends
}
