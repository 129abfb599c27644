//! Maps each factor of a gradient to a factor of its forward op.
//!
//! An op and its gradient have the same indices, so a gradient can take the choices of its op. Dims
//! give the mapping: the gradient reads operands and results of the op, and cotangents with the
//! shapes of its results. Factors that occur only in results of a gradient (the rows of a table)
//! are matched by name.

use std::collections::HashMap;

use phalanx_ir::Phase;

use crate::net::{Net, Node};

/// For each node with an origin: for each factor of the origin, the same factor in the node.
pub(crate) fn factor_maps(net: &Net) -> Vec<Vec<Option<usize>>> {
    let mut maps = vec![Vec::new(); net.nodes.len()];
    let mut by_origin: HashMap<usize, Vec<usize>> = HashMap::new();
    for (index, node) in net.nodes.iter().enumerate() {
        if let Some(origin) = node.origin {
            by_origin.entry(origin).or_default().push(index);
        }
    }
    for (origin, gradients) in by_origin {
        let mut known = Known::of(&net.nodes[origin]);
        for index in gradients {
            maps[index] = known.map(net, origin, index);
        }
    }
    maps
}

/// The origin's factors in the dims of values, as far as they are known.
struct Known {
    dims: HashMap<usize, Vec<Vec<Option<usize>>>>,
}

impl Known {
    fn of(origin: &Node) -> Self {
        let sides = (origin.ins.iter().zip(&origin.rule.inputs))
            .chain(origin.outs.iter().zip(&origin.rule.outputs));
        let mut dims: HashMap<usize, Vec<Vec<Option<usize>>>> = HashMap::new();
        for (&value, own) in sides {
            let own = own.iter().map(|d| d.iter().map(|&f| Some(f)).collect()).collect();
            let known = dims.entry(value).or_insert_with(|| Vec::clone(&own));
            if *known != own {
                // A value in two operands gives no information about either.
                known.clear();
            }
        }
        Self { dims }
    }

    fn map(&mut self, net: &Net, origin: usize, index: usize) -> Vec<Option<usize>> {
        let (forward, node) = (&net.nodes[origin], &net.nodes[index]);
        let mut back: Vec<Option<usize>> = vec![None; node.rule.factors.len()];
        for (operand, &value) in node.ins.iter().enumerate() {
            let made_here = net.values[value].maker.is_some_and(|(m, _)| {
                net.nodes[m].origin == Some(origin) && net.nodes[m].phase != Phase::F
            });
            if !made_here && !self.dims.contains_key(&value) {
                // A cotangent: gradients are computed from that of the first result alone.
                let result = &forward.rule.outputs[0];
                let some = result.iter().map(|d| d.iter().map(|&f| Some(f)).collect()).collect();
                self.dims.insert(value, some);
            }
            let Some(dims) = self.dims.get(&value) else { continue };
            for (own, theirs) in node.rule.inputs[operand].iter().zip(dims) {
                pair(forward, node, own, theirs, &mut back);
            }
        }
        for (factor, back) in back.iter_mut().enumerate() {
            let own = &node.rule.factors[factor];
            let same = |f: &phalanx_ir::rule::Factor| f.name == own.name && f.size == own.size;
            *back = back.or_else(|| forward.rule.factors.iter().position(same));
        }
        for (dims, &value) in node.rule.outputs.iter().zip(&node.outs) {
            let theirs = dims.iter().map(|d| d.iter().map(|&f| back[f]).collect()).collect();
            self.dims.entry(value).or_insert(theirs);
        }
        let mut map = vec![None; forward.rule.factors.len()];
        for (factor, back) in back.into_iter().enumerate() {
            if let Some(theirs) = back {
                map[theirs] = Some(factor);
            }
        }
        map
    }
}

/// Matches the factors of one dim, those of a single element left out.
fn pair(
    forward: &Node,
    node: &Node,
    own: &[usize],
    theirs: &[Option<usize>],
    back: &mut [Option<usize>],
) {
    let own: Vec<usize> = own.iter().copied().filter(|&f| node.rule.factors[f].size != 1).collect();
    let theirs: Vec<usize> =
        (theirs.iter().flatten().copied()).filter(|&f| forward.rule.factors[f].size != 1).collect();
    let fits = own.len() == theirs.len()
        && (own.iter().zip(&theirs))
            .all(|(&a, &b)| node.rule.factors[a].size == forward.rule.factors[b].size);
    if fits {
        for (a, b) in own.into_iter().zip(theirs) {
            back[a].get_or_insert(b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_autodiff::joint;
    use phalanx_ir::rule::FactorKind;
    use phalanx_ir::{DType, Rule};
    use phalanx_testing::cases::Recipe;

    /// Every factor of a gradient is a factor of its op, so the op's choices always apply.
    #[test]
    fn gradients_speak_of_the_factors_of_their_op() {
        let mut seen = 0;
        for seed in 0..300 {
            let Ok(case) = Recipe::new(seed).and_then(|recipe| recipe.case()) else { continue };
            let whole = joint(&case.forward, DType::F64).unwrap();
            let program = &whole.program;
            let rules: Vec<Rule> = program.instrs().iter().map(|i| program.rule(i)).collect();
            let padded = program.values().iter().map(|ty| ty.shape.clone()).collect();
            let net = Net::new(&whole, rules, padded);
            for (index, map) in factor_maps(&net).iter().enumerate() {
                let node = &net.nodes[index];
                let Some(origin) = node.origin else { continue };
                for (factor, own) in node.rule.factors.iter().enumerate() {
                    let mapped = map.iter().position(|m| *m == Some(factor));
                    let theirs = mapped.map(|f| net.nodes[origin].rule.factors[f].size);
                    let never = own.size == 1 || own.kind == FactorKind::Whole;
                    assert!(
                        never || theirs == Some(own.size),
                        "seed {seed}: `{}` of {}",
                        own.name,
                        phalanx_ir::text::instr(program, &program.instrs()[index])
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen > 1000);
    }
}
