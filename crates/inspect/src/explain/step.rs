//! A drawing of a step before it runs: the scripts of all ranks, played. Of a pipeline that does not drain between steps,
//! a row of three scripts: the first, one in the middle and the last.
//!
//! Each action takes what the cost model says of its work on this kind of host: FLOPs, bytes of memory, bytes on their
//! way. What ranks wait for each other follows from the scripts. One rank stands for all that do the same.

use phalanx_script::{Class, RollPart, ScriptKey};
use phalanx_session::network::Network;
use phalanx_session::predict::action_seconds;
use phalanx_session::{Lowered, Planner, RankScript, Settings, Timetable};
use phalanx_sim::{ActionTimes, Durations, IssueRule, Playback, play};

use crate::trace::played_picture;
use phalanx_config::Loaded;
use phalanx_error::Result;

/// The drawing for a configuration.
pub fn step_drawing(loaded: &Loaded) -> Result<String> {
    let models = Network::new(loaded)?.models(&loaded.config, false)?;
    let lowered = Lowered::new(&models, Settings::new(&loaded.config)?)?;
    let (planner, row) = (Planner::new(&lowered)?, lowered.row_microbatches());
    let keys: Vec<ScriptKey> = match row {
        Some(_) => RollPart::ALL.map(ScriptKey::Roll).into(),
        None => vec![ScriptKey::Train],
    };
    let scripts: Vec<Vec<RankScript>> =
        keys.into_iter().map(|key| planner.scripts_of(key)).collect::<Result<_>>()?;
    let classes: Vec<Vec<Class<'_>>> =
        scripts.iter().map(|own| own.iter().map(RankScript::class).collect()).collect();
    let mut played: Vec<Playback> = Vec::new();
    for own in &classes {
        // Messages end in their own script, so one can be played after the other.
        let begins = played.last().map(|before| {
            let ended =
                |times: &Vec<ActionTimes>| times.iter().map(|at| at.ended).fold(0.0, f64::max);
            before.classes.iter().map(ended).collect()
        });
        played.push(play_from(&lowered, own, begins)?);
    }
    let microbatches = row.unwrap_or(lowered.settings.microbatches);
    let timetable =
        Timetable::of_steps(&lowered, played.len() * microbatches / lowered.settings.microbatches)?;
    let all: Vec<(&[Class<'_>], &Playback)> =
        classes.iter().map(Vec::as_slice).zip(&played).collect();
    played_picture(&timetable, &all, microbatches)
}

/// Scripts with the times that the cost model gives their actions, where classes may begin late.
fn play_from(
    lowered: &Lowered,
    classes: &[Class<'_>],
    begins: Option<Vec<f64>>,
) -> Result<Playback> {
    let mut durations = Durations::given(classes, |_, _| 0.0);
    for (class, own) in classes.iter().zip(&mut durations.actions) {
        let seconds = action_seconds(class.script, lowered.settings.threads);
        for (seconds, action) in seconds.into_iter().zip(own) {
            action.work = 1e3 * seconds;
        }
    }
    durations.begins = begins.unwrap_or(durations.begins);
    Ok(play(classes, &durations, IssueRule::OneThread)?)
}
