//! Every update rule in every way to keep its state: whole or in shards, of whole parameters or of parts
//! that tensor parallelism and pipelines cut.

use crate::support::{agrees, gpt, llama};

const RULES: [&[&str]; 6] = [
    &["optim.kind=adam", "optim.weight_decay=0.1"],
    &["optim.kind=sgd", "optim.momentum=0.9", "optim.nesterov=true"],
    &["optim.kind=lamb", "optim.weight_decay=0.1"],
    &["optim.kind=lion", "optim.weight_decay=0.1"],
    &["optim.kind=adamw"],
    &["optim.kind=adafactor", "optim.weight_decay=0.1"],
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
            // LAMB and Adafactor, whose sums cross shards, everywhere; the others, which treat each
            // element alone, in every second layout.
            let sums = matches!(rule[0], "optim.kind=lamb" | "optim.kind=adafactor");
            if !sums && at % 2 != number % 2 {
                continue;
            }
            let sets = [*rule, *layout].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
        let tied = [*rule, &["parallel.pp=2", "train.microbatches=2", "model.tied=true"]].concat();
        // The gradient of GPT-2's key bias is zero but for rounding, which Adafactor makes whole steps of.
        let model = if rule[0] == "optim.kind=adafactor" { llama } else { gpt };
        agrees(&format!("{rule:?}, tied, in a pipeline"), &model(&tied), None);
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

/// What Adafactor exchanges and keeps: a number for each row and column, and two exchanged for each parameter.
#[test]
fn adafactor_keeps_rows_and_columns() {
    let of = |kind: &str, more: &[&str]| {
        let sets = [&[kind, "parallel.dp=2", "parallel.zero=1"], more].concat();
        agrees(&format!("{sets:?}"), &llama(&sets), None)
    };
    let found = of("optim.kind=adafactor", &[]);
    let without = of("optim.kind=adam", &[]);
    let bytes = |found: &phalanx_inspect::verify::Verified| -> u64 {
        let rows = found.comm.iter().filter(|row| row.op == "all_reduce");
        rows.map(|row| row.bytes_measured).sum()
    };
    let state = |found: &phalanx_inspect::verify::Verified| -> u64 {
        let rows = found.memory.iter().filter(|row| row.category == "optimizer");
        rows.map(|row| row.measured as u64).sum()
    };
    let params = shapes();
    // Vectors are matrices of one column.
    let sums: u64 = params.iter().map(|[rows, columns]| rows + columns).sum();
    assert_eq!(bytes(&found) - bytes(&without), 2 * 2 * (sums + 2 * params.len() as u64) * 8);
    assert_eq!(state(&found), sums * 8);
    // Blocks of tensor parallelism have the same rows and columns, and every rank keeps all.
    let cut = of("optim.kind=adafactor", &["parallel.tp=2"]);
    assert_eq!(state(&cut), sums * 8);
}

/// The rows and columns of all parameters of the small LLaMA.
fn shapes() -> Vec<[u64; 2]> {
    let norms = [[16, 1]; 2];
    let attention = [[16, 16], [16, 8], [16, 8], [16, 16]];
    let ffn = [[16, 26], [16, 26], [26, 16]];
    let layer = [&norms[..], &attention, &ffn].concat();
    [&layer[..], &layer, &[[29, 16], [16, 1], [16, 29]]].concat()
}
