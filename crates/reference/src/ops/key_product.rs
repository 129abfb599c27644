//! Products of stored scores with keys, from their definition. A whole tensor has all keys, so one step
//! is all of them.

use phalanx_ir::ops::{KeyForm, KeyProduct};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn key_product(
    op: &KeyProduct,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (a, b) = (call.floats(0)?, call.floats(1)?);
    let sizes = Sizes::of(op, call);
    // Scores of all keys are new; sums go on.
    let mut out = match op.goes_on && op.form != KeyForm::Scores {
        true => call.floats(2)?.to_vec(),
        false => vec![0.0; call.elements(0)],
    };
    let Sizes { b: batch, s, h, t, d, .. } = sizes;
    for at in (0..batch * h * s * t).map(|n| [n / t / s / h, n / t / s % h, n / t % s, n % t]) {
        let [x, y, p] = sizes.places(at);
        match op.form {
            KeyForm::Scores => {
                let hidden = op.causal && at[3] + s > at[2] + t;
                let sum = (0..d).map(|i| a[x + i] * b[y + i]).sum();
                out[p] = if hidden { f64::NEG_INFINITY } else { sum };
            }
            KeyForm::Weighted => (0..d).for_each(|i| out[x + i] += a[p] * b[y + i]),
            KeyForm::Sums => (0..d).for_each(|i| out[y + i] += a[p] * b[x + i]),
        }
    }
    Ok(vec![call.result(0, out)])
}

struct Sizes {
    b: usize,
    s: usize,
    h: usize,
    g: usize,
    t: usize,
    d: usize,
}

impl Sizes {
    fn of(op: &KeyProduct, call: &Call<'_>) -> Self {
        let (a, b) = (call.shape(0), call.shape(1));
        let g = op.key_heads;
        match op.form {
            KeyForm::Scores => Self { b: a[0], s: a[1], h: a[2], g, t: b[1], d: a[3] },
            KeyForm::Weighted | KeyForm::Sums => {
                Self { b: a[0], h: a[1], s: a[2], g, t: a[3], d: b[3] }
            }
        }
    }

    /// Where query, key and score of a sequence, head, query and key begin.
    fn places(&self, [b, h, i, j]: [usize; 4]) -> [usize; 3] {
        let x = ((b * self.s + i) * self.h + h) * self.d;
        let y = ((b * self.t + j) * self.g + h * self.g / self.h) * self.d;
        [x, y, ((b * self.h + h) * self.s + i) * self.t + j]
    }
}
