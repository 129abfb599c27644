//! Wrong programs do not build, and the message says what to do.

use phalanx_ir::ops::{
    AdamW, Binary, BinaryKind, Bounds, Collective, CollectiveKind, Decay, MemberScale,
    MemberSquares, Narrow,
};
use phalanx_ir::{Axis, Builder, DType, IrError, Mesh, Program, Role, text, verify};

fn mesh() -> Mesh {
    "dp=2 tp=4".parse().unwrap()
}

/// Builds a program of typed inputs and one op, and returns the refusal.
fn refusal(inputs: &[&str], op: impl Into<phalanx_ir::Op>) -> IrError {
    let b = Builder::on("test", DType::F32, mesh());
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    let values: Vec<_> =
        inputs.iter().zip(names).map(|(ty, name)| b.typed(name, Role::Data, ty)).collect();
    b.apply(op, &values);
    b.finish().unwrap_err()
}

fn check(error: IrError, expected: &[&str]) {
    let text = error.to_string();
    for part in expected {
        assert!(text.contains(part), "missing `{part}` in:\n{text}");
    }
}

#[test]
fn adding_a_replicated_value_to_a_partial_sum_is_refused() {
    let b = Builder::on("block", DType::F32, mesh());
    let x = b.typed("x", Role::Boundary, "f32[8,64]{0:dp 1:tp}");
    let w = b.typed("w", Role::Param, "f32[64,32]{0:tp}");
    let bias = b.typed("bias", Role::Param, "f32[32]");
    let y = x.matmul(w) + bias;
    b.output("y", y);
    check(
        b.finish().unwrap_err(),
        &[
            "add: operand 0 is a partial sum over `tp`, operand 1 is replicated over `tp`",
            "%3 = matmul(x, w, spec=ay,yz->az, out=f32, add=false) : f32[8,32]{0:dp P:tp}",
            "bias is f32[32]",
            "would count it 4 times (tp = 4)",
            "all_reduce<tp> or reduce_scatter<tp>",
        ],
    );
}

#[test]
fn multiplying_two_partial_sums_is_refused() {
    let error = refusal(&["f32[8]{P:tp}", "f32[8]{P:tp}"], Binary { kind: BinaryKind::Mul });
    check(error, &["mul", "partial sums over `tp`", "products between ranks", "reduce a first"]);
    // Over different axes it is legal: each operand is linear by itself.
    let b = Builder::on("test", DType::F32, mesh());
    let y = b.typed("a", Role::Data, "f32[8]{P:tp}") * b.typed("b", Role::Data, "f32[8]{P:dp}");
    assert_eq!(y.ty().to_string(), "f32[8]{P:dp,tp}");
}

#[test]
fn an_axis_on_two_factors_is_refused() {
    let b = Builder::on("test", DType::F32, mesh());
    let x = b.typed("x", Role::Data, "f32[8,64]{0:tp}");
    let w = b.typed("w", Role::Param, "f32[64,32]{1:tp}");
    b.output("y", x.matmul(w));
    check(
        b.finish().unwrap_err(),
        &["axis `tp` shards two factors, `a` and `z`", "gather one operand"],
    );
}

#[test]
fn a_gather_that_is_not_at_the_minor_end_is_refused() {
    let dp = Axis::new("dp").unwrap();
    let op = Collective::new(CollectiveKind::AllGather { dim: 0 }, vec![dp]);
    let error = refusal(&["f32[16,4]{0:dp,tp}"], op);
    check(error, &["all_gather", "[dp] is not the minor end of dim 0", "[dp, tp]"]);
}

#[test]
fn pieces_that_no_call_can_take_are_refused() {
    let dp = Axis::new("dp").unwrap();
    let gather = |pieces| Collective {
        pieces,
        ..Collective::new(CollectiveKind::AllGather { dim: 0 }, vec![dp])
    };
    for (operand, pieces) in [("f32[*16]{*:dp}", 0), ("f32[*16]{*:dp}", 9), ("f32[16,4]{0:dp}", 2)]
    {
        let said = format!("cannot be split into {pieces} pieces");
        check(refusal(&[operand], gather(pieces)), &["all_gather", &said]);
    }
}

#[test]
fn an_update_of_a_partial_gradient_is_refused() {
    let adamw = AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        decay: Decay::all(0.1),
        coupled: false,
        narrow: Narrow::None,
    };
    let unit = "f32[*64]{*:tp}";
    let error =
        refusal(&[unit, "f32[*64]{*:tp P:dp}", unit, unit, "f32[]", "f32[]", "f32[]"], adamw);
    check(
        error,
        &[
            "adamw: operand 1 is a partial sum over `dp`",
            "each of the 2 ranks would update with only its own summand",
            "reduce b first (all_reduce<dp> or reduce_scatter<dp>)",
        ],
    );
}

