//! How data-parallel replicas are kept equal.

use super::parallel::{LayoutKind, ParallelConfig, ZeroStage};
use super::setting::choice;
use super::values::Values;
use super::{Config, FloatKind};
use phalanx_error::Problem;

choice! {
    /// How replicas are kept equal.
    pub enum SyncKind {
        /// Gradients are summed in buckets while the backward pass runs.
        Ddp = "ddp",
        /// One rank keeps the optimizer, collects gradients and spreads weights.
        DataParallel = "dataparallel",
        /// Replicas train alone and average their weights from time to time.
        LocalSgd = "local-sgd",
        /// Replicas average weights after every few steps.
        Average = "average",
    }
}

choice! {
    /// What becomes of the optimizer's state when replicas are averaged.
    pub enum SyncMomentum {
        /// It is averaged too.
        Average = "average",
        /// Each replica keeps its own.
        Keep = "keep",
    }
}

impl ParallelConfig {
    /// Whether replicas train by themselves.
    pub(crate) fn has_replicas(&self) -> bool {
        matches!(self.sync, SyncKind::LocalSgd | SyncKind::Average)
    }

    /// How many replicas train by themselves, from one average to the next.
    pub fn separate_replicas(&self) -> usize {
        match self.sync {
            SyncKind::Ddp | SyncKind::DataParallel => 1,
            SyncKind::LocalSgd | SyncKind::Average => self.dp.get(),
        }
    }

    /// Rejects ways to keep replicas equal that are not built, or that other keys contradict.
    pub(crate) fn check_sync(&self, values: &mut Values) {
        let (sync, name) = (self.sync, self.sync.name());
        let averages = self.has_replicas();
        let written: Vec<(&str, String)> = self.write();
        for (key, used) in [
            ("parallel.sync_every", averages),
            ("parallel.sync_momentum", sync == SyncKind::LocalSgd),
            ("parallel.sync_warmup", sync == SyncKind::LocalSgd),
        ] {
            let usual = Self::KEYS.iter().find(|own| own.name == key).map(|own| own.usual());
            let value = written.iter().find(|(own, _)| *own == key).map(|(_, value)| value.clone());
            values.rule(&[key, "parallel.sync"], used || value == usual, || {
                let value = value.clone().unwrap_or_default();
                Problem::new(format!("{key} = {value} has no effect with parallel.sync = {name}"))
                    .because(match averages {
                        true => "average takes the mean of weights alone, from the first step on",
                        false => "gradients are summed in every step, so replicas stay equal",
                    })
                    .fix("parallel.sync = \"local-sgd\"")
            });
        }
        let (alone, why) = match sync {
            SyncKind::Ddp => return,
            SyncKind::DataParallel => {
                ("one replica has nobody to collect from", "one rank keeps all optimizer state")
            }
            SyncKind::LocalSgd | SyncKind::Average => (
                "one replica has nothing to be averaged with",
                "replicas have different weights from one average to the next",
            ),
        };
        values.rule(&["parallel.sync", "parallel.dp"], self.dp.get() > 1, || {
            Problem::new(format!("parallel.sync = \"{name}\" needs parallel.dp above 1"))
                .because(alone)
                .nearest("parallel.dp = 2")
        });
        let shares = self.zero != ZeroStage::Zero || self.fsdp;
        let fits = averages && self.cp.get() > 1;
        values.rule(&["parallel.sync", "parallel.zero"], !shares || fits, || {
            Problem::new(format!("parallel.sync = \"{name}\" does not work with shards over dp"))
                .because(why)
                .fix(match averages {
                    true => "leave parallel.zero and parallel.fsdp out; with parallel.cp, ranks of one replica may share shards",
                    false => "leave parallel.zero and parallel.fsdp out, or parallel.sync = \"ddp\"",
                })
        });
        values.rule(&["parallel.sync", "parallel.dp_shard"], self.dp_shard == self.dp, || {
            Problem::new(format!("parallel.sync = \"{name}\" does not work with parallel.dp_shard"))
                .because(why)
                .fix("leave parallel.dp_shard out")
        });
        let searched = self.layout == LayoutKind::Auto && !averages;
        values.rule(&["parallel.sync", "parallel.layout"], !searched, || {
            Problem::new(format!("parallel.sync = \"{name}\" does not work with parallel.layout"))
                .because("a searched layout may shard the weights that one rank would keep")
                .fix("leave parallel.layout out, or parallel.sync = \"ddp\"")
        });
    }
}

impl Config {
    /// Replicas that train by themselves have no common norm, by which f16 decides whether a step
    /// counts.
    pub(crate) fn check_replicas(&self, values: &mut Values) {
        let name = self.parallel.sync.name();
        let alone = self.parallel.separate_replicas() > 1;
        let f16 = self.precision.compute == FloatKind::F16;
        values.rule(&["parallel.sync", "precision.compute"], !(alone && f16), || {
            Problem::new(format!("parallel.sync = \"{name}\" does not work with f16"))
                .because("each replica would scale its loss and skip steps by itself")
                .fix("precision.compute = \"bf16\", or parallel.sync = \"ddp\"")
        });
    }
}
