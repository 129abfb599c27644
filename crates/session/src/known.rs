//! Facts about a session that are known before any rank starts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use phalanx_call::traffic::add;
use phalanx_ir::Param;
use phalanx_models::port;
use phalanx_script::{Category, MemoryPlan, Moved, Route, Script, ScriptKey};

use super::planner::{ClassPlan, Planner};
use super::rooms::Rooms;
use super::settings::{MemoryExcess, Settings};
use super::traced::{RankScript, Timetable};
use super::{Session, asynchronous};
use phalanx_error::Result;

/// Facts about a session that are known before it runs.
pub(super) struct Known {
    pub settings: Settings,
    pub(super) params: Vec<Param>,
    /// The first rank's script; the other ranks of its stage group do the same, each on its part.
    pub(super) script: Script,
    /// Where the buffers of the largest rank lie.
    pub(super) memory: MemoryPlan,
    /// For each rank and bound of the room for rows of experts: what it is planned to write, by category.
    pub(super) peaks: Vec<Vec<Vec<(Category, usize)>>>,
    /// How much room there is for rows of experts, where it is bounded.
    pub(super) rooms: Option<Rooms>,
    /// FLOPs of a step over all ranks.
    pub(super) flops: u64,
    /// Bytes of each rank's arena.
    pub arenas: Vec<usize>,
    /// Bytes that each rank's engine keeps outside of its arena.
    pub(super) beside: usize,
    /// What all ranks together are predicted to move in a step.
    pub(super) moved: BTreeMap<Route, Moved>,
    /// The mesh, the strategies, and what they shard.
    pub(super) layout: String,
    /// Which stage group runs what, and in which order.
    pub(super) timetable: Timetable,
    /// The scripts of steps that can be traced, one for each class of ranks.
    pub(super) scripts: BTreeMap<ScriptKey, Vec<RankScript>>,
    /// The names of the values that the model exposes when it predicts.
    pub(super) exposed: Vec<String>,
    /// The scripts whose model exposes what it predicts.
    pub(super) predicting: BTreeSet<ScriptKey>,
    /// Whether steps tell how many tokens chose which expert.
    pub(super) has_experts: bool,
    /// At least and at most how many steps that are taken together run without waiting in between.
    pub(super) together: RangeInclusive<usize>,
    /// By parameter: how many older versions of its weights are kept.
    pub(super) older: Vec<usize>,
    /// By rank: its replica.
    pub(super) replicas: Vec<usize>,
    /// The first rank of each replica.
    pub(super) first_ranks: Vec<usize>,
}

/// FLOPs of a script's programs.
fn flops(script: &Script) -> u64 {
    let runs = script.actions.iter().filter_map(|action| action.run());
    runs.map(|run| script.programs[run.program.0].program().flops()).sum()
}

impl Session {
    /// The script of the first rank's step; the other ranks of its stage group do the same, each on
    /// its part.
    pub fn script(&self) -> &Script {
        &self.known.script
    }

    /// Where the buffers of the largest rank's script lie, and what they cost.
    pub fn memory(&self) -> &MemoryPlan {
        &self.known.memory
    }

    /// Bytes of all ranks' arenas, which training and evaluation share.
    pub fn arena(&self) -> usize {
        self.known.arenas.iter().sum()
    }

    /// Bytes of the arenas in this process, where ranks are processes; else of all.
    pub fn local_arena(&self) -> usize {
        self.ranks.local().iter().map(|&rank| self.known.arenas[rank]).sum()
    }

    /// Bytes of the largest rank's arena.
    pub fn rank_arena(&self) -> usize {
        self.known.arenas.iter().copied().max().unwrap_or(0)
    }

    /// What all ranks together will move in a step, computed from the types of their scripts.
    pub fn moved(&self) -> &BTreeMap<Route, Moved> {
        &self.known.moved
    }

