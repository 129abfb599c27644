//! Every op has kernels, and they compile. This needs NVRTC, which comes as a package, but no GPU.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

use phalanx_call::Slots;
use phalanx_comm::CountedEndpoint;
use phalanx_engine::EngineError;
use phalanx_ir::{DType, Op};
use phalanx_testing::in_type;
use phalanx_testing::instances::{self, alone};

use super::{Arg, Operation, Resources, WITHOUT_KERNEL, compile};
use crate::compiler::compile_again;
use crate::folds::Folds;
use crate::fused_attention::{AttentionPlan, FusedShape};
use crate::kernels::KernelSpec;
use crate::libraries::Nvrtc;
use crate::products::{ProductPlan, ProductShape};
use crate::requirements::CudaRequirements;

/// An engine without a GPU: everything runs on kernels of ours.
struct Paper;

impl Resources for Paper {
    fn constant(&mut self, _bytes: &[u8]) -> Result<Arg, EngineError> {
        Ok(Arg::Null)
    }

    fn site(&mut self, _program: &str, _what: &'static str) -> i64 {
        0
    }

    fn blocks(&self) -> u32 {
        64
    }

    fn product(&mut self, _shape: &ProductShape) -> Result<Option<Arc<ProductPlan>>, EngineError> {
        Ok(None)
    }

    fn attention(
        &mut self,
        _shape: &FusedShape,
    ) -> Result<Option<Arc<AttentionPlan>>, EngineError> {
        Ok(None)
    }

    fn endpoint(&mut self) -> Option<&mut CountedEndpoint> {
        None
    }
}

/// The kernels of every op in every element type, by their names, and the ops.
fn kernels() -> (BTreeMap<String, KernelSpec>, BTreeSet<&'static str>) {
    let (mut found, mut ops) = (BTreeMap::new(), BTreeSet::new());
    for case in instances::every() {
        let given: Vec<_> = case.operands.iter().map(|(t, _)| t.clone()).collect();
        for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
            let (op, operands) = in_type(&case.op, &given, dtype);
            if WITHOUT_KERNEL.contains(&op.variant()) {
                continue;
            }
            ops.insert(op.variant());
            let (program, _) = alone(&op, &operands);
            let slots = Slots::assign_for(&program, &CudaRequirements::default());
            let instr = &program.instrs()[0];
            let (scratch, folds) = (slots.scratch[0], Folds::of(&program));
            let mut operation = Operation {
                program: &program,
                instr,
                slots: &slots,
                folds: &folds,
                scratch,
                rank: 0,
                ranks: &[0],
                engine: &mut Paper,
            };
            for mut task in compile(&mut operation).unwrap_or_else(|why| panic!("{op:?}: {why}")) {
                for kernel in task.kernels() {
                    found.insert(kernel.kernel.entry.clone(), kernel.kernel.clone());
                }
            }
        }
    }
    (found, ops)
}

#[test]
fn every_op_has_kernels_that_compile() {
    let (mut found, ops) = kernels();
    // What ranks do together has its own kernels.
    for name in Op::VARIANTS.iter().filter(|name| **name != "Collective") {
        let listed = WITHOUT_KERNEL.contains(name);
        assert_ne!(listed, ops.contains(name), "{name}: in the list or compiled, not both");
    }
    for spec in crate::ranks::kernels().into_iter().chain(crate::engine::drawing_kernels()) {
        found.insert(spec.entry.clone(), spec);
    }
    if let Err(why) = Nvrtc::get() {
        let count = found.len();
        let _ = writeln!(std::io::stderr(), "SKIPPED compiling {count} kernels: {why}");
        return;
    }
    let specs: Vec<&KernelSpec> = found.values().collect();
    let newer = compile_again(&specs[..1], "sm_999").unwrap_err().to_string();
    assert!(newer.contains("sm_999") && newer.contains("install"), "{newer}");
    // The oldest that is supported.
    let made = compile_again(&specs, "sm_80").unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(made.names.len(), specs.len());
}
