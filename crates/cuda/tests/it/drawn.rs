//! Initial values that the GPU draws have the bits of the host's.

use phalanx_cuda::CudaEngine;
use phalanx_engine::{Engine, Span};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Draw, Init, Stored, halves};

use crate::gpu;

#[test]
fn drawn_values_have_the_bits_of_the_host() {
    if !gpu::is_here("drawn_values_have_the_bits_of_the_host") {
        return;
    }
    let (count, first) = (300_001usize, (1u64 << 32) - 150_000);
    let mut engine = CudaEngine::new().unwrap();
    engine.reserve(phalanx_call::Tier::Device, 8 * count).unwrap();
    let stream = Stream::named(0x1234_5678_9abc, "blocks.3.attn.q");
    for init in [Init::Normal(0.02), Init::Uniform(0.3), Init::Constant(-1.5)] {
        let draw = Draw { stream, init };
        let whole = [DType::F64, DType::F32, DType::Bf16].map(Stored::As);
        for stored in whole.into_iter().chain([Stored::Upper, Stored::Lower]) {
            let span = Span::device(0, count * stored.dtype().size());
            assert!(engine.draw(span, stored, draw, first).unwrap());
            let mut found = vec![0; span.bytes];
            engine.download(span, &mut found).unwrap();
            let host = (0..count as u64).flat_map(|i| {
                let x = draw.at(first + i);
                match stored {
                    Stored::As(DType::F64) => x.to_ne_bytes().to_vec(),
                    Stored::As(DType::F32) => (x as f32).to_ne_bytes().to_vec(),
                    Stored::As(_) => half::bf16::from_f32(x as f32).to_ne_bytes().to_vec(),
                    Stored::Upper => halves::split(x as f32).0.to_ne_bytes().to_vec(),
                    Stored::Lower => halves::split(x as f32).1.to_ne_bytes().to_vec(),
                }
            });
            let differ = found.iter().zip(host).filter(|(own, host)| *own != host).count();
            assert_eq!(differ, 0, "{init:?} as {stored:?}: bytes that differ");
        }
    }
}
