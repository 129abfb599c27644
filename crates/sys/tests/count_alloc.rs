//! The counting allocator, in a binary of its own because it is global and counts every thread.

use std::hint::black_box;

use phalanx_sys::count_alloc::{CountingAllocator, Exemption, counts, exempt, peak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// One test only: the harness itself allocates while it starts a second one.
#[test]
fn allocations_are_counted_and_exemptions_kept_apart() {
    let mut vector: Vec<u8> = Vec::with_capacity(10);

    let start = counts();
    vector.extend_from_slice(black_box(&[1; 10]));
    assert_eq!(counts(), start, "filling reserved memory allocates nothing");

    vector.reserve_exact(1000);
    black_box(Box::new([0u8; 100]));
    let spent = counts() - start;
    assert_eq!((spent.allocations, spent.bytes), (2, 1110));
    assert_eq!(spent.exempt_allocations, 0);

    let start = counts();
    exempt(|| {
        let _inner = Exemption::enter();
        black_box(Box::new([0u8; 64]));
    });
    let spent = counts() - start;
    assert_eq!((spent.allocations, spent.exempt_allocations, spent.exempt_bytes), (0, 1, 64));

    // An exemption here says nothing about another thread's allocations.
    let start = counts();
    exempt(|| {
        let allocate = || drop(black_box(Vec::<u8>::with_capacity(1 << 20)));
        std::thread::spawn(allocate).join().unwrap();
    });
    let spent = counts() - start;
    assert!(spent.bytes >= 1 << 20, "{spent:?}");

    // What is freed makes room for what comes after it.
    let (kept, most) = peak(|| {
        for _ in 0..3 {
            drop(black_box(vec![0u8; 3 << 20]));
        }
        let mut kept = black_box(vec![0u8; 1 << 20]);
        kept.reserve_exact(1 << 20);
        kept
    });
    assert_eq!(most, 3 << 20);
    let (_, most) = peak(|| drop(kept));
    assert_eq!(most, 0, "what was there before does not count");
}
