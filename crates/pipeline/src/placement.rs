//! Which stage each chunk of each stage group is.
//!
//! A model is split into stages, contiguous runs of layers. A stage group holds one or several of
//! them, its chunks. Systems that keep several replicas of the model on the same stage groups
//! (Chimera) hold a stage several times, and where stages take unequally long (PipeDream), some stages have more
//! holders than others. Each micro-batch has one holder of every stage.

use crate::error::{PipelineError, Result};

/// What a chunk of a stage group is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldStage {
    /// The stage.
    pub stage: usize,
    /// The replica of the model; where stages have different numbers of holders, which of them.
    pub replica: usize,
}

/// The stages that every stage group holds, by chunk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    stage_groups: Vec<Vec<HeldStage>>,
    stages: usize,
}

impl Placement {
    /// Looped: chunk `c` of stage group `d` is stage `c·p + d`.
    pub fn looped(p: usize, v: usize) -> Result<Self> {
        Placement::new(rows(p, v, |d, c| c * p + d))
    }

    /// In the shape of a V: stage group `d` holds stage `d` and, on the way back, stage
    /// `2p − 1 − d`.
    pub fn vee(p: usize) -> Result<Self> {
        Placement::new(rows(p, 2, |d, c| if c == 0 { d } else { 2 * p - 1 - d }))
    }

    /// Pipelines in both directions, `pairs` of each: down pipeline i has stage s on group s + i·p/`pairs`, and
    /// its up pipeline the same mirrored. Chunk 2i goes down and chunk 2i + 1 up; `pairs` divides `p`.
    pub fn both_ways(p: usize, pairs: usize) -> Result<Self> {
        let held = |group: usize, chunk: usize| {
            let turned = p - (chunk / 2) * (p / pairs);
            let stage = if chunk.is_multiple_of(2) { group } else { p - 1 - group };
            HeldStage { stage: (stage + turned) % p, replica: chunk }
        };
        Placement::new((0..p).map(|d| (0..2 * pairs).map(|c| held(d, c)).collect()).collect())
    }

    /// So many stage groups for each stage, one stage after the other.
    pub fn held_by(holders: &[usize]) -> Result<Self> {
        let of_stage = |(stage, count): (usize, &usize)| {
            (0..*count).map(move |replica| vec![HeldStage { stage, replica }])
        };
        Placement::new(holders.iter().enumerate().flat_map(of_stage).collect())
    }

    /// Any placement in which every stage has a holder, and holders are numbered from 0 on.
    pub fn new(stage_groups: Vec<Vec<HeldStage>>) -> Result<Self> {
        let refuse = |what: String, help: String| Err(PipelineError::Placement { what, help });
        let all = || stage_groups.iter().flatten();
        let (Some(stages), Some(replicas)) = (
            all().map(|held| held.stage.saturating_add(1)).max(),
            all().map(|held| held.replica.saturating_add(1)).max(),
        ) else {
            let help = "give stage 0 to stage group 0, and F and BW of micro-batch 0 as its turns";
            return refuse("no stage group holds a stage".to_owned(), help.to_owned());
        };
        if let Some(empty) = stage_groups.iter().position(Vec::is_empty) {
            let help =
                format!("give stage group {empty} a stage, or number stage groups without a gap");
            return refuse(
                format!("stage group {empty} of {} holds no stage", stage_groups.len()),
                help,
            );
        }
        let mut times = vec![vec![0_usize; stages.min(all().count())]; replicas.min(all().count())];
        // Of each stage, one more than its last replica.
        let mut count = vec![1_usize; stages.min(all().count())];
        for held in all() {
            let Some(time) = times.get_mut(held.replica).and_then(|row| row.get_mut(held.stage))
            else {
                let HeldStage { stage, replica } = held;
                let what = format!(
                    "there is stage {stage} of replica {replica}, but earlier ones are missing"
                );
                return refuse(what, "number stages and replicas without a gap".to_owned());
            };
            *time += 1;
            count[held.stage] = count[held.stage].max(held.replica + 1);
        }
        for (replica, row) in times.iter().enumerate() {
            let wrong = |&stage: &usize| replica < count[stage] && row[stage] != 1;
            let Some(stage) = (0..row.len()).find(wrong) else { continue };
            let what = format!("stage {stage} of replica {replica} is held");
            let holders: Vec<String> = holders(&stage_groups, HeldStage { stage, replica });
            return match holders.as_slice() {
                [] => {
                    let help = format!(
                        "give stage {stage} to a stage group, or number stages without a gap"
                    );
                    refuse(format!("{what} 0 times"), help)
                }
                [first, ..] => refuse(
                    format!("{what} {} times: {}", row[stage], holders.join(", ")),
                    format!("keep it on {first}, and give the other another stage or replica"),
                ),
            };
        }
        Ok(Placement { stage_groups, stages })
    }

    /// How many stage groups.
    pub fn stage_groups(&self) -> usize {
        self.stage_groups.len()
    }

    /// How many stages the model has.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// How many chunks a stage group holds.
    pub fn chunks(&self, stage_group: usize) -> usize {
        self.stage_groups.get(stage_group).map_or(0, Vec::len)
    }

