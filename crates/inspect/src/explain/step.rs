//! A drawing of a step before it runs: the scripts of all ranks, played.
//!
//! Each action takes what the cost model says of its work on this kind of host: FLOPs, bytes of memory, bytes on their
//! way. What ranks wait for each other follows from the scripts. One rank stands for all that do the same.

use phalanx_script::{Class, ScriptKey};
use phalanx_session::network::Network;
use phalanx_session::predict::action_seconds;
use phalanx_session::{Lowered, Planner, RankScript, Settings, Timetable};
use phalanx_sim::{Durations, IssueRule, play};

use crate::trace::played_picture;
use phalanx_config::Loaded;
use phalanx_error::Result;

/// The drawing for a configuration.
pub fn step_drawing(loaded: &Loaded) -> Result<String> {
    let models = Network::new(loaded)?.models(&loaded.config, false)?;
    let lowered = Lowered::new(&models, Settings::new(&loaded.config)?)?;
    let scripts = Planner::new(&lowered)?.steps()?.remove(&ScriptKey::Train).unwrap_or_default();
    let classes: Vec<Class<'_>> = scripts.iter().map(RankScript::class).collect();
    let mut durations = Durations::given(&classes, |_, _| 0.0);
    for (class, own) in classes.iter().zip(&mut durations.actions) {
        let seconds = action_seconds(class.script, lowered.settings.threads);
        for (seconds, action) in seconds.into_iter().zip(own) {
            action.work = 1e3 * seconds;
        }
    }
    let playback = play(&classes, &durations, IssueRule::OneThread)?;
    played_picture(&Timetable::new(&lowered)?, &classes, &playback)
}
