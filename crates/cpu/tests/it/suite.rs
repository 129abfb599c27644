//! What every engine must pass, on one thread and on several.

use phalanx_cpu::CpuEngine;
use phalanx_models::BatchShape;
use phalanx_testing::{suite, tiny};

/// One test, as engines that run side by side would fight for the cores. Three threads are more
/// than the small models have sequences, so one of them has nothing to do.
#[test]
fn the_engine_suite() {
    for threads in [1, 2, 3] {
        let engine = || CpuEngine::new(threads).unwrap();
        suite::memory_is_written_as_planned(engine, true);
        suite::a_split_backward_keeps_the_bits(engine);
        suite::numbers_are_the_interpreters(engine);
    }
    for threads in [1, 2] {
        let engine = || CpuEngine::new(threads).unwrap();
        suite::a_run_can_be_repeated(engine);
        suite::recomputation_keeps_the_bits(engine);
        // The preset as it is: 32 sequences of 64 tokens.
        let shape = BatchShape { batch: 16, seq: 64 };
        suite::late_calls_keep_the_bits(engine, &tiny(1), shape);
    }
}
