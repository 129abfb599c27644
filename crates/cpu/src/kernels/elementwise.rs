//! Operations on single elements, over chunks that fit the first-level cache.
//!
//! The operation is looked up once per chunk; its loop is specialised for it at compile time. Every
//! operation computes in the accumulator type and rounds its result to the stored type, so a group
//! of operations executed chunk by chunk gives the same bits as the operations one after another.
//! Chunks of different lengths are a mistake of the caller and panic.

mod functions;

use half::{bf16, f16};
use phalanx_ir::ops::{BinaryKind, CompareKind, UnaryKind};

use super::inlined::inlined;
use crate::element::{CpuElement, vectorized};
use functions::{Loop1, Loop2, with_binary, with_unary, with_unary_gradient};

pub(crate) use functions::larger;

/// One operand: a chunk as long as the result, or one value for all of it.
#[derive(Clone, Copy, Debug)]
pub enum ElementOperand<'a, T> {
    /// One value for each element of the result.
    Chunk(&'a [T]),
    /// The same value for all elements.
    Scalar(T),
}

/// `out = op(x)`.
pub fn unary<T: CpuElement>(op: UnaryKind, x: &[T], out: &mut [T]) {
    with_unary(op, MapTo { x, out });
}

/// `dx = dy · op′(x)`.
pub fn unary_gradient<T: CpuElement>(op: UnaryKind, x: &[T], dy: &[T], dx: &mut [T]) {
    let (a, b) = (ElementOperand::Chunk(x), ElementOperand::Chunk(dy));
    with_unary_gradient(op, ZipTo { a, b, out: dx });
}

/// `out = op(a, b)`.
pub fn binary<T: CpuElement>(
    op: BinaryKind,
    a: ElementOperand<'_, T>,
    b: ElementOperand<'_, T>,
    out: &mut [T],
) {
    with_binary(op, ZipTo { a, b, out });
}

/// `target = op(target, b)`: adding up gradients, residual connections.
pub fn binary_in_place<T: CpuElement>(op: BinaryKind, target: &mut [T], b: ElementOperand<'_, T>) {
    with_binary(op, ZipInto { target, b });
}

/// `out = op(a, b)`, as bytes 0 and 1.
pub fn compare<T: Ordered>(
    op: CompareKind,
    a: ElementOperand<'_, T>,
    b: ElementOperand<'_, T>,
    out: &mut [u8],
) {
    match op {
        CompareKind::Eq => zip(a, b, out, inlined!(|a, b| u8::from(a.key() == b.key()))),
        CompareKind::Ne => zip(a, b, out, inlined!(|a, b| u8::from(a.key() != b.key()))),
        CompareKind::Lt => zip(a, b, out, inlined!(|a, b| u8::from(a.key() < b.key()))),
        CompareKind::Le => zip(a, b, out, inlined!(|a, b| u8::from(a.key() <= b.key()))),
        CompareKind::Gt => zip(a, b, out, inlined!(|a, b| u8::from(a.key() > b.key()))),
        CompareKind::Ge => zip(a, b, out, inlined!(|a, b| u8::from(a.key() >= b.key()))),
    }
}

/// `out = a` where `mask` is not zero, else `b`.
pub fn select<T: Copy>(
    mask: &[u8],
    a: ElementOperand<'_, T>,
    b: ElementOperand<'_, T>,
    out: &mut [T],
) {
    assert_eq!(mask.len(), out.len());
    match a {
        ElementOperand::Chunk(a) => out.copy_from_slice(a),
        ElementOperand::Scalar(a) => out.fill(a),
    }
    vectorized(inlined!(|| match b {
        ElementOperand::Chunk(b) => {
            assert_eq!(b.len(), out.len());
            for ((out, b), mask) in out.iter_mut().zip(b).zip(mask) {
                *out = if *mask == 0 { *b } else { *out };
            }
        }
        ElementOperand::Scalar(b) => {
            for (out, mask) in out.iter_mut().zip(mask) {
                *out = if *mask == 0 { b } else { *out };
            }
        }
    }));
}

/// `out = x · factor`; the factor keeps the accumulator's precision.
pub fn scale<T: CpuElement>(x: &[T], factor: T::Acc, out: &mut [T]) {
    (MapTo { x, out }).run(inlined!(|x| x * factor));
}

