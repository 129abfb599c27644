//! Rows of which a rank holds a part: the few numbers of each part, their merge, and the finish.
//!
//! Every rank merges the numbers of all parts in one order, so all find the same bits. A part may
//! be empty; its numbers then change nothing.

use super::inlined::inlined;
use super::lanes::lane_sum;
use super::{norm, row, softmax};
use crate::element::{CpuElement, CpuFloat, vectorized};

/// The most numbers that a row is reduced to.
pub const MOST: usize = 3;

/// The numbers of a row or a part of one; those that an op does not need are zero.
pub type Numbers<A> = [A; MOST];

/// The sum of squares.
pub fn squares<T: CpuElement>(x: &[T]) -> Numbers<T::Acc> {
    one(vectorized(inlined!(|| lane_sum([x], inlined!(|[x]| x * x)))))
}

/// The mean, and the sum of squares around it.
pub fn moments<T: CpuElement>(x: &[T]) -> Numbers<T::Acc> {
    if x.is_empty() {
        return [T::Acc::ZERO; MOST];
    }
    vectorized(inlined!(|| {
        let mean = lane_sum([x], inlined!(|[x]| x)) / T::Acc::from_f64(x.len() as f64);
        let around = lane_sum([x], inlined!(|[x]| (x - mean) * (x - mean)));
        [mean, around, T::Acc::ZERO]
    }))
}

/// The maximum, the sum of exponentials relative to it, and one element if the part holds it.
pub fn exponentials<T: CpuElement>(x: &[T], chosen: Option<usize>) -> Numbers<T::Acc> {
    let (max, sum) = vectorized(inlined!(|| row::maximum_and_sum_of_exp(x)));
    [max, sum, chosen.map_or(T::Acc::ZERO, |i| x[i].load())]
}

/// The inner product of two rows.
pub fn product<T: CpuElement>(a: &[T], b: &[T]) -> Numbers<T::Acc> {
    one(vectorized(inlined!(|| row::dot(a, b))))
}

/// The sum of x·dy·gain.
pub fn rms_gradient<T: CpuElement>([x, gamma, dy]: [&[T]; 3]) -> Numbers<T::Acc> {
    one(vectorized(inlined!(|| { lane_sum([x, dy, gamma], inlined!(|[x, dy, g]| x * (dy * g))) })))
}

/// The sums of dy·gain and of that times the normalised x.
pub fn layer_gradient<T: CpuElement>(
    [x, gamma, dy]: [&[T]; 3],
    [mean, rstd]: [T::Acc; 2],
) -> Numbers<T::Acc> {
    vectorized(inlined!(|| {
        let sum = lane_sum([dy, gamma], inlined!(|[dy, g]| dy * g));
        let product = lane_sum([x, dy, gamma], inlined!(|[x, dy, g]| (x - mean) * rstd * (dy * g)));
        [sum, product, T::Acc::ZERO]
    }))
}

/// How the numbers of two parts become those of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// All are sums.
    Add,
    /// Those of [`moments`], which need to know how many elements they stand for.
    Moments,
    /// Those of [`exponentials`].
    Exponentials,
}

impl Merge {
    /// The numbers of all parts, each given with its count of elements.
    pub fn all<A: CpuFloat>(self, parts: impl Iterator<Item = (usize, Numbers<A>)>) -> Numbers<A> {
        let merged = parts.reduce(|(n, a), (m, b)| (n + m, self.two((n, a), (m, b))));
        merged.map_or([A::ZERO; MOST], |(_, numbers)| numbers)
    }

    fn two<A: CpuFloat>(
        self,
        (n, a): (usize, Numbers<A>),
        (m, b): (usize, Numbers<A>),
    ) -> Numbers<A> {
        match self {
            Merge::Add => std::array::from_fn(|i| a[i] + b[i]),
            Merge::Moments if m == 0 => a,
            Merge::Moments => {
                let share = A::from_f64(m as f64 / (n + m) as f64);
                let apart = b[0] - a[0];
                let around = apart * apart * A::from_f64(n as f64) * share;
                [a[0] + apart * share, a[1] + b[1] + around, A::ZERO]
            }
            Merge::Exponentials => {
                let max = super::elementwise::larger(a[0], b[0]);
                let sum = a[1] * (a[0] - max).exp() + b[1] * (b[0] - max).exp();
                [max, sum, a[2] + b[2]]
            }
        }
    }
}

