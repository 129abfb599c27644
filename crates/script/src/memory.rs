//! The memory planner: one arena per tier for a whole script, from live ranges alone.
//!
//! Two buffers may share memory only if one's last use happens before the other's first write.

mod place;

use phalanx_call::{ALIGN, Tier};

use crate::action::{BufferId, Category, Kind, Script, Source};
use crate::error::ScriptError;
use crate::order::HappensBefore;
use place::place;

/// Where every buffer of a script lies, and what that costs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryPlan {
    /// For each buffer: the offset in its tier's arena.
    pub offsets: Vec<usize>,
    /// For each action: the offset of its program's workspace, where it needs one.
    pub workspaces: Vec<Option<usize>>,
    /// Bytes of the arena in the tier `Device`.
    pub arena: usize,
    /// For each category: the largest sum of live bytes in the tier `Device` at any action, without
    /// gaps.
    pub peaks: Vec<(Category, usize)>,
    /// By tier, in the order of [`Tier::ALL`]: bytes of its arena.
    pub arenas: [usize; Tier::ALL.len()],
    /// For each tier: what `peaks` is for the tier `Device`.
    pub peaks_by_tier: [Vec<(Category, usize)>; Tier::ALL.len()],
    /// The first and last action that uses each buffer; persistent ones live throughout.
    pub live_ranges: Vec<Option<(usize, usize)>>,
    /// For each buffer: the first action at which it counts in its own category. What comes from
    /// other ranks counts as communication until it is read.
    pub counts_from: Vec<usize>,
}

impl MemoryPlan {
    /// The planned peak of one category in the tier `Device`.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_in(Tier::Device, category)
    }

    /// The planned peak of one category in a tier.
    pub fn peak_in(&self, tier: Tier, category: Category) -> usize {
        let mut peaks = self.peaks_by_tier[tier.index()].iter();
        peaks.find(|(c, _)| *c == category).map_or(0, |(_, bytes)| *bytes)
    }

    /// What a buffer's bytes count as while an action runs; nothing if it is not alive then.
    pub fn category(&self, script: &Script, buffer: usize, action: usize) -> Option<Category> {
        let (first, last) = self.live_ranges[buffer]?;
        (first..=last).contains(&action).then(|| match action < self.counts_from[buffer] {
            true => Category::Communication,
            false => script.buffers[buffer].category,
        })
    }
}

/// Plans the arenas of a script.
pub fn plan(script: &Script) -> Result<MemoryPlan, ScriptError> {
    plan_with_state(script, None)
}

/// Plans a script that shares its state with another script: buffers that persist between scripts
/// stay where `base` has them, with the same indices.
pub fn plan_with_state(
    script: &Script,
    base: Option<&MemoryPlan>,
) -> Result<MemoryPlan, ScriptError> {
    let settled = Settled { state: base, row: None };
    Ok(plan_in_order(script, &HappensBefore::of(script)?, settled))
}

/// What lies somewhere already.
#[derive(Clone, Copy, Default)]
pub(crate) struct Settled<'a> {
    /// Where state lies: buffers with the same indices.
    pub(crate) state: Option<&'a MemoryPlan>,
    /// Where another script of an endless row has what it carries: buffers with the same keys.
    pub(crate) row: Option<(&'a Script, &'a MemoryPlan)>,
}

impl Settled<'_> {
    /// Where a buffer of a script lies, if that is known.
    fn offset(&self, script: &Script, index: usize) -> Option<usize> {
        match (script.buffers[index].source, self.state, self.row) {
            (Source::State, Some(state), _) => Some(state.offsets[index]),
            (Source::Carried, _, Some((other, plan))) => {
                other.find(&script.buffers[index].key).map(|found| plan.offsets[found.0])
            }
            _ => None,
        }
    }
}

/// The same for a script whose order is known.
pub(crate) fn plan_in_order(
    script: &Script,
    order: &HappensBefore,
    settled: Settled<'_>,
) -> MemoryPlan {
    let (uses, all) = (uses(script), (0..script.actions.len()).collect::<Vec<usize>>());
    let lives = lives(script, &uses);
    let (mut offsets, mut workspaces) =
        (vec![0; script.buffers.len()], vec![None; script.actions.len()]);
    let mut arenas = [0; Tier::ALL.len()];
    for tier in Tier::ALL {
        let mut allocations = allocations(script, tier, settled, (&uses, &all), &lives);
        place(&mut allocations, order);
        for room in &allocations {
            match room.owner {
                Owner::Buffer(index) => offsets[index] = room.offset,
                Owner::Workspace(action) => workspaces[action] = Some(room.offset),
            }
        }
        let arena = allocations.iter().map(|p| p.offset + p.bytes).max().unwrap_or(0);
        arenas[tier.index()] = arena.next_multiple_of(ALIGN);
    }
    let counts_from = counts_from(script);
    let arena = arenas[Tier::Device.index()];
    let mut plan = MemoryPlan {
        offsets,
        workspaces,
        arena,
        arenas,
        live_ranges: lives,
        counts_from,
        ..MemoryPlan::default()
    };
    plan.peaks_by_tier = Tier::ALL.map(|tier| peaks(script, &plan, tier));
    plan.peaks = plan.peaks_by_tier[Tier::Device.index()].clone();
    plan
}

