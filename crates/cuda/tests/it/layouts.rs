//! Every op in random legal layouts, on ranks that share a GPU.

use std::collections::BTreeMap;

use phalanx_comm::Communicator;
use phalanx_cuda::CudaEngine;
use phalanx_ir::OpDef;
use phalanx_testing::asked_seeds;
use phalanx_testing::instances;
use phalanx_testing::threads::Ranks;

use crate::gpu;

#[test]
fn every_op_in_random_layouts() {
    if !gpu::is_here("every_op_in_random_layouts") {
        return;
    }
    let seeds = asked_seeds("PHALANX_LAYOUT_SEEDS").unwrap_or(0..40);
    let engine = |endpoint: Box<dyn Communicator>| CudaEngine::on_rank(endpoint).unwrap();
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in instances::every() {
        let mut ranks = Ranks::new(engine);
        match case.in_random_layouts(seeds.clone(), &mut ranks) {
            Ok(found) => *ran.entry(case.op.name()).or_default() += found,
            Err(why) => wrong.push(format!("{}: {why}", case.op.name())),
        }
    }
    assert!(wrong.is_empty(), "{} ops are wrong:\n{}", wrong.len(), wrong.join("\n"));
    for (name, count) in &ran {
        let enough = *count >= 5 || seeds.end - seeds.start < 40;
        assert!(enough, "only {count} legal layouts of {name} were found: {ran:?}");
    }
}
