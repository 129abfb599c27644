//! `[optim]`: how weights are updated.

use toml_edit::Value;

use super::key::section;
use super::setting::{Count, Fraction, NonNegative, Positive, Ratio, Setting, choice};
use super::values::Values;
use phalanx_error::Problem;

section! {
    /// `[optim]`: the optimizer, its learning rate and clipping.
    pub struct OptimConfig in "optim" (steps: Count, usual_clip: Clip) {
        /// Rule that turns gradients into updates.
        kind: OptimKind = "adamw"; aka "optimizer" "name" "type",
        /// Highest learning rate; of adafactor, relative to the size of each parameter.
        lr: NonNegative = "1e-2 for adafactor, else 3e-4" => kind.lr(); aka "learning_rate" "max_lr" "peak_lr",
        /// Decay of the running means of the gradient and, but for lion, of its square.
        betas: [Fraction; 2] = "[0.9, 0.95] for adamw, [0.9, 0.99] for lion, [0, 0] for adafactor, which has none, else [0.9, 0.999]"
            => kind.betas(); aka "adam_beta1" "adam_beta2" "beta1" "beta2",
        /// Added to the root of the second mean, to avoid division by zero; of adafactor, to squares.
        eps: Positive = "1e-6 for lamb, 1e-30 for adafactor, else 1e-8" => kind.eps();
            aka "adam_eps" "adam_epsilon" "epsilon",
        /// Decay of matrices per step; norms and biases do not decay. adamw, lamb, lion and adafactor subtract
        /// this share times the learning rate; adam and sgd add it to the gradient.
        weight_decay: NonNegative = "0.1 for adamw, 0.01 for lamb, else 0" => kind.decay();
            aka "wd" "decay",
        /// SGD: share of the last update that is kept.
        momentum: Fraction = "0.0"; aka "sgd_momentum",
        /// SGD: look ahead along the momentum.
        nesterov: bool = "false"; aka "use_nesterov",
        /// Largest global gradient norm; longer gradients are scaled down to it. "none" or 0: no
        /// limit.
        clip: Clip = "1.0, none for pipedream" => usual_clip; aka "clip_grad" "max_norm" "grad_clip" "gradient_clipping" "max_grad_norm",
        /// How the learning rate falls after the warm-up.
        schedule: LrSchedule = "constant"; aka "lr_scheduler" "lr_decay_style" "decay_type" "scheduler",
        /// Steps over which the learning rate rises to lr.
        warmup_steps: usize = "0 for constant, else train.steps ÷ 20"
            => if schedule == LrSchedule::Constant { 0 } else { steps.get() / 20 };
            aka "lr_warmup_iters" "warmup" "lr_warmup_steps" "warmup_iters",
        /// Learning rate at the end of linear and cosine, as a share of lr.
        min_lr_ratio: Ratio = "0.1"; aka "min_lr" "min_lr_factor" "final_lr_ratio",
    }
}

choice! {
    /// Rule that turns gradients into updates.
    pub enum OptimKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Adam; weight decay is added to the gradient.
        Adam = "adam",
        /// Gradient descent, with or without momentum.
        Sgd = "sgd",
        /// Adam whose step is, for each parameter, as long as the parameter times the learning rate.
        Lamb = "lamb",
        /// Steps of one size, by the sign of a running mean.
        Lion = "lion",
        /// Second moments as products of row and column means.
        Adafactor = "adafactor",
    }
}

impl OptimKind {
    pub(crate) fn betas(self) -> [Fraction; 2] {
        let betas = match self {
            OptimKind::AdamW => [0.9, 0.95],
            OptimKind::Lion => [0.9, 0.99],
            OptimKind::Adafactor => [0.0, 0.0],
            OptimKind::Adam | OptimKind::Sgd | OptimKind::Lamb => [0.9, 0.999],
        };
        betas.map(|beta| Fraction::new(beta).expect("it is below one"))
    }

    fn lr(self) -> NonNegative {
        let lr = if self == OptimKind::Adafactor { 1e-2 } else { 3e-4 };
        NonNegative::new(lr).expect("it is not negative")
    }

    pub(crate) fn eps(self) -> Positive {
        let eps = match self {
            OptimKind::Lamb => 1e-6,
            OptimKind::Adafactor => 1e-30,
            OptimKind::AdamW | OptimKind::Adam | OptimKind::Sgd | OptimKind::Lion => 1e-8,
        };
        Positive::new(eps).expect("it is positive")
    }

