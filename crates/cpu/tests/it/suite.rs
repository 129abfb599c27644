//! What every engine must pass, on one thread and on several.

use phalanx_cpu::CpuEngine;
use phalanx_testing::suite;

/// More threads than the small models have sequences, so that some have nothing to do.
const THREADS: [usize; 3] = [1, 2, 3];

fn engine(threads: usize) -> impl Fn() -> CpuEngine {
    move || CpuEngine::new(threads).unwrap()
}

#[test]
fn recomputation_keeps_the_bits() {
    THREADS.map(|t| suite::recomputation_keeps_the_bits(engine(t)));
}

#[test]
fn a_split_backward_keeps_the_bits() {
    THREADS.map(|t| suite::a_split_backward_keeps_the_bits(engine(t)));
}

#[test]
fn a_run_can_be_repeated() {
    THREADS.map(|t| suite::a_run_can_be_repeated(engine(t)));
}

#[test]
fn numbers_are_the_interpreters() {
    THREADS.map(|t| suite::numbers_are_the_interpreters(engine(t)));
}
