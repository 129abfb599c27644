//! The real protocol under random schedules.
//!
//! This compiles the sources of the crate a second time, with the primitives of `sync` replaced by
//! those of a scheduler that switches threads at every one of them, at random and by priorities.
//! What is published, matched, read, released, poisoned and slept on is the code that ships.
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, reason = "half a crate")]
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

#[path = "../../src/blocking.rs"]
mod blocking;
#[path = "../../src/blocks.rs"]
mod blocks;
#[path = "../../src/call.rs"]
mod call;
#[path = "../../src/communicator.rs"]
mod communicator;
#[path = "../../src/device.rs"]
mod device;
#[path = "../../src/element.rs"]
mod element;
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/group.rs"]
mod group;
#[path = "../../src/header.rs"]
mod header;
#[path = "../../src/kernel/mod.rs"]
mod kernel;
#[path = "../../src/launch.rs"]
mod launch;
#[path = "../../src/matching.rs"]
mod matching;
mod pipe;
#[path = "../../src/ragged.rs"]
mod ragged;
#[path = "../../src/sanity.rs"]
mod sanity;
mod schedules;
#[path = "../../src/site.rs"]
mod site;
#[path = "../../src/streams/mod.rs"]
mod streams;
mod sync;
#[path = "../../src/threads/mod.rs"]
mod threads;
#[path = "../../src/traffic.rs"]
mod traffic;
#[path = "../../src/volume.rs"]
mod volume;

use blocks::Blocks;
use call::ReduceOp;
use group::GroupId;
