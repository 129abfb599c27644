//! A rank's part of a checkpoint: which state it writes, into which file, and how far that is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use phalanx_checkpoint::{FileSummary, FileWriter, Header, ParamBlock, PlacedEntry, SavedEntry};
use phalanx_engine::DiskStore;
use phalanx_script::{BufferKey, PlannedScript, RankOnMesh, ScriptKey, State, StateKey, StateKind};

use super::command::{Command, Reply};
use super::planner::Planner;
use super::{Lowered, Session};
use phalanx_error::{Error, Problem, Result};

/// Saving a session.
impl Session {
    /// Lets every rank save its part of the state in the folder of a checkpoint, beside the next
    /// step; [`Session::saved`] gives the files.
    pub fn save_beside_next_step(&mut self, folder: &Path) -> Result<()> {
        self.ranks.ask(Command::Save { folder, now: false }).map(drop)
    }

    /// The same at once.
    pub fn save_now(&mut self, folder: &Path) -> Result<()> {
        self.ranks.ask(Command::Save { folder, now: true }).map(drop)
    }

    /// Waits until all that was saved is on the disk; gives the files.
    pub fn saved(&mut self) -> Result<Vec<FileSummary>> {
        let answers = self.ranks.ask(Command::Saved)?;
        Ok(answers.into_iter().filter_map(Reply::into_saved).collect())
    }
}

/// The kind of a parameter's value in full precision, in checkpoints.
pub const FULL: &str = "master";

/// Entries begin at a multiple of this.
const ALIGN: usize = 64;

/// What two ranks that hold the same have in common: stage group, state, block and first element.
type Content = (usize, StateKey, usize, usize);

/// For each rank: the state that it writes. State that several ranks hold is written by one of them;
/// the work is spread evenly.
pub(crate) fn writers(planner: &Planner<'_>) -> Result<Vec<BTreeSet<StateKey>>> {
    let lowered = planner.lowered;
    let mut held: BTreeMap<Content, (usize, Vec<usize>)> = BTreeMap::new();
    for rank in 0..lowered.ranks() {
        let (state, at, ranks) = (planner.state(rank)?, lowered.place(rank), lowered.at(rank));
        for (key, range) in state.saved() {
            let unit = &state.units[key.unit];
            // Several stage groups may hold a unit; the first one writes it.
            if unit.stage_groups.first() != Some(&at.stage_group) {
                continue;
            }
            let block = ranks.mesh.shard(ranks.rank, &unit.blocks);
            let same = (at.stage_group, key, block, range.elements.start);
            let bytes = range.elements.len() * range.dtype.size();
            held.entry(same).or_insert((bytes, Vec::new())).1.push(rank);
        }
    }
    let mut all: Vec<(StateKey, usize, Vec<usize>)> =
        held.into_iter().map(|((_, key, ..), (bytes, ranks))| (key, bytes, ranks)).collect();
    // The largest first, each to the holder that has the least to write so far.
    all.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    let mut load = vec![0; lowered.ranks()];
    let mut writers = vec![BTreeSet::new(); lowered.ranks()];
    for (key, bytes, ranks) in all {
        let least = ranks.into_iter().min_by_key(|&rank| load[rank]);
        let writer = least.expect("what is listed is held by a rank");
        load[writer] += bytes;
        writers[writer].insert(key);
    }
    Ok(writers)
}

/// A rank's part of the checkpoints of a session.
pub(crate) struct Saves {
    name: String,
    header: Header,
    /// For each script that saves: where in the file the copies go, by their place in the tier `Disk`;
    /// nowhere if another rank writes them.
    places: BTreeMap<ScriptKey, Places>,
    /// The file that the next step writes.
    waiting: Option<Arc<RankFile>>,
    /// The file that is written, until it is on the disk.
    finishing: Option<JoinHandle<Result<FileSummary>>>,
}

type Places = HashMap<usize, Option<u64>>;

