//! Settings that nothing reads in this run, such as `parallel.sp` on one tensor-parallel rank.
//!
//! A system over one rank is no mistake: a user who tries several degrees also tries 1. But a setting that is
//! written is expected to do something, so the run says in a note that it does nothing. Settings that
//! contradict each other are refused instead.

use super::key::Key;
use super::setting::Setting;
use super::values::Values;
use super::{
    Config, DataKind, LayoutKind, LrSchedule, OptimKind, ParallelConfig, SyncKind, ZeroStage, keys,
};

/// A key, and why nothing reads it, as the end of the sentence "… has no effect with"; `None` if something
/// does.
type Use = (&'static str, Option<String>);

/// The reason, unless the key is read.
fn unless(read: bool, with: &str) -> Option<String> {
    (!read).then(|| with.to_owned())
}

impl ParallelConfig {
    /// How many ranks hold the same weights, so that they sum gradients and may share what they keep; of a pipeline
    /// whose stages are held several times, more than one.
    fn ranks_that_sum(&self) -> usize {
        let holders = if self.holders.0.iter().any(|count| *count > 1) { 2 } else { 1 };
        self.dp.saturating_mul(self.cp).get() * holders
    }
}

impl Config {
    /// Adds a note for each setting of the user that has no effect.
    pub(crate) fn note_idle(&self, values: &mut Values) {
        let uses = [self.uses_by_replicas(), self.uses_by_degrees(), self.uses_by_rules()];
        for (key, with) in uses.into_iter().flatten() {
            let (Some(with), true) = (with, self.is_changed(key)) else { continue };
            if let Some(given) = values.given.get(key).filter(|given| given.by_user) {
                let note = format!("{key} = {} has no effect with {with}", given.text());
                values.notes.push(note);
            }
        }
    }

    /// Whether the value of a key is another one than it has by itself. The file of a run has every key.
    fn is_changed(&self, name: &str) -> bool {
        let (parallel, optim) = (&self.parallel, &self.optim);
        match name {
            "parallel.dp_shard" => parallel.dp_shard != parallel.dp,
            "parallel.cp_order" => parallel.cp_order != parallel.cp_kind.usual_order(),
            "optim.betas" => optim.betas != optim.kind.betas(),
            "optim.eps" => optim.eps != optim.kind.eps(),
            "data.dtype" => self.data.dtype.is_some(),
            _ => {
                let usual = keys().find(|key| key.name == name).map(Key::usual);
                let written = self.written().into_iter().find(|(key, _)| *key == name);
                written.map(|(_, value)| value) != usual
            }
        }
    }

    /// What replicas keep in shards or sum in pieces.
    fn uses_by_replicas(&self) -> Vec<Use> {
        let parallel = &self.parallel;
        let averaged = parallel.has_replicas() && parallel.cp.get() == 1;
        let alone = match parallel.ranks_that_sum() {
            1 => Some("parallel.dp = 1 and parallel.cp = 1".to_owned()),
            _ => None,
        };
        let searched = unless(parallel.layout == LayoutKind::Given, "parallel.layout = \"auto\"");
        let stage = format!("parallel.zero = {}", parallel.zero.write());
        let no_zero = unless(parallel.zero != ZeroStage::Zero, &stage);
        let no_shards = unless(parallel.zero != ZeroStage::Zero || parallel.fsdp, &stage);
        let sync = format!("parallel.sync = {}", parallel.sync.write());
        let no_buckets = unless(parallel.sync != SyncKind::DataParallel && !averaged, &sync)
            .or(unless(parallel.zero == ZeroStage::Zero, &stage))
            .or(unless(!parallel.fsdp, "parallel.fsdp = true"));
        let whole = || searched.clone().or(alone.clone());
        let pieces = unless(!parallel.fsdp, "parallel.fsdp = true").or(no_zero);
        vec![
            ("parallel.zero", alone.clone()),
            ("parallel.fsdp", alone.clone()),
            ("parallel.dp_shard", whole().or(no_shards)),
            ("parallel.bucket_mib", whole().or(no_buckets)),
            ("parallel.reduce_bucket_size", whole().or(pieces.clone())),
            ("parallel.allgather_bucket_size", whole().or(pieces)),
        ]
    }

    /// How a degree is used that is 1.
    fn uses_by_degrees(&self) -> Vec<Use> {
        let one = |degree: usize, name: &str| unless(degree > 1, &format!("parallel.{name} = 1"));
        let (tp, cp) = (one(self.parallel.tp.get(), "tp"), one(self.parallel.cp.get(), "cp"));
        vec![
            ("parallel.sp", tp.clone()),
            ("parallel.tp_kind", tp),
            ("parallel.cp_kind", cp.clone()),
            ("parallel.cp_order", cp),
        ]
    }

    /// Constants of rules that were not chosen.
    fn uses_by_rules(&self) -> Vec<Use> {
        let (kind, data) = (self.optim.kind, self.data.kind);
        let optim = format!("optim.kind = {}", kind.write());
        let source = format!("data.kind = {}", data.write());
        let falls = self.optim.schedule != LrSchedule::Constant;
        let squares = !matches!(kind, OptimKind::Sgd | OptimKind::Lion);
        let is_cut = matches!(data, DataKind::Text | DataKind::Tokens);
        let no_checkpoints = "run.checkpoint_every = 0 and run.checkpoint_minutes = 0";
        vec![
            ("optim.betas", unless(kind != OptimKind::Sgd, &optim)),
            ("optim.eps", unless(squares, &optim)),
            ("optim.min_lr_ratio", unless(falls, "optim.schedule = \"constant\"")),
            ("data.val_fraction", unless(is_cut, &source)),
            ("data.dtype", unless(data == DataKind::Tokens, &source)),
            ("run.keep", unless(self.run.saves(), no_checkpoints)),
        ]
    }
}
