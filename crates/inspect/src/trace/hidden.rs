//! How much of the transfers between ranks is hidden: what a traced step says about collectives inside programs.
//!
//! A transfer that was started runs beside computation until its end is waited for. While one is open, a rank
//! computes, moves data itself, or stands still. Ranks that are threads move data between two computations.

use std::fmt;
use std::time::Duration;

use phalanx_engine::{CallPart, PartKind};
use phalanx_session::Trace;

/// What ranks did about transfers inside programs, summed over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HiddenTransfers {
    /// Transfers that ran beside computation.
    pub started: usize,
    /// While at least one was open: time in all.
    pub open: Duration,
    /// Of that: time in which the rank computed.
    pub hidden: Duration,
    /// Of that: time in which it moved data between two computations.
    pub moving: Duration,
    /// Of that: time in which it started them and waited for their ends.
    pub standing: Duration,
    /// Time in transfers that ran beside nothing.
    pub alone: Duration,
}

impl HiddenTransfers {
    /// What a traced step says; nothing from an engine that does not time parts of calls.
    pub fn of(trace: &Trace) -> Self {
        let mut sum = Self::default();
        for traced in trace.ranks.iter().flatten() {
            sum.add(&traced.kernels);
        }
        sum
    }

    /// The share of the time with open transfers in which ranks computed.
    pub fn share(&self) -> f64 {
        self.hidden.as_secs_f64() / self.open.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Adds the parts of one call, in their order.
    fn add(&mut self, parts: &[CallPart]) {
        let (mut open, mut since) = (0_usize, Duration::ZERO);
        for &CallPart { started, ended, kind, .. } in parts {
            let took = ended.saturating_sub(started);
            match kind {
                PartKind::Computes if open > 0 => self.hidden += took,
                PartKind::Computes => {}
                PartKind::Transfers if open == 0 => self.alone += took,
                PartKind::TakesOn => self.moving += took,
                PartKind::Starts | PartKind::Ends | PartKind::Transfers => self.standing += took,
            }
            match kind {
                PartKind::Starts => {
                    since = if open == 0 { started } else { since };
                    (open, self.started) = (open + 1, self.started + 1);
                }
                PartKind::Ends => {
                    open = open.saturating_sub(1);
                    if open == 0 {
                        self.open += ended.saturating_sub(since);
                    }
                }
                PartKind::Computes | PartKind::Transfers | PartKind::TakesOn => {}
            }
        }
    }
}

/// A line of its own; nothing if no transfer could be hidden.
impl fmt::Display for HiddenTransfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let Self { started, open, moving, standing, alone, .. } = *self;
        if started == 0 {
            return Ok(());
        }
        write!(
            f,
            "\n{started} transfers inside programs were open for {:.2} ms, all ranks together: {:.0}% of it was hidden \
             by computation; in the rest ranks moved data ({:.2} ms) and stood still ({:.2} ms); transfers beside \
             nothing: {:.2} ms",
            ms(open),
            100.0 * self.share(),
            ms(moving),
            ms(standing),
            ms(alone)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two transfers that are open together, and one that runs beside nothing.
    #[test]
    fn what_is_computed_meanwhile_is_hidden() {
        let parts = [
            (PartKind::Transfers, 0, 7),
            (PartKind::Starts, 7, 8),
            (PartKind::Computes, 8, 18),
            (PartKind::Starts, 18, 20),
            (PartKind::TakesOn, 20, 23),
            (PartKind::Ends, 23, 24),
            (PartKind::Computes, 24, 44),
            (PartKind::Ends, 44, 48),
            (PartKind::Computes, 48, 100),
        ];
        let ms = Duration::from_millis;
        let part = |(kind, from, to): (PartKind, u64, u64)| CallPart {
            name: String::new(),
            started: ms(from),
            ended: ms(to),
            kind,
        };
        let mut found = HiddenTransfers::default();
        found.add(&parts.map(part));
        let expected = HiddenTransfers {
            started: 2,
            open: ms(41),
            hidden: ms(30),
            moving: ms(3),
            standing: ms(8),
            alone: ms(7),
        };
        assert_eq!(found, expected);
        assert_eq!(found.share(), 30.0 / 41.0);
        assert_eq!(HiddenTransfers::default().share(), 0.0);
    }
}
