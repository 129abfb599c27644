//! PipeDream with stages that several stage groups hold (Narayanan et al., 2019): they take micro-batches in turn.
//!
//! A stage that takes twice as long as others gets two holders; micro-batch i goes to holder i mod 2, forward and backward.
//! When every holder of a stage has ended a backward, all of them update by the mean of their gradients, so they have equal weights at
//! every version. A holder of stage s starts with ⌈groups from s on ÷ holders of s⌉ forwards, as many as keep it and
//! those after it busy. The last holder of a round ends its backward later than the first, who would wait for it if it read
//! the newest weights: where that costs time, such a stage reads weights that are one update older.
//!
//! With vertical sync a micro-batch reads on every stage what the same earlier ones made. All stages have such a version after each
//! common multiple of their holders, so readers change versions there, all together, and all stages are as many micro-batches late.
//!
//! Which of that is needed is found by simulation, with stages that take as long as they have holders: no holder may
//! wait once the pipeline is full. Where one forward more on the first stage is not enough, round robin cannot feed the holders.

use phalanx_script::Updates;

use super::rolling::rolling;
use crate::costs::{Times, TurnCosts};
use crate::error::{PipelineError, Result};
use crate::flow;
use crate::placement::{Placement, common};
use crate::schedule::Schedule;
use crate::simulate::simulate;
use crate::turn::Turns;
use crate::words::{counted, listed};

/// PipeDream over stages with these numbers of holders, for steps of `m` micro-batches each.
pub fn round_robin(
    holders: &[usize],
    m: usize,
    steps: usize,
    vertical_sync: bool,
) -> Result<Schedule> {
    legal(holders, m)?;
    match Feeding::of(holders, vertical_sync)? {
        Some(feeding) => feeding.schedule(holders, m, m * steps),
        None => Err(PipelineError::Shape {
            what: format!("round robin cannot feed the holders {}", listed(holders)),
            why: format!(
                "even with {} in flight on the first stage, one more than usual, some would wait for micro-batches \
                 all the time",
                counted(Feeding::usual(holders, 0).ahead[0] + 2, "micro-batch")
            ),
            nearest: nearest(holders, m, vertical_sync),
        }),
    }
}

/// How many forwards holders are ahead, and how old the weights are that they read.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Feeding {
    /// By stage: how many forwards a holder is ahead of its backwards.
    ahead: Vec<usize>,
    /// By stage: how many updates late it is.
    delays: Vec<usize>,
    /// After how many micro-batches readers of all stages go on to newer versions together; 1 without vertical sync.
    together: usize,
}