/// Norms are formed of whole values, factors are given to every rank; a sum may be scaled early.
#[test]
fn members_of_partial_units_are_scaled_but_not_squared() {
    let bounds = Bounds { members: vec![(0, 3), (4, 8)], block: 8 };
    let (squares, scale) =
        (MemberSquares { bounds: bounds.clone() }, MemberScale { bounds: bounds.clone() });
    check(refusal(&["f32[*16]{P:dp}"], squares.clone()), &["member_squares", "partial sum"]);
    check(refusal(&["f32[*16]", "f32[2]{P:dp}"], scale.clone()), &["member_scale", "partial sum"]);
    check(refusal(&["f32[*16]", "f32[2]{0:dp}"], scale.clone()), &["member_scale"]);
    check(refusal(&["bf16[*16]", "bf16[2]"], scale.clone()), &["the factors", "expected f32"]);
    let b = Builder::on("test", DType::F32, mesh());
    let ty = |text: &str| b.typed(&format!("of type {text}"), Role::State, text);
    let found = b.apply(squares, &[ty("bf16[*16]{*:dp,tp}")]).ty();
    assert_eq!(found.to_string(), "f32[2]{P:dp,tp}");
    let found = b.apply(scale, &[ty("bf16[*16]{*:tp P:dp}"), ty("f32[2]")]).ty();
    assert_eq!(found.to_string(), "bf16[*16]{*:tp P:dp}");
}

#[test]
fn a_nonlinear_function_of_a_partial_sum_is_refused() {
    let op = phalanx_ir::ops::Unary { kind: phalanx_ir::ops::UnaryKind::Gelu };
    check(refusal(&["f32[8]{P:tp}"], op), &["gelu of a sum is not the sum of gelu"]);
}

fn parsed(body: &str) -> Program {
    text::parse(&format!("mesh dp=2 tp=4\nprogram t {{\n{body}\n}}\n")).unwrap()
}

#[test]
fn a_started_collective_is_waited_for_exactly_once() {
    let good = parsed(
        "x: data f32[8]{P:tp}
         %1 = all_reduce_start<tp>(x) : pending f32[8]
         %2 = done(%1) : f32[8]
         return y: probe %2",
    );
    verify(&good).unwrap();
    let never = parsed("x: data f32[8]{P:tp}\n%1 = all_reduce_start<tp>(x) : pending f32[8]");
    assert!(verify(&never).unwrap_err().to_string().contains("waited for 0 times"));
    let early = parsed(
        "x: data f32[8]{P:tp}
         %1 = all_reduce_start<tp>(x) : pending f32[8]
         %2 = neg(%1) : f32[8]
         %3 = done(%1) : f32[8]",
    );
    assert!(verify(&early).unwrap_err().to_string().contains("still running"));
}

#[test]
fn a_result_declared_in_another_layout_is_refused() {
    let program = parsed("x: data f32[8,4]{0:dp}\n%1 = exp(x) : f32[8,4]");
    let error = verify(&program).unwrap_err();
    assert!(error.to_string().contains("result 0 has the layout {0:dp}"), "{error}");
}

#[test]
fn units_are_read_only_by_elementwise_ops() {
    let program = parsed("u: state f32[*8]\n%1 = softmax(u) : f32[*8]");
    assert!(verify(&program).unwrap_err().to_string().contains("is a packed unit"));
}

#[test]
fn only_a_replicated_value_becomes_partial_or_sharded() {
    let of = |op: &str, ty: &str, to: &str| {
        let program = parsed(&format!("x: data {ty}\n%1 = {op} : {to}"));
        verify(&program).map_err(|e| e.to_string())
    };
    of("to_partial<tp>(x)", "f32[8]{0:dp}", "f32[8]{0:dp P:tp}").unwrap();
    for ty in ["f32[8]{P:tp}", "f32[8]{0:tp}"] {
        for (op, to) in
            [("to_partial<tp>(x)", "f32[8]{P:tp}"), ("shard<tp>(x, dim=0)", "f32[8]{0:tp}")]
        {
            let error = of(op, ty, to).unwrap_err();
            assert!(error.contains("over `tp`, not replicated"), "{error}");
        }
    }
}

