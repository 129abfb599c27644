//! `[precision]`: number formats.

use phalanx_ir::DType;

use toml_edit::Value;

use super::key::section;
use super::optim::OptimKind;
use super::run::DeviceKind;
use super::setting::{Count, Positive, Setting, choice, quoted};
use super::sync::SyncKind;
use super::values::Values;
use phalanx_error::Problem;

section! {
    /// `[precision]`: number formats of the computation, the weights and the gradients.
    pub struct PrecisionConfig in "precision" () {
        /// Activations and matrix products. f64 makes weights, gradients, reductions and optimizer
        /// state f64 too.
        compute: FloatKind = "f32"; aka "dtype" "mixed_precision_param" "params_dtype",
        /// Weights that the forward and backward passes read; 16-bit weights have f32 masters.
        weights: FloatKind = "f32, or f64 with compute = f64" => default_storage(compute);
            aka "param_dtype" "weight_dtype",
        /// Gradients as they are stored, accumulated and reduced.
        grads: FloatKind = "f32, or f64 with compute = f64" => default_storage(compute);
            aka "grad_dtype" "mixed_precision_reduce" "main_grads_dtype" "reduce_dtype",
        /// The residual stream, to which every half of a block adds: compute, or f32 where that has 16 bits.
        residual: FloatKind = "that of compute" => compute; aka "fp32_residual_connection" "residual_dtype",
        /// How f32 masters of bf16 weights are kept. whole: 4 bytes of a parameter besides the weights. split: 2
        /// bytes, the lower halves of numbers whose upper halves are the weights, with the same bits.
        masters: MasterKind = "whole"; aka "split_master" "master_weights",
        /// run.device = cuda and compute = f32: matrix products round their operands to TF32 (8 exponent
        /// bits, 10 mantissa bits), which tensor cores multiply; sums stay f32.
        tf32: bool = "false"; aka "allow_tf32" "use_tf32",
        /// compute = f16: what the loss is multiplied by before the backward pass; updates divide by
        /// it. dynamic: it is halved after an overflow and doubled after many steps without one.
        loss_scale: LossScale = "dynamic"; aka "fp16_loss_scale" "grad_scale",
        /// Dynamic loss scale: it starts at 2 to this power.
        initial_scale_power: u32 = "16"; aka "init_scale" "initial_loss_scale",
        /// Dynamic loss scale: it is doubled after this many steps without an overflow.
        loss_scale_window: Count = "1000"; aka "growth_interval" "scale_window",
        /// Dynamic loss scale: it is halved by this many overflows since it was last doubled, and by
        /// each one after them.
        hysteresis: Count = "2"; aka "delayed_shift",
        /// Dynamic loss scale: its smallest value. An overflow at this scale ends the run.
        min_loss_scale: Positive = "1"; aka "min_scale",
    }
}

/// What the loss of an f16 program is multiplied by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum LossScale {
    /// What the steps so far allow.
    Dynamic,
    /// Always the same number.
    Fixed(Positive),
}

impl Setting for LossScale {
    fn expects() -> String {
        "\"dynamic\", or a finite number above 0".into()
    }
    fn read(value: &Value) -> Option<Self> {
        match value.as_str() {
            Some("dynamic") => Some(LossScale::Dynamic),
            Some(_) => None,
            None => Positive::read(value).map(LossScale::Fixed),
        }
    }
    fn write(&self) -> String {
        match self {
            LossScale::Dynamic => quoted("dynamic"),
            LossScale::Fixed(scale) => scale.write(),
        }
    }
    fn words() -> &'static [&'static str] {
        &["dynamic"]
    }
}

choice! {
    /// A number format.
    pub enum FloatKind {
        /// IEEE single precision.
        F32 = "f32",
        /// IEEE double precision.
        F64 = "f64",
        /// 8 exponent bits, 7 mantissa bits.
        Bf16 = "bf16",
        /// IEEE half precision.
        F16 = "f16",
    }
}

