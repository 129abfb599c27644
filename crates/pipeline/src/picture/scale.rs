//! Round numbers for an axis.

/// The smallest of 1, 2, 5, 10, 20… times a power of ten that is not below `least`.
pub(super) fn step(least: f64) -> f64 {
    if !(least.is_finite() && least > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    factors
        .into_iter()
        .map(|f| f * power)
        .find(|s| *s >= least * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

/// Marks from 0 to `end`, at least `least` apart.
pub(super) fn ticks(end: f64, least: f64) -> impl Iterator<Item = f64> {
    let step = step(least);
    (0_u32..).map(move |k| f64::from(k) * step).take_while(move |tick| *tick <= end * (1.0 + 1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_not_too_close() {
        assert_eq!([0.3, 1.0, 1.1, 3.0, 70.0].map(step), [0.5, 1.0, 2.0, 5.0, 100.0]);
        assert_eq!(ticks(22.0, 4.0).collect::<Vec<_>>(), [0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!(step(0.0), 1.0);
    }
}
