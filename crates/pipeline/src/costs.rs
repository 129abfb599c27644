//! How long turns take.

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::flow::Phase;
use crate::schedule::Schedule;
use crate::turn::Turn;
use crate::words::typed;

/// The times of one micro-batch: forward, gradient of the inputs, gradient of the weights.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names of the parts")]
pub struct Times {
    pub f: f64,
    pub b: f64,
    pub w: f64,
}

/// The times of every stage, and of messages between stage groups.
#[derive(Clone, PartialEq, Debug)]
pub struct TurnCosts {
    shares: Shares,
    hop: f64,
}

#[derive(Clone, PartialEq, Debug)]
enum Shares {
    /// All layers that a stage group has of one replica take this long, and each of their chunks an equal part
    /// of it.
    Devices(Times),
    /// Each stage takes this long.
    Stages(Vec<Times>),
}

impl TurnCosts {
    /// The same for all stage groups: `times` is what one micro-batch takes for all layers of a
    /// group (of one replica, if it holds several), of which each of its `v` chunks takes `1/v`. A hop delays the arrival of a message;
    /// no group is busy with it.
    pub fn even(times: Times, hop: f64) -> Result<Self> {
        TurnCosts { shares: Shares::Devices(times), hop }.legal()
    }

    /// Every stage with its own times.
    pub fn uneven(stages: Vec<Times>, hop: f64) -> Result<Self> {
        TurnCosts { shares: Shares::Stages(stages), hop }.legal()
    }

    /// How long a message takes between two stage groups.
    pub fn hop(&self) -> f64 {
        self.hop
    }

    /// The times of each of `p` stages, one to a stage group.
    pub(crate) fn stage_times(&self, p: usize) -> Result<Vec<Times>> {
        match &self.shares {
            Shares::Devices(times) => Ok(vec![*times; p]),
            Shares::Stages(stages) if stages.len() == p => Ok(stages.clone()),
            Shares::Stages(stages) => Err(PipelineError::Costs {
                what: format!("got times of {} stages, but there are {p}", stages.len()),
                help: "give one entry per stage".to_owned(),
            }),
        }
    }

    /// How long a turn of a stage group takes.
    pub(crate) fn of(&self, schedule: &Schedule, stage_group: usize, turn: &Turn) -> f64 {
        let placement = schedule.placement();
        let sum = |times: &Times| -> f64 {
            // A second forward takes as long as the first one.
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
            Shares::Devices(times) => {
                sum(times) / (placement.share(stage_group, turn.chunk) * schedule.pieces()) as f64
            }
            Shares::Stages(stages) => {
                let held = placement.held(stage_group, turn.chunk);
                held.and_then(|held| stages.get(held.stage)).map_or(0.0, sum)
            }
        }
    }

    /// Refuses times for another number of stages than the schedule has.
    pub(crate) fn fit(&self, schedule: &Schedule) -> Result<()> {
        let (needed, name) = (schedule.placement().stages(), schedule.name());
        match &self.shares {
            Shares::Stages(stages) if stages.len() != needed => Err(PipelineError::Costs {
                what: format!("got times of {} stages, but `{name}` has {needed}", stages.len()),
                help: "give one entry per stage; there are stage groups × chunks stages".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// The error if the end of a schedule is too large for a number.
    pub(crate) fn too_long(&self, schedule: &Schedule) -> PipelineError {
        let times = match &self.shares {
            Shares::Devices(Times { f, b, w }) => {
                let [f, b, w] = [*f, *b, *w].map(typed);
                format!("tf = {f}, tb = {b}, tw = {w}")
            }
            Shares::Stages(stages) => {
                let most = stages.iter().map(|Times { f, b, w }| f.max(*b).max(*w));
                format!("times of stages up to {}", typed(most.fold(0.0, f64::max)))
            }
        };
        let (hop, name) = (typed(self.hop), schedule.name());
        // A turn has at most three parts and waits for at most two hops, and at worst nothing overlaps.
        let turns = schedule.all().count() as f64;
        let most = 10_f64.powf((f64::MAX / (5.0 * turns)).log10().floor());
        PipelineError::Costs {
            what: format!("{times}, hop = {hop}: the end of `{name}` is too large for a number"),
            help: format!(
                "the largest number is {:.1e}\n  usual fix: a larger unit, in which no time is \
                above {}",
                f64::MAX,
                typed(most)
            ),
        }
    }

    fn legal(self) -> Result<Self> {
        let stages = match &self.shares {
            Shares::Devices(times) => std::slice::from_ref(times),
            Shares::Stages(stages) => stages,
        };
        for Times { f, b, w } in stages {
            [("tf", *f), ("tb", *b), ("tw", *w)].into_iter().try_for_each(plain)?;
        }
        plain(("hop", self.hop))?;
        if stages.iter().all(|Times { f, b, w }| f + b + w == 0.0) {
            return Err(PipelineError::Costs {
                what: "no part takes any time: tf = tb = tw = 0".to_owned(),
                help: "give at least one of them a time above 0, such as tf = 1".to_owned(),
            });
        }
        Ok(self)
    }
}

/// The shortest time that is not 0: long enough that pictures, which divide by times, do not
/// overflow.
const SHORTEST: f64 = 1e-300;

fn plain((name, time): (&str, f64)) -> Result<()> {
    let shortest = typed(SHORTEST);
    let nearest = match time {
        0.0 | SHORTEST..=f64::MAX => return Ok(()),
        small if small > 0.0 && small < SHORTEST => {
            format!("nearest that work: {name} = 0 or {shortest}")
        }
        negative if negative < 0.0 && negative.is_finite() => {
            format!("nearest that work: {name} = 0")
        }
        _ => format!("usual fix: a plain number, such as {name} = 1"),
    };
    let help = format!("a time is a number, 0 or above\n  {nearest}");
    Err(PipelineError::Costs { what: format!("{name} = {} is not accepted", typed(time)), help })
}
