//! Measuring memory: which bytes of each buffer a step really writes.
//!
//! Every buffer is filled with a pattern at its birth and read at its death; what no longer holds
//! the pattern was written. Two runs with different patterns make sure that no written byte looks
//! unwritten. When a buffer lives is known from the plan; which of its bytes are written is found out.
//! State that steps hand on (weights, optimizer state) and what the host gives counts as written, for
//! the host fills all of it before the first step.

use std::collections::BTreeMap;

use phalanx_engine::{Args, Engine, Span};
use phalanx_script::{Buffer, BufferId, Category, Script, Source};

use crate::executor::{Call, Executor, RuntimeError, ScriptId};

/// By category: the largest sum, over the actions of a step, of written bytes of live buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observed {
    /// In the order of [`Category::ALL`].
    pub peaks: Vec<(Category, usize)>,
}

const PATTERNS: [u8; 2] = [0xA5, 0x5A];

/// What is written of each buffer and of each action's workspace blocks.
#[derive(Default)]
struct Written {
    buffers: BTreeMap<usize, Vec<bool>>,
    blocks: BTreeMap<usize, Vec<Vec<bool>>>,
}

impl<E: Engine> Executor<E> {
    /// Runs a script twice, action by action, and measures what it writes. State is put back as it
    /// was before, so that training goes on as if nothing had happened.
    pub fn observe(&mut self, id: ScriptId) -> Result<Observed, RuntimeError> {
        let saved = self.save(id)?;
        let mut written = Written::default();
        for pattern in PATTERNS {
            self.observed_run(id, pattern, &mut written)?;
            for (span, bytes) in &saved {
                self.engine.upload(span.offset, bytes)?;
            }
        }
        Ok(self.peaks(id, &written))
    }

    /// The contents of everything that outlives the script.
    fn save(&mut self, id: ScriptId) -> Result<Vec<(Span, Vec<u8>)>, RuntimeError> {
        let loaded = &self.scripts[id.index()];
        let mut saved = Vec::new();
        for (index, buffer) in loaded.script.buffers.iter().enumerate() {
            if buffer.source == Source::Script || loaded.plan.lives[index].is_none() {
                continue;
            }
            let span = Span { offset: loaded.plan.offsets[index], bytes: buffer.bytes };
            let mut bytes = vec![0; span.bytes];
            self.engine.download(span.offset, &mut bytes)?;
            saved.push((span, bytes));
        }
        Ok(saved)
    }

    fn observed_run(
        &mut self,
        id: ScriptId,
        pattern: u8,
        written: &mut Written,
    ) -> Result<(), RuntimeError> {
        let loaded = &self.scripts[id.index()];
        let fresh: Vec<bool> =
            (0..loaded.script.buffers.len()).map(|i| is_fresh(&loaded.script, i)).collect();
        let mut messages = BTreeMap::new();
        for (action, call) in loaded.calls.iter().enumerate() {
            // What an action waits for may be reading the memory of a buffer that is born with it.
            for before in &loaded.after[action] {
                if let Some(event) = messages.remove(before) {
                    self.engine.wait(event)?;
                }
            }
            for (index, buffer) in loaded.script.buffers.iter().enumerate() {
                let born = loaded.plan.lives[index].is_some_and(|(first, _)| first == action);
                if born && fresh[index] {
                    let offset = loaded.plan.offsets[index];
                    let bytes: Vec<u8> =
                        padding(buffer).iter().map(|&p| if p { 0 } else { pattern }).collect();
                    self.engine.upload(offset, &bytes)?;
                }
            }
            let blocks = match call {
                None => None,
                Some(Call { kernel, lane, message, inputs, outputs, workspace }) => {
                    let args = Args { inputs, outputs, workspace: *workspace };
                    let kernel = &loaded.kernels[*kernel];
                    match message {
                        None => self.engine.launch_observed(kernel, &args, pattern)?,
                        // Its other end may need something else first, so it goes on by itself.
                        Some(_) => {
                            let event = self.engine.launch(kernel, &args, *lane, &[])?;
                            messages.insert(action, event);
                            None
                        }
                    }
                }
            };
            if let Some(blocks) = blocks {
                let known = written.blocks.entry(action).or_insert_with(|| blocks.clone());
                for (known, block) in known.iter_mut().zip(&blocks) {
                    merge(known, block);
                }
            }
            for (index, buffer) in loaded.script.buffers.iter().enumerate() {
                let dies = loaded.plan.lives[index].is_some_and(|(_, last)| last == action);
                if !dies {
                    continue;
                }
                let mut bytes = vec![0; buffer.bytes];
                self.engine.download(loaded.plan.offsets[index], &mut bytes)?;
                // What the host or an earlier step wrote counts as written.
                let changed: Vec<bool> = (bytes.iter().zip(padding(buffer)))
                    .map(|(&b, padding)| !fresh[index] || padding || b != pattern)
                    .collect();
                let known =
                    written.buffers.entry(index).or_insert_with(|| vec![false; bytes.len()]);
                merge(known, &changed);
            }
        }
        messages.into_values().try_for_each(|event| self.engine.wait(event))?;
        Ok(())
    }

    fn peaks(&self, id: ScriptId, written: &Written) -> Observed {
        let loaded = &self.scripts[id.index()];
        let count = |bytes: &[bool]| bytes.iter().filter(|&&b| b).count();
        let mut peaks: BTreeMap<Category, usize> = BTreeMap::new();
        for (action, call) in loaded.calls.iter().enumerate() {
            let mut live: BTreeMap<Category, usize> = BTreeMap::new();
            for (index, bytes) in &written.buffers {
                if let Some(category) = loaded.plan.category(&loaded.script, *index, action) {
                    *live.entry(category).or_default() += count(bytes);
                }
            }
            if let (Some(call), Some(masks)) = (call, written.blocks.get(&action)) {
                let slots = &loaded.script.programs[call.kernel].slots;
                let instrs = loaded.script.programs[call.kernel].program.instrs().len();
                let peak = (0..=instrs).map(|i| {
                    let alive = slots.blocks.iter().zip(masks);
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
        let peaks = Category::ALL.into_iter().map(|c| (c, peaks.get(&c).copied().unwrap_or(0)));
        Observed { peaks: peaks.collect() }
    }
}

/// By byte: whether it is padding, which no action writes: it was zeroed with the arena and stays
/// zero, as the norm over the whole unit expects.
fn padding(buffer: &Buffer) -> Vec<bool> {
    let mut padding = vec![false; buffer.bytes];
    for range in &buffer.padding {
        padding[range.clone()].fill(true);
    }
    padding
}

/// Whether a script forms a buffer's contents anew. Gradients are, where the script trains, though
/// their memory stays.
fn is_fresh(script: &Script, index: usize) -> bool {
    let buffer = &script.buffers[index];
    match buffer.source {
        Source::Script | Source::Result => true,
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