/// The allocations of a tier; workspaces lie in the tier `Device`. `uses` has the uses of buffers,
/// and all actions, each of which uses its own workspace.
fn allocations<'a>(
    script: &Script,
    tier: Tier,
    settled: Settled<'_>,
    (uses, all): (&'a [Vec<usize>], &'a [usize]),
    lives: &[Option<(usize, usize)>],
) -> Vec<Allocation<'a>> {
    let mut allocations: Vec<Allocation<'a>> = Vec::new();
    for (index, buffer) in script.buffers.iter().enumerate().filter(|(_, b)| b.tier == tier) {
        let life = match (&lives[index], buffer.source) {
            (None, _) => continue,
            (Some(_), Source::Script) => Life::Uses(&uses[index]),
            (Some(_), Source::Carried) => carried(script, index, &uses[index]),
            // Its contents matter before the first action or after the last one.
            (Some(_), _) => Life::Always,
        };
        let fixed = settled.offset(script, index);
        let offset = fixed.unwrap_or(0);
        let owner = Owner::Buffer(index);
        allocations.push(Allocation {
            owner,
            bytes: buffer.bytes,
            life,
            offset,
            fixed: fixed.is_some(),
        });
    }
    for (index, action) in script.actions.iter().enumerate().filter(|_| tier == Tier::Device) {
        let extent = action.run().map_or(0, |r| script.programs[r.program.0].slots().extent);
        if extent > 0 {
            let owner = Owner::Workspace(index);
            let life = Life::Uses(&all[index..=index]);
            allocations.push(Allocation { owner, bytes: extent, life, offset: 0, fixed: false });
        }
    }
    allocations
}

/// What an allocation is for.
enum Owner {
    Buffer(usize),
    Workspace(usize),
}

/// An allocation: memory that a buffer or an action needs during its live range.
struct Allocation<'a> {
    owner: Owner,
    bytes: usize,
    life: Life<'a>,
    offset: usize,
    /// Whether the offset is already fixed.
    fixed: bool,
}

/// When an allocation holds something.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Life<'a> {
    /// Throughout.
    Always,
    /// From the first of these actions until all of them are over.
    Uses(&'a [usize]),
    /// From before the script until these actions are over; again from an action on, until after the script.
    Carried { before: Option<&'a [usize]>, from: Option<usize> },
}

/// The life of a buffer that is carried from a script to the next: between its last reader and what is written for the
/// next script, its memory is free.
fn carried<'a>(script: &Script, index: usize, uses: &'a [usize]) -> Life<'a> {
    let writes = |action: &usize| script.actions[*action].writes().contains(&BufferId(index));
    let window = script.window.map(|window| window.part);
    let (begins, ends) =
        window.map_or((true, true), |part| (part.begins_in_flight(), part.ends_in_flight()));
    let written = uses.iter().position(writes);
    let (before, after) = uses.split_at(written.unwrap_or(uses.len()));
    match (begins, ends) {
        // The last script reads it only.
        (true, false) => Life::Carried { before: Some(uses), from: None },
        (begins, _) => {
            Life::Carried { before: begins.then_some(before), from: after.first().copied() }
        }
    }
}

/// The actions that use each buffer, in order.
fn uses(script: &Script) -> Vec<Vec<usize>> {
    let mut uses: Vec<Vec<usize>> = vec![Vec::new(); script.buffers.len()];
    for (index, action) in script.actions.iter().enumerate() {
        let used = action.reads().into_iter().chain(action.writes()).chain(action.ends());
        for BufferId(buffer) in used {
            if uses[buffer].last() != Some(&index) {
                uses[buffer].push(index);
            }
        }
    }
    uses
}

fn lives(script: &Script, uses: &[Vec<usize>]) -> Vec<Option<(usize, usize)>> {
    let end = script.actions.len().saturating_sub(1);
    (script.buffers.iter().zip(uses))
        .map(|(buffer, uses)| match (buffer.source, uses.first(), uses.last()) {
            (Source::Script, Some(&first), Some(&last)) => Some((first, last)),
            (Source::Script, ..) => None,
            // An accumulator lives from its first write to its last use, but the host may read it
            // between steps, so its memory is never shared.
            _ => Some((0, end)),
        })
        .collect()
}

/// For each buffer: the first action that reads it, if other ranks write it; else the first action.
fn counts_from(script: &Script) -> Vec<usize> {
    let mut from: Vec<Option<usize>> = vec![Some(0); script.buffers.len()];
    for (index, action) in script.actions.iter().enumerate() {
        for BufferId(buffer) in action.reads() {
            from[buffer].get_or_insert(index);
        }
        if let Kind::Receive { buffer, .. } = action.kind {
            from[buffer.0] = None;
        }
    }
    from.into_iter().map(|first| first.unwrap_or(script.actions.len())).collect()
}

fn peaks(script: &Script, plan: &MemoryPlan, tier: Tier) -> Vec<(Category, usize)> {
    let steps = script.actions.len().max(1);
    let mut changes = vec![[0isize; Category::ALL.len()]; steps + 1];
    for (index, buffer) in script.buffers.iter().enumerate().filter(|(_, b)| b.tier == tier) {
        let Some((first, last)) = plan.live_ranges[index] else { continue };
        let known = plan.counts_from[index].clamp(first, last + 1);
        let (bytes, own) = (buffer.bytes as isize, buffer.category);
        for (category, life) in [(Category::Communication, first..known), (own, known..last + 1)] {
            changes[life.start][category as usize] += bytes;
            changes[life.end][category as usize] -= bytes;
        }
    }
    let mut live = [0isize; Category::ALL.len()];
    let mut peaks = [0isize; Category::ALL.len()];
    for (index, change) in changes[..steps].iter().enumerate() {
        let run = script.actions.get(index).filter(|_| tier == Tier::Device).and_then(|a| a.run());
        let workspace = run.map_or(0, |r| script.programs[r.program.0].slots().peak as isize);
        for category in Category::ALL {
            let c = category as usize;
            live[c] += change[c];
            let extra = if category == Category::Workspace { workspace } else { 0 };
            peaks[c] = peaks[c].max(live[c] + extra);
        }
    }
    Category::ALL.into_iter().map(|c| (c, peaks[c as usize] as usize)).collect()
}
