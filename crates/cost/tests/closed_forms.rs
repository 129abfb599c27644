//! Work and seconds of instructions, against numbers counted by hand.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use phalanx_call::traffic;
use phalanx_cost::{Hardware, Peaks, Transfer, Work, reductions, seconds};
use phalanx_ir::{DType, Program, text, verify};

/// A verified program of these lines, on a mesh.
fn program(mesh: &str, lines: &str) -> Program {
    let program = text::parse(&format!("mesh {mesh}\nprogram p {{\n{lines}\n}}\n")).unwrap();
    verify(&program).unwrap();
    program
}

/// The work of each of a program's instructions.
fn works(mesh: &str, lines: &str) -> Vec<Work> {
    let program = program(mesh, lines);
    program.instrs().iter().map(|instr| Work::of(&program, instr)).collect()
}

/// FLOPs, bytes read, bytes written.
fn local(work: &Work) -> (u64, u64, u64) {
    (work.flops, work.read, work.written)
}

const NOTHING: Transfer = Transfer { rounds: 0.0, bytes: 0.0 };

#[test]
fn a_matmul_by_its_local_shapes() {
    let lines = "x: boundary bf16[4,6,8]{0:dp}
        w: param bf16[8,12]{1:tp}
        v: param bf16[12,8]{0:tp}
        %1 = matmul(x, w, spec=bsd,de->bse, out=bf16, add=false) : bf16[4,6,12]{0:dp 2:tp}
        %2 = matmul(%1, v, spec=bse,ed->bsd, out=f32, add=false) : f32[4,6,8]{0:dp P:tp}
        return y: probe %1
        return z: gradient %2";
    // Alone: 24 rows, 8 by 12.
    let alone = works("dp=1 tp=1", lines);
    assert_eq!(local(&alone[0]), (2 * 24 * 8 * 12, 2 * (24 * 8 + 8 * 12), 2 * 24 * 12));
    assert_eq!((alone[0].dtype, alone[0].wire), (DType::Bf16, NOTHING));
    // Two replicas have half the rows, three tensor-parallel ranks a third of the columns. The
    // second product has a third of what is summed, and a result in four bytes.
    let shared = works("dp=2 tp=3", lines);
    assert_eq!(local(&shared[0]), (2 * 12 * 8 * 4, 2 * (12 * 8 + 8 * 4), 2 * 12 * 4));
    assert_eq!(local(&shared[1]), (2 * 12 * 4 * 8, 2 * (12 * 4 + 4 * 8), 4 * 12 * 8));
}

#[test]
fn packed_products_read_their_shared_operand_once() {
    let lines = "x: boundary f32[4,6,8]{0:dp}
        q: param f32[8,12]{1:tp}
        k: param f32[8,4]{1:tp}
        %1, %2 = packed_matmul(x, q, k, spec=bsd,de->bse, out=f32) : f32[4,6,12]{0:dp 2:tp}, f32[4,6,4]{0:dp 2:tp}
        return a: probe %1
        return b: probe %2";
    let work = works("dp=2 tp=2", lines)[0];
    assert_eq!(work.flops, 2 * 12 * 8 * (6 + 2));
    assert_eq!((work.read, work.written), (4 * (12 * 8 + 8 * 8), 4 * 12 * (6 + 2)));
}

/// Two products of queries, keys and size, halved by the mask; five in the gradient.
#[test]
fn causal_attention() {
    let lines = "q: boundary f32[2,16,8,4]{0:dp 1:cp 2:tp}
        k: boundary f32[2,16,4,4]{0:dp 2:tp}
        v: boundary f32[2,16,4,4]{0:dp 2:tp}
        %1, %2 = attention(q, k, v, kind=flash, causal=true, dropout=0, site=0) : f32[2,16,8,4]{0:dp 1:cp 2:tp}, f32[2,8,16]{0:dp 1:tp 2:cp}
        %3, %4, %5 = attention_grad(q, k, v, %1, %2, %1, kind=flash, causal=true, dropout=0, site=0) : f32[2,16,8,4]{0:dp 1:cp 2:tp}, f32[2,16,4,4]{0:dp 2:tp P:cp}, f32[2,16,4,4]{0:dp 2:tp P:cp}
        return o: probe %1";
    for (mesh, [b, s, h, g]) in
        [("dp=1 cp=1 tp=1", [2, 16, 8, 4]), ("dp=2 cp=4 tp=2", [1, 4, 4, 2])]
    {
        let works = works(mesh, lines);
        let scores = b * h * s * 16;
        assert_eq!(works[0].flops, 2 * 2 * scores * 4 / 2, "{mesh}");
        assert_eq!(works[1].flops, 5 * 2 * scores * 4 / 2, "{mesh}");
        let (q, kv, rows) = (4 * b * s * h * 4, 4 * b * 16 * g * 4, 4 * b * h * s);
        assert_eq!((works[0].read, works[0].written), (q + 2 * kv, q + rows), "{mesh}");
    }
}

