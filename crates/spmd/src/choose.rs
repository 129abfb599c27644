//! Chooses what annotations leave open, by estimated time and memory.
//!
//! One axis at a time, for all open instructions of the forward together: a dynamic program that
//! keeps, for every combination of states of the live values, the cheapest choices that lead to it.
//! The cost of a choice is its work, the moves of its operands in forward and backward, and the
//! memory of what it keeps, at a price per byte that the caller raises until the segment fits. A
//! move is counted once, however many readers share it.

use std::collections::HashMap;

use phalanx_cost::Work;
use phalanx_ir::Phase;
use phalanx_ir::ops::{CollectiveKind, Shaped};
use phalanx_ir::rule::FactorKind;

use crate::mask::State;
use crate::node_choices::{Choice, cotangent_state, operand_state, result_state};
use crate::plan::{Known, Plan};

/// The most combinations that are kept.
const WIDTH: usize = 256;

/// A live value: what the axis does to it, and which of its moves are already counted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Live {
    value: usize,
    state: State,
    moved: u16,
    returned: u16,
}

/// The cheapest choices that lead to a combination of states.
#[derive(Clone)]
struct Way {
    live: Vec<Live>,
    cost: f64,
    /// The last choice, by its index in the list of all choices.
    step: usize,
}

impl Plan<'_> {
    /// Chooses every open forward instruction on an axis.
    pub(crate) fn choose(&mut self, axis: usize) {
        let nodes: Vec<usize> =
            (0..self.net.nodes.len()).filter(|&n| self.net.nodes[n].phase == Phase::F).collect();
        let walk = Walk::new(self, axis, &nodes);
        let mut steps: Vec<(usize, Choice)> = vec![(0, Choice::Replicated)];
        let mut ways = vec![Way { live: Vec::new(), cost: 0.0, step: 0 }];
        for &node in &nodes {
            let options = match self.choices[node][axis] {
                Some(choice) => vec![choice],
                None => self.node_choices[node].options(&self.net.nodes[node], self.grid, axis),
            };
            let work: Vec<f64> = options.iter().map(|&choice| walk.work(node, choice)).collect();
            let mut next: HashMap<Vec<Live>, Way> = HashMap::new();
            for way in &ways {
                for (&choice, work) in options.iter().zip(&work) {
                    let (live, moves) = walk.take(node, choice, &way.live);
                    let cost = way.cost + work + moves;
                    if next.get(&live).is_none_or(|known| cost < known.cost) {
                        steps.push((way.step, choice));
                        let step = steps.len() - 1;
                        next.insert(live.clone(), Way { live, cost, step });
                    }
                }
            }
            ways = next.into_values().collect();
            ways.sort_by(|a, b| a.cost.total_cmp(&b.cost).then_with(|| a.live.cmp(&b.live)));
            ways.truncate(WIDTH);
        }
        let mut at = ways.first().expect("an instruction can always be replicated").step;
        let mut chosen = Vec::new();
        while at != 0 {
            chosen.push(steps[at].1);
            at = steps[at].0;
        }
        let stored: Vec<(usize, State)> = walk.stores(&nodes, chosen.iter().rev());
        for (&node, &choice) in nodes.iter().zip(chosen.iter().rev()) {
            if self.choices[node][axis].is_none() {
                self.put(node, axis, choice);
            }
        }
        for (param, state) in stored {
            self.store_apart(param, axis, state);
        }
    }
}

/// One axis of the walk.
struct Walk<'a> {
    plan: &'a Plan<'a>,
    axis: usize,
    size: usize,
    /// Bytes of each value on a rank, the axis left out.
    bytes: Vec<f64>,
    /// The last forward reader of each value.
    last: Vec<Option<usize>>,
    /// Whether the backward computes a cotangent of the value.
    wanted: Vec<bool>,
    /// Whether the backward reads the value.
    kept: Vec<bool>,
}

