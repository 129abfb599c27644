//! Typed programs: what is computed, on which mesh, in which layout.
//!
//! A [`Program`] is a straight-line list of instructions over **global** shapes. Every value has a
//! [`TensorType`], whose [`Layout`] says for each mesh axis whether the value is replicated, sharded
//! or a partial sum. Each op declares its sharding [`Rule`] once, in its own file under [`ops`]; the
//! verifier refuses a program whose layouts would lose, double or forget a reduction.
//!
//! Users write programs with the [`Builder`], as ordinary tensor code. Programs print and parse
//! back ([`text`]). This crate does no I/O, spawns no threads and has no unsafe code.
#![forbid(unsafe_code)]

pub mod attr;
pub mod builder;
mod draw;
pub mod dtype;
mod error;
pub mod exchange;
mod graph;
pub mod half;
mod halo;
pub mod halves;
pub mod layout;
mod loops;
pub mod mesh;
pub mod model;
pub mod ops;
pub mod program;
pub mod random;
mod refusal;
mod rewrite;
pub mod rule;
mod shard;
pub mod text;
pub mod types;
pub mod verify;
pub mod vjp;

pub use builder::{Builder, Tensor};
pub use draw::{Draw, Stored};
pub use dtype::DType;
pub use error::IrError;
pub use exchange::Exchange;
pub use graph::Graph;
pub use halo::{Halo, HaloRoom, Reach};
pub use layout::{Layout, LocalPart, Order};
pub use loops::{ProductLoops, StridedLoop};
pub use mesh::{Axis, Mesh};
pub use model::{Init, Instance, Model, Param};
pub use ops::{Op, OpDef};
pub use program::{Instr, Phase, Port, Program, Role, ValueId};
pub use rewrite::Rewriter;
pub use rule::Rule;
pub use shard::ElementRun;
pub use types::{Form, TensorType};
pub use verify::{VerifyError, verify};