#[test]
fn uneven_dims_are_padded_alike_in_every_layout() {
    let input = parsed("x: data f32[10]{0:dp,tp}");
    let error = verify(&input).unwrap_err();
    assert_eq!(error.axis, Some(Axis::new("dp").unwrap()));
    assert!(error.to_string().contains("pad it (`10~"), "{error}");
    verify(&parsed(
        "x: data f32[10~16]{0:dp P:tp}\n\
         %1 = reduce_scatter<tp>(x, dim=0) : f32[10~16]{0:dp,tp}\n\
         %2 = all_gather<tp>(%1, dim=0) : f32[10~16]{0:dp}",
    ))
    .unwrap();
    let scattered =
        parsed("x: data f32[10]{0:dp P:tp}\n%1 = reduce_scatter<tp>(x, dim=0) : f32[10]{0:dp,tp}");
    let error = verify(&scattered).unwrap_err().to_string();
    assert!(error.contains("pad it (`10~"), "{error}");
    let changed = parsed("x: data f32[10~12]{0:dp}\n%1 = exp(x) : f32[10~14]{0:dp}");
    let error = verify(&changed).unwrap_err().to_string();
    assert!(
        error.contains("operand 0 pads factor `x0` to 12, but result 0 pads it to 14"),
        "{error}"
    );
    assert!(error.contains("usual fix: 14"), "{error}");
}

#[test]
fn a_dim_that_is_not_in_blocks_changes_as_a_whole() {
    let of = |op: &str, ty: &str, to: &str| {
        verify(&parsed(&format!("x: data {ty}\n%1 = {op} : {to}"))).map_err(|e| e.to_string())
    };
    for order in ["striped", "zigzag"] {
        let ty = format!("f32[16,8]{{0:dp,tp@{order}}}");
        of("all_gather<dp,tp>(x, dim=0)", &ty, "f32[16,8]").unwrap();
        of("all_to_all<dp,tp>(x, from=0, to=1)", &ty, "f32[16,8]{1:dp,tp}").unwrap();
        of(&format!("shard<dp,tp>(x, dim=0, order={order})"), "f32[16,8]", &ty).unwrap();
    }
    let (one, both) = ("f32[16,8]{0:dp@striped}", "f32[16,8]{0:dp,tp@striped}");
    for (op, from, to) in [
        ("all_gather<tp>(x, dim=0)", both, one),
        ("all_to_all<tp>(x, from=0, to=1)", both, "f32[16,8]{0:dp@striped 1:tp}"),
        ("shard<tp>(x, dim=0, order=striped)", one, both),
    ] {
        let error = of(op, from, to).unwrap_err();
        assert!(error.contains("can change only as a whole"), "{error}");
    }
}

/// Zigzag over two axes is zigzag over the first, whose parts are dealt in zigzag again.
#[test]
fn zigzag_is_gathered_and_cut_axis_by_axis() {
    let of = |op: &str, ty: &str, to: &str| {
        verify(&parsed(&format!("x: data {ty}\n%1 = {op} : {to}"))).map_err(|e| e.to_string())
    };
    let (one, both) = ("f32[16,8]{0:dp@zigzag}", "f32[16,8]{0:dp,tp@zigzag}");
    of("all_gather<tp>(x, dim=0)", both, one).unwrap();
    of("shard<tp>(x, dim=0, order=zigzag)", one, both).unwrap();
    let error = of("shard<tp>(x, dim=0)", one, both).unwrap_err();
    assert!(error.contains("its new shards would be in block order"), "{error}");
    let error = of("all_gather<dp>(x, dim=0)", "f32[16,8]{0:dp+1}", "f32[16,8]").unwrap_err();
    assert!(error.contains("are not at home"), "{error}");
}

#[test]
fn a_started_collective_of_a_unit_gives_back_a_unit() {
    let good = parsed(
        "u: state f32[*8]{*:tp}
         %1 = all_gather_start<tp>(u, dim=0) : pending f32[*8]
         %2 = done(%1) : f32[*8]
         return y: probe %2",
    );
    verify(&good).unwrap();
    assert_eq!(text::parse(&good.to_string()).unwrap(), good);
}

#[test]
fn the_operand_of_a_started_collective_lives_until_its_done() {
    let program = parsed(
        "x: data f32[8]{P:tp}
         a: data f32[8]
         %2 = all_reduce_start<tp>(x) : pending f32[8]
         %3 = exp(a) : f32[8]
         %4 = done(%2) : f32[8]
         %5 = add(%3, %4) : f32[8]
         return y: probe %5",
    );
    verify(&program).unwrap();
    assert_eq!(program.last_uses(), [Some(2), Some(1), Some(2), Some(3), Some(3), Some(4)]);
}

#[test]
fn what_other_programs_read_is_complete() {
    for role in ["boundary", "cotangent"] {
        let program = parsed(&format!("x: data f32[]{{P:tp}}\nreturn y: {role} x"));
        let error = verify(&program).unwrap_err();
        assert_eq!(error.axis, Some(Axis::new("tp").unwrap()));
        let text = error.to_string();
        assert!(text.contains(&format!("{role} output y is a partial sum")), "{text}");
        assert!(text.contains("all_reduce<tp>"), "{text}");
    }
    for role in ["gradient", "loss", "probe", "residual"] {
        verify(&parsed(&format!("x: data f32[]{{P:tp}}\nreturn y: {role} x"))).unwrap();
    }
}
