//! Recomputation changes what is kept, never a bit of the results.

use phalanx_autodiff::{Recompute, joint, slice};

use crate::support::{DTYPES, assert_same_bits, chain, chains, numbers, segments};

#[test]
fn every_policy_gives_the_same_bits() {
    for (compute, grads) in DTYPES {
        for (name, forward) in segments(compute) {
            let numbers = numbers(&forward);
            let joint = joint(&forward, grads).unwrap();
            let kept = slice(&joint, Recompute::None);
            let expected = chain(&[&kept.f, &kept.bw], &numbers);
            for recompute in [Recompute::Selective, Recompute::Full] {
                let phases = slice(&joint, recompute);
                for (order, programs) in chains(&phases) {
                    let what = format!("{name}, {compute}, {grads}, {recompute}: {order}");
                    assert_same_bits(&chain(&programs, &numbers), &expected, &what);
                }
            }
        }
    }
}
