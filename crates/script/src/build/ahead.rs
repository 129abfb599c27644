//! Steps that do not wait for the norm of the step before: zero bubble's post-validation (Qi et al., 2024), without a
//! rollback.
//!
//! A step that clips by the global norm ends with a moment at which all stage groups wait for each other, although
//! gradients are rarely clipped. Here a group goes on at once. At the end of a step it computes only the weights that the next
//! forwards read, as if nothing were clipped (the *preview*), and leaves gradients and state as they are. The sums of all
//! groups are added while the next step's first forwards run; before a group's first backward, which would overwrite
//! its gradients, it does the update itself with the coefficient that was found (the *commit*). If that is one, the preview
//! had the same bits. If not, the forwards read wrong weights, and the host runs that step again, from weights that are
//! right: nothing has to be taken back.
//!
//! It costs a second read of the optimizer state per step, and a second buffer of weights.

use phalanx_ir::ops::CompareKind;

use super::finish::{self, push, whole};
use super::norm::{self, StepNumbers};
use super::update::Results;
use super::versions::VersionPlaces;
use super::{
    Action, Buffer, BufferId, BufferKey, Builder, Category, Kind, Lane, Role, Run, Script,
    ScriptError, Source, State, TensorType, Tier, TrainingScript, Write,
};
use crate::key::{Number, Scalar};
use crate::schedule::{Part, ScheduledRun};

/// Which ends of a step are put off.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AheadPart {
    /// The first of several steps: it ends with a preview.
    First,
    /// It commits the step before, and ends with a preview.
    Middle,
    /// The last one: it commits the step before, and updates as any other step, unless its forwards were wrong.
    Last,
}

/// What a rank keeps from a preview to its commit, besides previewed weights and gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pending {
    /// The stage group's loss and squares.
    sums: BufferId,
    lr: BufferId,
    step: BufferId,
}

impl Pending {
    /// Buffers for it.
    pub(super) fn keep(script: &mut Script, training: &TrainingScript<'_>) -> Self {
        let size = training.precision.state.size();
        let mut kept = |key, bytes| {
            let (source, category, padding) = (Source::State, Category::Optimizer, vec![]);
            script.buffer(Buffer { key, category, bytes, source, tier: Tier::Device, padding })
        };
        let number = |number| BufferKey::NumberOf { number, index: 0 };
        Self {
            sums: kept(number(Number::Sums), 2 * size),
            lr: kept(BufferKey::Own("pending lr".into()), size),
            step: kept(BufferKey::Own("pending step".into()), size),
        }
    }
}

/// Puts the commit of the step before and the preview of this one into a script.
pub(super) struct Ahead<'a> {
    training: TrainingScript<'a>,
    state: &'a State,
    pending: Pending,
    pub(super) part: AheadPart,
    /// The sums over all stage groups, until they are used.
    summed: Option<BufferId>,
    /// Whether the weights that this step reads were right.
    valid: Option<BufferId>,
}

impl<'a> Ahead<'a> {
    /// Starts adding up the sums of the step before; it ends beside the first forwards.
    pub(super) fn start(
        training: &TrainingScript<'a>,
        state: &'a State,
        part: AheadPart,
        script: &mut Script,
    ) -> Result<Self, ScriptError> {
        let pending = state.pending.ok_or_else(|| {
            ScriptError::Schedule("a step goes ahead, but its world does not preview".to_owned())
        })?;
        let mut own = Self { training: *training, state, pending, part, summed: None, valid: None };
        if part.commits() {
            own.summed = Some(own.sum(script)?);
        }
        Ok(own)
    }