impl<'a> Walk<'a> {
    fn new(plan: &'a Plan<'a>, axis: usize, nodes: &[usize]) -> Self {
        let values = &plan.net.values;
        let bytes = (0..values.len()).map(|v| values[v].bytes() / plan.shards_of(v) as f64);
        let mut last = vec![None; values.len()];
        let mut wanted: Vec<bool> = plan.differentiated();
        for &node in nodes {
            let n = &plan.net.nodes[node];
            n.ins.iter().for_each(|&v| last[v] = Some(node));
            let any = n.ins.iter().any(|&v| wanted[v]);
            n.outs.iter().for_each(|&v| wanted[v] |= any);
        }
        let kept = plan.kept();
        Self { plan, axis, size: plan.grid.size(axis), bytes: bytes.collect(), last, wanted, kept }
    }

    /// What a choice costs besides its work when values are in these states, and the states after
    /// it.
    fn take(&self, node: usize, choice: Choice, live: &[Live]) -> (Vec<Live>, f64) {
        let n = &self.plan.net.nodes[node];
        let mut live = live.to_vec();
        let mut cost = 0.0;
        for (operand, &value) in n.ins.iter().enumerate() {
            let (want, back) =
                (operand_state(n, choice, operand), cotangent_state(n, choice, operand));
            let at = match live.iter().position(|l| l.value == value) {
                Some(at) => at,
                None => {
                    let state = match self.plan.state(value, self.axis) {
                        Known::Is(state) => state,
                        Known::Open | Known::Not => {
                            let (state, _, price) = self.store(value, want, back);
                            cost += price;
                            state
                        }
                    };
                    let (moved, returned) = (0, if self.open(value) { !0 } else { 0 });
                    live.push(Live { value, state, moved, returned });
                    live.len() - 1
                }
            };
            cost += self.read(&mut live[at], want, back);
        }
        live.retain(|l| self.last[l.value] > Some(node));
        for (result, &value) in n.outs.iter().enumerate() {
            let made = result_state(n, choice, result);
            let pinned = self.plan.pins.read[value].as_ref().and_then(|p| p.state(self.axis));
            let seen = pinned.unwrap_or(made);
            let back = if self.wanted[value] { self.returns(made, seen, value) } else { 0.0 };
            cost += self.plan.costs.step(made, seen, self.size, self.bytes[value]) + back;
            if self.kept[value] {
                cost += self.plan.price * self.held(seen, value);
            }
            if self.last[value].is_some() {
                live.push(Live { value, state: seen, moved: 0, returned: 0 });
            }
        }
        live.sort_unstable();
        (live, cost)
    }

    /// Seconds of the work itself, three times for a product: its own and two gradients.
    fn work(&self, node: usize, choice: Choice) -> f64 {
        let (n, costs) = (&self.plan.net.nodes[node], self.plan.costs);
        let inside = match choice {
            // An op that works on parts of a factor has collectives inside, in forward and
            // backward.
            Choice::Factor(f) if n.rule.factors[f].kind == FactorKind::Lowered => {
                4.0 * costs.collective(&CollectiveKind::AllReduce, self.size, 0.0)
            }
            _ => 0.0,
        };
        let local = |rule: &[Vec<Vec<usize>>], values: &[usize]| -> Vec<Shaped> {
            let sides = rule.iter().zip(values);
            sides.map(|(dims, &value)| self.local(node, choice, dims, value)).collect()
        };
        let (ins, outs) = (local(&n.rule.inputs, &n.ins), local(&n.rule.outputs, &n.outs));
        inside + 3.0 * costs.hardware.seconds(&Work::of_shapes(&n.op, &ins, &outs))
    }