/// A norm reads its rows once and writes them once; a sharded row is reduced by one gather of a
/// number per row.
#[test]
fn a_norm_and_what_it_exchanges() {
    let lines = "x: boundary bf16[6,4,16]{0:dp 2:tp}
        gain: param bf16[16]{0:tp}
        %1, %2 = rms_norm(x, gain, eps=0.1) : bf16[6,4,16]{0:dp 2:tp}, f32[6,4]{0:dp}
        return y: probe %1
        return r: probe %2";
    let alone = works("dp=1 tp=1", lines)[0];
    assert_eq!(local(&alone), (0, 2 * (24 * 16 + 16), 2 * 24 * 16 + 4 * 24));
    assert_eq!(alone.wire, NOTHING);
    let shared = works("dp=2 tp=4", lines)[0];
    assert_eq!(local(&shared), (0, 2 * (12 * 4 + 4), 2 * 12 * 4 + 4 * 12));
    // 12 rows, one f32 each, to three others.
    assert_eq!(shared.wire, Transfer { rounds: 1.0, bytes: 3.0 * 12.0 * 4.0 });
}

/// Only rows that are asked for are read; the gradient writes the whole table.
#[test]
fn an_embedding_reads_the_rows_it_needs() {
    let lines = "table: param f32[1000,8]{0:tp}
        ids: data i32[4,6]{0:dp}
        dy: boundary f32[4,6,8]{0:dp}
        %1 = embedding(table, ids) : f32[4,6,8]{0:dp P:tp}
        %2 = embedding_grad(ids, dy, vocab=1000, out=f32) : f32[1000,8]{0:tp P:dp}
        return x: gradient %1
        return g: gradient %2";
    let works = works("dp=2 tp=4", lines);
    let (ids, rows) = (4 * 12, 4 * 12 * 8);
    assert_eq!(local(&works[0]), (0, ids + rows, rows));
    assert_eq!(local(&works[1]), (0, ids + rows, 4 * 250 * 8));
}

/// Over a sharded vocabulary three numbers per row are gathered; fused, three products are done.
#[test]
fn cross_entropy_apart_and_fused() {
    let lines = "logits: boundary f32[4,6,32]{0:dp 2:tp}
        targets: data i32[4,6]{0:dp}
        %1, %2 = cross_entropy(logits, targets) : f32[4,6]{0:dp}, f32[4,6]{0:dp}
        return a: probe %1
        return b: probe %2";
    let work = works("dp=2 tp=4", lines)[0];
    assert_eq!(local(&work), (0, 4 * (12 * 8 + 12), 2 * 4 * 12));
    assert_eq!(work.wire, Transfer { rounds: 1.0, bytes: 3.0 * 12.0 * 3.0 * 4.0 });
    let lines = "x: boundary f32[4,6,8]{0:dp}
        w: param f32[8,32]
        targets: data i32[4,6]{0:dp}
        scale: scalar f32[]
        %1, %2, %3 = linear_cross_entropy(x, w, targets, scale, transposed=false, chunk=5, out=f32) : f32[4,6]{0:dp}, f32[4,6,8]{0:dp}, f32[8,32]{P:dp}
        return l: probe %1
        return c: probe %2
        return g: gradient %3";
    let work = works("dp=2", lines)[0];
    assert_eq!(work.flops, 3 * 2 * 12 * 8 * 32);
    // 12 rows are three chunks of at most five.
    let (x, w, logits) = (4 * 12 * 8, 4 * 8 * 32, 4 * 12 * 32);
    assert_eq!(work.read, 2 * x + 3 * 2 * w + 4 * 12 + 4 + 3 * logits + 2 * w);
    assert_eq!(work.written, 4 * 12 + x + w + 2 * logits + 2 * w);
}

#[test]
fn views_touch_nothing_and_slices_what_they_keep() {
    let lines = "x: boundary f32[4,6]{0:dp}
        %1 = reshape(x, shape=4x2x3) : f32[4,2,3]{0:dp}
        %2 = slice(x, dim=1, start=1, len=2) : f32[4,2]{0:dp}
        return a: probe %1
        return b: probe %2";
    let works = works("dp=2", lines);
    assert_eq!(local(&works[0]), (0, 0, 0));
    assert_eq!(local(&works[1]), (0, 4 * 2 * 2, 4 * 2 * 2));
}

