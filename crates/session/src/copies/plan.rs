//! Who keeps which part of a copy.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_script::StateKey;

/// What each rank writes to copies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct CopyPlan {
    /// By rank: state that only its host holds; it goes to the buddy, too.
    pub(crate) sent: Vec<BTreeSet<StateKey>>,
    /// By rank: state that ranks of other hosts hold as well; one of those keeps it, too.
    pub(crate) kept: Vec<BTreeSet<StateKey>>,
    /// The files of which one each is needed.
    pub(crate) needs: Vec<Vec<String>>,
}

/// A piece of state, its bytes and the ranks that hold it.
pub(crate) type Holders = (StateKey, usize, Vec<usize>);

impl CopyPlan {
    /// Shares out pieces of state, the largest first, each to the holders that have the least so far.
    pub(crate) fn new(pieces: &[Holders], ranks: usize, host_of: impl Fn(usize) -> usize) -> Self {
        let mut load = vec![0; ranks];
        let mut plan = Self {
            sent: vec![BTreeSet::new(); ranks],
            kept: vec![BTreeSet::new(); ranks],
            needs: Vec::new(),
        };
        let mut needs = BTreeSet::new();
        for (key, bytes, holders) in pieces {
            // The holder of each host that has the least, and of these the two that have the least.
            let mut hosts: BTreeMap<usize, usize> = BTreeMap::new();
            for &rank in holders {
                let best = hosts.entry(host_of(rank)).or_insert(rank);
                if load[rank] < load[*best] {
                    *best = rank;
                }
            }
            let mut writers: Vec<usize> = hosts.into_values().collect();
            writers.sort_by_key(|&rank| load[rank]);
            match writers[..] {
                [] => {}
                [rank] => {
                    load[rank] += bytes;
                    plan.sent[rank].insert(*key);
                    needs.insert(vec![sent_name(rank)]);
                }
                [one, other, ..] => {
                    for rank in [one, other] {
                        load[rank] += bytes;
                        plan.kept[rank].insert(*key);
                    }
                    let pair = [one.min(other), one.max(other)];
                    needs.insert(pair.map(kept_name).to_vec());
                }
            }
        }
        plan.needs = needs.into_iter().collect();
        plan
    }
}

/// The file of what a rank sends to its buddy.
pub(crate) fn sent_name(rank: usize) -> String {
    format!("rank-{rank:04}.sent.safetensors")
}

/// The file of what a rank keeps at its own agent.
pub(crate) fn kept_name(rank: usize) -> String {
    format!("rank-{rank:04}.kept.safetensors")
}

#[cfg(test)]
mod tests {
    use phalanx_script::StateKind;

    use super::*;

    fn key(unit: usize) -> StateKey {
        StateKey { unit, kind: StateKind::Master }
    }

    #[test]
    fn what_several_hosts_hold_is_not_sent_and_any_host_may_be_lost() {
        // Four ranks on two hosts: 0 and 1, 2 and 3. Unit 0 is everywhere, 1 on the first host alone, 2
        // on rank 3 alone, 3 on one rank of each host.
        let pieces = [
            (key(0), 100, vec![0, 1, 2, 3]),
            (key(1), 60, vec![0, 1]),
            (key(2), 50, vec![3]),
            (key(3), 40, vec![1, 2]),
        ];
        let plan = CopyPlan::new(&pieces, 4, |rank| rank / 2);
        let of = |list: &[BTreeSet<StateKey>]| -> Vec<Vec<usize>> {
            list.iter().map(|keys| keys.iter().map(|key| key.unit).collect()).collect()
        };
        assert_eq!(of(&plan.kept), [vec![0], vec![3], vec![0, 3], vec![]]);
        assert_eq!(of(&plan.sent), [vec![], vec![1], vec![], vec![2]]);
        // Without the first host, or without the second: one of each needed file is left.
        let mut all: Vec<(String, BTreeSet<usize>)> = Vec::new();
        for rank in 0..4 {
            all.push((kept_name(rank), BTreeSet::from([rank / 2])));
            all.push((sent_name(rank), BTreeSet::from([rank / 2, 1 - rank / 2])));
        }
        for lost in 0..2 {
            let left = |name: &String| {
                all.iter().any(|(own, hosts)| own == name && hosts.iter().any(|h| *h != lost))
            };
            assert!(plan.needs.iter().all(|any| any.iter().any(left)), "{:?}", plan.needs);
        }
        assert_eq!(plan.needs.len(), 4);
    }
}
