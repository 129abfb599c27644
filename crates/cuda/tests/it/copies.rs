//! Bytes that come to the GPU beside what it computes: batches ahead of their step, and copies between
//! tiers.

use phalanx_call::{Lane, Tier};
use phalanx_cuda::CudaEngine;
use phalanx_engine::{Args, Engine, Span, Target};

use crate::gpu;

fn downloaded(engine: &mut CudaEngine, span: Span) -> Vec<u8> {
    let mut out = vec![0; span.bytes];
    engine.download(span, &mut out).unwrap();
    out
}

/// What is uploaded holds, whatever was expected.
#[test]
fn what_was_expected_changes_nothing_but_time() {
    if !gpu::is_here("what_was_expected_changes_nothing_but_time") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    let large = 5 << 20;
    engine.reserve(Tier::Device, 2 * large).unwrap();
    let bytes = |seed: usize, count: usize| -> Vec<u8> {
        (0..count).map(|i| (i * 7 + seed * 13 + i / 251) as u8).collect()
    };
    let (a, b) = (Span::device(64, 1000), Span::device(4096, 70_001));
    for round in 0..4 {
        let (first, second) = (bytes(round, a.bytes), bytes(round + 50, b.bytes));
        engine.expect(a, &first).unwrap();
        engine.expect(b, &second).unwrap();
        // Not yet: a step may use the place.
        assert_ne!(downloaded(&mut engine, a), first, "round {round}");
        engine.upload(b, &second).unwrap();
        let other = bytes(round + 100, a.bytes);
        engine.upload(a, if round % 2 == 0 { &first } else { &other }).unwrap();
        assert_eq!(downloaded(&mut engine, b), second, "round {round}");
        assert_eq!(downloaded(&mut engine, a), if round % 2 == 0 { first } else { other });
    }
    // Expected twice: the later bytes; expected and never uploaded; more than there is room for.
    engine.expect(a, &bytes(1, a.bytes)).unwrap();
    engine.expect(a, &bytes(2, a.bytes)).unwrap();
    engine.upload(a, &bytes(2, a.bytes)).unwrap();
    assert_eq!(downloaded(&mut engine, a), bytes(2, a.bytes));
    let whole = Span::device(8192, large);
    engine.expect(whole, &bytes(3, large)).unwrap();
    engine.upload(whole, &bytes(3, large)).unwrap();
    assert_eq!(downloaded(&mut engine, whole), bytes(3, large));
}

#[test]
fn copies_between_tiers_keep_the_order_that_their_calls_ask_for() {
    if !gpu::is_here("copies_between_tiers_keep_the_order_that_their_calls_ask_for") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    let bytes = 1 << 20;
    engine.reserve(Tier::Device, 2 * bytes).unwrap();
    engine.reserve(Tier::Host, bytes).unwrap();
    let down = engine.copy(Tier::Device, Tier::Host, bytes, "down").unwrap();
    let up = engine.copy(Tier::Host, Tier::Device, bytes, "up").unwrap();
    let (first, second) = (Span::device(0, bytes), Span::device(bytes, bytes));
    let host = Span { tier: Tier::Host, offset: 0, bytes };
    for round in 0..8u8 {
        let content: Vec<u8> = (0..bytes).map(|i| (i as u8) ^ round ^ (i >> 8) as u8).collect();
        engine.upload(first, &content).unwrap();
        let to = |span| Target { span, add: false };
        let workspace = Span::device(0, 0);
        let (inputs, outputs) = ([first], [to(host)]);
        let args = Args { inputs: &inputs, outputs: &outputs, workspace };
        let left = engine.launch(&down, &args, Lane::Down, &[]).unwrap();
        let (inputs, outputs) = ([host], [to(second)]);
        let args = Args { inputs: &inputs, outputs: &outputs, workspace };
        let back = engine.launch(&up, &args, Lane::Up, &[left]).unwrap();
        engine.wait(back).unwrap();
        assert!(downloaded(&mut engine, second) == content, "round {round}");
    }
}
