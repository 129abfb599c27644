//! Measuring memory: which bytes of each buffer a step really writes.
//!
//! Every buffer is filled with a pattern at the start of its live range and read at the end; bytes
//! that no longer hold the pattern were written. Two runs with different patterns make sure that no
//! written byte looks unwritten. Live ranges come from the plan; which bytes are written is
//! measured. State that is kept between steps (weights, optimizer state) and host inputs count as
//! written, because the host fills all of them before the first step.

use std::collections::BTreeMap;

use phalanx_engine::{Engine, Event, KernelCall, Span};
use phalanx_script::{Buffer, BufferId, Category, Kind, PlannedScript, Script, Source, Tier};

use crate::bind::span_of;
use crate::executor::{Executor, LoadedScript, RuntimeError, ScriptId};

/// For each category: the largest sum, over the actions of a step, of written bytes of live
/// buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observed {
    /// In the tier `Device`, in the order of [`Category::ALL`].
    pub peaks: Vec<(Category, usize)>,
    /// The same in every tier, in the order of [`Tier::ALL`].
    pub peaks_by_tier: [Vec<(Category, usize)>; Tier::ALL.len()],
}

const PATTERNS: [u8; 2] = [0xA5, 0x5A];

/// Which bytes of each buffer and of each action's workspace are written.
#[derive(Default)]
struct Written {
    buffers: BTreeMap<usize, Vec<bool>>,
    blocks: BTreeMap<usize, Vec<Vec<bool>>>,
}

impl<E: Engine> Executor<E> {
    /// Runs a script twice, action by action, and measures what it writes. The state is restored
    /// afterwards, so that training can go on.
    pub fn observe(&mut self, id: ScriptId) -> Result<Observed, RuntimeError> {
        let saved = self.save(id)?;
        let mut written = Written::default();
        for pattern in PATTERNS {
            let loaded = &self.scripts[id.index()];
            Watch::new(&mut self.engine, loaded, pattern, &mut written).run()?;
            for (span, bytes) in &saved {
                self.engine.upload(*span, bytes)?;
            }
        }
        let peaks_by_tier = Tier::ALL.map(|tier| self.peaks(id, &written, tier));
        let peaks = peaks_by_tier[Tier::Device.index()].clone();
        Ok(Observed { peaks, peaks_by_tier })
    }

    /// The contents of all buffers that persist after the script.
    fn save(&mut self, id: ScriptId) -> Result<Vec<(Span, Vec<u8>)>, RuntimeError> {
        let PlannedScript { script, memory, .. } = &*self.scripts[id.index()].planned;
        let mut saved = Vec::new();
        for (index, buffer) in script.buffers.iter().enumerate() {
            if buffer.source == Source::Script || memory.live_ranges[index].is_none() {
                continue;
            }
            let span = span_of(script, memory, BufferId(index));
            let mut bytes = vec![0; span.bytes];
            self.engine.download(span, &mut bytes)?;
            saved.push((span, bytes));
        }
        Ok(saved)
    }

    fn peaks(&self, id: ScriptId, written: &Written, tier: Tier) -> Vec<(Category, usize)> {
        let PlannedScript { script, memory: plan, .. } = &*self.scripts[id.index()].planned;
        let mut peaks: BTreeMap<Category, usize> = BTreeMap::new();
        for (number, action) in script.actions.iter().enumerate() {
            let mut live: BTreeMap<Category, usize> = BTreeMap::new();
            let here = written.buffers.iter().filter(|(i, _)| script.buffers[**i].tier == tier);
            for (index, bytes) in here {
                if let Some(category) = plan.category(script, *index, number) {
                    *live.entry(category).or_default() += count(bytes);
                }
            }
            // Workspaces lie in the tier `Device`.
            if let (Some(run), Some(masks), Tier::Device) =
                (action.run(), written.blocks.get(&number), tier)
            {
                let entry = &script.programs[run.program.0];
                let (slots, instrs) = (entry.slots(), entry.program().instrs().len());
                let peak = (0..=instrs).map(|i| {
                    let alive = slots.live_ranges.iter().zip(masks);
                    let alive = alive.filter(|(b, _)| b.birth <= i && i <= b.death);
                    alive.map(|(_, mask)| count(mask)).sum::<usize>()
                });
                *live.entry(Category::Workspace).or_default() += peak.max().unwrap_or(0);
            }
            for (category, bytes) in live {
                let peak = peaks.entry(category).or_default();
                *peak = (*peak).max(bytes);
            }
        }
        Category::ALL.into_iter().map(|c| (c, peaks.get(&c).copied().unwrap_or(0))).collect()
    }
}

fn count(bytes: &[bool]) -> usize {
    bytes.iter().filter(|&&b| b).count()
}

/// A run of a script that is inspected after every action.
struct Watch<'a, E: Engine> {
    engine: &'a mut E,
    loaded: &'a LoadedScript<E>,
    pattern: u8,
    written: &'a mut Written,
    /// For each buffer: whether the script computes its contents anew.
    fresh: Vec<bool>,
    /// For each call: messages in flight.
    messages: BTreeMap<usize, Event>,
}

