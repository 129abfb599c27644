//! Hardware as data: a few rates, and the time of work with these rates.

use phalanx_ir::DType;

use crate::work::{Transfer, Work};

/// The machine of a rank and its link to other ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hardware {
    /// FLOPs that a rank does in a second, by the element type of the operands.
    pub flops_per_s: Peaks,
    /// Bytes that a rank reads or writes in its own memory in a second.
    pub memory_bytes_per_s: f64,
    /// Bytes that a rank sends in a second.
    pub link_bytes_per_s: f64,
    /// Seconds before the first byte of a message arrives.
    pub latency_s: f64,
}

/// FLOPs per second of matrix products, by the element type of their operands.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Peaks {
    pub f64: f64,
    pub f32: f64,
    pub bf16: f64,
    pub f16: f64,
}

impl Default for Hardware {
    /// A recent accelerator with a fast link to its neighbours. Only the ratios matter.
    fn default() -> Self {
        Self {
            flops_per_s: Peaks::even(300e12),
            memory_bytes_per_s: 2e12,
            link_bytes_per_s: 100e9,
            latency_s: 5e-6,
        }
    }
}

impl Hardware {
    /// A rank of this many CPU cores, in round numbers. One of its threads moves bytes between
    /// ranks, through memory; values of 16-bit types are widened before they are multiplied.
    pub fn cpu(threads: usize) -> Self {
        let cores = threads.max(1) as f64;
        let wide = 60e9 * cores;
        Self {
            flops_per_s: Peaks { f64: wide / 2.0, ..Peaks::even(wide) },
            memory_bytes_per_s: 10e9 * cores,
            link_bytes_per_s: 5e9,
            latency_s: 10e-6,
        }
    }

    /// Seconds of some work: its products, then its memory traffic, then its transfers.
    pub fn seconds(&self, work: &Work) -> f64 {
        self.product_seconds(work.flops as f64, work.dtype)
            + self.memory_seconds((work.read + work.written) as f64)
            + self.transfer_seconds(work.wire)
    }

    /// Seconds of matrix products.
    pub fn product_seconds(&self, flops: f64, dtype: DType) -> f64 {
        if flops == 0.0 { 0.0 } else { flops / self.flops_per_s.of(dtype) }
    }

    /// Seconds to read or write this many bytes.
    pub fn memory_seconds(&self, bytes: f64) -> f64 {
        bytes / self.memory_bytes_per_s
    }

    /// Seconds of a transfer between ranks.
    pub fn transfer_seconds(&self, transfer: Transfer) -> f64 {
        transfer.rounds * self.latency_s + transfer.bytes / self.link_bytes_per_s
    }
}

impl Peaks {
    /// The same for every type.
    pub fn even(rate: f64) -> Self {
        Self { f64: rate, f32: rate, bf16: rate, f16: rate }
    }

    /// The peak of an element type.
    ///
    /// # Panics
    /// If there are no matrix products in this type.
    pub fn of(&self, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => self.f64,
            DType::F32 => self.f32,
            DType::Bf16 => self.bf16,
            DType::F16 => self.f16,
            DType::I32 | DType::U16 | DType::Bool => {
                panic!("there are no matrix products in {dtype}")
            }
        }
    }
}
