//! What every engine must pass, on one thread and on several.

use phalanx_cpu::CpuEngine;
use phalanx_testing::suite;

/// One test, as engines that run side by side would fight for the cores. Three threads are more
/// than the small models have sequences, so one of them has nothing to do.
#[test]
fn the_engine_suite() {
    for threads in [1, 2, 3] {
        let engine = || CpuEngine::new(threads).unwrap();
        suite::numbers_are_the_interpreters(engine);
        if threads < 3 {
            suite::a_run_can_be_repeated(engine);
            suite::recomputation_keeps_the_bits(engine);
            suite::a_split_backward_keeps_the_bits(engine);
        }
    }
}
