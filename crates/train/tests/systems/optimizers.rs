//! Every update rule in every way to keep its state: whole or in shards, of whole parameters or of parts
//! that tensor parallelism and pipelines cut.

use crate::support::{agrees, gpt, llama};

const RULES: [&[&str]; 5] = [
    &["optim.kind=adam", "optim.weight_decay=0.1"],
    &["optim.kind=sgd", "optim.momentum=0.9", "optim.nesterov=true"],
    &["optim.kind=lamb", "optim.weight_decay=0.1"],
    &["optim.kind=lion", "optim.weight_decay=0.1"],
    &["optim.kind=adamw"],
];

#[test]
fn every_rule_does_on_many_ranks_what_it_does_on_one() {
    let layouts: [&[&str]; 8] = [
        &["parallel.dp=2"],
        &["parallel.dp=2", "parallel.zero=1"],
        &["parallel.dp=2", "parallel.zero=2", "train.microbatches=2"],
        &["parallel.dp=2", "parallel.zero=3"],
        &["parallel.tp=2"],
        &["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"],
        &["parallel.tp=2", "parallel.dp=2", "parallel.zero=3", "parallel.sp=true"],
        &["parallel.pp=2", "train.microbatches=2", "parallel.dp=2", "parallel.zero=2"],
    ];
    for (number, rule) in RULES.iter().enumerate() {
        for (at, layout) in layouts.iter().enumerate() {
            // LAMB, whose norms cross shards, everywhere; the others, which treat each element
            // alone, in every second layout.
            if rule[0] != "optim.kind=lamb" && at % 2 != number % 2 {
                continue;
            }
            let sets = [*rule, *layout].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
        let tied = [*rule, &["parallel.pp=2", "train.microbatches=2"]].concat();
        agrees(&format!("{rule:?}, tied, in a pipeline"), &gpt(&tied), None);
    }
}

/// What LAMB exchanges: two numbers for each parameter of a unit, of what the ranks hold in parts.
#[test]
fn lamb_exchanges_two_numbers_per_parameter() {
    let lamb = ["optim.kind=lamb", "parallel.dp=2", "parallel.zero=1"];
    let found = agrees("LAMB with ZeRO-1", &llama(&lamb), None);
    let adam = ["optim.kind=adam", "parallel.dp=2", "parallel.zero=1"];
    let without = agrees("Adam with ZeRO-1", &llama(&adam), None);
    let bytes = |found: &phalanx_inspect::verify::Verified| -> u64 {
        let rows = found.comm.iter().filter(|row| row.op == "all_reduce");
        rows.map(|row| row.bytes_measured).sum()
    };
    // Two layers of nine parameters, embedding, final norm and head; two steps of two ranks, each
    // of which moves 2·(n−1)/n times what it holds, in f64.
    let params = 2 * 9 + 3;
    assert_eq!(bytes(&found) - bytes(&without), 2 * 2 * (2 * params) * 8);
}
