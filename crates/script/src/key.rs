//! Keys of buffers. Names are made from keys, for people, and are never parsed.

use std::fmt;
use std::sync::Arc;

use phalanx_call::Value;

use crate::names::Names;

/// What a buffer holds: one key for each buffer of a script, the same in all scripts of a plan.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum BufferKey {
    /// What a rank keeps of a unit from step to step.
    State(StateKey),
    /// The copy of a state on the disk.
    Saved(StateKey),
    /// A scalar that the host provides, or that is kept between steps.
    Scalar(Scalar),
    /// A scalar that the host provides for one of several updates.
    UpdateScalar {
        /// Which scalar.
        scalar: Scalar,
        /// The update, counted from 0.
        update: usize,
        /// The rounds that such an update takes.
        rounds: usize,
    },
    /// A micro-batch of a data port.
    Data {
        /// The port's name in the model.
        port: Arc<str>,
        /// The micro-batch.
        microbatch: usize,
    },
    /// The key of an instance's random numbers for a micro-batch.
    Random {
        /// The instance's number in the model.
        instance: usize,
        /// The micro-batch.
        microbatch: usize,
    },
    /// What an instance produces for a micro-batch: boundaries, residuals, cotangents, losses,
    /// probes.
    Value(Value),
    /// This rank's slice of a value that another stage group sends in slices.
    Slice(Value),
    /// A value that is kept for another stage group.
    Parked(Value),
    /// A value that another stage group kept, back again.
    Back(Value),
    /// A unit's weights, gathered for runs of the schedule.
    Gathered {
        /// The unit's number.
        unit: usize,
        /// The first run that reads them.
        run: usize,
    },
    /// A unit's gradient from some micro-batches, before it is summed into a shard.
    Formed {
        /// The unit's number.
        unit: usize,
        /// The first of the micro-batches.
        group: usize,
    },
    /// What another stage group, whose mesh has another shape, adds to the gradient of a unit that both have.
    Tied {
        /// The unit's number.
        unit: usize,
        /// The stage group that adds it.
        stage_group: usize,
        /// The update that it is for, counted from 0.
        update: usize,
    },
    /// A number that is computed at the end of a step.
    Number(Number),
    /// A number of one of several steps or, if it is not a result of the step, of one of several updates.
    NumberOf {
        /// Which number.
        number: Number,
        /// The step or the update, counted from 0.
        index: usize,
    },
    /// A buffer of a script that was written by hand.
    Own(Arc<str>),
}

/// Which state of which unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StateKey {
    /// The unit's number.
    pub unit: usize,
    /// Which kind of state.
    pub kind: StateKind,
}

/// What a rank keeps of a unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum StateKind {
    /// What programs read, or a shard of it.
    Weights,
    /// The same as it was so many updates ago, at least one.
    Older(usize),
    /// What the next step probably reads, before the update is certain.
    Preview,
    /// The gradient as the update reads it.
    Gradient,
    /// The wide copy that is updated, if weights are narrow.
    Master,
    /// Optimizer state by index: moments or momentum.
    Optimizer(usize),
}

/// A number that programs read.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Scalar {
    /// The learning rate.
    LearningRate,
    /// The step, counted from 1.
    Step,
    /// One over the count that the loss is averaged over, such as valid targets.
    InverseCount,
    /// One over the samples of a step.
    InverseSamples,
    /// Whether the updates of a step are applied.
    Go,
    /// What losses are multiplied by before the backward.
    LossScale,
    /// Steps since the last overflow, or since the loss scale was doubled.
    GoodSteps,
    /// Overflows that still leave the loss scale as it is, and one more.
    Hysteresis,
    /// Steps whose updates were applied.
    Applied,
    /// The model's own scalar, which the batch provides.
    User(Arc<str>),
}

/// Numbers that are computed at the end of a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Number {
    /// The mean loss of the batch.
    Loss,
    /// The global norm of the gradient.
    GradNorm,
    /// The coefficient by which gradients are multiplied.
    Clip,
    /// Whether all gradients were finite and all rows of experts had room, 1 or 0; otherwise the step changes nothing.
    Go,
    /// How many rows of experts found no room, in layers and micro-batches together.
    Lacking,
    /// The scale that the loss had.
    LossScale,
    /// A stage group's share of loss and squared norm.
    Sums,
}

impl Scalar {
    /// The scalar that a model's port of this name reads.
    pub fn of_port(name: &str) -> Self {
        let known = [
            Scalar::LearningRate,
            Scalar::Step,
            Scalar::InverseCount,
            Scalar::InverseSamples,
            Scalar::Go,
            Scalar::LossScale,
        ];
        let found = known.into_iter().find(|scalar| scalar.name() == name);
        found.unwrap_or_else(|| Scalar::User(name.into()))
    }