    /// Before a stage group's first backward: the norm, and the update of the step before.
    pub(super) fn before(
        &mut self,
        turn: ScheduledRun,
        script: &mut Script,
        versions: &mut VersionPlaces<'_>,
    ) -> Result<(), ScriptError> {
        let Some(summed) = self.summed.filter(|_| !matches!(turn.part, Part::F | Part::R)) else {
            return Ok(());
        };
        self.summed = None;
        let size = self.training.precision.state.size();
        let mut number = |number, source| {
            let (key, category) = (BufferKey::NumberOf { number, index: 1 }, Category::Workspace);
            let (tier, padding) = (Tier::Device, vec![]);
            script.buffer(Buffer { key, category, bytes: size, source, tier, padding })
        };
        let [loss, grad_norm, valid] =
            [Number::Loss, Number::GradNorm, Number::Go].map(|own| number(own, Source::Result));
        let coefficient = number(Number::Clip, Source::Script);
        let dtype = self.training.precision.state;
        let b = Builder::new("validate", dtype);
        let sums = b.input("sums", Role::Loss, TensorType::new(dtype, vec![2]));
        let [of_loss, squares] = [0, 1].map(|i| sums.slice(0, i, 1).reshape([]));
        let found = norm::finish(&[of_loss, squares], &self.training);
        let [one, zero] = [1.0, 0.0].map(|x| b.constant(dtype, [], x));
        b.probe("valid", found.compare(CompareKind::Eq, one).select(one, zero));
        let program = self.training.world.library.placed(&b.finish()?);
        let outputs = [loss, grad_norm, coefficient, valid].map(whole);
        push(script, "validate", program, vec![whole(summed)], &outputs, None);
        self.valid = Some(valid);
        let numbers = StepNumbers { coefficient, go: None, lacks: None };
        let of = Some([self.pending.lr, self.pending.step]);
        finish::append(script, self.state, &self.training, numbers, versions, of)
    }

    /// Ends a script whose step is committed by the next one: what that needs, and the preview.
    pub(super) fn preview(&self, script: &mut Script) -> Result<(), ScriptError> {
        let Self { training, state, pending, .. } = self;
        norm::sums_of_group(script, state, training, (pending.sums, true), |_| true)?;
        let dtype = training.precision.state;
        let given = [Scalar::LearningRate, Scalar::Step]
            .map(|of| finish::scalar(script, training.world.scalar_key(of, 0, 1), dtype));
        let b = Builder::new("carry", dtype);
        for name in ["lr", "step"] {
            let carried = b.scalar(name).scale(1.0);
            b.port(&format!("{name} again"), Role::Scalar, carried);
        }
        let program = training.world.library.placed(&b.finish()?);
        let kept = [pending.lr, pending.step].map(whole);
        push(script, "carry", program, given.map(whole).to_vec(), &kept, None);
        let b = Builder::new("one", dtype);
        b.port("clip", Role::Scalar, b.constant(dtype, [], 1.0));
        let program = training.world.library.placed(&b.finish()?);
        let (key, category) = (BufferKey::Number(Number::Clip), Category::Workspace);
        let (bytes, source, tier) = (dtype.size(), Source::Script, Tier::Device);
        let one = script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] });
        push(script, "no clipping", program, vec![], &[whole(one)], None);
        let numbers = StepNumbers { coefficient: one, go: None, lacks: None };
        for (unit, buffers) in state.units.iter().zip(&state.buffers) {
            let preview = buffers.preview.as_ref().ok_or_else(|| {
                ScriptError::Schedule(format!("`{}` has no place for a preview", unit.name))
            })?;
            let of = finish::UpdateOf { unit, buffers, numbers, given, results: Results::Weights };
            finish::update_unit(script, training, &of, [buffers.weights.buffer, preview.buffer])?;
        }
        Ok(())
    }

    /// Whether the last update may happen.
    pub(super) fn valid(&self) -> Option<BufferId> {
        self.valid
    }

    fn sum(&self, script: &mut Script) -> Result<BufferId, ScriptError> {
        let dtype = self.training.precision.state;
        let (key, category) = (BufferKey::Number(Number::Sums), Category::Communication);
        let (bytes, source, tier) = (2 * dtype.size(), Source::Script, Tier::Device);
        let key = match self.part {
            // The end of the last step adds up its own.
            AheadPart::Last => BufferKey::NumberOf { number: Number::Sums, index: 1 },
            _ => key,
        };
        let summed = script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] });
        let (mesh, ranks) = norm::all_ranks(self.training.world)?;
        let program = norm::summed(&mesh, dtype, 1)?;
        let program = script.program_of(self.training.world.library.placed(&program), ranks);
        let run = Run {
            program,
            inputs: vec![whole(self.pending.sums)],
            outputs: vec![(whole(summed), Write::Overwrite)],
            contributes: vec![],
        };
        let (label, lane, kind) = ("sums of all".to_owned(), Lane::Reduce, Kind::Run(run));
        script.actions.push(Action { label, lane, kind, after: vec![] });
        Ok(summed)
    }
}

impl AheadPart {
    /// Every part.
    pub const ALL: [AheadPart; 3] = [AheadPart::First, AheadPart::Middle, AheadPart::Last];

    /// Whether it begins with the update of the step before.
    pub fn commits(self) -> bool {
        self != AheadPart::First
    }

    /// Whether it leaves its own update to the next.
    pub fn previews(self) -> bool {
        self != AheadPart::Last
    }
}
