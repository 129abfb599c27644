//! Each system for itself (its bytes, its memory, the order of what it does) and in combination.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod again;
mod ahead;
mod asynchronous;
mod bits;
mod composition;
mod context;
mod cpu_units;
mod data_parallel;
mod ddp;
mod delays;
mod encoder_decoder;
mod evaluation;
mod experts;
mod foreign;
mod fsdp;
mod gpu;
mod grids;
mod half;
mod holders;
mod in_flight;
mod operators;
mod optimizers;
mod parked;
mod pipelines;
mod plans;
mod planted;
mod played;
mod replicas;
mod rolling;
mod rooms;
mod split;
mod stages;
mod support;
mod sweeps;
mod tables;
mod tensor;
mod ticks;
mod traces;
mod tutel;
mod unsteady;
mod weights;
mod zero;
