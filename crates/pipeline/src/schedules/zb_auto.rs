//! Automatic zero bubble (Qi et al., Zero Bubble Pipeline Parallelism, 2024): a schedule for given times and memory.
//!
//! Every stage group starts with some forwards, then takes a backward and a forward in turn. Weight gradients (W) wait
//! for nobody: a group runs one where it would wait long enough, where it has waited too long already, and
//! before a forward for which there is no memory. How many forwards come first, how long is too long, and whether a forward may
//! take the place of a backward that is late: these are tried, and the schedule whose longest group is shortest is taken.
//! The search costs milliseconds, finds the optimum of every case that can be enumerated, and reaches the published
//! rates of ZB-1p and ZB-2p without an integer program.

use phalanx_script::Part;

use crate::costs::Times;
use crate::error::{PipelineError, Result};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::{Turn, b, fwd, w, weave};

/// What a schedule is searched for.
#[derive(Clone, PartialEq, Debug)]
pub struct Demand {
    /// The times of each stage; there is one stage for each stage group.
    pub stages: Vec<Times>,
    /// How long a message takes.
    pub hop: f64,
    /// The memory for kept values, in shares: 1 is what the first stage group of 1F1B keeps, p micro-batches.
    pub memory: f64,
    /// What a micro-batch keeps between B and W, as a part of what it keeps between F and B.
    pub until_w: f64,
}

/// The schedule of `m` micro-batches with the shortest span that was found.
pub fn zb_auto(m: usize, demand: &Demand) -> Result<Schedule> {
    let p = demand.stages.len();
    let (step, most) = rooms(p, demand.memory)?;
    let most = most.min(2 * m.div_ceil(step));
    let scale = demand.stages.iter().map(|t| t.f + t.b + t.w).fold(0.0, f64::max);
    let scaled = |t: &Times| Times { f: t.f / scale, b: t.b / scale, w: t.w / scale };
    let stages: Vec<Times> = demand.stages.iter().map(scaled).collect();
    let mut search =
        Search { m, stages, hop: demand.hop / scale, until_w: demand.until_w, best: None };
    (1..=most).rev().for_each(|steps| search.with_room((steps * step) as f64));
    let lists = search.best.map(|best| best.lists).unwrap_or_default();
    Schedule::from_lists("zb-auto", m, Placement::looped(p, 1)?, lists)
}

/// What a search of this memory would be refused for, and lists of the same size that need no search: those of ZB-H1, or one
/// micro-batch after the other where there is memory for one.
pub(crate) fn zb_auto_outline(p: usize, m: usize, memory: f64) -> Result<Schedule> {
    let (step, most) = rooms(p, memory)?;
    Schedule::new("zb-auto", m, Placement::looped(p, 1)?, |i| match step * most {
        1 => weave([fwd(0..m), b(0..m), w(0..m)]),
        _ => {
            let warm = m.min(p - i);
            fwd(0..warm).then(weave([b(0..m), w(0..m).late(i), fwd(warm..m)]))
        }
    })
}

/// The sizes of memory that are tried, in micro-batches: multiples of a step, and how many of them there are. The step does not depend
/// on the limit: so more memory is never slower.
fn rooms(p: usize, memory: f64) -> Result<(usize, usize)> {
    let step = (p / 8).max(1);
    let most = (memory * p as f64 / step as f64 + TINY) as usize;
    match most {
        0 => Err(PipelineError::Shape {
            what: format!("zb-auto cannot run in a memory of {memory} shares"),
            why: format!("a stage group keeps at least {step} of the {p} micro-batches of a share"),
            nearest: format!("{} shares", step as f64 / p as f64),
        }),
        most => Ok((step, most)),
    }
}

/// Times are compared up to this; the longest stage takes 1.
const TINY: f64 = 1e-9;

/// How many numbers of first forwards are tried, between 1F1B's and twice as many.
const STARTS: usize = 9;

/// How many limits of waiting are tried.
const LIMITS: usize = 17;

struct Search {
    m: usize,
    stages: Vec<Times>,
    hop: f64,
    until_w: f64,
    best: Option<Found>,
}

/// A schedule, its longest stage group, and its end.
struct Found {
    lists: Vec<Vec<Turn>>,
    span: f64,
    makespan: f64,
}

