//! The systems: one small file each, with its rule.

mod bpipe;
mod breadth_first;
mod chimera;
mod dualpipe;
mod gpipe;
mod interleaved;
mod naive;
mod one_f_one_b;
mod pipedream;
mod pipedream_2bw;
mod rolling;
mod v_half;
mod v_min;
mod vee_block;
mod zb_auto;
mod zb_h1;
mod zb_h2;
mod zb_v;

pub use bpipe::bpipe;
pub use breadth_first::breadth_first;
pub use chimera::{RoundConcat, chimera};
pub use dualpipe::dualpipe;
pub use gpipe::gpipe;
pub use interleaved::interleaved;
pub use naive::naive;
pub use one_f_one_b::{Warmup, one_f_one_b};
pub use pipedream::pipedream;
pub use pipedream_2bw::pipedream_2bw;
pub use v_half::v_half;
pub use v_min::v_min;
pub(crate) use zb_auto::zb_auto_outline;
pub use zb_auto::{Demand, zb_auto};
pub use zb_h1::zb_h1;
pub use zb_h2::zb_h2;
pub use zb_v::zb_v;