    fn decay(self) -> NonNegative {
        let decay = match self {
            OptimKind::AdamW => 0.1,
            OptimKind::Lamb => 0.01,
            OptimKind::Adam | OptimKind::Sgd | OptimKind::Lion | OptimKind::Adafactor => 0.0,
        };
        NonNegative::new(decay).expect("it is not negative")
    }
}

choice! {
    /// How the learning rate falls after the warm-up.
    pub enum LrSchedule {
        /// Not at all.
        Constant = "constant",
        /// In a straight line.
        Linear = "linear",
        /// Along half a cosine wave.
        Cosine = "cosine",
    }
}

/// The largest global gradient norm, if there is a limit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Clip(pub Option<Positive>);

impl Clip {
    /// The limit if nothing is said: none where no global norm exists.
    pub(crate) fn usual(has_norm: bool) -> Self {
        Clip(Positive::new(1.0).filter(|_| has_norm))
    }
}

impl Setting for Clip {
    fn expects() -> String {
        "a finite number of at least 0, or \"none\"".into()
    }
    fn read(value: &Value) -> Option<Self> {
        match NonNegative::read(value) {
            Some(norm) => Some(Clip(Positive::new(norm.get()))),
            None => Option::<Positive>::read(value).map(Clip),
        }
    }
    fn write(&self) -> String {
        self.0.write()
    }
}

/// Constants that a preset has for its own optimizer are dropped if the user chose one that has no use for them.
pub(super) fn drop_unused_preset(values: &mut Values) {
    let kind = values.given.get("optim.kind").filter(|given| given.by_user);
    if kind.and_then(|given| OptimKind::read(&given.value)) != Some(OptimKind::Adafactor) {
        return;
    }
    let dropped = values.drop_of_preset(|key| key == "optim.betas");
    if let (Some(preset), [dropped]) = (&values.preset, &dropped[..]) {
        let note =
            format!("with optim.kind = \"adafactor\", {dropped} of preset {preset} has no use");
        values.notes.push(note);
    }
}

impl OptimConfig {
    pub(crate) fn check(&self, steps: Count, values: &mut Values) {
        let warmup = self.warmup_steps;
        let fits = warmup <= steps.get();
        values.rule(&["optim.warmup_steps", "train.steps"], fits, || {
            Problem::new(format!(
                "optim.warmup_steps = {warmup} is longer than train.steps = {steps}"
            ))
            .because("the learning rate would never reach optim.lr")
            .nearest(format!("optim.warmup_steps = {steps}"))
        });
        let betas = self.betas.map(|beta| beta.get());
        let decays = self.kind != OptimKind::Adafactor || betas == [0.0, 0.0];
        values.rule(&["optim.betas", "optim.kind"], decays, || {
            Problem::new(format!(
                "optim.betas = {betas:?} has no effect with optim.kind = adafactor"
            ))
            .because("its means decay by 1 − t^−0.8 in step t, and it has no momentum")
            .fix("optim.betas = [0, 0], or optim.kind = \"adamw\"")
        });
        let momentum = self.momentum.get();
        // What a kind has instead of `momentum`, if it does not read it.
        let instead = match self.kind {
            OptimKind::Sgd => None,
            OptimKind::Adafactor => Some("it has none"),
            _ => Some("its momentum is the first of optim.betas"),
        };
        if let Some(why) = instead {
            values.rule(&["optim.momentum", "optim.kind"], momentum == 0.0, || {
                let kind = self.kind;
                let what = format!("optim.momentum = {momentum:?} has no effect");
                Problem::new(format!("{what} with optim.kind = {kind}")).because(why).fix(
                    match self.kind {
                        OptimKind::Adafactor => "leave it out, or optim.kind = \"sgd\"",
                        _ => "set optim.betas instead, or optim.kind = \"sgd\"",
                    },
                )
            });
        }
        let moving = instead.is_none() && momentum > 0.0;
        values.rule(&["optim.nesterov", "optim.momentum"], moving || !self.nesterov, || {
            Problem::new("optim.nesterov = true needs momentum")
                .because("Nesterov's rule looks ahead along the momentum of optim.kind = sgd")
                .fix("optim.kind = \"sgd\" with optim.momentum = 0.9, or optim.nesterov = false")
        });
    }
}
