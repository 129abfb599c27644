//! A rank's part of what a session saves: which state it writes, into which files, and how far that is.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use phalanx_checkpoint::{FULL, FileSummary, FileWriter, LOWER, UPPER};
use phalanx_script::{PlannedScript, Precision, ScriptKey, State, StateKey, StateKind, StateOf};

use super::Session;
use super::command::{Command, Reply};
use super::copies::{CopyPlan, Holders, Stores, kept_name, sent_name};
use super::planner::Planner;
pub(crate) use files::RankFiles;
use files::{FilePlan, RankFile};
use phalanx_error::{Error, Problem, Result};

/// Where a session is saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SaveTargets<'a> {
    /// The folder of a checkpoint.
    pub folder: Option<&'a Path>,
    /// Copies in the memory of hosts, after so many steps.
    pub copy: Option<u64>,
}

/// What was written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SavedFiles {
    /// Files of a checkpoint.
    pub disk: Vec<FileSummary>,
    /// Files of a copy.
    pub copies: Vec<FileSummary>,
    /// The files of a copy of which one each is needed.
    pub needs: Vec<Vec<String>>,
}

/// Saving a session.
impl Session {
    /// Lets every rank save its part of the state beside the next step; [`Session::saved`] gives the
    /// files.
    pub fn save_beside_next_step(&mut self, to: SaveTargets<'_>) -> Result<()> {
        self.ranks.ask(Command::Save { to, now: false }).map(drop)
    }

    /// The same at once.
    pub fn save_now(&mut self, to: SaveTargets<'_>) -> Result<()> {
        self.ranks.ask(Command::Save { to, now: true }).map(drop)
    }

    /// The numbers that ranks keep beside parameters, by name: a checkpoint's manifest holds them.
    pub fn scalars(&mut self) -> Result<BTreeMap<String, f64>> {
        let answers = self.ranks.ask(Command::Scalars)?;
        Ok(answers.into_iter().flat_map(Reply::into_scalars).collect())
    }

    /// Waits until all that was saved outlives its process; gives the files.
    pub fn saved(&mut self) -> Result<SavedFiles> {
        let mut all = SavedFiles::default();
        for files in self.ranks.ask(Command::Saved)?.into_iter().map(Reply::into_saved) {
            all.disk.extend(files.disk);
            all.copies.extend(files.copies);
            all.needs = files.needs;
        }
        Ok(all)
    }
}

/// What two ranks that hold the same have in common: replica and stage group, state, block and first
/// element.
type Content = ((usize, usize), StateKey, usize, usize);

/// Pieces of state with the ranks that hold them, the largest first.
fn holders(planner: &Planner<'_>) -> Result<Vec<Holders>> {
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
            // What is kept of rows and columns is the same for all blocks.
            let block = match range.of {
                StateOf::Elements => ranks.mesh.shard(ranks.rank, &unit.blocks),
                StateOf::Rows | StateOf::Columns => 0,
            };
            let group = (lowered.replica(rank), at.stage_group);
            let same = (group, key, block, range.elements.start);
            let bytes = range.elements.len() * range.dtype.size();
            held.entry(same).or_insert((bytes, Vec::new())).1.push(rank);
        }
    }
    let mut all: Vec<Holders> =
        held.into_iter().map(|((_, key, ..), (bytes, ranks))| (key, bytes, ranks)).collect();
    all.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    Ok(all)
}

/// Who writes what: to checkpoints, and to copies if hosts keep them.
pub(crate) struct Writers {
    /// For each rank: the state that it writes to a checkpoint. State that several ranks hold is written
    /// by one of them; the work is spread evenly.
    disk: Vec<BTreeSet<StateKey>>,
    copies: Option<(Stores, CopyPlan)>,
}

impl Writers {
    pub(crate) fn new(planner: &Planner<'_>) -> Result<Self> {
        let (all, ranks) = (holders(planner)?, planner.lowered.ranks());
        let mut load = vec![0; ranks];
        let mut disk = vec![BTreeSet::new(); ranks];
        // Each to the holder that has the least to write so far.
        for (key, bytes, holders) in &all {
            let least = holders.iter().copied().min_by_key(|&rank| load[rank]);
            let writer = least.expect("what is listed is held by a rank");
            load[writer] += bytes;
            disk[writer].insert(*key);
        }
        let stores = Stores::find().filter(Stores::are_several);
        let copies = stores.map(|stores| {
            let plan = CopyPlan::new(&all, ranks, |rank| stores.host_of(rank));
            (stores, plan)
        });
        Ok(Self { disk, copies })
    }
}

/// A rank's part of what a session saves.
pub(crate) struct Saves {
    disk: FilePlan,
    copies: Option<CopyFiles>,
    /// What the next step writes.
    waiting: Option<Arc<RankFiles>>,
    /// What is written, until it outlives this process.
    finishing: Option<JoinHandle<Result<SavedFiles>>>,
}

