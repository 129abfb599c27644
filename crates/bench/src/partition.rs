//! How long planning takes: from a configuration to the script of one rank.

use std::time::Instant;

use phalanx_script::PlannedScript;
use serde::Serialize;

use phalanx_config::Loaded;
use phalanx_error::Result;
use phalanx_session::network::Network;
use phalanx_session::{Lowered, Planner, Settings};

/// The result of `bench partition`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PartitionBench {
    /// From the configuration to the script of one rank.
    pub ms: f64,
    /// Part of it: building the model.
    pub model_ms: f64,
    /// Gradients, partitioning, slicing and all passes.
    pub programs_ms: f64,
    /// The script of a rank.
    pub script_ms: f64,
    /// Checking that script and planning its memory, which comes on top.
    pub memory_ms: f64,
    /// Layers of the model.
    pub layers: usize,
    /// Ranks of the mesh.
    pub ranks: usize,
    /// Actions of the script.
    pub actions: usize,
}

/// Builds the script of one rank from a configuration, once, with nothing prepared.
pub fn partition(loaded: &Loaded) -> Result<PartitionBench> {
    let config = &loaded.config;
    let begun = Instant::now();
    let models = Network::new(loaded)?.models(config, false)?;
    let built = Instant::now();
    let lowered = Lowered::new(&models, Settings::new(config)?)?;
    let formed = Instant::now();
    let script = Planner::new(&lowered)?.train_script(0)?;
    let (planned, actions) = (Instant::now(), script.actions.len());
    PlannedScript::new(script, None)?;
    let ms = |from: Instant, to: Instant| 1e3 * (to - from).as_secs_f64();
    Ok(PartitionBench {
        ms: ms(begun, planned),
        model_ms: ms(begun, built),
        programs_ms: ms(built, formed),
        script_ms: ms(formed, planned),
        memory_ms: ms(planned, Instant::now()),
        layers: config.model.layers.get(),
        ranks: lowered.ranks(),
        actions,
    })
}
