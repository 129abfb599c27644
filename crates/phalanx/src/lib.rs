//! Phalanx: distributed training of large models.
#![forbid(unsafe_code)]

pub use phalanx_autodiff as autodiff;
pub use phalanx_data as data;
pub use phalanx_engine as engine;
pub use phalanx_ir as ir;
pub use phalanx_models as models;
pub use phalanx_reference as reference;
pub use phalanx_runtime as runtime;
pub use phalanx_script as script;
pub use phalanx_train as train;
