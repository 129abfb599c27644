//! Turns element types of values into Rust types.

/// Runs a generic constructor for the float type that a value has.
macro_rules! for_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_ir::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            phalanx_ir::DType::F64 => {
                type $T = f64;
                Ok($body)
            }
            phalanx_ir::DType::Bf16 => {
                type $T = half::bf16;
                Ok($body)
            }
            phalanx_ir::DType::F16 => {
                type $T = half::f16;
                Ok($body)
            }
            other => Err($op.unsupported(format!("it has no kernel for {other}"))),
        }
    };
}

/// Runs a generic constructor for a float type and a second one with the same accumulator.
macro_rules! for_floats {
    ($op:expr, $a:expr, $b:expr, $T:ident, $U:ident => $body:expr) => {
        match ($a, $b) {
            (phalanx_ir::DType::F32, phalanx_ir::DType::F32) => {
                type $T = f32;
                type $U = f32;
                Ok($body)
            }
            (phalanx_ir::DType::F64, phalanx_ir::DType::F64) => {
                type $T = f64;
                type $U = f64;
                Ok($body)
            }
            (phalanx_ir::DType::Bf16, phalanx_ir::DType::Bf16) => {
                type $T = half::bf16;
                type $U = half::bf16;
                Ok($body)
            }
            (phalanx_ir::DType::Bf16, phalanx_ir::DType::F32) => {
                type $T = half::bf16;
                type $U = f32;
                Ok($body)
            }
            (phalanx_ir::DType::F32, phalanx_ir::DType::Bf16) => {
                type $T = f32;
                type $U = half::bf16;
                Ok($body)
            }
            (phalanx_ir::DType::F16, phalanx_ir::DType::F16) => {
                type $T = half::f16;
                type $U = half::f16;
                Ok($body)
            }
            (phalanx_ir::DType::F16, phalanx_ir::DType::F32) => {
                type $T = half::f16;
                type $U = f32;
                Ok($body)
            }
            (phalanx_ir::DType::F32, phalanx_ir::DType::F16) => {
                type $T = f32;
                type $U = half::f16;
                Ok($body)
            }
            (phalanx_ir::DType::F16, phalanx_ir::DType::Bf16) => {
                type $T = half::f16;
                type $U = half::bf16;
                Ok($body)
            }
            (a, b) => Err($op.unsupported(format!("it has no kernel for {a} and {b}"))),
        }
    };
}

pub(crate) use {for_float, for_floats};
