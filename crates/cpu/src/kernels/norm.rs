//! Normalisation of rows by their root mean square, or by their mean and standard deviation.
//!
//! Slices whose lengths do not fit each other are a mistake of the caller and panic.
//! Statistics are computed and kept in the accumulator type; a result is rounded once. Gradients of
//! the gains are this thread's part: the caller sums the parts of all threads in a fixed order.

use super::inlined::inlined;
use super::lanes::lane_sum;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// `y = x / sqrt(mean(x²) + eps) · gamma` for every row of `x`; keeps each row's factor in `rstd`.
///
/// There are as many rows as elements of `rstd`, each as long as `gamma`.
pub fn rms_norm<T: CpuElement>(x: &[T], gamma: &[T], eps: f64, y: &mut [T], rstd: &mut [T::Acc]) {
    let d = gamma.len();
    assert_eq!([x.len(), y.len()], [rstd.len() * d; 2]);
    vectorized(inlined!(|| {
        let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
        for ((x, y), rstd) in rows.zip(rstd) {
            let squares = lane_sum([x], inlined!(|[x]| x * x));
            *rstd = inverse_root(squares, d, eps);
            rms_row(x, gamma, *rstd, y);
        }
    }));
}

/// The gradients of [`rms_norm`]: sets `dx`, and adds these rows' part of the gain's gradient to
/// `dgamma`.
pub fn rms_norm_gradient<T: CpuElement>(
    x: &[T],
    gamma: &[T],
    rstd: &[T::Acc],
    dy: &[T],
    dx: &mut [T],
    dgamma: &mut [T::Acc],
) {
    let d = gamma.len();
    assert_eq!([x.len(), dy.len(), dx.len()], [rstd.len() * d; 3]);
    assert_eq!(dgamma.len(), d);
    vectorized(inlined!(|| {
        let given = x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(rstd);
        for (((x, dy), &rstd), dx) in given.zip(dx.chunks_exact_mut(d)) {
            let product = lane_sum([x, dy, gamma], inlined!(|[x, dy, g]| x * (dy * g)));
            let shrink = rstd * rstd * product / T::Acc::from_f64(d as f64);
            rms_gradient_row([x, gamma, dy], rstd, shrink, dx, dgamma);
        }
    }));
}

/// `y = (x − mean) / sqrt(variance + eps) · gamma + beta` for every row of `x`; keeps each row's
/// mean and factor.
pub fn layer_norm<T: CpuElement>(
    x: &[T],
    gamma: &[T],
    beta: &[T],
    eps: f64,
    y: &mut [T],
    mean: &mut [T::Acc],
    rstd: &mut [T::Acc],
) {
    let d = gamma.len();
    assert_eq!([x.len(), y.len()], [rstd.len() * d; 2]);
    assert_eq!([mean.len(), beta.len()], [rstd.len(), d]);
    vectorized(inlined!(|| {
        let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
        for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
            let centre = lane_sum([x], inlined!(|[x]| x)) / T::Acc::from_f64(d as f64);
            let squares = lane_sum([x], inlined!(|[x]| (x - centre) * (x - centre)));
            *mean = centre;
            *rstd = inverse_root(squares, d, eps);
            layer_row([x, gamma, beta], centre, *rstd, y);
        }
    }));
}

/// What the forward pass of [`layer_norm`] had and kept.
#[derive(Clone, Copy)]
pub struct LayerNormed<'a, T: CpuElement> {
    /// The rows that were normalised.
    pub x: &'a [T],
    /// The gain.
    pub gamma: &'a [T],
    /// Each row's mean.
    pub mean: &'a [T::Acc],
    /// Each row's factor.
    pub rstd: &'a [T::Acc],
}

