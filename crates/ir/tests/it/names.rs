//! A gradient speaks of the factors of the op it belongs to: what shards `d` in the forward shards
//! `d` in the backward.

use std::collections::BTreeMap;

use phalanx_ir::rule::{Dim, FactorKind};
use phalanx_ir::{Op, OpDef, Rule, ValueId};

use crate::every::gradients;

/// Per dim of a value, the names of its factors; none where the dim is left out.
type Names = Vec<Option<Vec<String>>>;

/// The names of a value's dims. Left out are dims that an op which moves elements needs whole:
/// slice, pad, concatenation and reshape give them a factor of their own on either side, which is
/// never sharded and so tells nobody anything.
fn names(op: &Op, rule: &Rule, dims: &[Dim]) -> Names {
    let moves = matches!(op, Op::Slice(_) | Op::Pad(_) | Op::Concat(_) | Op::Reshape(_));
    let whole = |dim: &Dim| dim.iter().any(|&f| rule.factors[f].kind == FactorKind::Whole);
    (dims.iter())
        .map(|dim| {
            (!(moves && whole(dim)))
                .then(|| dim.iter().map(|&f| rule.factors[f].name.clone()).collect())
        })
        .collect()
}

#[test]
fn a_gradient_has_the_factor_names_of_its_op() {
    let mut compared = 0;
    for (joint, instr, gradients) in gradients(&crate::text::everything()) {
        let forward = joint.rule(&instr);
        let mut known: BTreeMap<ValueId, Names> = BTreeMap::new();
        for (i, dims) in forward.inputs.iter().enumerate() {
            let names = names(&instr.op, &forward, dims);
            known.extend(gradients[i].map(|g| (g, names.clone())));
            known.insert(instr.inputs[i], names);
        }
        let results = (forward.outputs.iter()).map(|dims| names(&instr.op, &forward, dims));
        let results: Vec<Names> = results.collect();
        known.insert(joint.input_named("dy").unwrap().value, results[0].clone());
        known.extend(instr.outputs.iter().copied().zip(results));
        for step in joint.instrs().iter().filter(|i| **i != instr) {
            let backward = joint.rule(step);
            let values = step.inputs.iter().zip(&backward.inputs);
            for (value, dims) in values.chain(step.outputs.iter().zip(&backward.outputs)) {
                let Some(expected) = known.get(value) else { continue };
                let mut found = names(&step.op, &backward, dims);
                if let Op::Transpose(of) = &instr.op {
                    // A transpose counts its operand's dims, and its gradient's operand is the
                    // result: dim i of that is dim perm[i].
                    for name in found.iter_mut().flatten().flatten() {
                        let i: usize = name.trim_start_matches('x').parse().unwrap();
                        *name = format!("x{}", of.perm[i]);
                    }
                }
                for (expected, found) in expected.iter().zip(&found) {
                    if let (Some(expected), Some(found)) = (expected, found) {
                        assert_eq!(expected, found, "{} and {}", instr.op.name(), step.op.name());
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 100, "{compared}");
}
