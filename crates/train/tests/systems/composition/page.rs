//! The page: written from cells, and read back.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{ALL, Cell, Combination, System, named};

const HEAD: &str = "# Which systems work together

There is no list of allowed combinations: strategies annotate values, and the partitioner does the rest.
This page shows the results of running every system, every pair and every triple of them (`cnn` in pairs alone: `cargo test` tries it
with some two others at a time) on a mesh of up to eight ranks, or 32 with a square or cube of them (in each of two stages, if one of them is a pipeline), compared with one rank by `verify`. A cell is ✓ only if it ran, every loss, gradient and
parameter matched (1e-10 in f64), and the bytes sent and the memory written were those predicted. The
command that runs them all and writes this page:

```sh
PHALANX_COMPOSITION=all cargo test --release -p phalanx-train --test systems composition -- --nocapture
```

With `new` instead of `all` it runs those that the page does not have yet.

`cargo test` runs a sample of them and fails if this page says otherwise.

| name | system |
|---|---|
| ddp | data parallelism with buckets, dp 2 |
| zero-1, zero-2, zero-3 | ZeRO's stages over dp (× cp) |
| fsdp | fully sharded, root unit kept |
| hybrid | FSDP in groups of 2 of dp 4; with tp and cp together: in groups of cp, copies over dp |
| wus | weight-update sharding |
| local-sgd, average | replicas that train by themselves, dp 2; the second of two steps ends with the mean of weights and momenta, or of weights |
| ep | four experts in every second layer, on two of the data-parallel ranks, which are four where nothing splits tensors or sequences |
| tp, tp+sp | Megatron's tensor parallelism, without and with sequence parallelism, tp 2 |
| tp-plan | tensor parallelism of the MLP alone, by parameter names, tp 2 |
| 2d, 2.5d, 3d | tensor parallelism on a square of 2 × 2 ranks, on two of them, on a cube of 2 × 2 × 2 |
| gspmd | GSPMD's 2-D recipe on a grid of 2 × 2 ranks |
| blocks | products of such a shape, or of sequence parallelism, block by block: `parallel.stream` |
| ulysses, ag-kv | context parallelism by all-to-all, by gathered keys and values, cp 2; both: each on an axis of its own |
| ring | Ring Attention in zigzag order, cp 2 |
| rsa | Ring Self-Attention with stored scores, cp 2 |
| selective, full | recomputation (selective: with materialised attention) |
| mb | two micro-batches |
| bf16, f16 | 16-bit weights and computation, f32 masters (compared within 5%); f16 with a dynamic loss scale |
| lamb, adafactor | instead of AdamW |
| gpt2, cnn | GPT-2 with biases, a tied head and dropout; the network of images, heights or channels on ranks, SGD; otherwise LLaMA with grouped heads |
| t5 | an encoder and a decoder, with tied tables and dropout; not in 16 bits, where gradients of queries differ by up to a third between layouts that cut products (that of all parameters by 1%), and less than 1e-10 in f64 |
| naive, gpipe, vectorised, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, zb-auto, v-half, v-min, chimera, dualpipe | pipelines of two stages (two chunks each where there are chunks) and two micro-batches; with mb: four |
| bpipe | a pipeline of four stages and four micro-batches, as fewer have nothing to park; with mb: eight |
| 1f1b-pb | 1f1b with the longer warm-up, DAPPLE's PB |
| pipedream, pipedream-2bw | the same without a flush, compared with one rank that follows the same delayed equations; pipedream without clipping |

✓ ran and matched · = two values of one setting, which cannot be combined · a number: refused, for the reason
below.
";

