//! DualPipe (DeepSeek-V3, 2024): pipelines in both directions, in which a forward runs beside a backward.
//!
//! Every stage group holds a stage of both directions, as in [`chimera`](super::chimera()). In its long middle part a group takes a
//! forward of one direction and a backward of the other as a pair: they need nothing of each other, so the messages and collectives
//! of one can hide behind the products of the other. Where a group would wait, at the start and at the end, backwards are split, and
//! weight gradients fill the gaps. A step waits (p/2 − 1)(tF + 2tB − tW), and a group keeps p + 1 micro-batches, beside
//! two copies of weights, gradients and optimizer state.
//!
//! A group calls the direction that reaches it earlier the near one. Fewer than 2p micro-batches do not fill the pipeline: the list is then that of 2p,
//! without the last ones.

use std::collections::{BTreeSet, VecDeque};

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::flow::At;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::Turn;
use crate::words::counted;

/// DualPipe of `m` micro-batches over `p` stage groups.
pub fn dualpipe(p: usize, m: usize) -> Result<Schedule> {
    legal(p, m)?;
    let groups = (0..p).map(|group| Group::new(p, group).filled(m.max(2 * p)));
    let (mut lists, mut pairs) = (Vec::with_capacity(p), BTreeSet::new());
    for (stage_group, blocks) in groups.enumerate() {
        let mut list: Vec<Turn> = Vec::new();
        for block in blocks {
            let kept: Vec<Turn> = block.into_iter().filter(|turn| turn.microbatch < m).collect();
            if kept.len() == 2 {
                pairs.insert(At { stage_group, index: list.len() });
            }
            list.extend(kept);
        }
        lists.push(list);
    }
    Schedule::from_lists("dualpipe", m, Placement::both_ways(p, 1)?, lists)?.in_pairs(pairs)
}

/// A stage group while its list is made.
struct Group {
    /// Groups between this one and the nearer end, and between it and the middle.
    outside: usize,
    inside: usize,
    /// The chunks of the near and the far direction.
    chunks: [usize; 2],
    /// How many forwards and backwards each of them has begun.
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Weight gradients that are still to come.
    pending: VecDeque<Turn>,
    /// One turn, or a pair.
    blocks: Vec<Vec<Turn>>,
}

const NEAR: usize = 0;
const FAR: usize = 1;

impl Group {
    fn new(p: usize, group: usize) -> Self {
        let outside = group.min(p - 1 - group);
        let chunks = if group < p / 2 { [0, 1] } else { [1, 0] };
        Self {
            outside,
            inside: p / 2 - 1 - outside,
            chunks,
            forwards: [0; 2],
            backwards: [0; 2],
            pending: VecDeque::new(),
            blocks: Vec::new(),
        }
    }

    /// The list of a pipeline that is filled: 2p micro-batches or more.
    fn filled(mut self, m: usize) -> Vec<Vec<Turn>> {
        let Self { outside, inside, .. } = self;
        let pairs = m / 2 - 2 * (inside + outside + 1) + outside + 1;
        for _ in 0..2 * inside {
            self.forward(NEAR);
        }
        for _ in 0..=outside {
            self.forward(NEAR);
            self.forward(FAR);
        }
        for _ in 0..inside {
            self.inputs(FAR);
            self.weights();
            self.forward(FAR);
        }
        for _ in 0..pairs {
            self.pair(NEAR, FAR);
            self.pair(FAR, NEAR);
        }
        for _ in 0..inside {
            self.backward(FAR);
            self.pair(FAR, NEAR);
        }
        // The first half of these backwards is whole; the weight gradients of the others come last.
        for number in 0..2 * (outside + 1) {
            let direction = if number.is_multiple_of(2) { FAR } else { NEAR };
            match number <= outside {
                true => self.backward(direction),
                false => self.inputs(direction),
            }
        }
        for _ in 0..inside {
            self.weights();
            self.inputs(NEAR);
        }
        while !self.pending.is_empty() {
            self.weights();
        }
        self.blocks
    }

    /// A forward of one direction beside a backward of the other.
    fn pair(&mut self, forward: usize, backward: usize) {
        let pair = vec![self.next(Part::F, forward), self.next(Part::BW, backward)];
        self.blocks.push(pair);
    }

    fn forward(&mut self, direction: usize) {
        let turn = self.next(Part::F, direction);
        self.blocks.push(vec![turn]);
    }

    fn backward(&mut self, direction: usize) {
        let turn = self.next(Part::BW, direction);
        self.blocks.push(vec![turn]);
    }

    /// The gradient of the inputs; that of the weights comes later.
    fn inputs(&mut self, direction: usize) {
        let turn = self.next(Part::B, direction);
        self.blocks.push(vec![turn]);
        self.pending.push_back(Turn { part: Part::W, ..turn });
    }

    fn weights(&mut self) {
        self.blocks.extend(self.pending.pop_front().map(|turn| vec![turn]));
    }

    /// The next turn of a direction: even micro-batches go down and odd ones up.
    fn next(&mut self, part: Part, direction: usize) -> Turn {
        let begun = if part == Part::F { &mut self.forwards } else { &mut self.backwards };
        let chunk = self.chunks[direction];
        let microbatch = 2 * begun[direction] + chunk;
        begun[direction] += 1;
        Turn { part, microbatch, chunk, version: 0 }
    }
}

fn legal(p: usize, m: usize) -> Result<()> {
    let refuse = |count: usize, what: &str, why: &str| {
        let fewer = if count > 2 { format!("{} or ", count - 1) } else { String::new() };
        Err(PipelineError::Shape {
            what: format!("dualpipe cannot have {}", counted(count, what)),
            why: why.to_owned(),
            nearest: format!("{fewer}{}", counted(count + 1, what)),
        })
    };
    match (p.is_multiple_of(2), m.is_multiple_of(2)) {
        (false, _) => refuse(p, "stage", "both directions meet between two stage groups"),
        (_, false) => refuse(m, "micro-batch", "both directions take as many micro-batches"),
        _ => Ok(()),
    }
}
