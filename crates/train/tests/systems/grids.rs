//! 2D, 2.5D and 3D tensor parallelism and GSPMD's 2-D recipe: any size, the bytes of a layer, and what ranks hold.

use phalanx_config::Loaded;
use phalanx_script::Part;
use phalanx_spmd::strategies::{Cube, Gspmd, Optimus};

use crate::support::{Laid, agrees, foreign_at_once, gpt, is_reduce, laid, llama, on, shared};

fn square(loaded: &Loaded, q: usize, depth: usize, stream: bool) -> Laid {
    let strategy = shared(Optimus { depth, stream, ..Optimus::default() });
    laid(loaded, Some(on(&format!("tp={}", q * q * depth), [strategy])))
}

fn cube(loaded: &Loaded, q: usize, stream: bool) -> Laid {
    let strategy = shared(Cube { stream, ..Cube::default() });
    laid(loaded, Some(on(&format!("tp={}", q * q * q), [strategy])))
}

fn grid(loaded: &Loaded, [rows, columns]: [usize; 2], stream: bool) -> Laid {
    let strategy = shared(Gspmd { rows, stream, ..Gspmd::default() });
    laid(loaded, Some(on(&format!("tp={}", rows * columns), [strategy])))
}

/// Widths, vocabularies and heads that the sides of the square or cube do not divide; tied and
/// untied heads; grouped queries.
#[test]
fn any_size_does_what_one_rank_does() {
    let odd = ["model.vocab=31", "model.width=18", "model.heads=3", "model.kv_heads=3"];
    let few = ["model.vocab=29", "model.width=24", "model.heads=4", "model.kv_heads=1"];
    for sets in [&odd[..], &few[..]] {
        for (tp, how) in [
            (4, &["parallel.tp_kind=2d"][..]),
            (8, &["parallel.tp_kind=2.5d", "parallel.tp_depth=2"]),
            (8, &["parallel.tp_kind=3d"]),
            (6, &["parallel.tp_kind=gspmd", "parallel.tp_rows=2", "train.batch_size=6"]),
        ] {
            // The three columns of a grid cannot share four heads and one key head evenly.
            let even = sets == odd || tp != 6;
            let (tp, how) = if even { (tp, how) } else { (4, &["parallel.tp_kind=gspmd"][..]) };
            let tp = format!("parallel.tp={tp}");
            // Both forms: operands that come block by block, and gathered ones.
            let stream = format!("parallel.stream={}", sets == odd);
            let sets = [sets, how, &[&tp, &stream]].concat();
            agrees(&format!("llama {sets:?}"), &llama(&sets), None);
            let sets = [&sets[..], &["model.dropout=0.1", "model.kv_heads=model.heads"]].concat();
            let sets: Vec<&str> = sets.into_iter().filter(|s| !s.contains("kv_heads")).collect();
            let kv = if sets.contains(&"model.heads=3") { 3 } else { 4 };
            let kv = format!("model.kv_heads={kv}");
            agrees(&format!("gpt2 {sets:?}"), &gpt(&[&sets[..], &[&kv]].concat()), None);
        }
    }
}

/// Four by four ranks, with as many key heads as columns and with fewer, block by block and gathered.
#[test]
fn a_larger_square() {
    for (kv_heads, stream) in [(4, true), (4, false), (2, true), (1, false)] {
        let kv = format!("model.kv_heads={kv_heads}");
        let stream = format!("parallel.stream={stream}");
        let sets = ["parallel.tp_kind=2d", "parallel.tp=16", &kv, &stream];
        agrees(&format!("{kv_heads} key heads"), &llama(&sets), None);
    }
}

