//! The order of several axes on one factor.
//!
//! The order matters: heads on `[tp, cp]` are other blocks than on `[cp, tp]`. Each instruction
//! takes the order that its operands or its annotated result have, the cheapest where they differ;
//! a gradient takes its op's.

use crate::mask::{Axes, MaskLayout};
use crate::plan::Plan;
use crate::reshard::Resharder;

impl Plan<'_> {
    /// Orders the axes of every instruction.
    pub(crate) fn order(&mut self, resharder: &mut Resharder<'_>) {
        for node in 0..self.net.nodes.len() {
            match self.net.nodes[node].origin {
                Some(origin) => self.order_like(node, origin),
                None => self.order_by_operands(node, resharder),
            }
        }
    }

    fn order_like(&mut self, node: usize, origin: usize) {
        for factor in 0..self.net.nodes[origin].rule.factors.len() {
            let Some(own) = self.maps[node].get(factor).copied().flatten() else { continue };
            let (axes, model) =
                (self.node_choices[node].factors[own], self.node_choices[origin].factors[factor]);
            if axes.len() > 1 && axes.set() & !model.set() == 0 {
                self.node_choices[node].factors[own] = model.only(axes.set());
            }
        }
    }

    fn order_by_operands(&mut self, node: usize, resharder: &mut Resharder<'_>) {
        for factor in 0..self.node_choices[node].factors.len() {
            let axes = self.node_choices[node].factors[factor];
            if axes.len() < 2 {
                continue;
            }
            let mut best: Option<(f64, Axes)> = None;
            for order in self.orders(node, factor, axes) {
                self.node_choices[node].factors[factor] = order;
                let cost = self.moves_cost(node, resharder);
                if best.is_none_or(|(known, _)| cost < known - 1e-12) {
                    best = Some((cost, order));
                }
            }
            let (_, order) = best.expect("its present order is always possible");
            self.node_choices[node].factors[factor] = order;
        }
    }

    /// The orders that operands and annotated results have, those of parameters first.
    fn orders(&self, node: usize, factor: usize, axes: Axes) -> Vec<Axes> {
        let n = &self.net.nodes[node];
        let mut places: Vec<(usize, &Vec<Vec<usize>>)> =
            n.ins.iter().copied().zip(&n.rule.inputs).collect();
        places.sort_by_key(|&(v, _)| !self.net.values[v].is_param);
        let pinned = |v: &usize| self.pins.read[*v].is_some();
        places.extend(n.outs.iter().copied().zip(&n.rule.outputs).filter(|(v, _)| pinned(v)));
        let mut found = Vec::new();
        for (value, dims) in places {
            let layout = self.layout(value);
            for (dim, factors) in dims.iter().enumerate() {
                let order = self.grid.led(layout.dims[dim].only(axes.set()));
                if factors.contains(&factor) && order.len() == axes.len() && !found.contains(&order)
                {
                    found.push(order);
                }
            }
        }
        if found.is_empty() { vec![self.grid.led(axes)] } else { found }
    }

    fn moves_cost(&self, node: usize, resharder: &mut Resharder<'_>) -> f64 {
        let (n, strat) = (&self.net.nodes[node], &self.node_choices[node]);
        let mut cost = 0.0;
        for (operand, &v) in n.ins.iter().enumerate() {
            let value = &self.net.values[v];
            let want = strat.operand(n, operand);
            cost += resharder.cost(&self.layout(v), &want, &value.padded, value.dtype.size());
        }
        for (result, &v) in n.outs.iter().enumerate() {
            let value = &self.net.values[v];
            let made = strat.result(n, result);
            let end = self.made_layout(v, &made);
            cost += resharder.cost(&made, &end, &value.padded, value.dtype.size());
        }
        cost
    }

    /// The layout in which readers see a value.
    pub(crate) fn layout(&self, value: usize) -> MaskLayout {
        match self.net.values[value].maker {
            Some((node, result)) => {
                let made = self.node_choices[node].result(&self.net.nodes[node], result);
                self.made_layout(value, &made)
            }
            None => self.pins.read_layout(value).expect("every input is pinned"),
        }
    }
}