    /// The ranks and how they divide the work, in one line.
    pub fn layout(&self) -> &str {
        &self.known.layout
    }

    /// For each rank of the world: what it is planned to write in a step, by category, with the room that the last step
    /// had for rows of experts.
    pub fn planned(&self) -> impl Iterator<Item = &[(Category, usize)]> {
        self.known.peaks.iter().map(|own| &own[self.bound][..])
    }

    /// How much room there is for rows of experts, where it is bounded.
    pub fn rooms(&self) -> Option<&Rooms> {
        self.known.rooms.as_ref()
    }

    /// FLOPs of the programs of one step over all ranks, multiplications and additions counted
    /// separately.
    pub fn flops_per_step(&self) -> u64 {
        self.known.flops
    }

    /// Bytes that up to so many ranks are planned to take on a device that they share: arenas, and the
    /// workspaces of libraries and the next batch beside them.
    pub fn planned_bytes(&self, sharing: usize) -> usize {
        let all = self.arena() + self.known.beside * self.ranks();
        all.min(sharing * (self.rank_arena() + self.known.beside))
    }
}

impl Known {
    /// How the plan exceeds its memory limit, if it does.
    pub(super) fn over(&self) -> Option<MemoryExcess> {
        let taken = |arena: &usize| arena + self.beside;
        let rank = self.arenas.iter().map(taken).max().unwrap_or(0);
        let all = self.arenas.iter().map(taken).sum();
        self.settings.memory_limit?.over((rank, all), &self.memory, self.beside)
    }

    /// Plans one rank of each class, and checks that all scripts match, before any rank starts.
    pub(super) fn of(planner: &Planner<'_>) -> Result<Self> {
        let (lowered, classes) = (planner.lowered, planner.classes()?);
        let mut moved: BTreeMap<Route, Moved> = BTreeMap::new();
        for (route, once) in planner.check()?.into_iter().flatten() {
            add(&mut moved, route, once);
        }
        let (mut arenas, mut peaks) = (vec![0; lowered.ranks()], vec![vec![]; lowered.ranks()]);
        for class in classes {
            for &rank in &class.ranks {
                arenas[rank] = class.arena(lowered.settings.device);
                peaks[rank] = class.peaks();
            }
        }
        let of_rank = |rank: usize| {
            let class = classes.iter().find(|class| class.ranks[0] == rank);
            class.map(|class| class.plan.train_script())
        };
        // Programs count the work of all ranks of their mesh.
        let firsts = lowered
            .stage_groups()
            .into_iter()
            .filter_map(|stage_group| of_rank(stage_group.ranks[0]));
        let flops = firsts.map(flops).sum::<u64>() * lowered.replicas() as u64;
        let device = lowered.settings.device;
        let arena = |class: &ClassPlan| (class.arena(device), usize::MAX - class.ranks[0]);
        let largest = classes.iter().max_by_key(|class| arena(class));
        let memory = largest.expect("there is a rank").memory().clone();
        Ok(Self {
            settings: lowered.settings.clone(),
            params: lowered.model.params().to_vec(),
            script: of_rank(0).expect("rank 0 is the first of its class").clone(),
            memory,
            peaks,
            rooms: planner.rooms()?,
            flops,
            arenas,
            beside: lowered.library.beside(),
            moved,
            layout: lowered.describe(),
            timetable: Timetable::new(lowered)?,
            scripts: planner.steps()?,
            exposed: lowered.exposed(),
            predicting: lowered.exposing(port::PREDICTION),
            has_experts: lowered.exposing(port::CHOSEN).contains(&ScriptKey::Train),
            together: lowered.together(),
            older: lowered.updates.as_ref().map_or_else(
                || vec![0; lowered.model.params().len()],
                |updates| asynchronous::older(&lowered.model, updates),
            ),
            replicas: (0..lowered.ranks()).map(|rank| lowered.replica(rank)).collect(),
            first_ranks: lowered.first_ranks(),
        })
    }
}
