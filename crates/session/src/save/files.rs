//! The files that a rank writes when a session is saved: what lies where in them, and the store that an
//! engine writes to.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use phalanx_checkpoint::{FileWriter, Header, ParamBlock, PlacedEntry, SavedEntry};
use phalanx_engine::DiskStore;
use phalanx_ir::Param;
use phalanx_script::{
    BufferKey, PlannedScript, RankOnMesh, ScriptKey, State, StateKey, StateKind, StateOf,
};

use super::{SavedFiles, saves, stored_name};
use crate::Lowered;
use crate::planner::Planner;
use phalanx_error::{Problem, Result};

/// Entries begin at a multiple of this.
const ALIGN: usize = 64;

/// What a rank writes to one file.
pub(super) struct FilePlan {
    pub(super) name: String,
    pub(super) header: Header,
    /// For each script that saves: where in the file the copies go, by their place in the tier `Disk`;
    /// nowhere if they are not in this file.
    places: BTreeMap<ScriptKey, Places>,
}

type Places = HashMap<usize, Option<u64>>;

impl FilePlan {
    /// The file of this state of a rank.
    pub(super) fn new<'p>(
        planner: &Planner<'_>,
        rank: usize,
        (name, own): (String, &BTreeSet<StateKey>),
        state: &State,
        scripts: impl Iterator<Item = (ScriptKey, &'p Arc<PlannedScript>)>,
    ) -> Self {
        let blocks = Blocks::new(planner.lowered, rank);
        let names = planner.lowered.settings.optimizer.state_names();
        let (mut at, mut placed, mut offsets) = (0_usize, Vec::new(), BTreeMap::new());
        let table = state.script();
        for (key, held) in state.saved().filter(|(key, _)| own.contains(key)) {
            let kind = stored_name(key.kind, planner.lowered.settings.precision, names);
            for member in &state.units[key.unit].members {
                let (elements, first) = held.part(member);
                if elements.is_empty() {
                    continue;
                }
                let entry = SavedEntry {
                    param: planner.lowered.model.params()[member.param].name.clone(),
                    kind: kind.to_owned(),
                    version: version(key.kind),
                    replica: planner.lowered.replica(rank),
                    block: blocks.of(member.param, held.of),
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
        Self { name, header: Header::new(placed, at), places }
    }

    pub(super) fn file(&self, writer: FileWriter, script: ScriptKey) -> RankFile {
        RankFile { writer, places: self.places.get(&script).cloned().unwrap_or_default() }
    }
}

/// How many updates ago a state was the newest, in checkpoints.
fn version(kind: StateKind) -> usize {
    match kind {
        StateKind::Older(age) => age,
        _ => 0,
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

/// A file that an engine writes to.
pub(super) struct RankFile {
    writer: FileWriter,
    places: Places,
}

impl RankFile {
    fn write(&self, at: usize, bytes: &[u8]) -> std::result::Result<(), String> {
        match self.places.get(&at) {
            // Another file has it.
            Some(None) => Ok(()),
            Some(Some(place)) => {
                let written = self.writer.write(*place, bytes);
                written.map_err(|error| {
                    let problem = Problem::io("cannot write", self.writer.path(), &error);
                    let remedy = problem.remedy.map(|remedy| format!("\n  {remedy}"));
                    problem.message + &remedy.unwrap_or_default()
                })
            }
            None => Err(format!("nothing is saved at byte {at}")),
        }
    }
}

/// A rank's files, as an engine writes to them.
pub(crate) struct RankFiles {
    pub(super) disk: Option<RankFile>,
    pub(super) copies: Vec<RankFile>,
    pub(super) needs: Vec<Vec<String>>,
}

impl RankFiles {
    pub(super) fn finish(&self) -> Result<SavedFiles> {
        let finish = |file: &RankFile| file.writer.finish();
        Ok(SavedFiles {
            disk: self.disk.iter().map(finish).collect::<Result<_>>()?,
            copies: self.copies.iter().map(finish).collect::<Result<_>>()?,
            needs: self.needs.clone(),
        })
    }
}

impl DiskStore for RankFiles {
    fn write(&self, at: usize, bytes: &[u8]) -> std::result::Result<(), String> {
        self.disk.iter().chain(&self.copies).try_for_each(|file| file.write(at, bytes))
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

    /// The block of a state of a parameter.
    fn of(&self, param: usize, of: StateOf) -> ParamBlock {
        let Param { shape, dealt, .. } = &self.lowered.model.params()[param];
        let RankOnMesh { mesh, rank } = self.ranks;
        match &self.types[param] {
            _ if of != StateOf::Elements => {
                ParamBlock { dealt: *dealt, ..ParamBlock::whole(&of.shape(shape)) }
            }
            None => ParamBlock { dealt: *dealt, ..ParamBlock::whole(shape) },
            Some(ty) => ParamBlock {
                shape: shape.clone(),
                start: (0..shape.len()).map(|dim| ty.global_index(mesh, rank, dim, 0)).collect(),
                extent: ty.local_shape(mesh),
                dealt: *dealt,
            },
        }
    }
}