    /// What a rank has of an operand or result whose dims have these factors.
    fn local(&self, node: usize, choice: Choice, dims: &[Vec<usize>], value: usize) -> Shaped {
        let chosen = |f: usize| if choice == Choice::Factor(f) { self.size } else { 1 };
        let shares =
            |f: usize| self.plan.node_choices[node].shares_of(self.plan.grid, f) * chosen(f);
        let value = &self.plan.net.values[value];
        let extents = value.padded.iter().zip(dims);
        let extent = |(&padded, factors): (&usize, &Vec<usize>)| {
            padded.div_ceil(factors.iter().map(|&f| shares(f)).product::<usize>())
        };
        (value.dtype, extents.map(extent).collect())
    }

    /// Bytes that a rank holds of a value in a state.
    fn held(&self, state: State, value: usize) -> f64 {
        let parts = if matches!(state, State::Sharded(_)) { self.size as f64 } else { 1.0 };
        self.bytes[value] / parts
    }

    fn read(&self, live: &mut Live, want: State, back: State) -> f64 {
        let (bytes, costs) = (self.bytes[live.value], self.plan.costs);
        let mut cost = 0.0;
        if live.moved & bit(want) == 0 {
            live.moved |= bit(want);
            cost += costs.step(live.state, want, self.size, bytes);
        }
        if self.wanted[live.value] && live.returned & bit(back) == 0 {
            live.returned |= bit(back);
            cost += costs.returns(live.state, back, self.size, bytes);
        }
        cost
    }

    fn returns(&self, from: State, back: State, value: usize) -> f64 {
        // The cotangent has the layout that readers see, and is complete.
        let back = if back == State::Partial { State::Replicated } else { back };
        self.plan.costs.returns(from, back, self.size, self.bytes[value])
    }

    fn open(&self, value: usize) -> bool {
        self.plan.net.values[value].is_param && self.plan.state(value, self.axis) == Known::Open
    }

    /// How an open parameter is read and stored for a reader, and what that costs: the reduction of
    /// its gradient, or a gather before each use and a scatter after it, and the memory.
    fn store(&self, param: usize, want: State, back: State) -> (State, State, f64) {
        let (costs, bytes) = (self.plan.costs, self.bytes[param]);
        let read = if want == State::Partial { State::Replicated } else { want };
        let reduced = if read == State::Replicated {
            costs.step(back, State::Replicated, self.size, bytes)
        } else {
            0.0
        };
        let mut best = (read, read, reduced + self.plan.price * self.held(read, param));
        if read == State::Replicated {
            let padded = &self.plan.net.values[param].padded;
            let lay = self.plan.input_layout(param);
            for (dim, &extent) in padded.iter().enumerate() {
                let shards = self.plan.grid.count(lay.dims[dim]) * self.size;
                let stored = State::Sharded(dim);
                if !extent.is_multiple_of(shards) {
                    continue;
                }
                let gathers = 2.0 * costs.step(stored, read, self.size, bytes);
                let scatter = costs.step(back, stored, self.size, bytes);
                let held = self.plan.price * self.held(stored, param);
                if gathers + scatter + held < best.2 {
                    best = (read, stored, gathers + scatter + held);
                }
            }
        }
        best
    }

    /// The open parameters that are stored in another layout than they are read in.
    fn stores<'c>(
        &self,
        nodes: &[usize],
        choices: impl Iterator<Item = &'c Choice>,
    ) -> Vec<(usize, State)> {
        let mut seen = Vec::new();
        let mut apart = Vec::new();
        for (&node, &choice) in nodes.iter().zip(choices) {
            let n = &self.plan.net.nodes[node];
            for (operand, &value) in n.ins.iter().enumerate() {
                if !self.open(value) || seen.contains(&value) {
                    continue;
                }
                seen.push(value);
                let (want, back) =
                    (operand_state(n, choice, operand), cotangent_state(n, choice, operand));
                let (read, stored, _) = self.store(value, want, back);
                if read != stored {
                    apart.push((value, stored));
                }
            }
        }
        apart
    }
}

fn bit(state: State) -> u16 {
    match state {
        State::Replicated => 1,
        State::Partial => 2,
        State::Sharded(dim) => 4 << dim.min(13),
    }
}
