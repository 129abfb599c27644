//! Ids that name nothing are reported with the program.

use phalanx_call::{Lane, Slots, Tier};
use phalanx_cuda::CudaEngine;
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::text;

use crate::gpu;

#[test]
fn a_bad_id_is_an_error_that_names_it() {
    if !gpu::is_here("a_bad_id_is_an_error_that_names_it") {
        return;
    }
    let program = text::parse(
        "mesh
program lookup {
  table: param f32[4,3]
  ids: data i32[2]
  %1 = embedding(table, ids) : f32[2,3]
  return y: probe %1
}
",
    )
    .unwrap();
    let mut engine = CudaEngine::new().unwrap();
    let slots = Slots::assign_for(&program, &*engine.requirements());
    let kernel = engine.compile(&program, &slots, &[0]).unwrap();
    let span = |offset, bytes| Span::device(offset, bytes);
    let (table, ids, out) = (span(0, 48), span(64, 8), span(128, 24));
    engine.reserve(Tier::Device, 1024).unwrap();
    let mut run = |words: [i32; 2]| {
        engine.upload(ids, &words.map(i32::to_le_bytes).concat()).unwrap();
        let outputs = [Target { span: out, add: false }];
        let args = Args { inputs: &[table, ids], outputs: &outputs, workspace: span(512, 0) };
        let event = engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap();
        engine.wait(event)
    };
    run([0, 3]).unwrap();
    for bad in [4, -1] {
        let error = run([1, bad]).unwrap_err().to_string();
        assert!(error.contains("`lookup`") && error.contains(&format!("id {bad}")), "{error}");
        // It is said once.
        run([0, 0]).unwrap();
    }
}
