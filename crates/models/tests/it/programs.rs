//! The programs as a reader sees them.

use phalanx_ir::text;
use phalanx_models::Purpose;

use crate::architectures::{build, small_gpt, small_llama, small_mlp};

/// On one device the text starts with an empty mesh, which is left out here.
fn compare(found: &phalanx_ir::Program, expected: &str) {
    let expected = format!("mesh\n{}\n", expected.trim());
    let found_text = found.to_string();
    assert!(found_text == expected, "found\n{found_text}");
    assert_eq!(text::parse(&expected).unwrap(), *found);
}

#[test]
fn a_llama_block() {
    compare(
        build(&small_llama(), Purpose::Train).program(1),
        r"
program block {
  h: boundary f32[2,8,16]
  norm1: param f32[16]
  attn.q: param f32[16,24]
  attn.k: param f32[16,12]
  attn.v: param f32[16,12]
  attn.out: param f32[24,16]
  norm2: param f32[16]
  mlp.gate: param f32[16,20]
  mlp.up: param f32[16,20]
  mlp.down: param f32[20,16]
  %10, %11 = rms_norm(h, norm1, eps=0.00001) : f32[2,8,16], f32[2,8]
  %12 = matmul(%10, attn.q, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,24]
  %13 = matmul(%10, attn.k, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %14 = matmul(%10, attn.v, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %15 = reshape(%12, shape=2x8x6x4) : f32[2,8,6,4]
  %16 = rotary(%15, theta=10000, scaling=none, inverse=false) : f32[2,8,6,4]
  %17 = reshape(%13, shape=2x8x3x4) : f32[2,8,3,4]
  %18 = rotary(%17, theta=10000, scaling=none, inverse=false) : f32[2,8,3,4]
  %19 = reshape(%14, shape=2x8x3x4) : f32[2,8,3,4]
  %20, %21 = attention(%16, %18, %19, kind=flash, causal=true, dropout=0, site=1) : f32[2,8,6,4], f32[2,6,8]
  %22 = reshape(%20, shape=2x8x24) : f32[2,8,24]
  %23 = matmul(%22, attn.out, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,16]
  %24 = add(h, %23) : f32[2,8,16]
  %25, %26 = rms_norm(%24, norm2, eps=0.00001) : f32[2,8,16], f32[2,8]
  %27 = matmul(%25, mlp.gate, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,20]
  %28 = silu(%27) : f32[2,8,20]
  %29 = matmul(%25, mlp.up, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,20]
  %30 = mul(%28, %29) : f32[2,8,20]
  %31 = matmul(%30, mlp.down, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,16]
  %32 = add(%24, %31) : f32[2,8,16]
  return h: boundary %32
}",
    );
}

#[test]
fn a_llama_head() {
    compare(
        build(&small_llama(), Purpose::Train).program(4),
        r"
program head {
  h: boundary f32[2,8,16]
  norm: param f32[16]
  head: param f32[16,37]
  targets: data i32[2,8]
  inv_tokens: scalar f32[]
  %5, %6 = rms_norm(h, norm, eps=0.00001) : f32[2,8,16], f32[2,8]
  %7 = matmul(%5, head, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,37]
  %8, %9 = cross_entropy(%7, targets) : f32[2,8], f32[2,8]
  %10 = sum(%8, dims=0x1, out=f32) : f32[]
  %11 = mul(%10, inv_tokens) : f32[]
  return loss: loss %11
}",
    );
}

#[test]
fn a_gpt_with_dropout() {
    compare(
        build(&small_gpt(), Purpose::Train).program(0),
        r"
program embed {
  ids: data i32[2,8]
  embed: param f32[37,12]
  pos: param f32[32,12]
  key: random i32[5]
  %4 = embedding(embed, ids) : f32[2,8,12]
  %5 = slice(pos, dim=0, start=0, len=8) : f32[8,12]
  %6 = add(%4, %5) : f32[2,8,12]
  %7 = dropout(%6, key, p=0.1, site=1) : f32[2,8,12]
  return h: boundary %7
}",
    );
    compare(
        build(&small_gpt(), Purpose::Train).program(1),
        r"
program block {
  h: boundary f32[2,8,12]
  norm1.gain: param f32[12]
  norm1.bias: param f32[12]
  attn.q: param f32[12,12]
  attn.q_bias: param f32[12]
  attn.k: param f32[12,12]
  attn.k_bias: param f32[12]
  attn.v: param f32[12,12]
  attn.v_bias: param f32[12]
  key: random i32[5]
  attn.out: param f32[12,12]
  attn.out_bias: param f32[12]
  norm2.gain: param f32[12]
  norm2.bias: param f32[12]
  mlp.up: param f32[12,40]
  mlp.up_bias: param f32[40]
  mlp.down: param f32[40,12]
  mlp.down_bias: param f32[12]
  %18, %19, %20 = layer_norm(h, norm1.gain, norm1.bias, eps=0.00001) : f32[2,8,12], f32[2,8], f32[2,8]
  %21 = matmul(%18, attn.q, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %22 = add(%21, attn.q_bias) : f32[2,8,12]
  %23 = reshape(%22, shape=2x8x3x4) : f32[2,8,3,4]
  %24 = matmul(%18, attn.k, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %25 = add(%24, attn.k_bias) : f32[2,8,12]
  %26 = reshape(%25, shape=2x8x3x4) : f32[2,8,3,4]
  %27 = matmul(%18, attn.v, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %28 = add(%27, attn.v_bias) : f32[2,8,12]
  %29 = reshape(%28, shape=2x8x3x4) : f32[2,8,3,4]
  %30, %31 = attention(%23, %26, %29, key, kind=flash, causal=true, dropout=0.1, site=1) : f32[2,8,3,4], f32[2,3,8]
  %32 = reshape(%30, shape=2x8x12) : f32[2,8,12]
  %33 = matmul(%32, attn.out, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %34 = add(%33, attn.out_bias) : f32[2,8,12]
  %35 = dropout(%34, key, p=0.1, site=2) : f32[2,8,12]
  %36 = add(h, %35) : f32[2,8,12]
  %37, %38, %39 = layer_norm(%36, norm2.gain, norm2.bias, eps=0.00001) : f32[2,8,12], f32[2,8], f32[2,8]
  %40 = matmul(%37, mlp.up, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,40]
  %41 = add(%40, mlp.up_bias) : f32[2,8,40]
  %42 = gelu(%41) : f32[2,8,40]
  %43 = matmul(%42, mlp.down, spec=aby,yz->abz, out=f32, add=false) : f32[2,8,12]
  %44 = add(%43, mlp.down_bias) : f32[2,8,12]
  %45 = dropout(%44, key, p=0.1, site=3) : f32[2,8,12]
  %46 = add(%36, %45) : f32[2,8,12]
  return h: boundary %46
}",
    );
}

#[test]
fn a_tied_head_that_emits_logits() {
    compare(
        build(&small_gpt(), Purpose::Predict).program(3),
        r"
program head {
  h: boundary f32[2,8,12]
  norm.gain: param f32[12]
  norm.bias: param f32[12]
  embed: param f32[37,12]
  %4, %5, %6 = layer_norm(h, norm.gain, norm.bias, eps=0.00001) : f32[2,8,12], f32[2,8], f32[2,8]
  %7 = matmul(%4, embed, spec=aby,zy->abz, out=f32, add=false) : f32[2,8,37]
  return logits: probe %7
}",
    );
}

#[test]
fn the_last_layer_of_a_perceptron() {
    compare(
        build(&small_mlp(), Purpose::Train).program(3),
        r"
program layer {
  h: boundary f32[2,7]
  weight: param f32[7,2]
  bias: param f32[2]
  y: data f32[2,2]
  inv_tokens: scalar f32[]
  %5 = matmul(h, weight, spec=ay,yz->az, out=f32, add=false) : f32[2,2]
  %6 = add(%5, bias) : f32[2,2]
  %7 = sub(%6, y) : f32[2,2]
  %8 = square(%7) : f32[2,2]
  %9 = sum(%8, dims=0x1, out=f32) : f32[]
  %10 = mul(%9, inv_tokens) : f32[]
  return loss: loss %10
}",
    );
}