impl Search {
    /// Tries all rules with room for so many micro-batches.
    fn with_room(&mut self, room: f64) {
        let (p, m) = (self.stages.len(), self.m);
        let whole = self.stages.iter().map(|t| t.f + t.b).fold(0.0, f64::max);
        let mut tried: Vec<Vec<usize>> = Vec::new();
        for start in 0..STARTS {
            let first = |i: usize| {
                let (own, more) = (p - i, (start * (p - i - 1)).div_ceil(STARTS - 3));
                (own + more).min(room as usize).min(m)
            };
            let first: Vec<usize> = (0..p).map(first).collect();
            if tried.contains(&first) {
                continue;
            }
            for limit in 0..LIMITS {
                let limit = (p - 1) as f64 * whole * limit as f64 / (LIMITS - 1) as f64;
                for early in [false, true] {
                    let rule = Rule { first: &first, limit, early, room };
                    let least = self.best.as_ref().map_or(f64::INFINITY, |best| best.span);
                    let found = Play::new(self, &rule).run(least);
                    let better = |found: &Found| {
                        self.best.as_ref().is_none_or(|best| {
                            (found.span + TINY, found.makespan) < (best.span, best.makespan)
                        })
                    };
                    if let Some(found) = found.filter(better) {
                        self.best = Some(found);
                    }
                }
            }
            tried.push(first);
        }
    }
}

/// What is tried.
struct Rule<'a> {
    /// How many forwards each group starts with.
    first: &'a [usize],
    /// How long a group may wait in all before it fills gaps that are too short for a W.
    limit: f64,
    /// Whether a forward may run while a backward is awaited.
    early: bool,
    /// For how many micro-batches there is memory.
    room: f64,
}

/// One stage group on its way.
#[derive(Clone, Default)]
struct Group {
    now: f64,
    begun: Option<f64>,
    waited: f64,
    kept: f64,
    /// When its forwards and backwards end, by micro-batch.
    forward: Vec<f64>,
    backward: Vec<f64>,
    weights: usize,
    /// Whether a backward was the last of F and B.
    turned: bool,
    turns: Vec<Turn>,
}

/// All groups; the one that is free first decides next.
struct Play<'a> {
    search: &'a Search,
    rule: &'a Rule<'a>,
    groups: Vec<Group>,
}

impl<'a> Play<'a> {
    fn new(search: &'a Search, rule: &'a Rule<'a>) -> Self {
        Self { search, rule, groups: vec![Group::default(); search.stages.len()] }
    }

    /// The schedule, unless some group takes longer than `least`.
    fn run(mut self, least: f64) -> Option<Found> {
        let m = self.search.m;
        let mut queue: Vec<usize> = (0..self.groups.len()).collect();
        while let Some(at) = self.earliest(&queue) {
            let group = queue[at];
            self.decide(group)?;
            let own = &self.groups[group];
            let Times { f, b, w } = self.search.stages[group];
            if own.waited + m as f64 * (f + b + w) > least {
                return None;
            }
            if own.weights == m {
                queue.remove(at);
            }
        }
        let span = |group: &Group| group.now - group.begun.unwrap_or(0.0);
        Some(Found {
            span: self.groups.iter().map(span).fold(0.0, f64::max),
            makespan: self.groups.iter().map(|group| group.now).fold(0.0, f64::max),
            lists: self.groups.into_iter().map(|group| group.turns).collect(),
        })
    }

    fn earliest(&self, queue: &[usize]) -> Option<usize> {
        let now = |at: &usize| self.groups[queue[*at]].now;
        (0..queue.len()).min_by(|a, b| now(a).total_cmp(&now(b)))
    }

    /// Lets a group take its next turn, or wait a little. Nothing if its memory is too small to go on.
    fn decide(&mut self, group: usize) -> Option<()> {
        match self.next(group)? {
            Next::Take(part, at) => self.take(group, part, at),
            Next::Wait(until) => self.wait(group, until),
        }
        Some(())
    }