/// `y = x · rstd · gain`; gives rstd, of a whole row of `d` elements.
pub fn rms_norm<T: CpuElement>(
    [x, gamma]: [&[T]; 2],
    d: usize,
    eps: f64,
    numbers: Numbers<T::Acc>,
    y: &mut [T],
) -> T::Acc {
    let rstd = norm::inverse_root(numbers[0], d, eps);
    vectorized(
        #[inline(always)]
        || norm::rms_row(x, gamma, rstd, y),
    );
    rstd
}

/// `y = (x − mean) · rstd · gain + bias`; gives mean and rstd, of a whole row of `d` elements.
pub fn layer_norm<T: CpuElement>(
    given: [&[T]; 3],
    d: usize,
    eps: f64,
    numbers: Numbers<T::Acc>,
    y: &mut [T],
) -> [T::Acc; 2] {
    let (mean, rstd) = (numbers[0], norm::inverse_root(numbers[1], d, eps));
    vectorized(
        #[inline(always)]
        || norm::layer_row(given, mean, rstd, y),
    );
    [mean, rstd]
}

/// dx of a part of a row of `d` elements; adds its part of the gain's gradient.
pub fn rms_norm_gradient<T: CpuElement>(
    given: [&[T]; 3],
    d: usize,
    rstd: T::Acc,
    numbers: Numbers<T::Acc>,
    dx: &mut [T],
    dgamma: &mut [T::Acc],
) {
    let shrink = rstd * rstd * numbers[0] / T::Acc::from_f64(d as f64);
    vectorized(
        #[inline(always)]
        || norm::rms_gradient_row(given, rstd, shrink, dx, dgamma),
    );
}

/// dx of a part of a row of `d` elements; adds its part of the gradients of gain and shift.
pub fn layer_norm_gradient<T: CpuElement>(
    given: [&[T]; 3],
    d: usize,
    statistics: [T::Acc; 2],
    numbers: Numbers<T::Acc>,
    dx: &mut [T],
    [dgamma, dbeta]: [&mut [T::Acc]; 2],
) {
    let count = T::Acc::from_f64(d as f64);
    let means = [numbers[0] / count, numbers[1] / count];
    vectorized(
        #[inline(always)]
        || norm::layer_gradient_row(given, statistics, means, dx, dgamma, dbeta),
    );
}

/// `exp(x) / Σ exp(x)`.
pub fn softmax<T: CpuElement>(x: &[T], numbers: Numbers<T::Acc>, out: &mut [T]) {
    vectorized(
        #[inline(always)]
        || softmax::softmax_row(x, numbers[0], T::Acc::ONE / numbers[1], out),
    );
}

/// `y · (dy − Σ y·dy)`.
pub fn softmax_gradient<T: CpuElement>([y, dy]: [&[T]; 2], numbers: Numbers<T::Acc>, dx: &mut [T]) {
    vectorized(
        #[inline(always)]
        || softmax::gradient_row(y, dy, numbers[0], dx),
    );
}

fn one<A: CpuFloat>(number: A) -> Numbers<A> {
    [number, A::ZERO, A::ZERO]
}

#[cfg(test)]
mod tests {
    use super::super::testing::normals;
    use super::*;

    /// The numbers of a row in pieces, empty ones among them, are those of the row.
    #[test]
    fn merged_parts_are_the_whole() {
        let x: Vec<f64> = normals("x", 100);
        let cuts = [0..0, 0..30, 30..31, 31..31, 31..100, 100..100];
        let check = |merge: Merge, of: &dyn Fn(&[f64]) -> Numbers<f64>| {
            let parts = cuts.iter().map(|cut| (cut.len(), of(&x[cut.clone()])));
            let merged = merge.all(parts);
            for (got, want) in merged.iter().zip(of(&x)) {
                assert!((got - want).abs() < 1e-12 * (1.0 + want.abs()), "{merge:?} {got} {want}");
            }
        };
        check(Merge::Add, &|x| squares(x));
        check(Merge::Moments, &|x| moments(x));
        check(Merge::Exponentials, &|x| exponentials(x, None));
        let nothing: Numbers<f64> = Merge::Exponentials.all(std::iter::empty());
        assert_eq!(nothing, [0.0; MOST]);
    }
}