impl Saves {
    /// Finds out what a rank writes, from its plan.
    pub(crate) fn new<'p>(
        planner: &Planner<'_>,
        rank: usize,
        state: &State,
        scripts: impl Iterator<Item = (ScriptKey, &'p Arc<PlannedScript>)>,
    ) -> Result<Self> {
        let own = &planner.writers()?[rank];
        let blocks = Blocks::new(planner.lowered, rank);
        let names = planner.lowered.settings.optimizer.state_names();
        let (mut at, mut placed, mut offsets) = (0_usize, Vec::new(), BTreeMap::new());
        let table = state.script();
        for (key, held) in state.saved().filter(|(key, _)| own.contains(key)) {
            let kind = kind_name(key.kind, names);
            for member in &state.units[key.unit].members {
                let (elements, first) = held.part(member);
                if elements.is_empty() {
                    continue;
                }
                let entry = SavedEntry {
                    param: planner.lowered.model.params()[member.param].name.clone(),
                    kind: kind.to_owned(),
                    version: 0,
                    replica: 0,
                    block: blocks.of(member.param),
                    elements,
                };
                let dtype = held.dtype;
                placed.push(PlacedEntry { entry, dtype, at: at + first * dtype.size() });
            }
            offsets.insert(key, at as u64);
            let bytes = table.buffers[held.buffer.0].bytes;
            at = (at + bytes).next_multiple_of(ALIGN);
        }
        let places = scripts.filter(|(key, _)| saves(*key));
        let places = places.map(|(key, planned)| (key, places_in(planned, &offsets))).collect();
        let name = format!("rank-{rank:04}.safetensors");
        let header = Header::new(placed, at);
        Ok(Self { name, header, places, waiting: None, finishing: None })
    }

    /// Creates the file of a checkpoint, for a script; gives the store that the engine writes to.
    pub(crate) fn open(&mut self, folder: &Path, script: ScriptKey) -> Result<Arc<RankFile>> {
        self.finishing = None;
        let writer = FileWriter::create(folder, &self.name, &self.header)?;
        let places = self.places.get(&script).cloned().unwrap_or_default();
        let file = Arc::new(RankFile { writer, places });
        self.waiting = Some(file.clone());
        Ok(file)
    }

    /// Whether the next step saves.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// All copies have ended: the file goes to the disk, while the next step runs.
    pub(crate) fn finish(&mut self) {
        if let Some(file) = self.waiting.take() {
            let sync = move || file.writer.finish();
            self.finishing = Some(std::thread::spawn(sync));
        }
    }

    /// Waits until the file is on the disk.
    pub(crate) fn finished(&mut self) -> Result<Option<FileSummary>> {
        let Some(thread) = self.finishing.take() else { return Ok(None) };
        let gone = || Error::failed(Problem::new("the thread that saves ended early"));
        thread.join().unwrap_or_else(|_| Err(gone())).map(Some)
    }
}

/// Whether a script saves the state.
pub(crate) fn saves(key: ScriptKey) -> bool {
    matches!(key, ScriptKey::Save | ScriptKey::SaveAndTrain)
}

/// The name of a kind of state in checkpoints.
pub(crate) fn kind_name(kind: StateKind, optimizer: &'static [&'static str]) -> &'static str {
    match kind {
        StateKind::Weights | StateKind::Master => FULL,
        StateKind::Optimizer(number) => optimizer[number],
        StateKind::Gradient => "gradient",
    }
}

fn places_in(planned: &PlannedScript, offsets: &BTreeMap<StateKey, u64>) -> Places {
    let buffers = planned.script.buffers.iter().zip(&planned.memory.offsets);
    let saved = buffers.filter_map(|(buffer, &at)| match &buffer.key {
        BufferKey::Saved(key) => Some((at, offsets.get(key).copied())),
        _ => None,
    });
    saved.collect()
}

/// A rank's file of a checkpoint, as an engine writes to it.
pub(crate) struct RankFile {
    writer: FileWriter,
    places: Places,
}

impl DiskStore for RankFile {
    fn write(&self, at: usize, bytes: &[u8]) -> std::result::Result<(), String> {
        match self.places.get(&at) {
            // Another rank writes its own copy of it.
            Some(None) => Ok(()),
            Some(Some(place)) => {
                let written = self.writer.write(*place, bytes);
                written.map_err(|error| {
                    Problem::io("cannot write", self.writer.path(), &error).to_string()
                })
            }
            None => Err(format!("nothing is saved at byte {at}")),
        }
    }
}

/// A rank's blocks of all parameters.
struct Blocks<'a> {
    lowered: &'a Lowered,
    types: Vec<Option<phalanx_ir::TensorType>>,
    ranks: RankOnMesh<'a>,
}

