//! Finds the lowest free memory without looking at every other allocation.
//!
//! An allocation is first written by one action, and its memory is free again once all its uses are
//! over. So two allocations conflict if the later one is first written before the uses of the other
//! are surely over. The first writes are sorted into chains, in each of which every action ends
//! before the next one starts: along a chain, the first writes that conflict with an allocation are
//! neighbours. A tree over the chains then knows, for whole ranges of them, which memory is taken;
//! as allocations lie close together, these are few ranges.

use std::collections::HashMap;
use std::ops::Range;

use phalanx_call::ALIGN;

use super::{Allocation, Life};
use crate::order::HappensBefore;

/// Places large allocations first, each at the lowest offset where it overlaps no allocation that
/// conflicts with it.
pub(super) fn place(allocations: &mut [Allocation<'_>], order: &HappensBefore) {
    let chains = Chains::of(allocations, order);
    let mut taken = Taken::new(chains.leaves());
    let (mut group_by_uses, of_room) = group_by_uses(allocations, &chains, order);
    for (room, &kin) in allocations.iter().zip(&of_room).filter(|(room, _)| room.fixed) {
        taken.take(memory(room), &group_by_uses[kin].lives);
    }
    let mut queue: Vec<usize> = (0..allocations.len()).filter(|&i| !allocations[i].fixed).collect();
    let passes = |life| matches!(life, Life::Uses(_));
    queue.sort_by_key(|&i| (passes(allocations[i].life), usize::MAX - allocations[i].bytes, i));
    for i in queue {
        let (room, kin) = (&mut allocations[i], &mut group_by_uses[of_room[i]]);
        // Below the place of the last one there is no gap of this size.
        let from = match kin.last {
            Some((bytes, end)) if bytes == room.bytes => end,
            _ => 0,
        };
        room.offset = taken.lowest(from, room.bytes, &kin.lives);
        taken.take(memory(room), &kin.lives);
        kin.last = Some((room.bytes, memory(room).end));
    }
}

/// Allocations that the same actions use, as the results of a run often are: they have the same
/// conflicts.
struct SameUses {
    lives: Lives,
    /// The bytes of the one that was placed last, and where it ends.
    last: Option<(usize, usize)>,
}

/// All groups of allocations with the same uses, and for each allocation the index of its group.
fn group_by_uses(
    allocations: &[Allocation<'_>],
    chains: &Chains,
    order: &HappensBefore,
) -> (Vec<SameUses>, Vec<usize>) {
    let mut known: HashMap<Life<'_>, usize> = HashMap::new();
    let mut group_by_uses = Vec::new();
    let mut of_room = Vec::with_capacity(allocations.len());
    for room in allocations {
        let number = *known.entry(room.life).or_insert_with(|| {
            group_by_uses.push(SameUses { lives: chains.lives(room.life, order), last: None });
            group_by_uses.len() - 1
        });
        of_room.push(number);
    }
    (group_by_uses, of_room)
}

/// The memory of an allocation, up to where the next one may begin.
fn memory(room: &Allocation<'_>) -> Range<usize> {
    room.offset..(room.offset + room.bytes).next_multiple_of(ALIGN)
}

/// The actions that are the first write of an allocation, one chain after the other.
struct Chains {
    /// For each chain: its actions, and where it begins among the places of all chains.
    chains: Vec<(usize, Vec<usize>)>,
    len: usize,
}

/// When an allocation holds something.
enum Lives {
    /// Throughout.
    Always,
    /// One live range, or two.
    Ranges(Vec<UseRange>),
}

/// A live range of an allocation.
struct UseRange {
    /// The leaf of its first write; none if it was written before the script.
    first: Option<usize>,
    /// The nodes of the first writes that are issued no earlier than its own, and whose allocations
    /// conflict with it.
    shadow: Vec<usize>,
}

impl Chains {
    fn of(allocations: &[Allocation<'_>], order: &HappensBefore) -> Self {
        let first = |room: &Allocation<'_>| match room.life {
            Life::Always => None,
            Life::Uses(uses) => uses.first().copied(),
            Life::Carried { from, .. } => from,
        };
        let mut firsts: Vec<usize> = allocations.iter().filter_map(first).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let len = firsts.len();
        let mut chains: Vec<(usize, Vec<usize>)> = Vec::new();
        for first in firsts {
            let follows =
                |chain: &[usize]| chain.last().is_some_and(|&last| order.before(last, first));
            match chains.iter_mut().find(|(_, chain)| follows(chain)) {
                Some((_, chain)) => chain.push(first),
                None => chains.push((0, vec![first])),
            }
        }
        let mut begin = 0;
        for (at, chain) in &mut chains {
            *at = begin;
            begin += chain.len();
        }
        Self { chains, len }
    }

    /// How many leaves a tree over all places has.
    fn leaves(&self) -> usize {
        self.len.next_power_of_two()
    }

    fn lives(&self, life: Life<'_>, order: &HappensBefore) -> Lives {
        match life {
            Life::Always => Lives::Always,
            Life::Uses(uses) => {
                let range = |&write| self.use_range(Some(write), Some(uses), order);
                Lives::Ranges(uses.first().map(range).into_iter().collect())
            }
            Life::Carried { before, from } => {
                let old = before.map(|uses| self.use_range(None, Some(uses), order));
                let new = from.map(|write| self.use_range(Some(write), None, order));
                Lives::Ranges(old.into_iter().chain(new).collect())
            }
        }
    }

    /// A live range: from a first write, or from before the script; until these uses are over, or until after it.
    fn use_range(
        &self,
        write: Option<usize>,
        uses: Option<&[usize]>,
        order: &HappensBefore,
    ) -> UseRange {
        let leaves = self.leaves();
        let over = |action: usize| {
            uses.is_some_and(|uses| uses.iter().rev().all(|&used| order.before(used, action)))
        };
        let mut first = None;
        let mut shadow = Vec::new();
        for (begin, chain) in &self.chains {
            let from = chain.partition_point(|&action| write.is_some_and(|write| action < write));
            if write.is_some() && chain.get(from) == write.as_ref() {
                first = Some(leaves + begin + from);
            }
            // An action after one action of a chain is also after all earlier actions of the chain.
            let to = from + chain[from..].partition_point(|&action| !over(action));
            cover(leaves, begin + from..begin + to, &mut shadow);
        }
        UseRange { first, shadow }
    }
}

/// Which memory is taken, by place: a binary tree, whose root is node 1 and whose leaves are places.
struct Taken {
    /// Taken throughout the script.
    always: Ranges,
    /// Taken when the script begins, and not throughout.
    begins: Ranges,
    /// For each node: memory of allocations that conflict with all of its places.
    over: Vec<Ranges>,
    /// For each node: memory of allocations that are first written at one of its places.
    within: Vec<Ranges>,
}

impl Taken {
    fn new(leaves: usize) -> Self {
        let empty = vec![Ranges::default(); 2 * leaves];
        let [always, begins] = [(); 2].map(|()| Ranges::default());
        Self { always, begins, over: empty.clone(), within: empty }
    }

    fn take(&mut self, memory: Range<usize>, lives: &Lives) {
        let Lives::Ranges(ranges) = lives else {
            self.always.add(memory);
            return;
        };
        for range in ranges {
            for &node in &range.shadow {
                self.over[node].add(memory.clone());
            }
            match range.first {
                None => self.begins.add(memory.clone()),
                Some(first) => up(first).for_each(|node| self.within[node].add(memory.clone())),
            }
        }
    }

    /// The lowest offset from `from` on with this many free bytes. An allocation that lives
    /// throughout conflicts with all others.
    fn lowest(&self, from: usize, bytes: usize, lives: &Lives) -> usize {
        let mut lists = vec![self.always.behind(from)];
        match lives {
            Lives::Always => {
                lists.extend([&self.begins, &self.within[1]].map(|own| own.behind(from)))
            }
            Lives::Ranges(ranges) => {
                for UseRange { first, shadow } in ranges {
                    match first {
                        None => lists.push(self.begins.behind(from)),
                        Some(first) => {
                            lists.extend(up(*first).map(|node| self.over[node].behind(from)));
                        }
                    }
                    lists.extend(shadow.iter().map(|&node| self.within[node].behind(from)));
                }
            }
        }
        free(lists, from, bytes)
    }
}

/// The lowest offset from `at` on with this many bytes that no range of these lists covers. Ranges
/// below are dropped from the lists, so every range is visited once.
fn free(mut lists: Vec<&[Range<usize>]>, mut at: usize, bytes: usize) -> usize {
    loop {
        let before = at;
        lists.retain_mut(|list| {
            at = above(list, at, bytes);
            !list.is_empty()
        });
        if at == before {
            return at;
        }
    }
}

/// The lowest offset from `at` on with this many bytes that no range of a list covers; the list
/// keeps only the ranges above.
fn above(list: &mut &[Range<usize>], mut at: usize, bytes: usize) -> usize {
    while let Some((range, rest)) = list.split_first() {
        if at + bytes <= range.start {
            break;
        }
        at = at.max(range.end);
        *list = rest;
    }
    at
}

/// A node and all its ancestors.
fn up(node: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(node), |&node| (node > 1).then_some(node / 2))
}

/// Adds the fewest nodes that together cover these places.
fn cover(leaves: usize, places: Range<usize>, nodes: &mut Vec<usize>) {
    let (mut low, mut high) = (leaves + places.start, leaves + places.end);
    while low < high {
        if low % 2 == 1 {
            nodes.push(low);
            low += 1;
        }
        if high % 2 == 1 {
            high -= 1;
            nodes.push(high);
        }
        (low, high) = (low / 2, high / 2);
    }
}

/// Sorted ranges of memory that do not touch each other.
#[derive(Clone, Default)]
struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// The ranges that end after an offset.
    fn behind(&self, offset: usize) -> &[Range<usize>] {
        &self.0[self.0.partition_point(|range| range.end <= offset)..]
    }

    fn add(&mut self, new: Range<usize>) {
        if new.is_empty() {
            return;
        }
        let from = self.0.partition_point(|range| range.end < new.start);
        let to = from + self.0[from..].partition_point(|range| range.start <= new.end);
        match to - from {
            0 => self.0.insert(from, new),
            _ => {
                let joined = self.0[from].start.min(new.start)..self.0[to - 1].end.max(new.end);
                self.0[from] = joined;
                self.0.drain(from + 1..to);
            }
        }
    }
}
