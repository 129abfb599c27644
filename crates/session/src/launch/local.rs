//! The processes of a job on this host.

use std::path::{Path, PathBuf};

use phalanx_checkpoint::{Checkpoint, newest};
use phalanx_comm::{FlightRecorder, Token, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::{Left, ProcessEnd};
use phalanx_sys::process::{Signal, is_stopped};

use super::children::{Children, Starting};
use super::crew::{Crew, Epoch};
use super::folder::Folder;
use super::held::HeldMemory;
use super::{Launched, new_token};
use crate::folders::CHECKPOINTS;

/// The processes, and what they share.
pub(super) struct LocalCrew<'a> {
    program: &'a Launched,
    folder: Folder,
    token: Token,
    children: Children,
    memory: HeldMemory,
}

impl<'a> LocalCrew<'a> {
    pub(super) fn new(program: &'a Launched) -> Result<Self> {
        let (folder, token) = (Folder::new()?, new_token()?);
        Ok(Self {
            program,
            folder,
            token,
            children: Children::default(),
            memory: HeldMemory::default(),
        })
    }
}

impl Crew for LocalCrew<'_> {
    fn start(&mut self, epoch: Epoch, recorder: &FlightRecorder) -> Result<Vec<(usize, String)>> {
        let Epoch { number, ranks, from } = epoch;
        self.memory.begin(from);
        let (meet, token) = (self.folder.meet(number), self.token.hex());
        let variables = |rank: usize| {
            vec![
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", ranks.to_string()),
                ("LOCAL_RANK", rank.to_string()),
                ("LOCAL_WORLD_SIZE", ranks.to_string()),
                (names::MEET, meet.display().to_string()),
                (names::TOKEN, token.clone()),
                (names::EPOCH, number.to_string()),
            ]
        };
        let starting = Starting {
            program: self.program,
            ranks: 0..ranks,
            variables: &variables,
            recorder,
            memory: &self.memory,
            output: None,
        };
        match self.children.start(&starting) {
            Ok(()) => Ok(Vec::new()),
            Err((_, error)) if number == 0 => {
                let file = Path::new(&self.program.file);
                Err(Error::refused(Problem::io("cannot start", file, &error)))
            }
            Err((rank, error)) => Ok((rank..ranks).map(|rank| (rank, error.to_string())).collect()),
        }
    }

    fn look(&mut self, recorder: &FlightRecorder) -> Vec<(usize, ProcessEnd)> {
        // The first rank's memory is that of all.
        self.memory.look(0..1, &self.children, recorder);
        self.children.ended(recorder)
    }

    fn send(&mut self, signal: Signal) {
        self.children.send(signal);
    }

    fn is_stopped(&self, rank: usize, recorder: &FlightRecorder) -> bool {
        is_stopped(recorder.rank(rank).process() as u32)
    }

    fn code(&self, rank: usize) -> Option<i32> {
        self.children.code(rank)
    }

    fn find_left(&mut self, recorder: &FlightRecorder, left: &mut Left) {
        left.memory = self.memory.holds(0);
        left.checkpoint = newest_step(&recorder.job().folder());
    }

    fn finish(&mut self, _code: u8) {}
}

/// The step of the newest whole checkpoint of a run, if its folder is known.
pub(crate) fn newest_step(run: &str) -> Option<u64> {
    let root = (!run.is_empty()).then(|| PathBuf::from(run).join(CHECKPOINTS))?;
    let saved = newest(&root).and_then(|path| Checkpoint::open(&path).ok())?;
    Some(saved.manifest().step)
}