choice! {
    /// How masters of narrower weights are kept.
    pub enum MasterKind {
        /// All of their bits.
        Whole = "whole",
        /// The bits that weights lack.
        Split = "split",
    }
}

impl From<FloatKind> for DType {
    fn from(float: FloatKind) -> DType {
        match float {
            FloatKind::F32 => DType::F32,
            FloatKind::F64 => DType::F64,
            FloatKind::Bf16 => DType::Bf16,
            FloatKind::F16 => DType::F16,
        }
    }
}

impl PrecisionConfig {
    /// Element type of the optimizer's state, of master weights and of reductions.
    pub fn state(&self) -> DType {
        DType::from(self.compute).accumulator()
    }

    /// Whether the optimizer keeps its own copy of the weights in [`PrecisionConfig::state`].
    pub fn has_masters(&self) -> bool {
        DType::from(self.weights) != self.state()
    }

    /// Gradients are sums of many numbers, which f16 cannot hold; and the keys of the loss scale mean
    /// nothing without f16.
    fn check_scaling(&self, values: &mut Values) {
        values.rule(&["precision.grads"], self.grads != FloatKind::F16, || {
            Problem::new("precision.grads = f16 does not work")
                .because("sums of scaled gradients do not fit f16, whose largest number is 65504")
                .nearest("precision.grads = \"f32\", or \"bf16\"")
        });
        let most = 127;
        let power = self.initial_scale_power;
        values.rule(&["precision.initial_scale_power"], power <= most, || {
            Problem::new(format!("precision.initial_scale_power = {power} is too large"))
                .because(format!("a loss is scaled in f32, which holds 2 to the power {most}"))
                .nearest(format!("precision.initial_scale_power = {most}"))
        });
        let (least, first) = (self.min_loss_scale.get(), 2f64.powi(power.min(most) as i32));
        let keys = ["precision.min_loss_scale", "precision.initial_scale_power"];
        values.rule(&keys, least <= first, || {
            Problem::new(format!("precision.min_loss_scale = {least} is above 2^{power}"))
                .because("2 to the power precision.initial_scale_power is the first scale")
                .nearest(format!("precision.min_loss_scale = {first}"))
        });
        let fixed = self.loss_scale != LossScale::Dynamic;
        let written = Self::KEYS.iter().zip(self.write());
        for (key, (name, value)) in written.filter(|(key, _)| SCALING.contains(&key.field())) {
            let used = self.compute == FloatKind::F16 && (key.field() == "loss_scale" || !fixed);
            values.rule(&[name], used || value == key.usual(), || {
                let problem = Problem::new(format!("{name} = {value} has no effect"));
                match self.compute {
                    FloatKind::F16 => problem
                        .because("precision.loss_scale is a number, which never changes")
                        .fix("precision.loss_scale = \"dynamic\""),
                    other => problem
                        .because(format!("losses are scaled for f16 alone, not for {other}"))
                        .fix("precision.compute = \"f16\""),
                }
            });
        }
    }

    /// A residual stream is as wide as what is added to it, or as what products sum in; and only language
    /// models have one.
    pub(crate) fn check_residual(&self, is_language: bool, values: &mut Values) {
        let (residual, compute) = (self.residual, self.compute);
        let wider = DType::from(residual) == DType::from(compute).accumulator();
        let keys = ["precision.residual", "precision.compute"];
        values.rule(&keys, residual == compute || wider, || {
            let sums = DType::from(compute).accumulator();
            Problem::new(format!("precision.residual = {residual} does not work"))
                .because(format!("with precision.compute = {compute} it is {compute} or {sums}"))
                .nearest(format!("precision.residual = \"{sums}\""))
        });
        let keys = ["precision.residual", "model.kind"];
        values.rule(&keys, residual == compute || is_language, || {
            Problem::new(format!("precision.residual = {residual} has no effect"))
                .because("only models with blocks have a residual stream")
                .fix(format!("precision.residual = \"{compute}\""))
        });
    }