    /// The name of the port that reads it.
    pub fn name(&self) -> &str {
        match self {
            Scalar::LearningRate => "lr",
            Scalar::Step => "step",
            Scalar::InverseCount => "inv_tokens",
            Scalar::InverseSamples => "inv_samples",
            Scalar::Go => "go",
            Scalar::LossScale => "loss_scale",
            Scalar::GoodSteps => "good_steps",
            Scalar::Hysteresis => "hysteresis",
            Scalar::Applied => "applied",
            Scalar::User(name) => name,
        }
    }
}

impl Number {
    /// The number that a loss of this name is added to. Only what is added to `Loss` is minimised.
    pub fn of_loss(name: &str) -> Self {
        if name == LACKING { Number::Lacking } else { Number::Loss }
    }
}

/// The loss that tells how many rows of experts found no room.
const LACKING: &str = "experts.lacking";

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateKind::Weights => f.write_str("weights"),
            StateKind::Older(age) => write!(f, "weights-{age}"),
            StateKind::Preview => f.write_str("preview"),
            StateKind::Gradient => f.write_str("gradient"),
            StateKind::Master => f.write_str("master"),
            StateKind::Optimizer(number) => write!(f, "state{number}"),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Number::Loss => "loss",
            Number::GradNorm => "grad_norm",
            Number::Clip => "clip",
            Number::Go => "go",
            Number::Lacking => "lacking",
            Number::LossScale => "loss_scale",
            Number::Sums => "sums",
        })
    }
}

impl BufferKey {
    /// The key of one kind of a unit's state.
    pub fn state(unit: usize, kind: StateKind) -> Self {
        BufferKey::State(StateKey { unit, kind })
    }

    /// In words, such as `blocks.3/h@mb0`.
    pub fn describe<'a>(&'a self, names: &'a Names) -> impl fmt::Display + 'a {
        Described { key: self, names }
    }
}

struct Described<'a> {
    key: &'a BufferKey,
    names: &'a Names,
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, names } = *self;
        match key {
            BufferKey::State(StateKey { unit, kind }) => write!(f, "{}/{kind}", names.unit(*unit)),
            BufferKey::Saved(StateKey { unit, kind }) => {
                write!(f, "{}/{kind}/saved", names.unit(*unit))
            }
            BufferKey::Scalar(scalar) => f.write_str(scalar.name()),
            BufferKey::UpdateScalar { scalar, update, rounds: 1 } => {
                write!(f, "{}@{update}", scalar.name())
            }
            BufferKey::UpdateScalar { scalar, update, rounds } => {
                write!(f, "{}@{update} of {rounds} rounds", scalar.name())
            }
            BufferKey::Data { port, microbatch } => write!(f, "{port}@mb{microbatch}"),
            BufferKey::Random { instance, microbatch } => {
                write!(f, "{}/key@mb{microbatch}", names.instance(*instance))
            }
            BufferKey::Value(value) => names.value(value).fmt(f),
            BufferKey::Slice(value) => write!(f, "{}/slice", names.value(value)),
            BufferKey::Parked(value) => write!(f, "{} parked", names.value(value)),
            BufferKey::Back(value) => write!(f, "{} back", names.value(value)),
            BufferKey::Gathered { unit, run } => {
                write!(f, "{}/gathered@{run}", names.unit(*unit))
            }
            BufferKey::Formed { unit, group } => {
                write!(f, "{}/formed@mb{group}", names.unit(*unit))
            }
            BufferKey::Tied { unit, stage_group, update } => {
                write!(f, "{}/of stage group {stage_group}@{update}", names.unit(*unit))
            }
            BufferKey::Number(number) => number.fmt(f),
            BufferKey::NumberOf { number, index } => write!(f, "{number}@{index}"),
            BufferKey::Own(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_names_for_people() {
        let names = Names {
            instances: vec!["embed".to_owned(), "blocks.0".to_owned()],
            units: vec!["bucket.0".to_owned()],
            ..Names::default()
        };
        let value = Value { instance: 1, port: "h".into(), microbatch: 2, again: true };
        for (key, name) in [
            (BufferKey::state(0, StateKind::Optimizer(1)), "bucket.0/state1"),
            (BufferKey::state(7, StateKind::Weights), "unit 7/weights"),
            (BufferKey::Random { instance: 0, microbatch: 3 }, "embed/key@mb3"),
            (BufferKey::Value(value.clone()), "blocks.0/h@mb2 again"),
            (BufferKey::Parked(Value { again: false, ..value.clone() }), "blocks.0/h@mb2 parked"),
            (BufferKey::Back(Value { again: false, ..value.clone() }), "blocks.0/h@mb2 back"),
            (BufferKey::Slice(Value { again: false, ..value }), "blocks.0/h@mb2/slice"),
            (BufferKey::Scalar(Scalar::of_port("lr")), "lr"),
            (BufferKey::Scalar(Scalar::of_port("warmth")), "warmth"),
        ] {
            assert_eq!(key.describe(&names).to_string(), name);
        }
        assert_eq!(Scalar::of_port("step"), Scalar::Step);
    }
}
