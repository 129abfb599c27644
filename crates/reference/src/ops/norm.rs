//! Normalisation of rows, and its gradients by the textbook formulas.

use phalanx_ir::ops::{LayerNorm, RmsNorm};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn rms_norm(op: &RmsNorm, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, gain, n) = (call.floats(0)?, call.floats(1)?, call.width(0));
    let (mut y, mut stats) = (Vec::new(), Vec::new());
    for row in rows(x, n) {
        let rstd = 1.0 / (mean(row.iter().map(|x| x * x), n) + op.eps).sqrt();
        y.extend(row.iter().zip(gain).map(|(x, gain)| x * rstd * gain));
        stats.push(rstd);
    }
    Ok(vec![call.result(0, y), call.result(1, stats)])
}

pub(super) fn rms_norm_grad(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, gain) = (call.floats(0)?, call.floats(1)?);
    let (stats, dy, n) = (call.floats(2)?, call.floats(3)?, call.width(0));
    let (mut dx, mut dgain) = (Vec::new(), vec![0.0; n]);
    for ((x, dy), rstd) in rows(x, n).zip(rows(dy, n)).zip(stats) {
        let unit: Vec<f64> = x.iter().map(|x| x * rstd).collect();
        let scaled: Vec<f64> = dy.iter().zip(gain).map(|(dy, gain)| dy * gain).collect();
        let along = mean(unit.iter().zip(&scaled).map(|(u, s)| u * s), n);
        dx.extend((unit.iter().zip(&scaled)).map(|(u, s)| rstd * (s - u * along)));
        for i in 0..n {
            dgain[i] += dy[i] * unit[i];
        }
    }
    Ok(vec![call.result(0, dx), call.result(1, dgain)])
}

pub(super) fn layer_norm(
    op: &LayerNorm,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, gain, bias) = (call.floats(0)?, call.floats(1)?, call.floats(2)?);
    let n = call.width(0);
    let (mut y, mut means, mut stats) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows(x, n) {
        let middle = mean(row.iter().copied(), n);
        let variance = mean(row.iter().map(|x| (x - middle).powi(2)), n);
        let rstd = 1.0 / (variance + op.eps).sqrt();
        y.extend((0..n).map(|i| (row[i] - middle) * rstd * gain[i] + bias[i]));
        means.push(middle);
        stats.push(rstd);
    }
    let results = [y, means, stats];
    Ok((results.into_iter().enumerate()).map(|(i, values)| call.result(i, values)).collect())
}

pub(super) fn layer_norm_grad(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, gain, n) = (call.floats(0)?, call.floats(1)?, call.width(0));
    let (means, stats, dy) = (call.floats(2)?, call.floats(3)?, call.floats(4)?);
    let (mut dx, mut dgain, mut dbias) = (Vec::new(), vec![0.0; n], vec![0.0; n]);
    for (r, (x, dy)) in rows(x, n).zip(rows(dy, n)).enumerate() {
        let unit: Vec<f64> = x.iter().map(|x| (x - means[r]) * stats[r]).collect();
        let scaled: Vec<f64> = dy.iter().zip(gain).map(|(dy, gain)| dy * gain).collect();
        let flat = mean(scaled.iter().copied(), n);
        let along = mean(unit.iter().zip(&scaled).map(|(u, s)| u * s), n);
        dx.extend((unit.iter().zip(&scaled)).map(|(u, s)| stats[r] * (s - flat - u * along)));
        for i in 0..n {
            dgain[i] += dy[i] * unit[i];
            dbias[i] += dy[i];
        }
    }
    let results = [dx, dgain, dbias];
    Ok((results.into_iter().enumerate()).map(|(i, values)| call.result(i, values)).collect())
}

fn mean(values: impl Iterator<Item = f64>, n: usize) -> f64 {
    values.sum::<f64>() / n as f64
}

fn rows(x: &[f64], n: usize) -> impl Iterator<Item = &[f64]> {
    // Avoids chunks of size zero if rows have no elements.
    x.chunks(n.max(1))
}