impl<'a, E: Engine> Watch<'a, E> {
    fn new(
        engine: &'a mut E,
        loaded: &'a LoadedScript<E>,
        pattern: u8,
        written: &'a mut Written,
    ) -> Self {
        let script = &loaded.planned.script;
        let fresh = (0..script.buffers.len()).map(|i| is_fresh(script, i)).collect();
        Self { engine, loaded, pattern, written, fresh, messages: BTreeMap::new() }
    }

    fn run(mut self) -> Result<(), RuntimeError> {
        let mut calls =
            self.loaded.actions.iter().zip(self.loaded.calls.iter()).enumerate().peekable();
        for action in 0..self.loaded.planned.script.actions.len() {
            let call = calls.next_if(|(_, (of, _))| **of == action);
            // Earlier actions may still read the memory of a buffer whose live range starts here,
            // so wait for them first.
            if let Some((_, (_, call))) = call {
                self.await_messages(call)?;
            }
            self.fill_what_is_born(action)?;
            if let Some((number, (_, call))) = call {
                self.call(action, number, call)?;
            }
            self.inspect_what_dies(action)?;
        }
        self.messages.into_values().try_for_each(|event| self.engine.wait(event))?;
        Ok(())
    }

    fn await_messages(&mut self, call: &KernelCall<E::Kernel>) -> Result<(), RuntimeError> {
        for before in &call.after {
            if let Some(event) = self.messages.remove(before) {
                self.engine.wait(event)?;
            }
        }
        Ok(())
    }

    fn fill_what_is_born(&mut self, action: usize) -> Result<(), RuntimeError> {
        let PlannedScript { script, memory: plan, .. } = &*self.loaded.planned;
        for (index, buffer) in script.buffers.iter().enumerate() {
            let born = plan.live_ranges[index].is_some_and(|(first, _)| first == action);
            if born && self.fresh[index] {
                let fill = |&padding: &bool| if padding { 0 } else { self.pattern };
                let bytes: Vec<u8> = padding(buffer).iter().map(fill).collect();
                self.engine.upload(span_of(script, plan, BufferId(index)), &bytes)?;
            }
        }
        Ok(())
    }

    /// Makes an action's call, and notes what it writes of its workspace.
    fn call(
        &mut self,
        action: usize,
        number: usize,
        call: &KernelCall<E::Kernel>,
    ) -> Result<(), RuntimeError> {
        let (kernel, args) = (&*call.kernel, call.args());
        let kind = &self.loaded.planned.script.actions[action].kind;
        if matches!(kind, Kind::Send { .. } | Kind::Receive { .. }) {
            // Its other end may need something else first, so this message is not waited for here.
            let event = self.engine.launch(kernel, &args, call.lane, &[])?;
            self.messages.insert(number, event);
        } else if let Some(blocks) = self.engine.launch_observed(kernel, &args, self.pattern)? {
            let known = self.written.blocks.entry(action).or_insert_with(|| blocks.clone());
            for (known, block) in known.iter_mut().zip(&blocks) {
                merge(known, block);
            }
        }
        Ok(())
    }

    fn inspect_what_dies(&mut self, action: usize) -> Result<(), RuntimeError> {
        let PlannedScript { script, memory: plan, .. } = &*self.loaded.planned;
        for (index, buffer) in script.buffers.iter().enumerate() {
            let dies = plan.live_ranges[index].is_some_and(|(_, last)| last == action);
            if !dies {
                continue;
            }
            let mut bytes = vec![0; buffer.bytes];
            self.engine.download(span_of(script, plan, BufferId(index)), &mut bytes)?;
            // What the host or an earlier step wrote counts as written.
            let changed: Vec<bool> = (bytes.iter().zip(padding(buffer)))
                .map(|(&b, padding)| !self.fresh[index] || padding || b != self.pattern)
                .collect();
            let known = self.written.buffers.entry(index);
            merge(known.or_insert_with(|| vec![false; bytes.len()]), &changed);
        }
        Ok(())
    }
}

/// For each byte: whether it is padding, which no action writes: it is zero from the start and
/// stays zero, as the norm over the whole unit needs.
fn padding(buffer: &Buffer) -> Vec<bool> {
    let mut padding = vec![false; buffer.bytes];
    for range in &buffer.padding {
        padding[range.clone()].fill(true);
    }
    padding
}

/// Whether a script computes a buffer's contents anew. It does so for gradients, if it trains,
/// although their memory persists.
fn is_fresh(script: &Script, index: usize) -> bool {
    let buffer = &script.buffers[index];
    match buffer.source {
        Source::Script | Source::Result | Source::Carried => true,
        Source::State | Source::Host => {
            buffer.category == Category::Gradients
                && script.actions.iter().any(|a| a.writes().contains(&BufferId(index)))
        }
    }
}

fn merge(known: &mut [bool], new: &[bool]) {
    for (known, new) in known.iter_mut().zip(new) {
        *known |= new;
    }
}
