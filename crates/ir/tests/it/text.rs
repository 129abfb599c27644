//! The text form is the program.

use phalanx_ir::ops::{
    AdamW, AttentionKind, Bounds, CompareKind, Deal, Decay, LinearCrossEntropy, MemberScale,
    MemberSquares, Narrow, NoiseKind, Queue, RopeScaling, Rotary, Sgd, SumSquares, Window,
};
use phalanx_ir::{Builder, DType, Program, Role, text, verify};

/// A program that uses every op of the forward builder.
pub(crate) fn everything() -> Program {
    let b = Builder::new("everything", DType::Bf16);
    let ids = b.data("ids", DType::I32, [2, 8]);
    let x = b.param("embed", [32, 16]).embedding(ids);
    let q = x.matmul(b.param("q", [16, 16])).reshape([2, 8, 4, 4]);
    let k = x.matmul(b.param("k", [16, 8])).reshape([2, 8, 2, 4]);
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    let rotary = Rotary { theta: 10_000.0, scaling, inverse: false };
    let o = q.rotary(rotary).attention(k.rotary(rotary), k, AttentionKind::Flash, 0.1);
    let m = q.attention(k, k, AttentionKind::Materialised, 0.1);
    let h = (o + m).reshape([2, 8, 16]).rms_norm(b.param("n1", [16]), 1e-5);
    let h = h.layer_norm(b.param("g", [16]), b.param("c", [16]), 1e-5).dropout(0.25);
    let h = h.gelu() * h.silu() / h.square().shift(1.0) - h.relu().tanh().scale(0.5);
    let t = h.transpose(&[1, 0, 2]).slice(0, 2, 4).softmax().max_over(&[2]).cast(DType::F32);
    let t = t.compare(CompareKind::Lt, t.scale(2.0)).select(t, t.scale(3.0));
    b.probe("t", b.concat(&[t, t], 1).broadcast([4, 4, 3], &[2]));
    let window = Window::of([3, 2]).stride([2, 1]).dilation([1, 2]).pad([1, 1]);
    let image = b.data("image", DType::Bf16, [2, 8, 6, 4]).group_norm(
        2,
        b.param("gg", [4]),
        b.param("gb", [4]),
        1e-5,
    );
    let image = image.conv2d(b.param("conv", [3, 2, 4, 6]), window);
    b.probe("image", image.max_pool(Window::of([2, 2])) + image.mean_pool(Window::of([2, 2])));
    let logits = h.max(h.scale(0.5)).min(h).matmul_transposed(b.param("head", [32, 16]));
    let nll = logits.cross_entropy(b.data("targets", DType::I32, [2, 8]));
    b.loss("loss", nll.sum_all() * b.scalar("inv_tokens"));
    let (gates, index) = h.matmul(b.param("router", [16, 4])).cast(DType::F32).softmax().top_k(2);
    let gates = gates + gates.noise(NoiseKind::Normal) * gates.noise(NoiseKind::Uniform).softplus();
    let slot = index.assign(4, 5, Some(gates.compare(CompareKind::Lt, gates.scale(2.0))));
    b.probe("load", slot.histogram(4, 5, DType::F32));
    b.probe("back", h.dispatch(slot, 4, 5).combine(slot, gates));
    b.probe("dealt", slot.deal(Deal { experts: 4, parts: 2, per: 5 }));
    let stands = gates.compare(CompareKind::Lt, gates.scale(2.0));
    let (rows, slot, counts) =
        h.queue(index, Queue { experts: 4, parts: 2, room: 3 }, Some(stands));
    b.probe("packed", rows.grouped_matmul(b.param("up", [4, 16, 6]), counts).combine(slot, gates));
    b.finish().unwrap()
}

