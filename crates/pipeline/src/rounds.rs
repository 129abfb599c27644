//! When a table updates its weights: every `round` micro-batches, each stage as late as its versions say.
//!
//! In a table with rounds, version v ≥ 0 is what the weights are after v updates of the step, and version −a what they
//! were a updates before it. A micro-batch of update u that reads version v is u − v updates late, and all micro-batches of
//! a stage must be equally late: that is the rule that scripts follow ([`Updates`]). A version can be read once
//! enough backwards of its stage are over.

use phalanx_script::Updates;

use crate::error::{PipelineError, Result};
use crate::flow::{At, Phase};
use crate::schedule::Schedule;

/// A turn of a table, with the version that it reads.
#[derive(Clone, Copy)]
pub(crate) struct VersionRead {
    pub(crate) line: usize,
    pub(crate) at: At,
    pub(crate) version: i64,
}

/// The updates of a table in which every row has this round.
pub(crate) fn updates(schedule: &Schedule, round: usize, reads: &[VersionRead]) -> Result<Updates> {
    let step = schedule.microbatches();
    let refuse =
        |line: usize, what: String, help: String| Err(PipelineError::Csv { line, what, help });
    let first = reads.first().map_or(1, |read| read.line);
    if round == 0 || !step.is_multiple_of(round) {
        let near =
            (1..=step).rev().find(|near| step.is_multiple_of(*near) && *near <= round.max(1));
        return refuse(
            first,
            format!("round {round} does not divide the {step} micro-batches of the step"),
            format!(
                "an update takes the gradients of so many micro-batches\n  nearest that work: round {}",
                near.unwrap_or(1)
            ),
        );
    }
    if schedule.placement().replicas() > 1 {
        let why = "replicas of a stage would update at different times";
        let what = "a table with rounds has replicas".to_owned();
        return refuse(
            first,
            what,
            format!("{why}\n  nearest that work: replica 0 everywhere, or no rounds"),
        );
    }
    // By stage: how late it is, and where that was written first.
    let mut late: Vec<Option<(usize, usize)>> = vec![None; schedule.placement().stages()];
    for read in reads {
        let (stage, microbatch) = (schedule.stage(read.at), schedule.turn(read.at).microbatch);
        let update = (microbatch / round) as i64;
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
        let needed = read.version.max(0) as usize * round;
        let ends = reads.iter().filter(|other| makes(schedule, other.at, stage, needed));
        let later = ends.filter(|other| other.at.index > read.at.index);
        if let Some(last) = later.max_by_key(|other| other.at.index) {
            return refuse(
                read.line,
                format!("micro-batch {microbatch} reads version {} before it exists", read.version),
                format!(
                    "its update needs the backwards of micro-batches 0 to {}\n  \
                     usual fix: move line {} after line {}",
                    needed - 1,
                    read.line,
                    last.line
                ),
            );
        }
    }
    let delays = late.into_iter().map(|late| late.map_or(0, |(delay, _)| delay)).collect();
    Ok(Updates::new(step, round, delays))
}

/// Whether a turn ends the backward of one of the first micro-batches on a stage.
fn makes(schedule: &Schedule, at: At, stage: usize, first: usize) -> bool {
    let turn = schedule.turn(at);
    let ends = Phase::of(turn.part).contains(&Phase::W);
    schedule.stage(at) == stage && turn.microbatch < first && ends
}