impl<'a> Blocks<'a> {
    fn new(lowered: &'a Lowered, rank: usize) -> Self {
        Self { lowered, types: lowered.param_types(rank), ranks: lowered.at(rank) }
    }

    fn of(&self, param: usize) -> ParamBlock {
        let shape = &self.lowered.model.params()[param].shape;
        let RankOnMesh { mesh, rank } = self.ranks;
        match &self.types[param] {
            None => ParamBlock::whole(shape),
            Some(ty) => ParamBlock {
                shape: shape.clone(),
                start: (0..shape.len()).map(|dim| ty.global_index(mesh, rank, dim, 0)).collect(),
                extent: ty.local_shape(mesh),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use phalanx_config::{Config, Sources};
    use phalanx_ir::random::Stream;

    use super::*;
    use crate::Settings;
    use crate::network::Network;

    /// How often each element of each kind of each parameter is written by the ranks of a layout.
    fn written(sets: &[String]) -> BTreeMap<(String, String), Vec<u32>> {
        let sources = Sources::default().preset("tiny").set("run.checkpoint_every=1");
        let sources = sets.iter().fold(sources.set("model.layers=4"), |s, set| s.set(set.as_str()));
        let loaded = Config::load(&sources).unwrap();
        let models = Network::new(&loaded).unwrap().models(&loaded.config, false).unwrap();
        let lowered = Lowered::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
        let planner = Planner::new(&lowered).unwrap();
        let mut counts: BTreeMap<(String, String), Vec<u32>> = BTreeMap::new();
        for rank in 0..lowered.ranks() {
            let plan = planner.plan(rank).unwrap();
            let saves = Saves::new(&planner, rank, plan.state(), plan.scripts()).unwrap();
            for PlacedEntry { entry, .. } in &saves.header.placed {
                let elements = entry.block.shape.iter().product();
                let key = (entry.param.clone(), entry.kind.clone());
                let count = counts.entry(key).or_insert_with(|| vec![0; elements]);
                for run in entry.block.runs(&entry.elements) {
                    count[run.global..run.global + run.len].iter_mut().for_each(|n| *n += 1);
                }
            }
        }
        counts
    }

    /// Each layout writes every element once, and a reader looks for global elements. So any layout
    /// can be read by any other: 40 layouts are 1600 pairs.
    #[test]
    fn every_layout_writes_every_element_once() {
        let random = Stream::named(12, "layouts");
        let mut draws = 0;
        let mut of = |values: &[&'static str]| {
            draws += 1;
            values[random.below(draws, values.len() as u64) as usize]
        };
        for _ in 0..40 {
            let (dp, tp, pp) = (of(&["1", "2", "4"]), of(&["1", "2", "4"]), of(&["1", "2", "4"]));
            let cp = of(&["1", "1", "2"]);
            let mut sets = vec![
                format!("parallel.dp={dp}"),
                format!("parallel.tp={tp}"),
                format!("parallel.cp={cp}"),
                format!("parallel.pp={pp}"),
                format!("parallel.zero={}", of(&["0", "1", "2", "3"])),
                format!("model.tied={}", of(&["true", "false"])),
                "train.microbatches=4".to_owned(),
            ];
            if tp != "1" {
                sets.push(format!("parallel.sp={}", of(&["true", "false"])));
            }
            if pp != "1" {
                let schedule = of(&["1f1b", "gpipe", "zb-h1", "interleaved"]);
                let schedule =
                    if pp == "4" && schedule == "interleaved" { "1f1b" } else { schedule };
                sets.push(format!("parallel.schedule={schedule}"));
            }
            if of(&["f32", "bf16"]) == "bf16" {
                sets.push("precision.weights=bf16".to_owned());
                sets.push("precision.compute=bf16".to_owned());
            }
            let counts = written(&sets);
            let kinds: BTreeSet<&str> = counts.keys().map(|(_, kind)| kind.as_str()).collect();
            assert_eq!(kinds, BTreeSet::from(["exp_avg", "exp_avg_sq", FULL]), "{sets:?}");
            for ((param, kind), count) in counts {
                assert!(count.iter().all(|&n| n == 1), "{sets:?}: {param}/{kind}");
            }
        }
    }
}