    /// What a group does next.
    fn next(&self, group: usize) -> Option<Next> {
        let (m, own) = (self.search.m, &self.groups[group]);
        let (forwards, backwards) = (own.forward.len(), own.backward.len());
        let pending = backwards > own.weights;
        if backwards == m {
            return Some(Next::Take(Part::W, own.now));
        }
        let fits = own.kept + 1.0 <= self.rule.room + TINY;
        let starts = forwards < self.rule.first[group] || own.turned || backwards == forwards;
        let forward = forwards < m && starts;
        if forward && !fits && pending {
            return Some(Next::Take(Part::W, own.now));
        }
        if forward && !fits && backwards == forwards {
            return None;
        }
        let part = if forward && fits { Part::F } else { Part::B };
        let (now, arrival) = (own.now, self.arrival(group, part));
        if arrival.is_there(now) {
            return Some(Next::Take(part, now));
        }
        let there = |part| self.arrival(group, part).is_there(now);
        if part == Part::F && backwards < forwards && there(Part::B) {
            return Some(Next::Take(Part::B, now));
        }
        let gap = arrival.at - now;
        let Times { f, w, .. } = self.search.stages[group];
        let early = self.rule.early && part == Part::B && forwards < m && fits;
        if early && gap >= f - TINY && there(Part::F) {
            return Some(Next::Take(Part::F, now));
        }
        if pending && (w <= gap + TINY || own.waited + gap > self.rule.limit + TINY) {
            return Some(Next::Take(Part::W, now));
        }
        Some(match arrival.known {
            true => Next::Take(part, arrival.at),
            false => Next::Wait(arrival.at),
        })
    }

    /// When what a turn needs arrives, or could arrive at the earliest.
    fn arrival(&self, group: usize, part: Part) -> Arrival {
        let (last, own) = (self.groups.len() - 1, &self.groups[group]);
        let hop = self.search.hop;
        let from = |other: usize, ends: &[f64], number: usize, long: f64| match ends.get(number) {
            Some(end) => Arrival { at: end + hop, known: true },
            None => Arrival { at: self.groups[other].now + long + hop, known: false },
        };
        match part {
            Part::F if group == 0 => Arrival { at: 0.0, known: true },
            Part::F => {
                let before = &self.groups[group - 1].forward;
                from(group - 1, before, own.forward.len(), self.search.stages[group - 1].f)
            }
            _ if group == last => Arrival { at: own.forward[own.backward.len()], known: true },
            _ => {
                let after = &self.groups[group + 1].backward;
                from(group + 1, after, own.backward.len(), self.search.stages[group + 1].b)
            }
        }
    }

    /// Waits until another group has decided something.
    fn wait(&mut self, group: usize, until: f64) {
        let now = self.groups[group].now;
        let others = self.groups.iter().map(|other| other.now).filter(|time| *time > now);
        let next = others.fold(until.max(now + TINY), f64::min);
        let own = &mut self.groups[group];
        own.waited += if own.begun.is_some() { next - now } else { 0.0 };
        own.now = next;
    }

    fn take(&mut self, group: usize, part: Part, at: f64) {
        let Times { f, b, w } = self.search.stages[group];
        let own = &mut self.groups[group];
        own.waited += if own.begun.is_some() { at - own.now } else { 0.0 };
        own.begun.get_or_insert(at);
        let microbatch = match part {
            Part::F => {
                own.now = at + f;
                own.forward.push(own.now);
                (own.kept, own.turned) = (own.kept + 1.0, false);
                own.forward.len() - 1
            }
            Part::B => {
                own.now = at + b;
                own.backward.push(own.now);
                (own.kept, own.turned) = (own.kept + self.search.until_w - 1.0, true);
                own.backward.len() - 1
            }
            _ => {
                own.now = at + w;
                own.weights += 1;
                own.kept -= self.search.until_w;
                own.weights - 1
            }
        };
        own.turns.push(Turn { part, microbatch, chunk: 0, version: 0 });
    }
}

/// What a group does.
enum Next {
    /// A turn of this part, from this time on.
    Take(Part, f64),
    /// Nothing until this time, or until another group has decided something.
    Wait(f64),
}

/// When something arrives.
struct Arrival {
    at: f64,
    /// Whether that is certain; otherwise it may come later.
    known: bool,
}

impl Arrival {
    fn is_there(&self, now: f64) -> bool {
        self.known && self.at <= now + TINY
    }
}
