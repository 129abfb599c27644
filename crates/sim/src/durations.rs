//! How long actions take: given by a rule, or found in a traced step.
//!
//! What a trace tells of an action is when it was issued, began and ended. Its duration is what is
//! left without waiting for others: from the moment at which everything that takes part had begun
//! to its end. The time that the issuing thread needs between two actions is the first one's, too.

use phalanx_script::{Action, ActionAt, Class, Kind, ScriptError, meetings};

use crate::play::{ActionTimes, holds_thread};

/// The time that an action takes, in any unit.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ActionDuration {
    /// From when it, and all that takes part in it, has begun to its end.
    pub work: f64,
    /// What the thread that issues it spends on it besides, before it issues the next.
    pub issue: f64,
}

/// How long every action takes, and when ranks begin.
#[derive(Clone, PartialEq, Debug)]
pub struct Durations {
    /// For each class of ranks: when it begins.
    pub begins: Vec<f64>,
    /// For each class, for each action of its script.
    pub actions: Vec<Vec<ActionDuration>>,
}

/// When actions of a class of ranks happened: none for actions that call nothing.
pub type MeasuredTimes = Vec<Option<ActionTimes>>;

impl Durations {
    /// Durations by a rule; all ranks begin at 0, and issuing takes no time.
    pub fn given(classes: &[Class<'_>], work: impl Fn(usize, &Action) -> f64) -> Self {
        let of = |(number, class): (usize, &Class<'_>)| {
            let duration = |action| ActionDuration { work: work(number, action), issue: 0.0 };
            class.script.actions.iter().map(duration).collect()
        };
        Self {
            begins: vec![0.0; classes.len()],
            actions: classes.iter().enumerate().map(of).collect(),
        }
    }

    /// What a traced step says, by class.
    ///
    /// # Panics
    /// If there are not as many times as actions.
    pub fn traced(classes: &[Class<'_>], times: &[MeasuredTimes]) -> Result<Self, ScriptError> {
        let fits =
            |(class, own): (&Class<'_>, &MeasuredTimes)| class.script.actions.len() == own.len();
        assert!(
            classes.len() == times.len() && classes.iter().zip(times).all(fits),
            "a trace tells of every action of every class"
        );
        // From when on each action works: its own start, or the last of those that take part in it.
        let start = |at: ActionAt| times[at.class][at.action].map(|own| own.started);
        let mut from: Vec<Vec<Option<f64>>> = times
            .iter()
            .map(|own| own.iter().map(|times| times.map(|times| times.started)).collect())
            .collect();
        for members in meetings(classes)? {
            let last = members.iter().filter_map(|&at| start(at)).fold(f64::NEG_INFINITY, f64::max);
            for at in members {
                let own = &mut from[at.class][at.action];
                *own = own.map(|own| own.max(last));
            }
        }
        let mut actions: Vec<Vec<ActionDuration>> = Vec::with_capacity(classes.len());
        for ((class, times), from) in classes.iter().zip(times).zip(&from) {
            actions.push(own_durations(class, times, from));
        }
        let begin = |own: &MeasuredTimes| {
            own.iter().flatten().map(|times| times.issued).fold(f64::INFINITY, f64::min)
        };
        let begins: Vec<f64> = times.iter().map(begin).collect();
        let first = begins.iter().copied().fold(f64::INFINITY, f64::min);
        let since = |begin: f64| if begin.is_finite() { begin - first } else { 0.0 };
        Ok(Self { begins: begins.into_iter().map(since).collect(), actions })
    }

    /// How long an action takes.
    pub fn of(&self, at: ActionAt) -> ActionDuration {
        self.actions[at.class][at.action]
    }

    /// Every duration replaced by the median of those that `alike` gives the same key: what a step
    /// takes in which nothing is by chance longer than usual. All ranks begin at 0.
    pub fn medians<K: Ord>(&self, alike: impl Fn(ActionAt) -> K) -> Self {
        let mut found: std::collections::BTreeMap<K, [Vec<f64>; 2]> = Default::default();
        let places = || {
            let classes = self.actions.iter().enumerate();
            classes.flat_map(|(class, own)| {
                (0..own.len()).map(move |action| ActionAt { class, action })
            })
        };
        for at in places() {
            let ActionDuration { work, issue } = self.of(at);
            let [works, issues] = found.entry(alike(at)).or_default();
            works.push(work);
            issues.push(issue);
        }
        for list in found.values_mut().flatten() {
            list.sort_by(f64::total_cmp);
        }
        let mut medians =
            Self { begins: vec![0.0; self.begins.len()], actions: self.actions.clone() };
        for at in places() {
            let [work, issue] = [0, 1].map(|which| {
                let list = &found[&alike(at)][which];
                list[list.len() / 2]
            });
            medians.actions[at.class][at.action] = ActionDuration { work, issue };
        }
        medians
    }
}

/// The durations of one class's actions.
fn own_durations(
    class: &Class<'_>,
    times: &MeasuredTimes,
    from: &[Option<f64>],
) -> Vec<ActionDuration> {
    let actions = &class.script.actions;
    let mut found = vec![ActionDuration::default(); actions.len()];
    // The next action that something was called for.
    let mut next: Option<f64> = None;
    for (number, action) in actions.iter().enumerate().rev() {
        let (Some(times), Some(from)) = (times[number], from[number]) else { continue };
        debug_assert!(!matches!(action.kind, Kind::Release { .. }), "nothing is called for it");
        let free = if holds_thread(class.script, action) { times.ended } else { times.started };
        found[number] = ActionDuration {
            work: (times.ended - from).max(0.0),
            issue: next.map_or(0.0, |next| (next - free).max(0.0)),
        };
        next = Some(times.issued);
    }
    found
}