/// The gradients of [`layer_norm`]: sets `dx`, and adds these rows' part of the gradients of gain
/// and shift to `dgamma` and `dbeta`.
pub fn layer_norm_gradient<T: CpuElement>(
    forward: LayerNormed<'_, T>,
    dy: &[T],
    dx: &mut [T],
    dgamma: &mut [T::Acc],
    dbeta: &mut [T::Acc],
) {
    let LayerNormed { x, gamma, mean, rstd } = forward;
    let d = gamma.len();
    let count = T::Acc::from_f64(d as f64);
    assert_eq!([x.len(), dy.len(), dx.len()], [rstd.len() * d; 3]);
    assert_eq!([mean.len(), dgamma.len(), dbeta.len()], [rstd.len(), d, d]);
    vectorized(inlined!(|| {
        let given = x.chunks_exact(d).zip(dy.chunks_exact(d));
        let rows = given.zip(mean.iter().zip(rstd)).zip(dx.chunks_exact_mut(d));
        for (((x, dy), (&mean, &rstd)), dx) in rows {
            let sum = lane_sum([dy, gamma], inlined!(|[dy, g]| dy * g));
            let product =
                lane_sum([x, dy, gamma], inlined!(|[x, dy, g]| (x - mean) * rstd * (dy * g)));
            let means = [sum / count, product / count];
            layer_gradient_row([x, gamma, dy], [mean, rstd], means, dx, dgamma, dbeta);
        }
    }));
}

#[inline(always)]
pub(super) fn rms_row<T: CpuElement>(x: &[T], gamma: &[T], rstd: T::Acc, y: &mut [T]) {
    for ((y, x), gamma) in y.iter_mut().zip(x).zip(gamma) {
        *y = T::store(x.load() * rstd * gamma.load());
    }
}

#[inline(always)]
pub(super) fn rms_gradient_row<T: CpuElement>(
    [x, gamma, dy]: [&[T]; 3],
    rstd: T::Acc,
    shrink: T::Acc,
    dx: &mut [T],
    dgamma: &mut [T::Acc],
) {
    let given = x.iter().zip(gamma).zip(dy);
    for (((x, gamma), dy), (dx, dgamma)) in given.zip(dx.iter_mut().zip(dgamma)) {
        let (x, dy) = (x.load(), dy.load());
        *dx = T::store(rstd * (dy * gamma.load() - x * shrink));
        *dgamma += dy * (x * rstd);
    }
}

#[inline(always)]
pub(super) fn layer_row<T: CpuElement>(
    [x, gamma, beta]: [&[T]; 3],
    mean: T::Acc,
    rstd: T::Acc,
    y: &mut [T],
) {
    for ((y, x), (gamma, beta)) in y.iter_mut().zip(x).zip(gamma.iter().zip(beta)) {
        *y = T::store((x.load() - mean) * rstd * gamma.load() + beta.load());
    }
}

/// `sum` and `product` are the means, over the row, of `dy · gamma` and of that times the
/// normalised `x`.
#[inline(always)]
pub(super) fn layer_gradient_row<T: CpuElement>(
    [x, gamma, dy]: [&[T]; 3],
    [mean, rstd]: [T::Acc; 2],
    [sum, product]: [T::Acc; 2],
    dx: &mut [T],
    dgamma: &mut [T::Acc],
    dbeta: &mut [T::Acc],
) {
    let given = x.iter().zip(gamma).zip(dy);
    let results = dx.iter_mut().zip(dgamma.iter_mut().zip(dbeta));
    for (((x, gamma), dy), (dx, (dgamma, dbeta))) in given.zip(results) {
        let (dy, normed) = (dy.load(), (x.load() - mean) * rstd);
        *dx = T::store(rstd * (dy * gamma.load() - sum - normed * product));
        *dgamma += dy * normed;
        *dbeta += dy;
    }
}

