//! Data that every rank can make for every other, and naive sums of them.

use half::bf16;

use phalanx_comm::Element;
use phalanx_comm::ReduceOp;

/// A type that cases run over. Nothing here uses the kernels.
pub(super) trait Sample: Element + PartialEq + std::fmt::Debug {
    /// A value that depends on all bits of the seed, small enough that sums stay finite.
    fn from_seed(seed: u32) -> Self;
    /// A small whole number.
    fn from_small(value: i32) -> Self;
    /// The reduction in the order given.
    fn fold(values: &[Self], reduction: ReduceOp) -> Self;
}

/// The values that a rank gives in a case.
pub(super) fn values<T: Sample>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|i| T::from_seed(mix(rank as u32, i as u32))).collect()
}

/// The reduction, element by element, of what the ranks give, in the order given.
pub(super) fn reduced<T: Sample>(ranks: &[usize], count: usize, reduction: ReduceOp) -> Vec<T> {
    let all: Vec<Vec<T>> = ranks.iter().map(|&rank| values(rank, count)).collect();
    folded(&all, reduction)
}

/// The reduction of lists, element by element.
pub(super) fn folded<T: Sample>(all: &[Vec<T>], reduction: ReduceOp) -> Vec<T> {
    let count = all.first().map_or(0, Vec::len);
    let column = |i: usize| all.iter().map(|values| values[i]).collect::<Vec<T>>();
    (0..count).map(|i| T::fold(&column(i), reduction)).collect()
}

fn mix(a: u32, b: u32) -> u32 {
    let mut x = a.wrapping_mul(0x9E37_79B9) ^ b.wrapping_mul(0x85EB_CA6B) ^ 0x1234_5678;
    x ^= x >> 15;
    x = x.wrapping_mul(0x2C1B_3C6D);
    x ^ (x >> 12)
}

/// Numbers of very different size and either sign, so that the bits of a sum depend on its order.
fn number(seed: u32) -> f64 {
    let mantissa = f64::from(seed % 65_537) / 65_537.0 + 0.5;
    let exponent = (seed >> 17) % 12;
    let sign = if seed & 1 == 0 { 1.0 } else { -1.0 };
    sign * mantissa * f64::from(1u32 << exponent)
}

fn fold<A: Copy>(
    values: &[A],
    add: impl Fn(A, A) -> A,
    max: impl Fn(A, A) -> A,
    how: ReduceOp,
) -> A {
    let mut acc = values[0];
    for &value in &values[1..] {
        acc = match how {
            ReduceOp::Sum => add(acc, value),
            ReduceOp::Max => max(acc, value),
        };
    }
    acc
}

impl Sample for f64 {
    fn from_seed(seed: u32) -> Self {
        number(seed)
    }

    fn from_small(value: i32) -> Self {
        f64::from(value)
    }

    fn fold(values: &[Self], reduction: ReduceOp) -> Self {
        fold(values, |a, b| a + b, f64::max, reduction)
    }
}

impl Sample for f32 {
    fn from_seed(seed: u32) -> Self {
        number(seed) as f32
    }

    fn from_small(value: i32) -> Self {
        value as f32
    }

    fn fold(values: &[Self], reduction: ReduceOp) -> Self {
        fold(values, |a, b| a + b, f32::max, reduction)
    }
}

impl Sample for bf16 {
    fn from_seed(seed: u32) -> Self {
        bf16::from_f64(number(seed))
    }

    fn from_small(value: i32) -> Self {
        bf16::from_f64(f64::from(value))
    }

    fn fold(values: &[Self], reduction: ReduceOp) -> Self {
        let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        bf16::from_f32(fold(&wide, |a, b| a + b, f32::max, reduction))
    }
}

impl Sample for i32 {
    fn from_seed(seed: u32) -> Self {
        seed as i32
    }

    fn from_small(value: i32) -> Self {
        value
    }

    fn fold(values: &[Self], reduction: ReduceOp) -> Self {
        fold(values, i32::wrapping_add, i32::max, reduction)
    }
}
