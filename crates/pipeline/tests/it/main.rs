//! Integration tests: schedules against closed forms, a published table and known orders.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod asynchronous;
mod bpipe;
mod checking;
mod chimera;
mod closed_forms;
mod dualpipe;
mod golden;
mod pictures;
mod planners;
mod refusals;
mod support;
mod tables;
mod uneven;
mod vectors;
mod zb_auto;
mod zero_bubble_table;