const COLLECTIVES: &str = "x: boundary f32[8,12]{0:dp 1:tp}
    y: boundary f32[8,12]{P:tp}
    u: state f32[*48]{*:tp}
    %1 = all_gather<tp>(x, dim=1) : f32[8,12]{0:dp}
    %2 = all_reduce<tp>(y) : f32[8,12]
    %3 = reduce_scatter<tp>(y, dim=0) : f32[8,12]{0:tp}
    %4 = all_to_all<tp>(x, from=1, to=0) : f32[8,12]{0:dp,tp}
    %5 = shard<dp>(%2, dim=0) : f32[8,12]{0:dp}
    %6 = all_gather<tp>(u, dim=0, pieces=3) : f32[*48]
    return a: probe %1
    return b: probe %2
    return c: probe %3
    return d: probe %4
    return e: probe %5
    return f: state %6";

#[test]
fn collectives_move_what_rings_move() {
    let shared = works("dp=2 tp=4", COLLECTIVES);
    let wire: Vec<(f64, f64)> = shared.iter().map(|w| (w.wire.rounds, w.wire.bytes)).collect();
    let expected = [
        (1.0, 4.0 * 3.0 * 4.0 * 3.0),
        (2.0, 2.0 * 96.0 * 4.0 * 0.75),
        (1.0, 96.0 * 4.0 * 0.75),
        (1.0, 4.0 * 3.0 * 4.0 * 0.75),
        (0.0, 0.0),
        (3.0, 12.0 * 4.0 * 3.0),
    ];
    assert_eq!(wire, expected);
    // A block that is kept is a copy; what a transfer touches at its ends is part of it.
    assert_eq!(local(&shared[4]), (0, 4 * 4 * 12, 4 * 4 * 12));
    assert_eq!(local(&shared[0]), (0, 0, 0));
    assert!(works("dp=1 tp=1", COLLECTIVES).iter().all(|alone| alone.wire == NOTHING));
}

/// What is priced is what is predicted before a run and measured in it.
#[test]
fn transfers_are_those_of_the_predicted_traffic() {
    let program = program("dp=2 tp=4", COLLECTIVES);
    for instr in program.instrs() {
        let moved = traffic::of_instr(&program, instr, 0);
        let bytes = moved.iter().map(|(_, moved)| moved.bytes as f64).sum::<f64>();
        assert_eq!(Transfer::of(&program, instr).bytes, bytes, "{}", text::instr(&program, instr));
    }
}

#[test]
fn seconds_add_up() {
    let lines = "x: boundary bf16[4,8]{0:dp 1:tp}
        w: param bf16[8,6]{0:tp}
        %1 = matmul(x, w, spec=rd,de->re, out=bf16, add=false) : bf16[4,6]{0:dp P:tp}
        %2 = all_reduce<tp>(%1) : bf16[4,6]{0:dp}
        %3 = matmul(x, %2, spec=rd,re->de, out=f32, add=false) : f32[8,6]{0:tp P:dp}
        return y: boundary %2
        return w: gradient %3";
    let program = program("dp=2 tp=2", lines);
    let hardware = Hardware {
        flops_per_s: Peaks { bf16: 1e3, ..Peaks::even(f64::NAN) },
        memory_bytes_per_s: 1e2,
        link_bytes_per_s: 1e1,
        latency_s: 7.0,
    };
    let product = 2.0 * 2.0 * 4.0 * 6.0 / 1e3;
    let forward = (2.0 * (2.0 * 4.0 + 4.0 * 6.0) + 2.0 * 2.0 * 6.0) / 1e2;
    let sum = 2.0 * 7.0 + 2.0 * 2.0 * 6.0 / 1e1;
    let gradient = (2.0 * (2.0 * 4.0 + 2.0 * 6.0) + 4.0 * 4.0 * 6.0) / 1e2;
    let expected = 2.0 * product + forward + sum + gradient;
    let got = seconds(&program, &hardware);
    assert!((got - expected).abs() < 1e-9, "{got} {expected}");
    // The gradient is left to be summed over two replicas: each sends half of it twice.
    let left: Vec<Transfer> = reductions(&program).collect();
    assert_eq!(left, [Transfer { rounds: 2.0, bytes: 4.0 * 4.0 * 6.0 }]);
}

/// What all ranks do together is the program's work, however it is shared.
#[test]
fn shares_add_up() {
    let lines = "x: boundary f32[8,16]{0:dp}
        w: param f32[16,24]{1:tp}
        %1 = matmul(x, w, spec=rd,de->re, out=f32, add=false) : f32[8,24]{0:dp 1:tp}
        return y: probe %1";
    for (mesh, ranks) in [("dp=1 tp=1", 1), ("dp=2 tp=3", 6), ("dp=8 tp=1", 8)] {
        let program = program(mesh, lines);
        let own: u64 = program.instrs().iter().map(|i| Work::of(&program, i).flops).sum();
        assert_eq!(own * ranks, program.flops(), "{mesh}");
    }
}