#[inline(always)]
pub(super) fn inverse_root<A: CpuFloat>(squares: A, d: usize, eps: f64) -> A {
    A::ONE / (squares / A::from_f64(d as f64) + A::from_f64(eps)).sqrt()
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{
        assert_close, dot, doubles, normals, numerical_gradient, tolerance,
    };
    use super::*;

    const EPS: f64 = 1e-5;

    fn naive_rms(x: &[f64], gamma: &[f64]) -> Vec<f64> {
        naive_layer(x, gamma, &vec![0.0; gamma.len()], false)
    }

    fn naive_layer(x: &[f64], gamma: &[f64], beta: &[f64], centred: bool) -> Vec<f64> {
        let d = gamma.len() as f64;
        let mut y = Vec::new();
        for row in x.chunks(gamma.len()) {
            let mean = if centred { row.iter().sum::<f64>() / d } else { 0.0 };
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d;
            for (x, (g, b)) in row.iter().zip(gamma.iter().zip(beta)) {
                y.push((x - mean) / (variance + EPS).sqrt() * g + b);
            }
        }
        y
    }

    fn forward_is_right<T: CpuElement>() {
        for (rows, d) in [(3, 5), (2, 64), (4, 201)] {
            let x: Vec<T> = normals("x", rows * d);
            let gamma: Vec<T> = normals("gamma", d);
            let beta: Vec<T> = normals("beta", d);
            let mut y = vec![T::default(); rows * d];
            let (mut mean, mut rstd) = (vec![T::Acc::ZERO; rows], vec![T::Acc::ZERO; rows]);
            rms_norm(&x, &gamma, EPS, &mut y, &mut rstd);
            let want = naive_rms(&doubles(&x), &doubles(&gamma));
            assert_close(&y, &want, tolerance::<T>(8.0));
            layer_norm(&x, &gamma, &beta, EPS, &mut y, &mut mean, &mut rstd);
            let want = naive_layer(&doubles(&x), &doubles(&gamma), &doubles(&beta), true);
            assert_close(&y, &want, tolerance::<T>(8.0));
        }
    }

    #[test]
    fn forward() {
        forward_is_right::<f64>();
        forward_is_right::<f32>();
        forward_is_right::<bf16>();
    }

    fn gradients_are_right<T: CpuElement>() {
        let (rows, d) = (3, 70);
        let x: Vec<T> = normals("x", rows * d);
        let gamma: Vec<T> = normals("gamma", d);
        let beta: Vec<T> = normals("beta", d);
        let dy: Vec<T> = normals("dy", rows * d);
        let [x64, gamma64, beta64, dy64] = [&x, &gamma, &beta, &dy].map(|v| doubles(v));
        let mut y = vec![T::default(); rows * d];
        let mut dx = y.clone();
        let [mut mean, mut rstd] = [(); 2].map(|()| vec![T::Acc::ZERO; rows]);
        // Parts are added, so what was there before must still be in the sum.
        let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![T::Acc::ONE; d]);
        let limit = tolerance::<T>(16.0).max(1e-8);
        let plus_one = |v: Vec<f64>| v.iter().map(|v| v + 1.0).collect::<Vec<_>>();

        rms_norm(&x, &gamma, EPS, &mut y, &mut rstd);
        rms_norm_gradient(&x, &gamma, &rstd, &dy, &mut dx, &mut dgamma);
        let want = numerical_gradient(&x64, |x| dot(&naive_rms(x, &gamma64), &dy64));
        assert_close(&dx, &want, limit);
        let want = numerical_gradient(&gamma64, |g| dot(&naive_rms(&x64, g), &dy64));
        assert_close(&dgamma, &plus_one(want), limit);

        dgamma.fill(T::Acc::ONE);
        layer_norm(&x, &gamma, &beta, EPS, &mut y, &mut mean, &mut rstd);
        let forward = LayerNormed { x: &x, gamma: &gamma, mean: &mean, rstd: &rstd };
        layer_norm_gradient(forward, &dy, &mut dx, &mut dgamma, &mut dbeta);
        let loss = |x: &[f64], g: &[f64], b: &[f64]| dot(&naive_layer(x, g, b, true), &dy64);
        let want = numerical_gradient(&x64, |x| loss(x, &gamma64, &beta64));
        assert_close(&dx, &want, limit);
        let want = numerical_gradient(&gamma64, |g| loss(&x64, g, &beta64));
        assert_close(&dgamma, &plus_one(want), limit);
        let want = numerical_gradient(&beta64, |b| loss(&x64, &gamma64, b));
        assert_close(&dbeta, &plus_one(want), limit);
    }

    #[test]
    fn gradients() {
        gradients_are_right::<f64>();
        gradients_are_right::<f32>();
        gradients_are_right::<bf16>();
    }
}
