//! The decisions so far: for every instruction a choice per axis, and what follows for values.

use phalanx_autodiff::Joint;
use phalanx_ir::text::value_name;
use phalanx_ir::{Phase, Program, Role, ValueId};

use crate::cost::Costs;
use crate::error::SpmdError;
use crate::inherit::factor_maps;
use crate::mask::{Axes, Grid, MaskLayout, State};
use crate::net::Net;
use crate::node_choices::{Choice, NodeChoices, operand_state, result_state};
use crate::pins::{Pin, Pins, differentiated};

/// What an axis does to a value, as far as that is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// Not known: the instruction that computes it is not decided.
    Not,
    /// A parameter without annotation: it takes the layout that its readers want.
    Open,
    /// Known.
    Is(State),
}

/// The layout that a value must have in the end, besides what its readers want.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goal {
    /// The value whose dims it must have: the parameter or boundary that it is the gradient of.
    pub(crate) like: usize,
    /// Whether it may stay a partial sum over axes that replicate the parameter.
    pub(crate) partial: bool,
}

/// The state of partitioning one joint graph.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) net: &'a Net,
    pub(crate) grid: &'a Grid,
    pub(crate) costs: &'a Costs,
    program: &'a Program,
    pub(crate) pins: Pins,
    pub(crate) node_choices: Vec<NodeChoices>,
    /// For each node, its choice on each axis.
    pub(crate) choices: Vec<Vec<Option<Choice>>>,
    pub(crate) maps: Vec<Vec<Option<usize>>>,
    /// Seconds that a byte of memory is worth.
    pub(crate) price: f64,
    /// The goals of values that leave the graph as gradients.
    pub(crate) goals: Vec<Vec<Goal>>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(
        joint: &'a Joint,
        net: &'a Net,
        grid: &'a Grid,
        costs: &'a Costs,
        pins: Pins,
    ) -> Self {
        let program = &joint.program;
        let mut goals = vec![Vec::new(); net.values.len()];
        for port in program.outputs() {
            let Some(of) = differentiated(program, port) else { continue };
            let partial = port.role == Role::Gradient;
            goals[port.value.index()].push(Goal { like: of.value.index(), partial });
        }
        Self {
            net,
            grid,
            costs,
            program,
            pins,
            node_choices: net.nodes.iter().map(|n| NodeChoices::replicated(n, grid)).collect(),
            choices: vec![vec![None; grid.len()]; net.nodes.len()],
            maps: factor_maps(net),
            price: 0.0,
            goals,
        }
    }

    /// The axes in the order in which they are decided: those that shard parameters first, since
    /// strategies append theirs at the minor end of what the weights impose.
    pub(crate) fn axes(&self) -> Vec<usize> {
        let params = self.net.values.iter().zip(&self.pins.read).filter(|(v, _)| v.is_param);
        let weights = params.flat_map(|(_, pin)| pin).flat_map(|p| &p.dims);
        let set = weights.fold(0, |set, axes| set | axes.set());
        let mut axes: Vec<usize> = (0..self.grid.len()).collect();
        axes.sort_by_key(|a| set >> a & 1 == 0);
        axes
    }

    /// What an axis does to a value for its readers.
    pub(crate) fn state(&self, value: usize, axis: usize) -> Known {
        if let Some(state) = self.pins.read[value].as_ref().and_then(|p| p.state(axis)) {
            return Known::Is(state);
        }
        match self.net.values[value].maker {
            None => Known::Open,
            Some((node, result)) => match self.choices[node][axis] {
                None => Known::Not,
                Some(choice) => Known::Is(result_state(&self.net.nodes[node], choice, result)),
            },
        }
    }

    /// Takes a choice, if it is compatible with the other axes; else the axis replicates here.
    pub(crate) fn put(&mut self, node: usize, axis: usize, choice: Choice) {
        let n = &self.net.nodes[node];
        let fits = match choice {
            Choice::Factor(f) => self.node_choices[node].fits(n, self.grid, f, axis),
            _ => true,
        };
        let choice = if fits { choice } else { Choice::Replicated };
        self.node_choices[node].put(axis, choice);
        self.choices[node][axis] = Some(choice);
    }

    /// The axes of a value's dim as far as they are known, major to minor. Axes from an annotation
    /// come after those that follow from the instruction: strategies append at the minor end of
    /// what the weights impose.
    pub(crate) fn axes_of(&self, value: usize, dim: usize) -> Axes {
        let pin = self.pins.read[value].as_ref();
        let closed = pin.map_or(0, |p| p.closed);
        let made = self.net.values[value].maker.map_or_else(Axes::default, |(node, result)| {
            let dims = &self.net.nodes[node].rule.outputs[result][dim];
            let joined = |axes: Axes, &f: &usize| axes.join(self.node_choices[node].factors[f]);
            dims.iter().fold(Axes::default(), joined)
        });
        made.only(!closed).join(pin.map_or_else(Axes::default, |p| p.dims[dim]))
    }

    /// The factor of a node that an axis shards, if it shards a dim of this value.
    pub(crate) fn factor(
        &self,
        node: usize,
        factors: &[usize],
        value: usize,
        dim: usize,
        axis: usize,
    ) -> Result<Option<usize>, SpmdError> {
        let n = &self.net.nodes[node];
        let major = self.grid.count(self.axes_of(value, dim).before(axis));
        let factors: Vec<usize> = factors.iter().copied().filter(|&f| n.extents[f] != 1).collect();
        let mut before = major;
        for (at, &factor) in factors.iter().enumerate() {
            let extent = n.extents[factor];
            if before >= extent {
                before /= extent.max(1);
                continue;
            }
            let (left, size) = (extent / before.max(1), self.grid.size(axis));
            if !left.is_multiple_of(size) && size.is_multiple_of(left) && at + 1 < factors.len() {
                return Err(SpmdError::Straddle {
                    segment: self.program.name.clone(),
                    axis: self.grid.name(axis),
                    size,
                    value: self.value_name(value),
                    left,
                    rest: size / left,
                });
            }
            return Ok(Some(factor));
        }
        Ok(None)
    }

    pub(crate) fn value_name(&self, value: usize) -> String {
        value_name(self.program, ValueId(value as u32))
    }

    /// Gives open parameters the layout that their first reader wants, once an axis is decided
    /// everywhere.
    pub(crate) fn close_params(&mut self, axis: usize) {
        for value in 0..self.net.values.len() {
            if !self.net.values[value].is_param || self.state(value, axis) != Known::Open {
                continue;
            }
            let wanted = self.net.values[value].users.first().map(|&(node, operand)| {
                let choice = self.choices[node][axis];
                let choice = choice.expect("its first reader is in the forward, which is decided");
                operand_state(&self.net.nodes[node], choice, operand)
            });
            let state = match wanted {
                Some(State::Sharded(dim)) => State::Sharded(dim),
                _ => State::Replicated,
            };
            // The dim may have no room for the axis next to its annotated axes.
            let before = self.pins.read[value].clone();
            self.close(value, axis, state);
            let padded = &self.net.values[value].padded;
            if !self.input_layout(value).divides(self.grid, padded)
                || !self.layout(value).divides(self.grid, padded)
            {
                self.pins.read[value] = before;
                self.close(value, axis, State::Replicated);
            }
        }
    }

    /// Stores a parameter over an axis in another way than it is read.
    pub(crate) fn store_apart(&mut self, param: usize, axis: usize, stored: State) {
        let open = Pin::open(self.net.values[param].padded.len());
        self.pins.stored[param].get_or_insert(open).close(axis, stored);
        self.close(param, axis, State::Replicated);
    }

    /// How many ranks share the elements of a value, by the axes decided so far.
    pub(crate) fn shards_of(&self, value: usize) -> usize {
        (0..self.net.values[value].padded.len())
            .map(|dim| self.grid.count(self.axes_of(value, dim)))
            .product()
    }

    /// The inputs for which the backward computes a cotangent.
    pub(crate) fn differentiated(&self) -> Vec<bool> {
        let mut wanted = vec![false; self.net.values.len()];
        for goal in self.goals.iter().flatten() {
            wanted[goal.like] = true;
        }
        wanted
    }

    /// Bytes that a rank holds of parameters and of forward values that the backward reads, a value
    /// and its views counted once.
    pub(crate) fn memory(&self) -> f64 {
        let local =
            |v: usize, lay: &MaskLayout| self.net.values[v].bytes() / lay.shards(self.grid) as f64;
        let params = (0..self.net.values.len()).filter(|&v| self.net.values[v].is_param);
        let params: f64 = params.map(|v| local(v, &self.input_layout(v))).sum();
        let kept = self.kept().into_iter().enumerate().filter(|(_, kept)| *kept);
        params + kept.map(|(v, _)| local(v, &self.layout(v))).sum::<f64>()
    }

    /// The forward values that the backward reads, directly or through a view.
    pub(crate) fn kept(&self) -> Vec<bool> {
        let mut kept = vec![false; self.net.values.len()];
        let read = self.net.nodes.iter().filter(|n| n.phase != Phase::F).flat_map(|n| &n.ins);
        for &value in read {
            let mut value = value;
            while let Some((node, _)) = self.net.values[value].maker {
                let node = &self.net.nodes[node];
                if !node.is_view {
                    break;
                }
                value = node.ins[0];
            }
            let forward = match self.net.values[value].maker {
                Some((node, _)) => self.net.nodes[node].phase == Phase::F,
                None => true,
            };
            kept[value] = forward && !self.net.values[value].of_params;
        }
        kept
    }

    fn close(&mut self, value: usize, axis: usize, state: State) {
        self.pins.read[value].as_mut().expect("every input is pinned").close(axis, state);
    }

    /// How an input is stored over an axis that is decided for it.
    pub(crate) fn stored_state(&self, param: usize, axis: usize) -> State {
        let stored = self.pins.stored[param].as_ref().and_then(|p| p.state(axis));
        let read = || self.pins.read[param].as_ref().and_then(|p| p.state(axis));
        stored.or_else(read).expect("what is stored is decided before what is derived from it")
    }

    /// The layout in which an input arrives.
    pub(crate) fn input_layout(&self, value: usize) -> MaskLayout {
        self.pins.stored_layout(value).expect("every input is pinned")
    }

    /// The layout in which readers see the result of a node.
    pub(crate) fn made_layout(&self, value: usize, made: &MaskLayout) -> MaskLayout {
        let Some(pin) = &self.pins.read[value] else { return made.clone() };
        let padded = &self.net.values[value].padded;
        let dims = made.dims.iter().zip(&pin.dims).zip(padded);
        let dims = dims.map(|((made, pin_dim), padded)| {
            // Annotations come first: axes that no longer fit replicate the value.
            let mut open = made.only(!pin.closed);
            while !padded.is_multiple_of(self.grid.count(open.join(*pin_dim))) && !open.is_empty() {
                open = open.without_suffix(1);
            }
            open.join(*pin_dim)
        });
        MaskLayout { dims: dims.collect(), partial: made.partial & !pin.closed }
    }

    /// The layout in which a gradient leaves, given the layout it has.
    pub(crate) fn goal_layout(&self, goal: Goal, has: &MaskLayout) -> MaskLayout {
        let like = self.input_layout(goal.like);
        let partial = if goal.partial { has.partial & !like.sharded() } else { 0 };
        MaskLayout { partial, ..like }
    }
}
