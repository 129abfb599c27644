//! One thread's share of each operation: plain functions on slices, without threads, locks or heap.
