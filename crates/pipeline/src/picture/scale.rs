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

/// The most marks; no picture has room for more.
const MOST: u32 = 10_000;

/// Marks from 0 to `end`, at least `least` apart; at most [`MOST`], and none if `end` is not a
/// number.
pub(super) fn ticks(end: f64, least: f64) -> impl Iterator<Item = f64> {
    let step = step(least);
    let most = if end.is_finite() { MOST } else { 0 };
    (0..most).map(move |k| f64::from(k) * step).take_while(move |tick| *tick <= end * (1.0 + 1e-9))
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

    #[test]
    fn marks_end_whatever_they_are_made_for() {
        let odd = [0.0, -1.0, 5e-324, 1e-310, 1.0, 1e308, f64::INFINITY, f64::NAN];
        for (end, least) in odd.iter().flat_map(|end| odd.map(|least| (*end, least))) {
            assert!(ticks(end, least).count() <= MOST as usize, "{end} {least}");
        }
        assert_eq!(ticks(f64::INFINITY, 1.0).count(), 0);
        assert_eq!(ticks(1e308, 1e307).count(), 11);
    }
}
