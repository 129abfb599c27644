//! Context parallelism: what attention exchanges in each layer.

use phalanx_config::Loaded;
use phalanx_ir::Order;
use phalanx_script::Part;
use phalanx_session::SharedStrategy;
use phalanx_spmd::strategies::{AllGatherKv, Ring, RingSelfAttention, Ulysses};

use crate::support::{Laid, agrees, foreign_at_once, gpt, laid, llama, on, shared};

const BATCH: u64 = 2;
const SEQ: u64 = 8192;
const WIDTH: u64 = 256;
const HEADS: u64 = 8;

/// A layer large enough that bytes count for more than calls.
fn layer(kv_heads: u64, attention: &str) -> Loaded {
    let kv = format!("model.kv_heads={kv_heads}");
    llama(&[
        &format!("model.attention={attention}"),
        "model.layers=1",
        "model.width=256",
        "model.heads=8",
        &kv,
        "model.ffn=512",
        "train.batch_size=2",
        "train.seq_len=8192",
    ])
}

/// Elements of 8 bytes that one rank sends in the block's forward and in its backward; and how.
fn sent(kv_heads: u64, degree: u64, strategy: SharedStrategy) -> ([u64; 2], String) {
    sent_with(kv_heads, degree, strategy, "flash")
}

fn sent_with(
    kv_heads: u64,
    degree: u64,
    strategy: SharedStrategy,
    attention: &str,
) -> ([u64; 2], String) {
    let laid = laid(&layer(kv_heads, attention), Some(on(&format!("cp={degree}"), [strategy])));
    let rows = [Part::F, Part::BW].map(|part| laid.in_segment(1, part));
    let sums = rows.each_ref().map(|rows| rows.iter().map(|(_, _, bytes)| bytes / 8).sum());
    (sums, format!("{kv_heads} key heads on {degree} ranks: {rows:?}"))
}

/// Queries and attention's result move once in each direction, keys and values too:
/// (2 + 2g/a)·bNh(P−1)/P² elements each way. With g < P key heads, the P/g ranks that share one
/// gather its positions, and then heads are exchanged for positions between the g groups.
#[test]
fn ulysses_exchanges_heads_for_positions() {
    for degree in [2, 4] {
        for kv_heads in [8, 4, 2, 1] {
            let part = |heads: u64| BATCH * SEQ / degree * (WIDTH / HEADS * heads);
            let groups = kv_heads.min(degree);
            let shared_by = degree / groups;
            let own = part(kv_heads);
            let kv = own * (shared_by - 1) + own * shared_by * (groups - 1) / groups;
            let expected = 2 * part(HEADS) * (degree - 1) / degree + 2 * kv;
            if kv_heads >= degree {
                let bnh = BATCH * SEQ * WIDTH;
                let sheet = (2 * HEADS + 2 * kv_heads) * bnh * (degree - 1);
                assert_eq!(expected, sheet / (HEADS * degree * degree));
            }
            let ([forward, backward], what) = sent(kv_heads, degree, shared(Ulysses::default()));
            assert_eq!(forward, expected, "{what}");
            assert_eq!(backward, expected, "{what}");
        }
    }
}

/// Keys and values are gathered forward; backward their gradients are scattered, and they are
/// gathered once more because only the own part is kept: 2·bNg·d(P−1)/P forward, twice that
/// backward.
#[test]
fn all_gather_kv_gathers_keys_and_values() {
    for degree in [2, 4] {
        for kv_heads in [8, 2, 1] {
            let kv = BATCH * SEQ * (WIDTH / HEADS * kv_heads);
            let once = 2 * kv * (degree - 1) / degree;
            let ([forward, backward], what) =
                sent(kv_heads, degree, shared(AllGatherKv::default()));
            assert_eq!((forward, backward), (once, 2 * once), "{what}");
        }
    }
}

#[test]
fn context_parallel_ranks_do_what_one_rank_does() {
    for kv_heads in [4, 2, 1] {
        let loaded = llama(&[&format!("model.kv_heads={kv_heads}")]);
        for degree in [2, 4] {
            let mesh = format!("cp={degree}");
            let what = format!("{kv_heads} key heads on {mesh}");
            agrees(&what, &loaded, Some(on(&mesh, [shared(Ulysses::default())])));
            agrees(&what, &loaded, Some(on(&mesh, [shared(AllGatherKv::default())])));
        }
    }
}

