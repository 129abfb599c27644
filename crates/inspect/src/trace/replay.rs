//! A traced step, played again from its scripts: with the durations that were measured, and with the
//! usual ones.
//!
//! The first must give the step's own times, because waiting is not a duration: it follows from lanes,
//! dependencies, messages and collectives. The second is the prediction that pictures show: every
//! action takes the median of those that do the same, and no rank begins later than others.

use phalanx_script::{Class, Kind, ScheduledRun};
use phalanx_sim::{ActionTimes, Durations, IssueRule, MeasuredTimes, Playback, play};

use phalanx_error::Result;
use phalanx_session::Trace;

/// A traced step beside what its scripts say, in milliseconds. One rank stands for each class of
/// ranks that do the same.
#[derive(Clone, Debug)]
pub struct Replay {
    /// By class: what was measured; the first issue is 0.
    pub measured: Vec<MeasuredTimes>,
    /// From the first issue to the last end, as it was measured.
    pub step: f64,
    /// The measured durations, without waiting.
    pub durations: Durations,
    /// The scripts with the measured durations.
    pub replayed: Playback,
    /// The scripts with the usual durations.
    pub predicted: Playback,
}

impl Replay {
    /// Plays the scripts of a trace.
    pub fn new(trace: &Trace) -> Result<Self> {
        let classes = trace.classes();
        let own = |class: &Class<'_>| trace.ranks[class.script.rank].iter();
        let all = || classes.iter().flat_map(own).map(|traced| traced.times);
        let origin = all().map(|times| times.issued).min().unwrap_or_default();
        let end = all().map(|times| times.ended).max().unwrap_or_default();
        let ms = |time: std::time::Duration| 1e3 * time.saturating_sub(origin).as_secs_f64();
        let measured = |class: &Class<'_>| {
            let mut times: MeasuredTimes = vec![None; class.script.actions.len()];
            for traced in own(class) {
                let [issued, started, ended] =
                    [traced.times.issued, traced.times.started, traced.times.ended].map(ms);
                times[traced.times.action] = Some(ActionTimes { issued, started, ended });
            }
            times
        };
        let measured: Vec<MeasuredTimes> = classes.iter().map(measured).collect();
        let durations = Durations::traced(&classes, &measured)?;
        let usual = durations.medians(|at| {
            let action = &classes[at.class].script.actions[at.action];
            let bytes = match &action.kind {
                Kind::Send { messages, .. } | Kind::Receive { messages, .. } => {
                    messages.iter().map(|message| message.bytes()).sum()
                }
                _ => 0,
            };
            (at.class, action.lane, action.run().map(|run| run.program), bytes)
        });
        let replayed = play(&classes, &durations, IssueRule::OneThread)?;
        let predicted = play(&classes, &usual, IssueRule::OneThread)?;
        Ok(Self { measured, step: ms(end), durations, replayed, predicted })
    }

    /// How much longer the replayed step is than the measured one, as a share of it.
    pub fn error(&self) -> f64 {
        self.replayed.makespan / self.step - 1.0
    }
}

/// The turns of a script with their times.
pub(super) fn turns<'a>(
    class: &'a Class<'_>,
    times: &'a MeasuredTimes,
) -> impl Iterator<Item = (ScheduledRun, ActionTimes)> + 'a {
    class.script.turns.iter().filter_map(|&(action, turn)| Some((turn, times[action]?)))
}
