//! Where the time of a run went.

use std::time::Duration;

/// What time was spent for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spent {
    /// Steps that brought the run further, and evaluations.
    Productive,
    /// Steps that had been taken before a failure, and were taken again.
    Redone,
    /// From the last finished step before a failure to the first step after it.
    Recovery,
    /// Steps that waited for a checkpoint.
    Checkpoint,
    /// From the start of the job to its first step, and from the last step to its end.
    Start,
}

impl Spent {
    /// Everything that time is spent for, in printing order.
    pub const ALL: [Spent; 5] =
        [Spent::Productive, Spent::Redone, Spent::Recovery, Spent::Checkpoint, Spent::Start];

    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Spent::Productive => "productive",
            Spent::Redone => "redone",
            Spent::Recovery => "recovery",
            Spent::Checkpoint => "checkpoint",
            Spent::Start => "start",
        }
    }
}

/// The sums, and the furthest step: steps up to there are redone if they are taken once more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ledger {
    spent: [Duration; Spent::ALL.len()],
    furthest: u64,
    /// How many times ranks were started again.
    pub restarts: u64,
}

impl Ledger {
    /// A ledger that goes on from another one's sums.
    pub fn of(spent: [Duration; Spent::ALL.len()], furthest: u64, restarts: u64) -> Self {
        Self { spent, furthest, restarts }
    }

    /// Adds time.
    pub fn add(&mut self, kind: Spent, time: Duration) {
        self.spent[kind as usize] += time;
    }

    /// Adds the time of a step.
    pub fn add_step(&mut self, step: u64, time: Duration) {
        let kind = if step > self.furthest { Spent::Productive } else { Spent::Redone };
        self.furthest = self.furthest.max(step);
        self.add(kind, time);
    }

    /// The time that was spent for something.
    pub fn spent(&self, kind: Spent) -> Duration {
        self.spent[kind as usize]
    }

    /// The furthest step that was taken.
    pub fn furthest(&self) -> u64 {
        self.furthest
    }

    /// All of the time.
    pub fn total(&self) -> Duration {
        self.spent.iter().sum()
    }

    /// The share of time, after the start, that brought the run further.
    pub fn goodput(&self) -> Option<f64> {
        let running = (self.total() - self.spent(Spent::Start)).as_secs_f64();
        (running > 0.0).then(|| self.spent(Spent::Productive).as_secs_f64() / running)
    }

    /// A line for people.
    pub fn line(&self) -> String {
        let seconds = |kind: Spent| self.spent(kind).as_secs_f64();
        let each = Spent::ALL.into_iter().filter(|&kind| seconds(kind) >= 0.05);
        let each: Vec<String> =
            each.map(|kind| format!("{} {:.1} s", kind.name(), seconds(kind))).collect();
        let restarts = match self.restarts {
            0 => String::new(),
            1 => "; 1 restart".to_owned(),
            n => format!("; {n} restarts"),
        };
        let goodput = self.goodput().map_or(0.0, |share| 100.0 * share);
        format!(
            "time   {}{restarts}; {goodput:.1}% of it productive after the start",
            each.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_redone_until_the_furthest_is_reached() {
        let second = Duration::from_secs(1);
        let mut ledger = Ledger::default();
        ledger.add(Spent::Start, second);
        (1..=5).for_each(|step| ledger.add_step(step, second));
        ledger.add(Spent::Recovery, second);
        (4..=8).for_each(|step| ledger.add_step(step, second));
        ledger.restarts = 1;
        let spent = Spent::ALL.map(|kind| ledger.spent(kind).as_secs());
        assert_eq!(spent, [8, 2, 1, 0, 1]);
        assert_eq!((ledger.total().as_secs(), ledger.furthest()), (12, 8));
        assert_eq!(ledger.goodput(), Some(8.0 / 11.0));
        assert_eq!(
            ledger.line(),
            "time   productive 8.0 s, redone 2.0 s, recovery 1.0 s, start 1.0 s; 1 restart; 72.7% of \
             it productive after the start"
        );
    }

    #[test]
    fn a_run_without_time_has_no_share() {
        assert_eq!(Ledger::default().goodput(), None);
    }
}