/// Sequences that ranks don't divide: the last rank has padding, or nothing else, and writes what was
/// planned all the same. (Its head's rows come in runs that are shorter than a chunk.)
#[test]
fn sequences_that_ranks_do_not_divide() {
    for sets in [
        ["parallel.cp=2", "train.seq_len=7"],
        ["parallel.cp=4", "train.seq_len=5"],
        ["parallel.cp=4", "train.seq_len=3"],
    ] {
        for threads in ["run.threads=1", "run.threads=2"] {
            let sets = [&sets[..], &[threads]].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
    }
}

/// Own blocks of keys and values go once around in each direction: 2(P−1) blocks forward, and in the
/// backward as many again and 2(P−1) blocks of sums of their gradients, which come home in the end.
/// A rank never holds all keys.
#[test]
fn ring_attention_passes_blocks_on() {
    for degree in [2, 4] {
        for kv_heads in [8, 2, 1] {
            for order in [Order::Block, Order::Zigzag, Order::Striped] {
                let block = BATCH * SEQ / degree * (WIDTH / HEADS * kv_heads);
                let once = 2 * (degree - 1) * block;
                let ring = Ring { order, ..Ring::default() };
                let ([forward, backward], what) = sent(kv_heads, degree, shared(ring));
                assert_eq!((forward, backward), (once, 2 * once), "{what}");
                assert!(!what.contains("all_gather"), "{what}");
            }
        }
    }
}

#[test]
fn a_ring_does_what_one_rank_does() {
    for order in ["block", "zigzag", "striped"] {
        let order = format!("parallel.cp_order={order}");
        for (kv_heads, degree, seq) in [(4, 2, 8), (2, 4, 8), (1, 4, 13), (2, 2, 7), (2, 3, 11)] {
            let kv = format!("model.kv_heads={kv_heads}");
            let (cp, seq) = (format!("parallel.cp={degree}"), format!("train.seq_len={seq}"));
            let sets = ["parallel.cp_kind=ring", &order, &kv, &cp, &seq];
            agrees(&format!("{sets:?}"), &llama(&sets), None);
            // Learned positions are gathered, and dropout is that of the whole sequence. The bias of keys has
            // no gradient: Adam divides what rounding leaves of it by eps, which must not be tiny.
            let sets = ["parallel.cp_kind=ring", &order, "model.dropout=0.2", &cp, &seq];
            agrees(
                &format!("gpt2, {sets:?}"),
                &gpt(&[&sets[..], &["optim.eps=1e-6"]].concat()),
                None,
            );
        }
    }
}

/// Keys go around once for the scores and values once for the result: 2(P−1) blocks. The backward passes
/// both again, and as many blocks of sums of their gradients.
#[test]
fn ring_self_attention_passes_blocks_on() {
    for degree in [2, 4] {
        for kv_heads in [8, 2, 1] {
            let block = BATCH * SEQ / degree * (WIDTH / HEADS * kv_heads);
            let once = 2 * (degree - 1) * block;
            let ([forward, backward], what) =
                sent_with(kv_heads, degree, shared(RingSelfAttention::default()), "materialised");
            assert_eq!((forward, backward), (once, 2 * once), "{what}");
            assert!(!what.contains("all_gather"), "{what}");
        }
    }
}

#[test]
fn ring_self_attention_does_what_one_rank_does() {
    for (kv_heads, degree, seq) in [(4, 2, 8), (2, 4, 8), (1, 4, 13), (2, 2, 7), (2, 3, 11)] {
        let kv = format!("model.kv_heads={kv_heads}");
        let (cp, seq) = (format!("parallel.cp={degree}"), format!("train.seq_len={seq}"));
        let sets = ["parallel.cp_kind=rsa", &kv, &cp, &seq];
        agrees(&format!("{sets:?}"), &llama(&sets), None);
        let sets = ["parallel.cp_kind=rsa", "model.dropout=0.2", &cp, &seq, "optim.eps=1e-6"];
        agrees(&format!("gpt2, {sets:?}"), &gpt(&sets), None);
        let sets = ["parallel.cp_kind=rsa", "train.recompute=selective", &kv, &cp, &seq];
        agrees(&format!("{sets:?}"), &llama(&sets), None);
    }
}

/// The largest sum of live bytes in the workspace of the block's part.
fn workspace(laid: &Laid, part: Part) -> usize {
    let program = laid.lowered.compiled().program(1, part);
    let name = &program.name;
    let all = laid.script().programs.iter().filter(|entry| entry.placed.program.name == *name);
    all.map(|entry| entry.placed.slots.peak).max().unwrap()
}

/// Two ranks: gathered keys and values are four blocks, the own ones among them; in a ring the other rank's two are here,
/// and in the backward, once these are done with, the sums of their gradients. So what a block needs is less too, although
/// a rank's largest arena, which may be that of the head, is not.
#[test]
fn a_ring_of_two_holds_half_of_what_is_gathered() {
    let loaded = layer(8, "flash");
    let on_two = |strategy| laid(&loaded, Some(on("cp=2", [strategy])));
    let (ring, gathered) =
        (on_two(shared(Ring::default())), on_two(shared(AllGatherKv::default())));
    let block = (BATCH * SEQ / 2 * WIDTH * 8) as usize;
    for part in [Part::F, Part::BW] {
        let of = |laid: &Laid| foreign_at_once(laid.lowered.compiled().program(1, part));
        println!("{part:?}: {} {}", workspace(&ring, part), workspace(&gathered, part));
        assert_eq!((of(&ring), of(&gathered)), (2 * block, 4 * block), "{part:?}");
        assert!(workspace(&ring, part) < workspace(&gathered, part), "{part:?}");
    }
}

/// On more ranks two blocks of keys and of values are here: those of a step and those of the next one. In the backward so is
/// one of the sums of each of their gradients; what a rank adds to them is its own.
#[test]
fn a_longer_ring_holds_two_blocks_of_each() {
    let ring = laid(&layer(8, "flash"), Some(on("cp=4", [shared(Ring::default())])));
    let block = (BATCH * SEQ / 4 * WIDTH * 8) as usize;
    for (part, blocks) in [(Part::F, 4), (Part::BW, 6)] {
        let held = foreign_at_once(ring.lowered.compiled().program(1, part));
        assert_eq!(held, blocks * block, "{part:?}");
    }
}

/// Gathered keys lie in the order of positions, whatever the order in which queries are distributed: the same numbers, and
/// the same bytes.
#[test]
fn keys_are_gathered_from_any_order() {
    for order in [Order::Zigzag, Order::Striped] {
        for degree in [2, 4] {
            let kv = BATCH * SEQ * (WIDTH / HEADS * 2);
            let once = 2 * kv * (degree - 1) / degree;
            let gathered = AllGatherKv { order, ..AllGatherKv::default() };
            let ([forward, backward], what) = sent(2, degree, shared(gathered));
            assert_eq!((forward, backward), (once, 2 * once), "{what}");
        }
        let order = format!("parallel.cp_order={}", order.name());
        let gathered = ["parallel.cp_kind=allgather", &order];
        for more in [
            &["parallel.cp=2"][..],
            &["parallel.cp=4", "train.seq_len=13", "model.kv_heads=1"],
            &["parallel.cp=3", "train.seq_len=7", "train.recompute=full"],
            &["parallel.cp=2", "parallel.tp=2", "parallel.dp=2", "parallel.zero=3"],
            &["parallel.cp=2", "parallel.pp=2", "train.microbatches=2"],
            &["parallel.cp=2", "model.attention=materialised", "train.recompute=selective"],
        ] {
            let sets = [&gathered[..], more].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
        // Learned positions and dropout.
        let sets = ["parallel.cp=2", "model.dropout=0.2", "optim.eps=1e-6"];
        let sets = [&gathered[..], &sets].concat();
        agrees(&format!("gpt2, {sets:?}"), &gpt(&sets), None);
    }
}
