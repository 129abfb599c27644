//! Who is waited for: from what each rank was doing last, the one to look at.

use std::time::Duration;

/// Whether a process lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Life {
    /// It runs, or sleeps.
    Runs,
    /// It is stopped, by SIGSTOP or a debugger, and does nothing until it is continued.
    Stopped,
    /// It has ended, in these words.
    Ended(String),
}

/// What is known of a rank at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankSight {
    /// Its process.
    pub process: u64,
    /// Whether that lives.
    pub life: Life,
    /// The step it is in; 0 before the first, and between steps the last.
    pub step: u64,
    /// Whether it is inside a step.
    pub inside: bool,
    /// The action it began last.
    pub action: String,
    /// The call between ranks that it began last, in words; empty before the first.
    pub call: String,
    /// The rank that it waits for, if it waits.
    pub waits_for: Option<usize>,
    /// Whether it waits for all others, after a step.
    pub meets: bool,
    /// How long ago it did something last.
    pub quiet: Duration,
}

/// The rank to look at, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blame {
    /// The rank.
    pub rank: usize,
    /// One sentence about it and those who wait.
    pub sentence: String,
}

/// Finds the rank that others wait for: one that has ended or is stopped, or else the one at the end
/// of a chain of waiting ranks, or the one that all others wait for after a step. Nothing if nobody
/// waits and all live.
pub fn blame(ranks: &[RankSight]) -> Option<Blame> {
    let dead = ranks.iter().position(|sight| matches!(sight.life, Life::Ended(_)));
    let stopped = || ranks.iter().position(|sight| sight.life == Life::Stopped);
    let absent = || {
        let some = ranks.iter().any(|sight| sight.meets);
        ranks.iter().position(|sight| !sight.meets).filter(|_| some)
    };
    let rank = dead.or_else(stopped).or_else(|| last_of_chain(ranks)).or_else(absent)?;
    Some(Blame { rank, sentence: sentence(ranks, rank) })
}

/// Follows waiting ranks from the one that has waited longest to one that does not wait, or to one
/// that was seen before: then they wait for each other.
fn last_of_chain(ranks: &[RankSight]) -> Option<usize> {
    let waiting = |rank: &usize| ranks[*rank].waits_for.is_some();
    let first = (0..ranks.len()).filter(waiting).max_by_key(|&rank| ranks[rank].quiet)?;
    let (mut at, mut seen) = (first, vec![false; ranks.len()]);
    while let Some(next) = ranks[at].waits_for.filter(|&next| next < ranks.len()) {
        if std::mem::replace(&mut seen[at], true) {
            break;
        }
        at = next;
    }
    Some(at)
}

fn sentence(ranks: &[RankSight], rank: usize) -> String {
    let RankSight { process, life, step, inside, action, call, quiet, .. } = &ranks[rank];
    let state = match life {
        Life::Ended(how) => format!("rank {rank} {how}"),
        Life::Stopped => format!("rank {rank} (process {process}) is stopped"),
        Life::Runs if ranks[rank].waits_for.is_some() => {
            format!("rank {rank} (process {process}) waits for a rank that waits for it")
        }
        Life::Runs => {
            let time = quiet.as_secs_f64();
            format!("rank {rank} (process {process}) has been busy for {time:.1} s")
        }
    };
    let place = match (inside, action.is_empty()) {
        (true, false) => format!(" in step {step}, in `{action}`"),
        (true, true) => format!(" at the beginning of step {step}"),
        (false, _) if *step > 0 => format!(" after step {step}"),
        (false, _) => " before its first step".to_owned(),
    };
    let call = match call.is_empty() {
        true => "; it has called no other rank yet".to_owned(),
        false => format!("; its last call was {call}"),
    };
    format!("{state}{place}{call}; {}", waiting_for(ranks, rank))
}

/// Who waits for a rank, directly or behind others.
fn waiting_for(ranks: &[RankSight], rank: usize) -> String {
    let waits = |other: &RankSight| other.waits_for.is_some() || other.meets;
    let others: Vec<usize> =
        (0..ranks.len()).filter(|&other| other != rank && waits(&ranks[other])).collect();
    let Some(&first) = others.first() else { return "no other rank waits for it yet".to_owned() };
    let names: Vec<String> = others.iter().map(usize::to_string).collect();
    let (noun, verb) = if others.len() == 1 { ("rank", "waits") } else { ("ranks", "wait") };
    let call = if ranks[first].meets { "" } else { &ranks[first].call };
    let on = if call.is_empty() { String::new() } else { format!(", rank {first} in {call}") };
    format!("{noun} {} {verb} for it{on}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(step: u64, action: &str) -> RankSight {
        RankSight {
            process: 100,
            life: Life::Runs,
            step,
            inside: true,
            action: action.to_owned(),
            call: "all_reduce #4 of group [0, 1, 2] at `norm`".to_owned(),
            waits_for: None,
            meets: false,
            quiet: Duration::from_millis(1500),
        }
    }

    fn waits(on: usize) -> RankSight {
        RankSight { waits_for: Some(on), ..busy(7, "norm") }
    }

    #[test]
    fn the_end_of_a_chain_of_waiting_ranks_is_named() {
        let found = blame(&[waits(1), waits(2), busy(7, "blocks.3 F mb 0")]).unwrap();
        assert_eq!(found.rank, 2);
        assert_eq!(
            found.sentence,
            "rank 2 (process 100) has been busy for 1.5 s in step 7, in `blocks.3 F mb 0`; its last \
             call was all_reduce #4 of group [0, 1, 2] at `norm`; ranks 0, 1 wait for it, rank 0 in \
             all_reduce #4 of group [0, 1, 2] at `norm`"
        );
    }

    #[test]
    fn who_does_not_come_after_a_step_is_named() {
        let met = RankSight { meets: true, inside: false, ..busy(7, "") };
        let found = blame(&[met.clone(), busy(7, "update blocks.0"), met]).unwrap();
        assert_eq!(found.rank, 1);
        assert!(found.sentence.contains("in step 7, in `update blocks.0`"), "{}", found.sentence);
        assert!(found.sentence.ends_with("; ranks 0, 2 wait for it"), "{}", found.sentence);
    }

    #[test]
    fn who_has_ended_or_is_stopped_comes_first() {
        let ended = RankSight { life: Life::Ended("was ended by SIGKILL".into()), ..busy(3, "") };
        let found = blame(&[waits(2), ended, busy(7, "x")]).unwrap();
        assert_eq!(found.rank, 1);
        assert!(
            found.sentence.starts_with("rank 1 was ended by SIGKILL at the beginning of step 3")
        );
        let stopped = RankSight { life: Life::Stopped, ..busy(3, "x") };
        let found = blame(&[busy(3, "y"), stopped]).unwrap();
        assert_eq!(found.rank, 1);
        assert!(found.sentence.contains("is stopped in step 3"), "{}", found.sentence);
        assert!(found.sentence.ends_with("no other rank waits for it yet"), "{}", found.sentence);
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_told_and_who_works_is_not_blamed() {
        let found = blame(&[waits(1), waits(0)]).unwrap();
        assert!(found.sentence.contains("waits for a rank that waits for it"), "{found:?}");
        assert_eq!(blame(&[busy(1, "x"), busy(1, "y")]), None);
        // A number that is no rank, as a torn record may have, is followed by nobody.
        assert_eq!(blame(&[waits(9), busy(1, "y")]).unwrap().rank, 0);
    }
}
