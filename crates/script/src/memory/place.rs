//! Finding the lowest free memory without asking every other room.
//!
//! A room is written first by one action, and other rooms may have its memory once all of its uses
//! are over. So two rooms are in each other's way if the one that is issued later is written before
//! the uses of the other are surely over. The first writes are sorted into chains, in each of which
//! every action ends before the next one starts: along a chain, those that a room is in the way of
//! are neighbours. A tree over the chains then knows, for whole stretches of them, which memory is
//! taken, and as rooms lie wall to wall, that is few ranges.

use std::ops::Range;

use phalanx_call::ALIGN;

use super::Room;
use crate::order::HappensBefore;

/// Large rooms first, each at the lowest offset where it overlaps nothing that is in its way.
pub(super) fn place(rooms: &mut [Room], order: &HappensBefore) {
    let chains = Chains::of(rooms, order);
    let mut taken = Taken::new(chains.len);
    let spells: Vec<Option<Spell>> = rooms.iter().map(|r| chains.spell(r, order)).collect();
    for (room, spell) in rooms.iter().zip(&spells).filter(|(room, _)| room.fixed) {
        taken.take(memory(room), spell.as_ref());
    }
    let mut queue: Vec<usize> = (0..rooms.len()).filter(|&i| !rooms[i].fixed).collect();
    queue.sort_by_key(|&i| (!rooms[i].uses.is_empty(), usize::MAX - rooms[i].bytes, i));
    for i in queue {
        rooms[i].offset = taken.lowest(rooms[i].bytes, spells[i].as_ref());
        taken.take(memory(&rooms[i]), spells[i].as_ref());
    }
}

/// What a room takes from others: all up to where the next one may begin.
fn memory(room: &Room) -> Range<usize> {
    room.offset..(room.offset + room.bytes).next_multiple_of(ALIGN)
}

/// The actions that write some room first, one chain after the other.
struct Chains {
    /// By chain: its actions, and where it begins among the places of all chains.
    chains: Vec<(usize, Vec<usize>)>,
    len: usize,
}

/// When a room is needed.
struct Spell {
    /// The place of its first write.
    first: usize,
    /// By chain: the places of the first writes that are issued no earlier than its own, and whose
    /// rooms can't have its memory.
    shadow: Vec<Range<usize>>,
}

impl Chains {
    fn of(rooms: &[Room], order: &HappensBefore) -> Self {
        let mut firsts: Vec<usize> = rooms.iter().filter_map(|r| r.uses.first().copied()).collect();
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

    /// When a room is needed; none if it is needed throughout.
    fn spell(&self, room: &Room, order: &HappensBefore) -> Option<Spell> {
        let &write = room.uses.first()?;
        let over = |action: usize| room.uses.iter().rev().all(|&used| order.before(used, action));
        let mut first = 0;
        let mut shadow = Vec::with_capacity(self.chains.len());
        for (begin, chain) in &self.chains {
            let from = chain.partition_point(|&action| action < write);
            if chain.get(from) == Some(&write) {
                first = begin + from;
            }
            // What comes after one action of a chain comes after all that follow it.
            let to = from + chain[from..].partition_point(|&action| !over(action));
            if from < to {
                shadow.push(begin + from..begin + to);
            }
        }
        Some(Spell { first, shadow })
    }
}

/// Which memory is taken, by place: a binary tree, whose root is node 1 and whose leaves are places.
struct Taken {
    leaves: usize,
    /// Taken throughout the script.
    always: Ranges,
    /// By node: taken by rooms whose shadows cover all of its places.
    over: Vec<Ranges>,
    /// By node: taken by rooms that are first written at one of its places.
    within: Vec<Ranges>,
}

impl Taken {
    fn new(places: usize) -> Self {
        let leaves = places.next_power_of_two();
        let empty = vec![Ranges::default(); 2 * leaves];
        Self { leaves, always: Ranges::default(), over: empty.clone(), within: empty }
    }

    fn take(&mut self, memory: Range<usize>, spell: Option<&Spell>) {
        let Some(spell) = spell else {
            self.always.add(memory);
            return;
        };
        for node in spell.shadow.iter().flat_map(|shadow| cover(self.leaves, shadow)) {
            self.over[node].add(memory.clone());
        }
        for node in up(self.leaves + spell.first) {
            self.within[node].add(memory.clone());
        }
    }

    /// The lowest offset with so many free bytes. What is needed throughout is in everything's way.
    fn lowest(&self, bytes: usize, spell: Option<&Spell>) -> usize {
        let mut lists: Vec<&Ranges> = vec![&self.always];
        match spell {
            None => lists.push(&self.within[1]),
            Some(spell) => {
                lists.extend(up(self.leaves + spell.first).map(|node| &self.over[node]));
                let shadow = spell.shadow.iter().flat_map(|shadow| cover(self.leaves, shadow));
                lists.extend(shadow.map(|node| &self.within[node]));
            }
        }
        lists.retain(|list| !list.0.is_empty());
        let mut at = 0;
        loop {
            let above = lists.iter().fold(at, |at, list| list.above(at, bytes));
            if above == at {
                return at;
            }
            at = above;
        }
    }
}

/// A node and all that it is part of.
fn up(node: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(node), |&node| (node > 1).then_some(node / 2))
}

/// The fewest nodes that together are these places.
fn cover(leaves: usize, places: &Range<usize>) -> Vec<usize> {
    let (mut low, mut high) = (leaves + places.start, leaves + places.end);
    let mut nodes = Vec::new();
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
    nodes
}

/// Ranges of memory in order, none of which touches another.
#[derive(Clone, Default)]
struct Ranges(Vec<Range<usize>>);

impl Ranges {
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

    /// The lowest offset from `at` on with so many bytes that no range here has.
    fn above(&self, mut at: usize, bytes: usize) -> usize {
        let next = self.0.partition_point(|range| range.end <= at);
        for range in &self.0[next..] {
            if at + bytes <= range.start {
                break;
            }
            at = range.end;
        }
        at
    }
}