impl Feeding {
    /// The least with which no holder waits, if there is one.
    fn of(holders: &[usize], vertical_sync: bool) -> Result<Option<Self>> {
        if vertical_sync {
            return Self::in_sync(holders);
        }
        if holders.iter().all(|count| *count == 1) {
            return Ok(Some(Self::usual(holders, 0)));
        }
        for (more, older) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut found = Self::usual(holders, older);
            found.ahead[0] += more;
            found.delays[0] += more;
            if found.feeds(holders)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The same, where all stages are as many common multiples of their holders late.
    fn in_sync(holders: &[usize]) -> Result<Option<Self>> {
        let together = common(holders);
        for more in [0, 1] {
            let mut found = Self { together, ..Self::usual(holders, 0) };
            found.ahead[0] += more;
            // A forward comes so many micro-batches before the newest backward of its stage.
            let least = (found.ahead[0] * holders[0]).div_ceil(together);
            for late in least..least + LATER {
                found.delays = holders.iter().map(|count| late * (together / count)).collect();
                if found.feeds(holders)? {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }

    /// As many forwards as there are holders to keep busy, where stages with several holders read weights that are so many
    /// updates older.
    fn usual(holders: &[usize], older: usize) -> Self {
        let first = |s: usize| holders[s..].iter().sum::<usize>().div_ceil(holders[s]);
        let ahead: Vec<usize> = (0..holders.len()).map(|s| first(s) - 1).collect();
        let late = |(ahead, count): (&usize, &usize)| ahead + if *count > 1 { older } else { 0 };
        Self { delays: ahead.iter().zip(holders).map(late).collect(), ahead, together: 1 }
    }

    /// Whether no holder waits in the middle of a long row, if a stage takes as long as it has holders.
    fn feeds(&self, holders: &[usize]) -> Result<bool> {
        let round = common(holders);
        let all = round * ROUNDS.max(LEAST.div_ceil(round));
        let schedule = self.schedule(holders, round, all)?;
        if !flow::walk(&schedule, |_| ()) {
            return Ok(false);
        }
        let times = |count: &usize| {
            let t = *count as f64;
            Times { f: t, b: t, w: t }
        };
        let times = holders.iter().map(times).collect();
        let timeline = simulate(&schedule, &TurnCosts::uneven(times, 0.0)?)?;
        let (half, more) = (all / round / 2 * round, all / round * 3 / 4 * round);
        // When the first stage has ended so many micro-batches.
        let ended = |count: usize| {
            let turns = timeline.stage_groups[..holders[0]].iter().flatten();
            let own = turns.filter(|timed| timed.turn.microbatch < count);
            own.map(|timed| timed.end).fold(0.0, f64::max)
        };
        let each = (ended(more) - ended(half)) / (more - half) as f64;
        Ok(each <= 3.0 * (1.0 + 1e-9))
    }

    /// The turns of `all` micro-batches, in steps of `m`.
    fn schedule(&self, holders: &[usize], m: usize, all: usize) -> Result<Schedule> {
        let place = Placement::held_by(holders)?;
        let held = place.clone();
        let turns = |group: usize| -> Turns {
            let own = held.held(group, 0).expect("each stage group holds a stage");
            let each = holders[own.stage];
            let count = all.saturating_sub(own.replica).div_ceil(each);
            rolling(self.ahead[own.stage], count).every(each, own.replica)
        };
        let schedule = Schedule::new("pipedream", all, place, turns)?;
        let (holders, together) = (holders.to_vec(), self.together);
        let updates = Updates::new(m, 1, self.delays.clone());
        Ok(schedule.updating(Updates { holders, together, ..updates }))
    }
}

/// How many rounds of all holders are simulated, and the least micro-batches.
const ROUNDS: usize = 8;
const LEAST: usize = 64;

/// How many delays are tried with vertical sync.
const LATER: usize = 3;

/// Refuses holders among whom a step's micro-batches cannot be distributed.
fn legal(holders: &[usize], m: usize) -> Result<()> {
    let refuse = |what: String, why: &str, nearest: String| {
        Err(PipelineError::Shape { what, why: why.to_owned(), nearest })
    };
    if let Some(stage) = holders.iter().position(|count| *count == 0) {
        let least: Vec<usize> = holders.iter().map(|count| (*count).max(1)).collect();
        return refuse(
            format!("the holders {} leave stage {stage} to nobody", listed(holders)),
            "each stage needs a holder",
            format!("holders {}", listed(&least)),
        );
    }
    let Some(stage) = holders.iter().position(|count| !m.is_multiple_of(*count)) else {
        return Ok(());
    };
    let count = holders[stage];
    let round = common(holders);
    let fewer = (1..=count).rev().find(|count| m.is_multiple_of(*count)).unwrap_or(1);
    let mut other = holders.to_vec();
    other[stage] = fewer;
    refuse(
        format!("{} holders cannot take {} in turn", count, counted(m, "micro-batch")),
        &format!(
            "an update of stage {stage} takes a micro-batch of each holder, and a step whole updates"
        ),
        format!(
            "{}, or holders {}",
            counted(m.next_multiple_of(round), "micro-batch"),
            listed(&other)
        ),
    )
}

/// Holders that can be fed and differ the least: fewer before more, later stages first.
fn nearest(holders: &[usize], m: usize, vertical_sync: bool) -> String {
    let ones = vec![1; holders.len()];
    let mut reached = vec![holders.to_vec()];
    for _ in 0..NEAR {
        let mut next: Vec<Vec<usize>> = Vec::new();
        for from in &reached {
            for stage in (0..from.len()).rev() {
                for count in [from[stage].saturating_sub(1), from[stage] + 1] {
                    let mut other = from.clone();
                    other[stage] = count;
                    next.push(other);
                }
            }
        }
        // Fewer holders are always there; more may not be.
        next.sort_by_key(|other| other.iter().sum::<usize>() > holders.iter().sum());
        let fed = |other: &&Vec<usize>| {
            legal(other, m).is_ok()
                && Feeding::of(other, vertical_sync).is_ok_and(|found| found.is_some())
        };
        if let Some(found) = next.iter().find(fed) {
            return format!("holders {}", listed(found));
        }
        reached = next;
    }
    format!("holders {}", listed(&ones))
}

/// How many changes of one holder are tried.
const NEAR: usize = 2;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    /// By hand: two holders of the first stage take even and odd micro-batches.
    #[test]
    fn holders_take_micro_batches_in_turn() {
        let schedule = round_robin(&[2, 1], 4, 1, false).unwrap();
        let words = "0: F0 F2 BW0 BW2\n1: F1 F3 BW1 BW3\n2: F0 BW0 F1 BW1 F2 BW2 F3 BW3\n";
        assert_eq!(schedule.to_string(), words);
        let versions = |group: usize| -> Vec<usize> {
            schedule.turns(group).iter().map(|turn| turn.version).collect()
        };
        assert_eq!([versions(0), versions(2)], [vec![0; 4], vec![0, 0, 1, 1, 2, 2, 3, 3]]);
    }

    /// With stages that take as long as they have holders, these are fed with the usual forwards, or with one more.
    #[test]
    fn forwards_are_as_few_as_feed_all_holders() {
        for (holders, ahead, delays) in [
            (vec![2, 1], vec![1, 0], vec![1, 0]),
            (vec![7, 1], vec![1, 0], vec![1, 0]),
            (vec![2, 2], vec![1, 0], vec![1, 0]),
            (vec![2, 1, 1], vec![1, 1, 0], vec![2, 1, 0]),
            (vec![4, 2, 1], vec![1, 1, 0], vec![2, 2, 0]),
            (vec![1, 2], vec![2, 0], vec![2, 1]),
            (vec![9, 5, 1, 1], vec![2, 1, 1, 0], vec![3, 2, 1, 0]),
            (vec![1, 2, 1], vec![4, 1, 0], vec![4, 2, 0]),
            (vec![1, 1, 1], vec![2, 1, 0], vec![2, 1, 0]),
        ] {
            let found = Feeding::of(&holders, false).unwrap();
            assert_eq!(found, Some(Feeding { ahead, delays, together: 1 }), "{holders:?}");
        }
        assert_eq!(Feeding::of(&[1, 3, 1], false).unwrap(), None);
    }

    /// A micro-batch reads what the same earlier ones made, on every stage.
    #[test]
    fn in_sync_all_stages_read_the_same_micro_batches() {
        for holders in [vec![2, 1], vec![1, 2], vec![2, 1, 1], vec![4, 2, 1], vec![1, 1, 1]] {
            let schedule = round_robin(&holders, common(&holders) * 4, 2, true).unwrap();
            let updates = schedule.updates().unwrap().clone();
            let made = |stage: usize, m| updates.version(stage, m) * holders[stage] as i64;
            for microbatch in 0..schedule.microbatches() {
                let first = made(0, microbatch);
                assert!(first <= microbatch as i64, "{holders:?}");
                for stage in 1..holders.len() {
                    assert_eq!(made(stage, microbatch), first, "{holders:?}, {microbatch}");
                }
            }
        }
        // Both holders of the first stage, then the second stage, whose versions change twice as often.
        let schedule = round_robin(&[2, 1], 8, 2, true).unwrap();
        let kept: Vec<usize> = (0..3).map(|group| schedule.kept_versions(group)).collect();
        assert_eq!(kept, [2, 2, 4]);
        let delays = |holders: &[usize]| Feeding::of(holders, true).unwrap().unwrap().delays;
        assert_eq!(delays(&[1, 1, 1]), [2, 2, 2]);
    }

    #[test]
    fn holders_that_cannot_be_fed_are_refused() {
        let said =
            |holders: &[usize], m| round_robin(holders, m, 1, false).unwrap_err().to_string();
        let starved = said(&[1, 3, 1], 6);
        assert!(starved.contains("cannot feed the holders 1-3-1"), "{starved}");
        assert!(starved.contains("holders 1-2-1"), "{starved}");
        let odd = said(&[2, 1], 3);
        assert!(odd.contains("2 holders cannot take 3 micro-batches"), "{odd}");
        assert!(odd.contains("4 micro-batches, or holders 1-1"), "{odd}");
        let none = said(&[2, 0], 4);
        assert!(none.contains("leave stage 1 to nobody") && none.contains("2-1"), "{none}");
    }
}
