//! After two steps, collectives and the ops that exchange numbers inside allocate nothing. A binary
//! of its own, because the counting allocator is global.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::sync::{Barrier, Mutex};

use phalanx_comm::{Communicator, Launcher, Threads};
use phalanx_cpu::CpuEngine;
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::text;
use phalanx_script::{Lane, Slots, Tier};
use phalanx_sys::count_alloc::{CountingAllocator, Counts, counts};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const STEP: &str = "mesh tp=2
program step {
  x: data f32[4,6~8]{1:tp}
  targets: data i32[4]
  gain: param f32[6~8]{0:tp}
  %1 = all_gather_start<tp>(x, dim=1) : pending f32[4,6~8]
  %2, %3 = rms_norm(x, gain, eps=0.1) : f32[4,6~8]{1:tp}, f32[4]
  %4, %5 = rms_norm_grad(x, gain, %3, %2, out=f32) : f32[4,6~8]{1:tp}, f32[6~8]{0:tp}
  %6, %7 = cross_entropy(%4, targets) : f32[4], f32[4]
  %8 = done(%1) : f32[4,6~8]
  %9 = to_partial<tp>(%8) : f32[4,6~8]{P:tp}
  %10 = all_reduce<tp>(%9) : f32[4,6~8]
  %11 = all_to_all<tp>(%4, from=1, to=0) : f32[4,6~8]{0:tp}
  return nll: probe %6
  return y: probe %10
  return z: probe %11
}
";

const REDUCE: &str = "mesh tp=2
program reduce {
  g: gradient f32[*32]{P:tp}
  %1 = reduce_scatter<tp>(g, dim=0) : f32[*32]{*:tp}
  return shard: gradient %1
}
";

/// What the third step of both ranks allocates, over all threads.
fn third_step(threads: usize) -> Counts {
    let meeting = Barrier::new(2);
    let (before, after) = (Mutex::new(Counts::default()), Mutex::new(Counts::default()));
    let rank = |endpoint: Box<dyn Communicator>| {
        let first = endpoint.rank() == 0;
        let mut engine = CpuEngine::on_rank(threads, endpoint).unwrap();
        let [step, reduce] = [STEP, REDUCE].map(|source| {
            let program = text::parse(source).unwrap();
            phalanx_ir::verify(&program).unwrap();
            let slots = Slots::assign_for(&program, &*engine.requirements());
            let kernel = engine.compile(&program, &slots, &[0, 1]).unwrap();
            (kernel, program.inputs().len(), program.outputs().len())
        });
        engine.reserve(Tier::Device, 1 << 16).unwrap();
        let span = |i: usize| Span::device(i * 1024, 1024);
        let places = |count: usize, from: usize| (0..count).map(|i| span(from + i)).collect();
        let target = |span| Target { span, add: false };
        let inputs: [Vec<Span>; 2] = [places(step.1, 0), places(reduce.1, 4)];
        let outputs = [(step.2, 8), (reduce.2, 12)].map(|(count, from)| {
            let spans: Vec<Span> = places(count, from);
            spans.into_iter().map(target).collect::<Vec<Target>>()
        });
        let args = |i: usize| Args {
            inputs: &inputs[i],
            outputs: &outputs[i],
            workspace: Span::device(32 * 1024, 16 * 1024),
        };
        for number in 0..3 {
            meeting.wait();
            if first && number == 2 {
                *before.lock().unwrap() = counts();
            }
            meeting.wait();
            let reduced = engine.launch(&reduce.0, &args(1), Lane::Reduce, &[]).unwrap();
            engine.launch(&step.0, &args(0), Lane::Compute, &[]).unwrap();
            engine.wait(reduced).unwrap();
            meeting.wait();
            if first && number == 2 {
                *after.lock().unwrap() = counts();
            }
        }
        meeting.wait();
    };
    std::thread::scope(|scope| {
        for local in Threads::new(2).launch().unwrap() {
            let rank = &rank;
            scope.spawn(move || rank(local.endpoint));
        }
    });
    after.into_inner().unwrap() - before.into_inner().unwrap()
}

#[test]
fn warm_collectives_allocate_nothing() {
    for threads in [1, 2] {
        let allocated = third_step(threads);
        assert_eq!(allocated.allocations, 0, "{threads} threads: {allocated:?}");
    }
}