/// `target = target · factor`; the factor keeps the accumulator's precision.
pub fn scale_in_place<T: CpuElement>(target: &mut [T], factor: T::Acc) {
    vectorized(inlined!(|| {
        for x in target {
            *x = T::store(x.load() * factor);
        }
    }));
}

/// `out = x + addend`; the addend keeps the accumulator's precision.
pub fn add_constant<T: CpuElement>(x: &[T], addend: T::Acc, out: &mut [T]) {
    (MapTo { x, out }).run(inlined!(|x| x + addend));
}

/// A type whose elements can be compared.
pub trait Ordered: Copy {
    /// What is compared instead of the element.
    type Key: PartialOrd + Copy;
    /// The element as its key.
    fn key(self) -> Self::Key;
}

macro_rules! ordered_by_value {
    ($($type:ty),*) => {$(
        impl Ordered for $type {
            type Key = $type;

            #[inline(always)]
            fn key(self) -> $type {
                self
            }
        }
    )*};
}

ordered_by_value!(f32, f64, i32, u8);

macro_rules! ordered_as_loaded {
    ($($type:ty),*) => {$(
        impl Ordered for $type {
            type Key = f32;

            #[inline(always)]
            fn key(self) -> f32 {
                self.load()
            }
        }
    )*};
}

ordered_as_loaded!(bf16, f16);

struct MapTo<'a, T> {
    x: &'a [T],
    out: &'a mut [T],
}

impl<T: CpuElement> Loop1<T::Acc> for MapTo<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T::Acc) -> T::Acc) {
        let Self { x, out } = self;
        vectorized(inlined!(|| map1(x, out, inlined!(|x: T| T::store(f(x.load()))))));
    }
}

struct ZipTo<'a, T> {
    a: ElementOperand<'a, T>,
    b: ElementOperand<'a, T>,
    out: &'a mut [T],
}

impl<T: CpuElement> Loop2<T::Acc> for ZipTo<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
        let f = inlined!(|a: T, b: T| T::store(f(a.load(), b.load())));
        zip(self.a, self.b, self.out, f);
    }
}

struct ZipInto<'a, T> {
    target: &'a mut [T],
    b: ElementOperand<'a, T>,
}

impl<T: CpuElement> Loop2<T::Acc> for ZipInto<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
        let Self { target, b } = self;
        vectorized(inlined!(|| match b {
            ElementOperand::Chunk(b) => {
                assert_eq!(target.len(), b.len());
                for (a, b) in target.iter_mut().zip(b) {
                    *a = T::store(f(a.load(), b.load()));
                }
            }
            ElementOperand::Scalar(b) => {
                for a in target.iter_mut() {
                    *a = T::store(f(a.load(), b.load()));
                }
            }
        }));
    }
}

#[inline(always)]
fn zip<A: Copy, B: Copy, O>(
    a: ElementOperand<'_, A>,
    b: ElementOperand<'_, B>,
    out: &mut [O],
    f: impl Fn(A, B) -> O,
) {
    vectorized(inlined!(|| match (a, b) {
        (ElementOperand::Chunk(a), ElementOperand::Chunk(b)) => map2(a, b, out, f),
        (ElementOperand::Chunk(a), ElementOperand::Scalar(b)) =>
            map1(a, out, inlined!(|a| f(a, b))),
        (ElementOperand::Scalar(a), ElementOperand::Chunk(b)) =>
            map1(b, out, inlined!(|b| f(a, b))),
        (ElementOperand::Scalar(a), ElementOperand::Scalar(b)) => {
            out.iter_mut().for_each(|out| *out = f(a, b));
        }
    }));
}

#[inline(always)]
fn map1<A: Copy, O>(a: &[A], out: &mut [O], f: impl Fn(A) -> O) {
    assert_eq!(a.len(), out.len());
    for (out, a) in out.iter_mut().zip(a) {
        *out = f(*a);
    }
}