fn round_trip(program: &Program) {
    let printed = program.to_string();
    let back = text::parse(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
    assert_eq!(back.to_string(), printed);
    assert!(back == *program, "the values are numbered differently:\n{printed}");
    verify(&back).unwrap();
}

#[test]
fn every_forward_op_prints_and_parses_back() {
    round_trip(&everything());
}

#[test]
fn updates_on_units_print_and_parse_back() {
    let b = Builder::new("update", DType::F32);
    let unit = |name: &str| b.typed(name, Role::State, "f32[*64]");
    let scalars = [b.scalar("lr"), b.scalar("step"), b.scalar("clip")];
    let narrow = Narrow::Copy(DType::Bf16);
    let adamw = AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        decay: Decay::all(0.1),
        coupled: false,
        narrow,
    };
    let [lr, step, clip] = scalars;
    b.apply(adamw, &[unit("w"), unit("g"), unit("m"), unit("v"), lr, step, clip]);
    let sgd = Sgd { momentum: 0.9, nesterov: true, decay: Decay::all(0.0), narrow: Narrow::None };
    b.apply(sgd, &[unit("w"), unit("g"), unit("m"), lr, step, clip]);
    let halves = [("upper", "bf16[*64]"), ("grad", "bf16[*64]"), ("lower", "u16[*64]")];
    let [upper, grad, lower] = halves.map(|(name, ty)| b.typed(name, Role::State, ty));
    let split = AdamW { narrow: Narrow::Split, ..adamw };
    let results = b.apply_all(split, &[upper, grad, lower, unit("m"), unit("v"), lr, step, clip]);
    assert_eq!(
        results.iter().map(|r| r.dtype()).collect::<Vec<_>>(),
        [DType::Bf16, DType::U16, DType::F32, DType::F32]
    );
    b.probe("norm", b.apply(SumSquares, &[unit("g")]));
    let bounds = Bounds { members: vec![(0, 10), (16, 30)], block: 32 };
    let squares = b.apply(MemberSquares { bounds: bounds.clone() }, &[unit("g")]);
    b.port("scaled", Role::State, b.apply(MemberScale { bounds }, &[unit("g"), squares]));
    round_trip(&b.finish().unwrap());
}

#[test]
fn the_chunked_loss_prints_and_parses_back() {
    let b = Builder::new("head", DType::F32);
    let x = b.boundary("h", [2, 8, 16]);
    let op = LinearCrossEntropy { transposed: false, chunk: 4, out: DType::F32 };
    let targets = b.data("targets", DType::I32, [2, 8]);
    b.apply_all(op, &[x, b.param("head", [16, 32]), targets, b.scalar("inv_tokens")]);
    round_trip(&b.finish().unwrap());
}

#[test]
fn sharded_programs_and_split_axes_print_and_parse_back() {
    let source = "\
mesh dp=2 tp.0=2 tp.1=2
program block {
  h: boundary bf16[8,4096,2048]{0:dp 1:tp.0,tp.1}
  norm1: param bf16[2048]
  q: param bf16[2048,2048]{1:tp.0,tp.1}
  %3, %4 = rms_norm(h, norm1, eps=0.00001) : bf16[8,4096,2048]{0:dp 1:tp.0,tp.1}, f32[8,4096]{0:dp 1:tp.0,tp.1}
  %5 = all_gather<tp.0,tp.1>(%3, dim=1) : bf16[8,4096,2048]{0:dp}
  %6 = matmul(%5, q, spec=abc,cd->abd, out=bf16, add=false) : bf16[8,4096,2048]{0:dp 2:tp.0,tp.1} @B
  return y: boundary %6
}
";
    let program = text::parse(source).unwrap();
    verify(&program).unwrap();
    assert_eq!(program.to_string(), source);
    // A split axis may be written by its whole name.
    let short = source.replace("tp.0,tp.1", "tp");
    assert_eq!(text::parse(&short).unwrap(), program);
}

#[test]
fn unreadable_text_names_its_line() {
    let bad = "mesh\nprogram t {\n  x: data f32[8]\n  %1 = frobnicate(x) : f32[8]\n}\n";
    let error = text::parse(bad).unwrap_err().to_string();
    assert_eq!(error, "line 4: unknown op `frobnicate`");
    let bad = "mesh\nprogram t {\n  %1 = exp(y) : f32[8]\n}\n";
    assert_eq!(
        text::parse(bad).unwrap_err().to_string(),
        "line 3: there is no value `y` before this line"
    );
}

#[test]
fn the_first_mistake_is_the_one_reported() {
    let b = Builder::new("wrong", DType::F32);
    let x = b.data("x", DType::F32, [4, 8]);
    let y = x.matmul(b.param("w", [9, 3]));
    b.output("z", y.rms_norm(b.param("n", [5]), 1e-5));
    let error = b.finish().unwrap_err().to_string();
    assert_eq!(error, "matmul: `y` of ay,yz->az is 8 in f32[4,8] and 9 in f32[9,3]");
}