/// A rank's part of copies.
struct CopyFiles {
    stores: Stores,
    host: usize,
    /// What goes to the buddy too, and what does not.
    sent: FilePlan,
    kept: FilePlan,
    needs: Vec<Vec<String>>,
}

impl CopyFiles {
    /// Begins the files of a copy after a step.
    fn open(&self, step: u64, script: ScriptKey) -> Result<Vec<RankFile>> {
        let mut files = Vec::new();
        for (plan, buddy) in [(&self.sent, true), (&self.kept, false)] {
            let FilePlan { name, header, .. } = plan;
            if header.placed.is_empty() {
                continue;
            }
            let encoded = header.encode();
            let bytes = (encoded.len() + header.data) as u64;
            let sink = self.stores.sink((self.host, buddy), (step, name, bytes))?;
            let place = Path::new("the hosts' copies").join(name);
            let writer = FileWriter::over(&place, name, header, &encoded, Box::new(sink))?;
            files.push(plan.file(writer, script));
        }
        Ok(files)
    }
}

impl Saves {
    /// Finds out what a rank writes, from its plan.
    pub(crate) fn new<'p>(
        planner: &Planner<'_>,
        rank: usize,
        state: &State,
        scripts: impl Iterator<Item = (ScriptKey, &'p Arc<PlannedScript>)>,
    ) -> Result<Self> {
        let scripts: Vec<_> = scripts.collect();
        let writers = planner.writers()?;
        let plan = |name: String, own| {
            FilePlan::new(planner, rank, (name, own), state, scripts.iter().copied())
        };
        let disk = plan(format!("rank-{rank:04}.safetensors"), &writers.disk[rank]);
        let copies = writers.copies.as_ref().map(|(stores, copies)| CopyFiles {
            stores: stores.clone(),
            host: stores.host_of(rank),
            sent: plan(sent_name(rank), &copies.sent[rank]),
            kept: plan(kept_name(rank), &copies.kept[rank]),
            needs: copies.needs.clone(),
        });
        Ok(Self { disk, copies, waiting: None, finishing: None })
    }

    /// Begins the files that a script writes; gives the store that the engine writes to.
    pub(crate) fn open(
        &mut self,
        to: SaveTargets<'_>,
        script: ScriptKey,
    ) -> Result<Arc<RankFiles>> {
        self.finishing = None;
        let disk = to.folder.map(|folder| {
            let writer = FileWriter::create(folder, &self.disk.name, &self.disk.header)?;
            Ok::<_, Error>(self.disk.file(writer, script))
        });
        let copies = match (to.copy, &self.copies) {
            (Some(step), Some(copies)) => copies.open(step, script)?,
            _ => Vec::new(),
        };
        let needs = self.copies.as_ref().map(|copies| copies.needs.clone()).unwrap_or_default();
        let files = Arc::new(RankFiles { disk: disk.transpose()?, copies, needs });
        self.waiting = Some(files.clone());
        Ok(files)
    }

    /// Whether the next step saves.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// All copies have ended: the files go to the disk or to hosts, while the next step runs.
    pub(crate) fn finish(&mut self) {
        if let Some(files) = self.waiting.take() {
            self.finishing = Some(std::thread::spawn(move || files.finish()));
        }
    }

    /// Waits until the files outlive this process.
    pub(crate) fn finished(&mut self) -> Result<SavedFiles> {
        let Some(thread) = self.finishing.take() else { return Ok(SavedFiles::default()) };
        let gone = || Error::failed(Problem::new("the thread that saves ended early"));
        thread.join().unwrap_or_else(|_| Err(gone()))
    }
}

/// Whether a script saves the state.
pub(crate) fn saves(key: ScriptKey) -> bool {
    matches!(key, ScriptKey::Save | ScriptKey::SaveAndTrain)
}

/// The name under which a checkpoint holds a kind of state; masters may be in halves.
pub(crate) fn stored_name(
    kind: StateKind,
    precision: Precision,
    optimizer: &'static [&'static str],
) -> &'static str {
    match kind {
        StateKind::Weights if precision.split => UPPER,
        StateKind::Master if precision.split => LOWER,
        _ => kind_name(kind, optimizer),
    }
}

/// The name by which a kind of state is read from checkpoints.
pub(crate) fn kind_name(kind: StateKind, optimizer: &'static [&'static str]) -> &'static str {
    match kind {
        StateKind::Weights | StateKind::Older(_) | StateKind::Preview | StateKind::Master => FULL,
        StateKind::Optimizer(number) => optimizer[number],
        StateKind::Gradient => "gradient",
    }
}

#[cfg(test)]
mod layout_tests;
