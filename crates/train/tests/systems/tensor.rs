//! Megatron's tensor parallelism and sequence parallelism: any size, and the bytes of a layer.

use phalanx_config::Loaded;
use phalanx_script::Part;
use phalanx_session::Lowered;
use phalanx_spmd::strategies::{Cut, Megatron, Sequence, TensorPlan};

use crate::support::{Laid, agrees, gpt, laid, llama, models, on, settings, shared};

fn tp(loaded: &Loaded, degree: usize) -> Laid {
    laid(loaded, Some(on(&format!("tp={degree}"), [shared(Megatron::default())])))
}

fn with_sequence(loaded: &Loaded, degree: usize) -> Laid {
    let strategies = [shared(Megatron::default()), shared(Sequence::default())];
    laid(loaded, Some(on(&format!("tp={degree}"), strategies)))
}

/// A vocabulary that no degree divides, and heads that one of them does not.
#[test]
fn any_vocabulary_on_any_degree() {
    for degree in [2, 3, 4] {
        let sets = ["model.vocab=509", "model.width=24", "model.heads=6", "model.kv_heads=6"];
        let parallel = || Some(on(&format!("tp={degree}"), [shared(Megatron::default())]));
        agrees(&format!("tp {degree}"), &llama(&sets), parallel());
        // Tied heads, and biases.
        agrees(&format!("gpt2, tp {degree}"), &gpt(&sets), parallel());
    }
}

#[test]
fn fewer_key_heads_than_ranks() {
    for (kv_heads, degree) in [(1, 2), (2, 4), (1, 4)] {
        let loaded = llama(&[&format!("model.kv_heads={kv_heads}")]);
        for strategies in [
            vec![shared(Megatron::default())],
            vec![shared(Megatron::default()), shared(Sequence::default())],
        ] {
            let what = format!("{kv_heads} key heads on {degree} ranks");
            agrees(&what, &loaded, Some(on(&format!("tp={degree}"), strategies)));
        }
    }
}

/// A plan that says by name what Megatron finds gives the same programs; any other trains alike.
#[test]
fn weights_can_be_split_by_name() {
    let loaded = llama(&["model.kv_heads=4"]);
    let attention = || TensorPlan::new("tp").rows("attn.out").columns("attn.*");
    let whole = attention().rows("mlp.down").columns("mlp.*").rows("embed").columns("head");
    let named = laid(&loaded, Some(on("tp=2", [shared(whole)])));
    let found = tp(&loaded, 2);
    let texts = |laid: &Laid| -> Vec<String> {
        laid.script().programs.iter().map(|entry| entry.placed.program.to_string()).collect()
    };
    assert_eq!(texts(&named), texts(&found));
    agrees("only attention", &loaded, Some(on("tp=2", [shared(attention())])));
    let odd = TensorPlan::new("tp").rows("mlp.up").cut("attn.q", Cut::Dim(0)).rows("head");
    agrees("rows first", &loaded, Some(on("tp=2", [shared(odd)])));
}

/// Only ranks that split attention need a head each; a plan may leave it whole.
#[test]
fn a_plan_on_more_ranks_than_heads() {
    let on_eight = |plan: &str| llama(&["parallel.tp=8", &format!("parallel.tp_plan={plan}")]);
    agrees("mlp", &on_eight(r#"["mlp.down rows", "mlp.* columns"]"#), None);
    let loaded = on_eight(r#"["attn.out rows", "attn.* columns"]"#);
    let lowered = Lowered::new(&models(&loaded), settings(&loaded, None));
    let Err(refused) = lowered else { panic!("attention has four heads") };
    assert_eq!(refused.exit_code(), 2, "{refused}");
    assert!(refused.to_string().contains("split it: tp = 4×2"), "{refused}");
}

/// A layer large enough that bytes count for more than calls.
fn layer(sets: &[&str]) -> Loaded {
    let large = [
        "model.layers=1",
        "model.width=256",
        "model.heads=8",
        "model.kv_heads=8",
        "model.ffn=1024",
        "train.batch_size=2",
        "train.seq_len=128",
        "model.context=128",
        "precision.compute=bf16",
        "precision.weights=bf16",
        "precision.grads=f32",
    ];
    gpt(&[&large[..], sets].concat())
}

/// b·s·h of that layer.
const BSH: u64 = 2 * 128 * 256;

/// Two all-reduces of b·s·h forward and two backward: 8·bsh(t−1)/t elements sent; with full
/// recomputation two more.
#[test]
fn a_layer_sums_twice_in_each_direction() {
    for t in [2, 4] {
        let laid = tp(&layer(&[]), t);
        let t = t as u64;
        let sum = |times: u64| {
            vec![("all_reduce<tp>".to_owned(), times, { times * 2 * BSH * 2 * (t - 1) / t })]
        };
        assert_eq!(laid.in_segment(1, Part::F), sum(2));
        assert_eq!(laid.in_segment(1, Part::BW), sum(2));
        assert_eq!(laid.segment_bytes(1), 8 * BSH * 2 * (t - 1) / t);
    }
    let again = tp(&layer(&["train.recompute=full"]), 2);
    // Of the forward that is run again all but the last product is needed: its sum is not.
    assert_eq!(again.in_segment(1, Part::BW)[0].1, 3);
}

/// With sequence parallelism: two gathers and two scatters in each direction, and the two inputs of
/// column-split products gathered again for their weight gradients: 10·bsh(t−1)/t.
#[test]
fn a_layer_with_sequence_parallelism_sends_ten() {
    for t in [2u64, 4] {
        for recompute in ["none", "selective"] {
            let loaded = layer(&[&format!("train.recompute={recompute}")]);
            let laid = with_sequence(&loaded, t as usize);
            let once = BSH * 2 * (t - 1) / t;
            let rows = |part| -> Vec<(String, u64, u64)> {
                let large = laid.in_segment(1, part).into_iter();
                large.filter(|row| row.0.contains("<tp>")).collect()
            };
            let named = |op: &str, times: u64| (format!("{op}<tp>"), times, times * once);
            assert_eq!(rows(Part::F), [named("all_gather", 2), named("reduce_scatter", 2)]);
            assert_eq!(rows(Part::BW), [named("all_gather", 4), named("reduce_scatter", 2)]);
            assert_eq!(laid.segment_bytes(1), 10 * once);
        }
    }
}

/// What such a layer keeps: 32·sbh/t and 4·asb/t of log-sum-exp, as docs/memory.md counts for one
/// rank, and the norms' 16·sb/t of statistics. With materialised probabilities selective
/// recomputation leaves 32·sbh/t and the statistics.
#[test]
fn a_layer_with_sequence_parallelism_keeps_a_share() {
    let (bsh, bs, a) = (BSH as usize, 2 * 128, 8);
    for t in [1, 2, 4] {
        for (attention, lse) in [("flash", 4 * a * bs), ("materialised", 0)] {
            let attention = format!("model.attention={attention}");
            let loaded = layer(&[&attention, "train.recompute=selective"]);
            let laid = with_sequence(&loaded, t);
            let residuals = laid.lowered.compiled().phases[1].residuals();
            let mesh = laid.lowered.mesh();
            let kept: usize = residuals.iter().map(|(_, ty)| ty.local_bytes(mesh)).sum();
            assert_eq!(kept, (32 * bsh + lse + 16 * bs) / t, "tp {t}, {attention}: {residuals:?}");
        }
    }
}