/// The page of these cells.
pub(super) fn written(cells: &BTreeMap<Combination, Cell>) -> String {
    let mut reasons: Vec<&str> = Vec::new();
    let mut marks: BTreeMap<&[System], String> = BTreeMap::new();
    for (systems, cell) in cells {
        let mark = match cell {
            Cell::Green => "✓".to_owned(),
            Cell::Same => "=".to_owned(),
            Cell::Red(_) => "✗".to_owned(),
            Cell::Refused(why) => {
                let known = reasons.iter().position(|r| r == why);
                let number = known.unwrap_or_else(|| {
                    reasons.push(why);
                    reasons.len() - 1
                });
                (number + 1).to_string()
            }
        };
        marks.insert(systems, mark);
    }
    let green = cells.values().filter(|c| **c == Cell::Green).count();
    let mut text = HEAD.to_owned();
    let _ = writeln!(text, "\n{green} of {} cells ran and matched.", cells.len());
    let all: Vec<System> = ALL.iter().map(|(system, _)| *system).collect();
    let three: Vec<System> = all.iter().copied().filter(|system| system.in_triples()).collect();
    let head = |text: &mut String, columns: &[System]| {
        let names: Vec<&str> = columns.iter().map(|system| system.name()).collect();
        let _ = writeln!(text, "| | {} |\n|---|{}", names.join(" | "), "---|".repeat(names.len()));
    };
    let row = |text: &mut String, first: &[System], columns: &[System]| {
        let mark = |system: &System| marks[&*joined(first, *system)].as_str();
        let cells: Vec<&str> = columns.iter().map(mark).collect();
        let _ = writeln!(text, "| {} | {} |", named(first), cells.join(" | "));
    };
    text.push_str("\n## Pairs\n\nOn the diagonal: the system alone.\n\n");
    head(&mut text, &all);
    for &a in &all {
        row(&mut text, &[a], &all);
    }
    text.push_str("\n## Triples\n\n");
    head(&mut text, &three);
    for (i, &a) in three.iter().enumerate() {
        for &b in &three[i + 1..] {
            row(&mut text, &[a, b], &three);
        }
    }
    text.push_str("\n## Why some are refused\n\n");
    for (number, reason) in reasons.iter().enumerate() {
        let _ = writeln!(text, "{}. {reason}", number + 1);
    }
    text
}

/// A combination with one more system; the same if it has that already.
fn joined(first: &[System], more: System) -> Combination {
    let mut all = first.to_vec();
    if !all.contains(&more) {
        all.push(more);
    }
    all.sort();
    all
}

/// What the page says of each combination, in a word.
pub(super) fn read(text: &str) -> BTreeMap<Combination, &'static str> {
    let word = |cell: Cell| match cell {
        Cell::Green => "green",
        Cell::Same => "same",
        Cell::Red(_) => "red",
        Cell::Refused(_) => "refused",
    };
    cells(text).into_iter().map(|(systems, cell)| (systems, word(cell))).collect()
}

/// The cells of a page, of systems that there are; it may have fewer columns than there are systems.
pub(super) fn cells(text: &str) -> BTreeMap<Combination, Cell> {
    let system = |name: &str| ALL.iter().find(|(_, n)| *n == name).map(|(s, _)| *s);
    let reasons: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.split_once(". ")).collect();
    let (mut found, mut columns) = (BTreeMap::new(), Vec::new());
    for line in text.lines().filter(|line| line.starts_with('|')) {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let Some(first) = cells.next() else { continue };
        if first.is_empty() {
            columns = cells.map(system).collect();
            continue;
        }
        let first: Option<Combination> = first.split(" × ").map(system).collect();
        let (Some(first), cells) = (first, cells.collect::<Vec<_>>()) else { continue };
        if cells.len() != columns.len() {
            continue;
        }
        for (more, mark) in columns.iter().zip(cells) {
            let cell = match mark {
                "✓" => Cell::Green,
                "=" => Cell::Same,
                "✗" => Cell::Red(String::new()),
                number => Cell::Refused(reasons.get(number).copied().unwrap_or("").to_owned()),
            };
            found.extend(more.map(|more| (joined(&first, more), cell)));
        }
    }
    found
}