    /// Halves of masters are bf16 weights and the rest of f32; one op updates both.
    pub(crate) fn check_masters(&self, optim: OptimKind, sync: SyncKind, values: &mut Values) {
        let split = self.masters == MasterKind::Split;
        let refuse = |what: String, why: &str, fix: String| {
            let problem =
                Problem::new(format!("precision.masters = \"split\" does not work with {what}"));
            problem.because(why).fix(fix)
        };
        let (weights, fits) = (self.weights, self.weights == FloatKind::Bf16);
        values.rule(&["precision.masters", "precision.weights"], fits || !split, || {
            let why = "weights are the upper halves of f32 masters, which only bf16 can be";
            let fix = "precision.weights = \"bf16\", or precision.masters = \"whole\"".to_owned();
            refuse(format!("precision.weights = {weights}"), why, fix)
        });
        let one_op = match optim {
            OptimKind::AdamW | OptimKind::Adam | OptimKind::Sgd | OptimKind::Lion => true,
            OptimKind::Lamb | OptimKind::Adafactor => false,
        };
        values.rule(&["precision.masters", "optim.kind"], one_op || !split, || {
            let why = "its update needs norms of whole parameters, and reads masters more than once";
            let fix = "optim.kind = \"adamw\", \"adam\", \"sgd\" or \"lion\", or precision.masters = \"whole\"";
            refuse(format!("optim.kind = \"{}\"", optim.name()), why, fix.to_owned())
        });
        let apart = matches!(sync, SyncKind::LocalSgd | SyncKind::Average);
        values.rule(&["precision.masters", "parallel.sync"], !(apart && split), || {
            let why = "replicas average masters, and halves have no mean";
            let fix = "parallel.sync = \"ddp\", or precision.masters = \"whole\"".to_owned();
            refuse(format!("parallel.sync = \"{}\"", sync.name()), why, fix)
        });
    }

    /// Only products of f32 on a GPU can round their operands.
    pub(crate) fn check_tf32(&self, device: DeviceKind, values: &mut Values) {
        let keys = ["precision.tf32", "precision.compute", "run.device"];
        let (compute, f32) = (self.compute, self.compute == FloatKind::F32);
        let works = f32 && device == DeviceKind::Cuda;
        values.rule(&keys, works || !self.tf32, || {
            let problem = Problem::new("precision.tf32 = true has no effect");
            match f32 {
                true => problem
                    .because("only GPUs have products of TF32, and programs run on the CPU")
                    .fix("run.device = \"cuda\""),
                false => problem
                    .because(format!("products of {compute} are not rounded to TF32"))
                    .fix("precision.compute = \"f32\""),
            }
        });
    }

    /// Applies the rule that f64 is all or nothing, then checks what remains.
    pub(crate) fn settle(&mut self, values: &mut Values) {
        let compute = self.compute;
        self.check_scaling(values);
        for (key, stored) in
            [("precision.weights", &mut self.weights), ("precision.grads", &mut self.grads)]
        {
            // f32 is the usual value of these keys, rarely a choice against f64, so f64 replaces
            // it.
            if compute == FloatKind::F64 && *stored == FloatKind::F32 {
                *stored = FloatKind::F64;
            }
            let stored = *stored;
            let agree = (compute == FloatKind::F64) == (stored == FloatKind::F64);
            values.rule(&[key, "precision.compute"], agree, || {
                let problem = Problem::new(format!(
                    "{key} = {stored} does not work with precision.compute = {compute}"
                ));
                if compute == FloatKind::F64 {
                    problem
                        .because("f64 makes weights, gradients and optimizer state f64 too")
                        .fix(format!("leave {key} out, or precision.compute = \"{stored}\""))
                } else {
                    problem
                        .because("f64 is stored only if it is also computed")
                        .fix(format!("{key} = \"f32\", or precision.compute = \"f64\""))
                }
            });
        }
    }
}

/// The keys of the loss scale.
const SCALING: [&str; 5] =
    ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"];

fn default_storage(compute: FloatKind) -> FloatKind {
    match compute {
        FloatKind::F64 => FloatKind::F64,
        _ => FloatKind::F32,
    }
}