/// Block by block beside the other systems: copies and shards of weights, context parallelism of every kind,
/// pipelines with and without a split backward, recomputation, 16 bits. Bytes and memory are as predicted, too.
#[test]
fn blocks_compose() {
    let shapes: [(&[&str], usize); 5] = [
        (&["parallel.tp_kind=2d", "parallel.tp=4"], 4),
        (&["parallel.tp_kind=2.5d", "parallel.tp=8", "parallel.tp_depth=2"], 8),
        (&["parallel.tp_kind=3d", "parallel.tp=8"], 8),
        (&["parallel.tp_kind=gspmd", "parallel.tp=4"], 4),
        (&["parallel.tp=2", "parallel.sp=true"], 2),
    ];
    let others: [&[&str]; 8] = [
        &["parallel.dp=2"],
        &["parallel.dp=2", "parallel.zero=3", "train.recompute=full"],
        &["parallel.dp=2", "parallel.zero=1", "train.microbatches=2"],
        &["parallel.cp=2", "parallel.cp_kind=ring"],
        &["parallel.cp=2", "parallel.cp_kind=allgather", "train.recompute=full"],
        &["parallel.pp=2", "parallel.schedule=zb-h1", "train.microbatches=2", "model.layers=4"],
        &["parallel.pp=2", "parallel.schedule=1f1b", "train.microbatches=2", "parallel.zero=2"],
        &["parallel.cp=2", "parallel.cp_kind=ulysses", "parallel.dp=2", "parallel.zero=2"],
    ];
    for (number, other) in others.into_iter().enumerate() {
        // Each with two of the shapes.
        for (shape, ranks) in [shapes[number % 5], shapes[(number + 2) % 5]] {
            let samples = format!("train.batch_size={}", 4 * ranks);
            let sets = [shape, other, &["parallel.stream=true", &samples]].concat();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
    }
}

/// Depth 1 is the square itself.
#[test]
fn depth_one_is_two_dimensional() {
    let texts = |laid: &Laid| -> Vec<String> {
        laid.script().programs.iter().map(|entry| entry.placed.program.to_string()).collect()
    };
    let by = |kind: &str| {
        let kind = format!("parallel.tp_kind={kind}");
        texts(&laid(&llama(&["parallel.tp=4", &kind]), None))
    };
    assert_eq!(by("2d"), by("2.5d"));
}

/// A GPT-2 layer large enough that bytes count for more than calls, in 16 bits.
fn layer(sets: &[&str]) -> Loaded {
    let large = [
        "model.layers=1",
        "model.width=256",
        "model.heads=16",
        "model.kv_heads=16",
        "model.ffn=1024",
        "train.batch_size=8",
        "train.seq_len=64",
        "model.context=64",
        "precision.compute=bf16",
        "precision.weights=bf16",
        "precision.grads=f32",
    ];
    gpt(&[&large[..], sets].concat())
}

const H: u64 = 256;
/// b·s·h.
const BSH: u64 = 8 * 64 * H;
/// The inputs of products: of q, k and v together, of the projection, of the two of the MLP.
const X: u64 = 7 * BSH;
/// The weights of the layer, and its gains and biases.
const W: u64 = 12 * H * H;
const VECTORS: u64 = 13 * H;
/// The results of the products: q, k, v, of the projection, of the two of the MLP.
const Y: u64 = 9 * BSH;

/// Bytes by op over one side of the square or cube, at once and block by block.
fn moved(laid: &Laid, part: Part, op: &str, side: usize) -> u64 {
    let by_blocks = if op == "all_gather" { "broadcast" } else { "reduce" };
    let routes = [op, by_blocks].map(|op| format!("{op}<tp.{side}>"));
    let rows = laid.in_segment(1, part);
    rows.iter().filter(|row| routes.contains(&row.0)).map(|row| row.2).sum()
}

/// What norms exchange: two numbers of f32 per row and norm forward, two backward.
fn exchanged(rows: u64, ranks: u64) -> u64 {
    2 * 2 * 4 * rows * (ranks - 1)
}

/// F, B and W of 2D move (q−1)/q²·(X + W) each; of 2.5D with X/d. Sums of weight gradients travel
/// in f32, four bytes instead of two.
#[test]
fn squares_move_what_summa_moves() {
    let forms = [(2, 1), (4, 1), (2, 2)].into_iter();
    for ((q, depth), stream) in forms.flat_map(|form| [(form, false), (form, true)]) {
        let laid = square(&layer(&[]), q as usize, depth as usize, stream);
        let (rows, columns) = if depth == 1 { (0, 1) } else { (1, 2) };
        let part = |elements: u64| elements * (q - 1) / (q * q);
        let norms = exchanged(8 * 64 / q / depth, q);
        for recompute in [Part::F, Part::BW] {
            let gathered = moved(&laid, recompute, "all_gather", rows);
            // The backward needs gains but no biases.
            let vectors = if recompute == Part::F { VECTORS } else { 2 * H };
            assert_eq!(gathered, 2 * part(W + vectors), "weights, {q} {depth}");
            let gathered = moved(&laid, recompute, "all_gather", columns);
            assert_eq!(gathered, 2 * part(X / depth) + norms, "inputs, {q} {depth}");
        }
        let scattered = moved(&laid, Part::BW, "reduce_scatter", columns);
        assert_eq!(scattered, 2 * part(X / depth), "gradients of inputs, {q} {depth}");
        let scattered = moved(&laid, Part::BW, "reduce_scatter", rows);
        assert_eq!(scattered, 4 * part(W + VECTORS), "gradients of weights, {q} {depth}");
    }
}

/// Full recomputation moves what the forward moves once more, but for the last product, whose result nobody needs.
#[test]
fn a_square_that_runs_again_moves_once_more() {
    let part = |elements: u64| 2 * (elements / 4);
    for stream in [false, true] {
        let once = square(&layer(&[]), 2, 1, stream);
        let again = square(&layer(&["train.recompute=full"]), 2, 1, stream);
        let more = |side| {
            let of = |laid| moved(laid, Part::BW, "all_gather", side);
            of(&again) - of(&once)
        };
        assert_eq!(more(0), part(W + VECTORS - 4 * H * H - H), "weights, {stream}");
        let norms = exchanged(8 * 64 / 2, 2);
        assert_eq!(more(1), part(X - 4 * BSH) + norms, "inputs, {stream}");
    }
}

/// Squares hold the same weights, and sum their gradients: 2(d−1)/d·W/q² more, in f32, once a step.
#[test]
fn squares_sum_their_gradients_over_the_depth() {
    let (flat, deep) = (square(&layer(&[]), 2, 1, false), square(&layer(&[]), 2, 2, false));
    let summed = |laid: &Laid| laid.moved("all_reduce", is_reduce).bytes;
    assert_eq!((summed(&flat), flat.elements()), (0, deep.elements()));
    let depth = 2;
    assert_eq!(summed(&deep), 4 * 2 * (depth - 1) * deep.elements() / depth);
}

/// Over rows a layer of the recipe moves 3(W/v)(u−1)/u elements, over columns 10·bsh/u·(v−1)/v: two gathers and two
/// scatters in each direction, and the inputs of first products once more for the gradients of their weights; twelve if
/// these run apart.
#[test]
fn a_grid_moves_what_the_recipe_says() {
    for ([u, v], stream) in [([2, 2], false), ([2, 4], false), ([4, 2], false), ([2, 2], true)] {
        let laid = grid(&layer(&[]), [u as usize, v as usize], stream);
        let over_rows = |elements: u64| elements / v * (u - 1) / u;
        let once = 2 * BSH / u * (v - 1) / v;
        let norms = exchanged(8 * 64 / u, v);
        let gathered = |part, side| moved(&laid, part, "all_gather", side);
        let scattered = |part, side| moved(&laid, part, "reduce_scatter", side);
        assert_eq!(gathered(Part::F, 0), 2 * over_rows(W + VECTORS), "{u} {v}");
        assert_eq!(gathered(Part::BW, 0), 2 * over_rows(W + 2 * H), "{u} {v}");
        assert_eq!(scattered(Part::BW, 0), 4 * over_rows(W + VECTORS), "{u} {v}");
        let both = |part| (gathered(part, 1), scattered(part, 1));
        assert_eq!(both(Part::F), (2 * once + norms, 2 * once), "{u} {v} {stream}");
        assert_eq!(both(Part::BW), (4 * once + norms, 2 * once), "{u} {v} {stream}");
        assert_eq!(both(Part::B), (2 * once + norms, 2 * once), "{u} {v} {stream}");
        assert_eq!(both(Part::W), (4 * once, 0), "{u} {v} {stream}");
    }
}

/// F of 3D moves (q−1)/q³·(X + W + Y); its backward gathers inputs and weights again.
#[test]
fn a_cube_moves_inputs_weights_and_results() {
    for stream in [false, true] {
        check_cube(stream);
    }
}

fn check_cube(stream: bool) {
    let q = 2;
    let laid = cube(&layer(&[]), 2, stream);
    let part = |elements: u64| elements * (q - 1) / (q * q * q);
    // Gains and biases move over two sides at once, and are not counted here.
    let of = |part, op: &str| {
        let sides = [0, 1, 2].map(|side| moved(&laid, part, op, side));
        (sides[0], sides[1] + sides[2])
    };
    let norms = exchanged(8 * 64 / q / q, q);
    assert_eq!(of(Part::F, "all_gather"), (2 * part(W), 2 * part(X) + norms));
    assert_eq!(of(Part::F, "reduce_scatter"), (0, 2 * part(Y)));
    assert_eq!(of(Part::BW, "all_gather"), (2 * part(W), 2 * part(X + Y) + norms));
    assert_eq!(of(Part::BW, "reduce_scatter"), (4 * part(W), 2 * part(X)));
    // Run apart, both gradients of a product gather that of its result.
    assert_eq!(of(Part::B, "all_gather"), (2 * part(W), 2 * part(Y) + norms));
    assert_eq!(of(Part::B, "reduce_scatter"), (0, 2 * part(X)));
    assert_eq!(of(Part::W, "all_gather"), (0, 2 * part(X + Y)));
    assert_eq!(of(Part::W, "reduce_scatter"), (4 * part(W), 0));
}

/// Of parameters, a rank of a square holds 1/q², of a cube 1/q³, of a grid 1/uv; and of what a layer keeps 1/q²d, but
/// for the statistics of norms, which every rank of a row of them has.
#[test]
fn nothing_is_replicated() {
    let kept = |laid: &Laid| -> usize {
        let residuals = laid.lowered.compiled().phases[1].residuals();
        residuals.iter().map(|(_, ty)| ty.local_bytes(laid.lowered.mesh())).sum()
    };
    let (one, statistics) = (kept(&laid(&layer(&[]), None)), 2 * 2 * 4 * 8 * 64);
    let all = W + VECTORS;
    for (laid, weights, values, samples) in [
        (square(&layer(&[]), 2, 1, true), 4, 4, 2),
        (square(&layer(&[]), 4, 1, true), 16, 16, 4),
        (square(&layer(&[]), 2, 2, true), 4, 8, 4),
        (cube(&layer(&[]), 2, true), 8, 8, 4),
        (grid(&layer(&[]), [2, 4], false), 8, 8, 2),
        (grid(&layer(&[]), [4, 2], false), 8, 8, 4),
    ] {
        let block = &laid.lowered.compiled().program(1, Part::F);
        let held: usize = (block.inputs_with(phalanx_ir::Role::Param))
            .map(|p| block.ty(p.value).local_bytes(laid.lowered.mesh()) / 2)
            .sum();
        assert_eq!(held as u64, all / weights);
        shares(&laid, weights as usize);
        assert_eq!(kept(&laid), (one - statistics) / values + statistics / samples);
    }
}

/// Every parameter, those of the embedding and of the head too, lies in as many parts.
fn shares(laid: &Laid, parts: usize) {
    for segment in 0..3 {
        let program = laid.lowered.compiled().program(segment, Part::F);
        for port in program.inputs_with(phalanx_ir::Role::Param) {
            let ty = program.ty(port.value);
            let held = ty.local_bytes(program.mesh()) / ty.dtype.size();
            // A vocabulary that columns do not divide is padded.
            let [whole, padded] = [ty.elements(), ty.elements() + 4 * H as usize];
            let parts = held * parts;
            assert!((whole..=padded).contains(&parts), "{} {}: {held}", program.name, port.name);
        }
    }
}

/// Beside a product lie its own blocks and those of the next step: 2(X₁ + W₁)/q² of the largest one in F,
/// of its weight in B and of its input in W. Gathered, it is (X₁ + W₁)/q, and weights that are gathered ahead.
#[test]
fn two_blocks_are_there_at_a_time() {
    let (x, w) = ((4 * BSH) as usize, (4 * H * H) as usize);
    for q in [2, 4] {
        for (part, elements) in [(Part::F, x + w), (Part::B, w), (Part::W, x)] {
            let of = |stream| {
                let laid = square(&layer(&[]), q, 1, stream);
                foreign_at_once(laid.lowered.compiled().program(1, part))
            };
            assert_eq!(of(true), 2 * (2 * elements / (q * q)), "streamed, {q} {part:?}");
            assert!(of(false) >= 2 * elements / q, "gathered, {q} {part:?}");
        }
    }
}