#[inline(always)]
fn map2<A: Copy, B: Copy, O>(a: &[A], b: &[B], out: &mut [O], f: impl Fn(A, B) -> O) {
    assert_eq!([a.len(), b.len()], [out.len(); 2]);
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = f(*a, *b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::CpuFloat;
    use crate::kernels::testing::{
        assert_close, doubles, normals, numerical_gradient, round, tolerance,
    };

    /// By the standard library, and Φ by integrating its density with Simpson's rule.
    fn naive(op: UnaryKind, x: f64) -> f64 {
        match op {
            UnaryKind::Neg => -x,
            UnaryKind::Exp => x.exp(),
            UnaryKind::Log => x.ln(),
            UnaryKind::Sqrt => x.sqrt(),
            UnaryKind::Rsqrt => x.powf(-0.5),
            UnaryKind::Recip => x.powi(-1),
            UnaryKind::Square => x.powi(2),
            UnaryKind::Tanh => x.tanh(),
            UnaryKind::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            UnaryKind::Relu => x.max(0.0),
            UnaryKind::Gelu => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            UnaryKind::GeluErf => {
                let density = |t: f64| (-t * t / 2.0).exp() / std::f64::consts::TAU.sqrt();
                let n = 1000;
                let h = x / f64::from(2 * n);
                let area: f64 = (0..n)
                    .map(|i| {
                        let t = h * f64::from(2 * i);
                        density(t) + 4.0 * density(t + h) + density(t + 2.0 * h)
                    })
                    .sum();
                x * (0.5 + area * h / 3.0)
            }
            UnaryKind::Silu => x / (1.0 + (-x).exp()),
            UnaryKind::Softplus => x.exp().ln_1p(),
        }
    }

    fn is_defined(op: UnaryKind, x: f64) -> bool {
        let positive =
            matches!(op, UnaryKind::Log | UnaryKind::Sqrt | UnaryKind::Rsqrt | UnaryKind::Recip);
        // Near a pole or a kink, differences say nothing about the derivative.
        !(positive && x < 0.3 || op == UnaryKind::Relu && x.abs() < 1e-3)
    }

    fn unaries_are_right<T: CpuElement>() {
        for op in UnaryKind::ALL {
            let mut x: Vec<T> = normals("x", 203);
            x.retain(|x| is_defined(op, x.load().to_f64()));
            let dy: Vec<T> = normals("dy", x.len());
            let mut out = vec![T::default(); x.len()];
            unary(op, &x, &mut out);
            let want: Vec<f64> = doubles(&x).iter().map(|x| naive(op, *x)).collect();
            assert_close(&out, &want, tolerance::<T>(8.0).max(1e-14));

            unary_gradient(op, &x, &dy, &mut out);
            let slopes = doubles(&x)
                .iter()
                .map(|x| numerical_gradient(&[*x], |x| naive(op, x[0]))[0])
                .collect::<Vec<_>>();
            let want: Vec<f64> = doubles(&dy).iter().zip(slopes).map(|(d, s)| d * s).collect();
            assert_close(&out, &want, tolerance::<T>(16.0).max(1e-8));
        }
    }

    #[test]
    fn unaries_and_their_gradients() {
        unaries_are_right::<f64>();
        unaries_are_right::<f32>();
        unaries_are_right::<bf16>();
    }

    #[test]
    fn far_out_nothing_overflows() {
        let x = [-1e4f32, -100.0, 100.0, 1e4];
        let mut out = [0.0; 4];
        for (op, want) in [
            (UnaryKind::Sigmoid, [0.0, 0.0, 1.0, 1.0]),
            (UnaryKind::Tanh, [-1.0, -1.0, 1.0, 1.0]),
            (UnaryKind::Silu, [0.0, 0.0, 100.0, 1e4]),
            (UnaryKind::Softplus, [0.0, 0.0, 100.0, 1e4]),
            (UnaryKind::Gelu, [0.0, 0.0, 100.0, 1e4]),
            (UnaryKind::GeluErf, [0.0, 0.0, 100.0, 1e4]),
        ] {
            unary(op, &x, &mut out);
            assert_close(&out, &want, 1e-30);
            unary_gradient(op, &x, &[1.0; 4], &mut out);
            assert!(out.iter().all(|v| v.is_finite()), "{op:?}: {out:?}");
        }
    }

    fn binaries_are_right<T: CpuElement>() {
        let (a, b): (Vec<T>, Vec<T>) = (normals("a", 77), normals("b", 77));
        let (s, n) = (round::<T>(0.75), 77);
        for op in BinaryKind::ALL {
            let f = |a: T, b: T| {
                let (a, b) = (a.load().to_f64(), b.load().to_f64());
                match op {
                    BinaryKind::Add => a + b,
                    BinaryKind::Sub => a - b,
                    BinaryKind::Mul => a * b,
                    BinaryKind::Div => a / b,
                    BinaryKind::Max => a.max(b),
                    BinaryKind::Min => a.min(b),
                }
            };
            let mut out = vec![T::default(); n];
            let (ac, bc, sc) = (
                ElementOperand::Chunk(&a[..]),
                ElementOperand::Chunk(&b[..]),
                ElementOperand::Scalar(s),
            );
            for (left, right) in [(ac, bc), (ac, sc), (sc, bc), (sc, sc)] {
                let at = |operand: ElementOperand<'_, T>, i: usize| match operand {
                    ElementOperand::Chunk(values) => values[i],
                    ElementOperand::Scalar(value) => value,
                };
                binary(op, left, right, &mut out);
                let want: Vec<f64> = (0..n).map(|i| f(at(left, i), at(right, i))).collect();
                assert_close(&out, &want, tolerance::<T>(1.001));
                if let ElementOperand::Chunk(left) = left {
                    let mut target = left.to_vec();
                    binary_in_place(op, &mut target, right);
                    assert_eq!(target, out);
                }
            }
        }
        let mut out = vec![T::default(); n];
        scale(&a, T::Acc::from_f64(0.3), &mut out);
        let want: Vec<f64> = doubles(&a).iter().map(|a| a * 0.3).collect();
        assert_close(&out, &want, tolerance::<T>(2.0));
        add_constant(&a, T::Acc::from_f64(0.3), &mut out);
        let want: Vec<f64> = doubles(&a).iter().map(|a| a + 0.3).collect();
        assert_close(&out, &want, tolerance::<T>(2.0));
    }

    #[test]
    fn binaries() {
        binaries_are_right::<f64>();
        binaries_are_right::<f32>();
        binaries_are_right::<bf16>();
    }

    #[test]
    fn a_nan_survives_max_and_min() {
        let (a, b) = ([f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 3.0]);
        for (op, last) in [(BinaryKind::Max, 3.0), (BinaryKind::Min, 2.0)] {
            let mut out = [0.0; 3];
            binary(op, ElementOperand::Chunk(&a), ElementOperand::Chunk(&b), &mut out);
            assert!(out[0].is_nan() && out[1].is_nan() && out[2] == last);
        }
    }

    #[test]
    fn comparisons_and_selection() {
        let (a, b) = ([1, 2, 3, i32::MIN], [2, 2, 2, i32::MAX]);
        for (op, want) in [
            (CompareKind::Eq, [0, 1, 0, 0]),
            (CompareKind::Ne, [1, 0, 1, 1]),
            (CompareKind::Lt, [1, 0, 0, 1]),
            (CompareKind::Le, [1, 1, 0, 1]),
            (CompareKind::Gt, [0, 0, 1, 0]),
            (CompareKind::Ge, [0, 1, 1, 0]),
        ] {
            let mut mask = [9; 4];
            compare(op, ElementOperand::Chunk(&a), ElementOperand::Chunk(&b), &mut mask);
            assert_eq!(mask, want, "{op:?}");
            let narrow = [-1.0, 0.0, 1.0, -8.0].map(bf16::from_f32);
            compare(
                op,
                ElementOperand::Chunk(&narrow),
                ElementOperand::Scalar(bf16::ZERO),
                &mut mask,
            );
            assert_eq!(mask, want, "{op:?}");
            let mut out = [0; 4];
            select(&mask, ElementOperand::Chunk(&a), ElementOperand::Scalar(7), &mut out);
            assert_eq!(out, std::array::from_fn(|i| if want[i] == 1 { a[i] } else { 7 }));
            select(&mask, ElementOperand::Scalar(7), ElementOperand::Chunk(&b), &mut out);
            assert_eq!(out, std::array::from_fn(|i| if want[i] == 1 { 7 } else { b[i] }));
        }
    }
}
