//! How long turns take.

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::flow::Phase;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::simulate::Timeline;
use crate::turn::Turn;

/// The times of one micro-batch: forward, gradient of the inputs, gradient of the weights.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names of the parts")]
pub struct Times {
    pub f: f64,
    pub b: f64,
    pub w: f64,
}

/// The times of every stage, and of the way from one device to another.
#[derive(Clone, PartialEq, Debug)]
pub struct Costs {
    shares: Shares,
    hop: f64,
}

#[derive(Clone, PartialEq, Debug)]
enum Shares {
    /// Each device's whole share takes this long, and each of its chunks an equal part of it.
    Devices(Times),
    /// Each stage takes this long.
    Stages(Vec<Times>),
}

impl Costs {
    /// All devices alike: `times` is what one micro-batch takes for a device's whole share of the
    /// model, of which each of its `v` chunks takes `1/v`. A hop delays arrival and keeps no device
    /// busy.
    pub fn even(times: Times, hop: f64) -> Result<Self> {
        Costs { shares: Shares::Devices(times), hop }.legal()
    }

    /// Every stage with its own times.
    pub fn uneven(stages: Vec<Times>, hop: f64) -> Result<Self> {
        Costs { shares: Shares::Stages(stages), hop }.legal()
    }

    /// Every stage with the median times that its turns had in a timeline, so that one turn that was
    /// held up counts no more than any other. A forward's first and second run are taken together. Where
    /// weights' gradients are not formed apart, all of a backward counts as its B.
    pub fn measured(timeline: &Timeline, hop: f64) -> Result<Self> {
        let all = || timeline.devices.iter().flatten();
        let stages = all().map(|timed| timed.stage + 1).max().unwrap_or(0);
        let usual = |stage: usize, parts: &[Part]| {
            let own = all().filter(|t| t.stage == stage && parts.contains(&t.turn.part));
            median(own.map(|timed| timed.end - timed.start).collect())
        };
        let times = |stage: usize| {
            let whole = || usual(stage, &[Part::BW]).or(usual(stage, &[Part::FBW])).unwrap_or(0.0);
            Times {
                f: usual(stage, &[Part::F, Part::R]).unwrap_or(0.0),
                b: usual(stage, &[Part::B]).unwrap_or_else(whole),
                w: usual(stage, &[Part::W]).unwrap_or(0.0),
            }
        };
        Self::uneven((0..stages).map(times).collect(), hop)
    }

    /// How long a message takes from one device to another.
    pub fn hop(&self) -> f64 {
        self.hop
    }

    /// How long a turn of a device takes.
    pub(crate) fn of(&self, placement: &Placement, device: usize, turn: &Turn) -> f64 {
        let sum = |times: &Times| -> f64 {
            // It finishes nothing that was not done already, and takes as long as the first time.
            let part = if turn.part == Part::R { Part::F } else { turn.part };
            let phases = Phase::of(part).iter();
            phases
                .map(|phase| match phase {
                    Phase::F => times.f,
                    Phase::B => times.b,
                    Phase::W => times.w,
                })
                .sum()
        };
        match &self.shares {
            Shares::Devices(times) => sum(times) / placement.chunks(device) as f64,
            Shares::Stages(stages) => {
                let held = placement.held(device, turn.chunk);
                held.and_then(|held| stages.get(held.stage)).map_or(0.0, sum)
            }
        }
    }

    /// Refuses times for another number of stages than the schedule has.
    pub(crate) fn fit(&self, schedule: &Schedule) -> Result<()> {
        let (needed, name) = (schedule.placement().stages(), schedule.name());
        match &self.shares {
            Shares::Stages(stages) if stages.len() != needed => Err(PipelineError::Costs {
                what: format!("times of {} stages, but `{name}` has {needed}", stages.len()),
                help: "give one entry per stage, which is devices times chunks".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn legal(self) -> Result<Self> {
        let stages = match &self.shares {
            Shares::Devices(times) => std::slice::from_ref(times),
            Shares::Stages(stages) => stages,
        };
        let refuse =
            |what: String, help: &str| Err(PipelineError::Costs { what, help: help.to_owned() });
        let plain = |time: &f64| time.is_finite() && *time >= 0.0;
        for Times { f, b, w } in stages {
            for (name, time) in [("tf", f), ("tb", b), ("tw", w)] {
                if !plain(time) {
                    return refuse(format!("{name} = {time}"), "a time is a number, 0 or above");
                }
            }
        }
        if !plain(&self.hop) {
            return refuse(format!("hop = {}", self.hop), "a time is a number, 0 or above");
        }
        if stages.iter().all(|Times { f, b, w }| f + b + w == 0.0) {
            return refuse(
                "no part takes any time: tf = tb = tw = 0".to_owned(),
                "give at least one of them a time above 0",
            );
        }
        Ok(self)
    }
}

/// The middle one of some times, or what lies halfway between the middle two.
fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    let (low, high) = (times.len().checked_sub(1)? / 2, times.len() / 2);
    Some((times[low] + times[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn one_time_of_many_moves_no_median() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0]), Some(3.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(median(vec![2.0, 100.0, 1.0]), Some(2.0));
    }
}