    /// The most holders that a stage has: where all have as many, replicas of the model.
    pub fn replicas(&self) -> usize {
        self.stage_groups.iter().flatten().map(|held| held.replica + 1).max().unwrap_or(0)
    }

    /// For each stage: how many stage groups or chunks hold it.
    pub fn holders(&self) -> Vec<usize> {
        let of = |stage| self.stage_groups.iter().flatten().filter(move |held| held.stage == stage);
        (0..self.stages).map(|stage| of(stage).count()).collect()
    }

    /// Whether pipelines go both ways, each through all stages; otherwise holders of a stage take turns.
    pub(crate) fn goes_both_ways(&self) -> bool {
        self.replicas() > 1 && self.stage_groups.iter().any(|row| row.len() > 1)
    }

    /// How many chunks a stage group holds of the replica that one of its chunks belongs to: together they are
    /// the group's share of a model.
    pub fn share(&self, stage_group: usize, chunk: usize) -> usize {
        let own = self.held(stage_group, chunk).map(|held| held.replica);
        let row = self.stage_groups.get(stage_group).into_iter().flatten();
        row.filter(|held| Some(held.replica) == own).count().max(1)
    }

    /// What a chunk of a stage group is.
    pub fn held(&self, stage_group: usize, chunk: usize) -> Option<HeldStage> {
        self.stage_groups.get(stage_group)?.get(chunk).copied()
    }

    /// The stage group and chunk that hold a stage of a replica.
    pub fn find(&self, held: HeldStage) -> Option<(usize, usize)> {
        let in_row = |row: &Vec<HeldStage>| row.iter().position(|h| *h == held);
        self.stage_groups.iter().enumerate().find_map(|(d, row)| in_row(row).map(|c| (d, c)))
    }
}

/// After how many micro-batches all holders are first in turn again.
pub(crate) fn common(holders: &[usize]) -> usize {
    fn divisor(a: usize, b: usize) -> usize {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    holders.iter().fold(1, |all: usize, count| {
        (all / divisor(all, *count).max(1)).saturating_mul(*count).max(1)
    })
}

/// The holders of a stage, as text.
fn holders(stage_groups: &[Vec<HeldStage>], held: HeldStage) -> Vec<String> {
    let chunks = |(stage_group, row): (usize, &Vec<HeldStage>)| -> Vec<String> {
        let own = row.iter().enumerate().filter(|(_, other)| **other == held);
        own.map(|(chunk, _)| format!("stage group {stage_group} chunk {chunk}")).collect()
    };
    stage_groups.iter().enumerate().flat_map(chunks).collect()
}

fn rows(p: usize, v: usize, stage: impl Fn(usize, usize) -> usize) -> Vec<Vec<HeldStage>> {
    let row = |d| (0..v).map(|c| HeldStage { stage: stage(d, c), replica: 0 }).collect();
    (0..p).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(placement: &Placement) -> Vec<Vec<usize>> {
        placement
            .stage_groups
            .iter()
            .map(|row| row.iter().map(|held| held.stage).collect())
            .collect()
    }

    #[test]
    fn round_and_round_or_there_and_back() -> Result<()> {
        let looped = Placement::looped(3, 2)?;
        assert_eq!(stages(&looped), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(looped.find(HeldStage { stage: 4, replica: 0 }), Some((1, 1)));
        let vee = Placement::vee(3)?;
        assert_eq!(stages(&vee), [[0, 5], [1, 4], [2, 3]]);
        assert_eq!((vee.stage_groups(), vee.stages(), vee.chunks(2)), (3, 6, 2));
        Ok(())
    }

    #[test]
    fn stages_may_have_different_numbers_of_holders() -> Result<()> {
        let uneven = Placement::held_by(&[2, 1, 1])?;
        assert_eq!(stages(&uneven), [[0], [0], [1], [2]]);
        assert_eq!((uneven.stages(), uneven.replicas()), (3, 2));
        assert_eq!(uneven.holders(), [2, 1, 1]);
        assert_eq!(uneven.find(HeldStage { stage: 0, replica: 1 }), Some((1, 0)));
        assert_eq!(uneven.find(HeldStage { stage: 1, replica: 1 }), None);
        Ok(())
    }

    #[test]
    fn a_stage_is_held_once_by_each_replica() {
        let held = |stage, replica| HeldStage { stage, replica };
        let both_ways = vec![vec![held(0, 0), held(1, 1)], vec![held(1, 0), held(0, 1)]];
        assert!(Placement::new(both_ways).is_ok());
        for (stage_groups, words) in [
            (vec![], "no stage group"),
            (vec![vec![held(0, 0)], vec![]], "stage group 1 of 2 holds no stage"),
            (vec![vec![held(0, 0)], vec![held(0, 0)]], "held 2 times"),
            (vec![vec![held(0, 0)], vec![held(usize::MAX, 0)]], "earlier ones are missing"),
            (vec![vec![held(0, 0)], vec![held(1, 1)]], "stage 1 of replica 0 is held 0 times"),
        ] {
            let text =
                Placement::new(stage_groups).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.contains(words), "{text}");
        }
    }
}
