//! `[precision]`: number formats.

use phalanx_ir::DType;

use super::key::section;
use super::setting::choice;
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
        F16 = "f16" later,
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

    /// Applies the rule that f64 is all or nothing, then checks what remains.
    pub(crate) fn settle(&mut self, values: &mut Values) {
        let compute = self.compute;
        check_built("precision.compute", compute, values);
        for (key, stored) in
            [("precision.weights", &mut self.weights), ("precision.grads", &mut self.grads)]
        {
            // f32 is the usual value of these keys, rarely a choice against f64, so f64 replaces
            // it.
            if compute == FloatKind::F64 && *stored == FloatKind::F32 {
                *stored = FloatKind::F64;
            }
            let stored = *stored;
            check_built(key, stored, values);
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

/// Refuses a number format that no engine computes in yet.
fn check_built(key: &str, float: FloatKind, values: &mut Values) {
    values.rule(&[key], float != FloatKind::F16, || {
        Problem::new(format!("{key} = f16: half precision is not built yet"))
            .because("f16 needs loss scaling; bf16 has the range of f32 and needs none")
            .nearest(format!("{key} = \"bf16\""))
    });
}

fn default_storage(compute: FloatKind) -> FloatKind {
    match compute {
        FloatKind::F64 => FloatKind::F64,
        _ => FloatKind::F32,
    }
}
