//! What a run says before its first step.

use std::collections::BTreeMap;

use phalanx_config::{Config, DeviceKind};
use phalanx_error::{Result, bytes};
use phalanx_script::traffic::row_bytes;
use phalanx_script::{Category, RowBytes};
use phalanx_session::network::describe_step;
use phalanx_session::{again, host};

use super::Run;
use crate::resume::Resume;

/// What multiplies matrices besides libraries, for checkpoints: the same bits need the same units.
pub(super) fn multipliers(config: &Config) -> String {
    match config.run.device {
        DeviceKind::Cpu => host::multipliers(config.run.cpu_units),
        DeviceKind::Cuda => "a GPU's".to_owned(),
    }
}

/// A note for a run that goes on with other units than it began with.
fn other_products(before: &str, now: &str) -> Option<String> {
    // Checkpoints of earlier versions do not have this field.
    (!before.is_empty() && before != now).then(|| {
        format!("note   own products were {before}, and are {now}: the last bits of a step differ")
    })
}

/// What is told if not all ranks multiply with the same units, which each gives in its words.
fn different_products(by_rank: &[String]) -> Option<String> {
    let first = by_rank.first()?;
    let others: Vec<usize> = (0..by_rank.len()).filter(|&rank| by_rank[rank] != *first).collect();
    let (rank, more) = (*others.first()?, others.len() - 1);
    let more = match more {
        0 => String::new(),
        1 => ", and one more differs".to_owned(),
        more => format!(", and {more} more differ"),
    };
    Some(format!(
        "note   own products are {first} on rank 0, and {} on rank {rank}{more}: on equal processors the last bits of a step are others",
        by_rank[rank]
    ))
}

impl Run<'_> {
    /// Whether ranks multiply with different units, in words. Every process must call it together.
    pub(super) fn different_products(&mut self) -> Result<Option<String>> {
        let own = multipliers(&self.loaded.config);
        let all = self.session.from_each(own.as_bytes())?;
        let words: Vec<String> =
            all.iter().map(|own| String::from_utf8_lossy(own).into_owned()).collect();
        Ok(different_products(&words))
    }

    /// What a reader wants to know before the first step.
    pub(super) fn header(
        &self,
        dir: String,
        resumed: Option<&Resume>,
        products: Option<String>,
    ) -> Vec<String> {
        let config = &self.loaded.config;
        let memory = self.session.memory();
        let parts: Vec<String> = (Category::ALL.into_iter())
            .filter(|&category| memory.peak(category) > 0)
            .map(|category| format!("{category} {}", bytes(memory.peak(category) as u64)))
            .collect();
        let floor = match self.corpus.entropy_floor() {
            Some(floor) => format!(", entropy {floor:.4}"),
            None => String::new(),
        };
        // The ranks of a pipeline hold different stages.
        let whose = if config.parallel.pp.get() > 1 { "the largest rank" } else { "each rank" };
        let together = match self.session.ranks() {
            1 => String::new(),
            _ => format!(", {} on all together", bytes(self.session.arena() as u64)),
        };
        let copies = config.run.copy_every;
        let alone = copies > 0 && !again::hosts_keep_copies();
        let alone = alone.then(|| {
            format!("run.copy_every = {copies} has no effect with ranks that have one host")
        });
        let notes = self.loaded.notes.iter().chain(&alone).map(|note| format!("note   {note}"));
        let notes = notes.chain(products);
        let rooms = self.session.rooms().map(|rooms| format!("rooms  {}", rooms.describe()));
        let rows = row_bytes(self.session.script()).map(|RowBytes { even, bound }| {
            let (even, bound) = (bytes(even), bytes(bound));
            format!(
                "rows   of experts: rank 0 receives {even} in a step if choices are even, at most {bound}"
            )
        });
        let resumed = resumed.map(|resumed| self.going_on(resumed)).unwrap_or_default();
        let lines = [
            format!("config {}", self.loaded.origin()),
            format!("model  {}", self.network.describe(config, self.parameters)),
            format!("data   {}{floor}", self.corpus.describe()),
            format!("step   {}", describe_step(config)),
            format!("ranks  {}", self.session.layout()),
            format!(
                "plan   {} on {whose}{together}: {}",
                bytes(self.session.rank_arena() as u64),
                parts.join(", ")
            ),
            format!("moves  {}", self.moves()),
        ];
        let lines = lines.into_iter().chain(rooms).chain(rows).chain([format!("run    {dir}")]);
        lines.chain(resumed).chain(notes).chain([String::new()]).collect()
    }

    /// What a reader wants to know of the checkpoint that a run goes on from.
    fn going_on(&self, resumed: &Resume) -> Vec<String> {
        let checkpoint = &resumed.checkpoint;
        let manifest = checkpoint.manifest();
        let (step, path) = (manifest.step, checkpoint.path().display());
        let mut lines = vec![format!("resume after step {step}, from {path}")];
        lines.extend(resumed.notes().iter().map(|note| format!("note   {note}")));
        let now = self.corpus.describe();
        if manifest.corpus != now {
            lines.push(format!("note   the data were {}", manifest.corpus));
        }
        lines.extend(other_products(&manifest.products, &multipliers(&self.loaded.config)));
        lines
    }

    /// What ranks will exchange in a step, computed from the types of their scripts.
    fn moves(&self) -> String {
        let mut by_op: BTreeMap<&str, u64> = BTreeMap::new();
        for (route, moved) in self.session.moved() {
            *by_op.entry(route.op).or_default() += moved.bytes;
        }
        by_op.retain(|_, moved| *moved > 0);
        let total: u64 = by_op.values().sum();
        let each: Vec<String> =
            by_op.iter().map(|(op, moved)| format!("{op} {}", bytes(*moved))).collect();
        match self.session.ranks() {
            1 => "nothing: there is one rank".to_owned(),
            _ => {
                // Rows of experts travel as many as there are; types know how many there may be.
                let most = match row_bytes(self.session.script()) {
                    Some(_) => "at most ",
                    None => "",
                };
                format!("{most}{} between ranks in each step: {}", bytes(total), each.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_different_units_are_told() {
        let words = |all: &[&str]| all.iter().map(|&own| own.to_owned()).collect::<Vec<_>>();
        assert_eq!(different_products(&words(&["none"])), None);
        assert_eq!(different_products(&words(&["bf16 on amx"; 4])), None);
        let told = different_products(&words(&["bf16 on amx", "bf16 on amx", "none", "none"]));
        let expected = "note   own products are bf16 on amx on rank 0, and none on rank 2, and one more differs: on equal processors the last bits of a step are others";
        assert_eq!(told.as_deref(), Some(expected));
    }

    #[test]
    fn other_units_are_told() {
        let told = other_products("bf16 on avx512-bf16", "none");
        let expected = "note   own products were bf16 on avx512-bf16, and are none: the last bits of a step differ";
        assert_eq!(told.as_deref(), Some(expected));
        assert_eq!(other_products("none", "none"), None);
        assert_eq!(other_products("", "none"), None);
    }
}
