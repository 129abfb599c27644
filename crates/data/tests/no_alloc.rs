//! Once warm, the loader allocates nothing on either thread. A binary of its own, because the
//! counting allocator is global.

use std::sync::Arc;

use phalanx_data::{Loader, LoaderConfig, MarkovCorpus};
use phalanx_sys::count_alloc::{CountingAllocator, counts};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_warm_loader_allocates_nothing() {
    let corpus = Arc::new(MarkovCorpus::new(1, 64, 100_000).unwrap());
    let mut loader = Loader::new(corpus, LoaderConfig::new(1, 32, 8), 0).unwrap();
    for _ in 0..20 {
        loader.next_batch().unwrap();
    }
    let start = counts();
    assert!(start.allocations > 0, "the counter works");
    for _ in 0..500 {
        loader.next_batch().unwrap();
    }
    assert_eq!((counts() - start).allocations, 0);
}
