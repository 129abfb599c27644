//! What every engine must pass.

use phalanx_cuda::CudaEngine;
use phalanx_models::BatchShape;
use phalanx_testing::{suite, tiny};

use crate::gpu;

fn engine() -> CudaEngine {
    CudaEngine::new().unwrap()
}

#[test]
fn memory_is_written_as_planned() {
    if gpu::is_here("memory_is_written_as_planned") {
        suite::memory_is_written_as_planned(engine, true);
    }
}

#[test]
fn a_split_backward_keeps_the_bits() {
    if gpu::is_here("a_split_backward_keeps_the_bits") {
        suite::a_split_backward_keeps_the_bits(engine);
    }
}

#[test]
fn numbers_are_the_interpreters() {
    if gpu::is_here("numbers_are_the_interpreters") {
        suite::numbers_are_the_interpreters(engine);
    }
}

#[test]
fn a_run_can_be_repeated() {
    if gpu::is_here("a_run_can_be_repeated") {
        suite::a_run_can_be_repeated(engine);
    }
}

/// The second step is captured; what nobody waits for there runs as late, or as early, as it may on libraries that stand
/// in for NVIDIA's.
#[test]
fn a_second_queue_keeps_the_bits() {
    if gpu::is_here("a_second_queue_keeps_the_bits") {
        suite::engines_have_the_same_bits(engine, || engine().with_second_queue().unwrap());
    }
}

#[test]
fn recomputation_keeps_the_bits() {
    if gpu::is_here("recomputation_keeps_the_bits") {
        suite::recomputation_keeps_the_bits(engine);
    }
}

#[test]
fn late_calls_keep_the_bits() {
    if gpu::is_here("late_calls_keep_the_bits") {
        let shape = BatchShape { batch: 2, seq: 8 };
        suite::late_calls_keep_the_bits(engine, &tiny(1), shape);
    }
}
