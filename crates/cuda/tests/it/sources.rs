//! What can be checked without a GPU: every op has a kernel, or is in the list that may only shrink.

use phalanx_cuda::{CudaRequirements, Device, WITHOUT_KERNEL};
use phalanx_ir::Op;

#[test]
fn the_list_of_ops_without_a_kernel_names_ops() {
    for name in WITHOUT_KERNEL {
        assert!(Op::VARIANTS.contains(&name), "{name} is no op");
    }
    let may_lack: [&str; 0] = [];
    assert!(WITHOUT_KERNEL.iter().all(|name| may_lack.contains(name)), "the list may only shrink");
}

/// On a machine without a GPU the error lists files and says what to install.
#[test]
fn a_missing_library_is_named() {
    let Err(error) = Device::first() else { return };
    let text = error.to_string();
    assert!(text.contains("lib") || text.contains("cuInit"), "{text}");
}

/// Slots can be placed for programs of this engine without a GPU.
#[test]
fn scratch_memory_is_known_without_a_gpu() {
    use phalanx_call::Requirements;
    for case in phalanx_testing::instances::every() {
        let operands: Vec<_> = case.operands.iter().map(|(t, _)| t.clone()).collect();
        let (program, _) = phalanx_testing::instances::alone(&case.op, &operands);
        let bytes = CudaRequirements::default().scratch(&program, &program.instrs()[0]);
        assert!(bytes < 1 << 20, "{:?}: {bytes}", case.op);
    }
}
