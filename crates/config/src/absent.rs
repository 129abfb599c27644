//! Names that users of other systems look for, and that no key has: each with what to do instead.
//! Guessing the nearest spelling would suggest something else.

/// What to do instead of a key that does not exist, by the last part of its name.
pub(crate) fn instead(field: &str) -> Option<&'static str> {
    let field = field.to_ascii_lowercase().replace('-', "_");
    ABSENT.iter().find(|(names, _)| names.contains(&field.as_str())).map(|(_, what)| *what)
}

const ABSENT: &[(&[&str], &str)] = &[
    (
        &[
            "micro_batch_size",
            "microbatch_size",
            "micro_batch",
            "micro_bs",
            "mbs",
            "per_device_train_batch_size",
        ],
        "set train.batch_size and train.microbatches: micro-batch = batch_size ÷ (dp × microbatches)",
    ),
    (
        &["seed", "rng_seed", "manual_seed"],
        "set run.seed, or data.seed for the order of data alone",
    ),
    (
        &["epochs", "num_epochs", "num_train_epochs", "max_epochs"],
        "set train.steps: an epoch has (tokens in the file ÷ seq_len ÷ batch_size) steps",
    ),
    (
        &[
            "lora",
            "lora_r",
            "lora_rank",
            "lora_alpha",
            "peft",
            "adapter",
            "freeze",
            "frozen",
            "freeze_layers",
        ],
        "leave it out: all weights are trained; adapters and frozen layers do not exist here",
    ),
    (&["ema", "ema_decay", "swa"], "leave it out: weights are not averaged over steps"),
    (
        &["early_stop", "early_stopping", "patience"],
        "set train.eval_every to see the held-out loss; Ctrl-C ends a run and saves its weights",
    ),
    (
        &["wandb", "tensorboard", "comet", "mlflow", "report_to", "logger"],
        "leave it out: metrics.jsonl in the run's folder has every step, and --json prints them",
    ),
    (
        &["tokenizer", "tokenizer_path", "tokenizer_model", "tokenizer_name_or_path"],
        "make token ids first and set data.kind = \"tokens\"; data.kind = \"text\" needs no tokenizer",
    ),
    (
        &["resume", "resume_from_checkpoint", "load_path"],
        "leave it out, and write phalanx train --resume DIR",
    ),
    (
        &["gpus", "gpu", "num_gpus", "devices", "cuda", "nnodes", "nproc_per_node", "world_size"],
        "set parallel.dp, tp, cp and pp: there are as many ranks as their product, threads or processes (run.ranks)",
    ),
    (&["moe"], "set model.experts, the number of experts of a layer"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A name that is a key here, or another system's name for one, needs no advice.
    #[test]
    fn no_name_is_known_already() {
        for name in ABSENT.iter().flat_map(|(names, _)| *names).filter(|name| **name != "seed") {
            assert!(!crate::keys().any(|key| key.field() == *name), "{name}");
            assert!(!crate::keys().any(|key| key.aka.contains(name)), "{name}");
            assert_eq!(instead(&name.to_uppercase()), instead(name));
        }
    }

    #[test]
    fn keys_in_the_advice_exist() {
        for (_, what) in ABSENT {
            for word in what.split(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '_') {
                let section = word.split('.').next().unwrap_or_default();
                if crate::SECTIONS.contains(&section) && word.contains('.') {
                    assert!(crate::keys().any(|key| key.name == word), "{word}");
                }
            }
        }
    }
}
