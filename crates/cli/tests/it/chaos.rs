//! Ranks are killed on purpose in every phase of a step; every run must end with the bits of one that
//! was not disturbed.
//!
//! By default this is a small sample. `PHALANX_CHAOS=all cargo test --release -p phalanx-cli --test it
//! chaos -- --nocapture` kills 100 ranks, over schedules and ZeRO stages, and prints a table.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const STEPS: usize = 14;
const PHASES: [&str; 5] = ["F", "B", "reduce", "update", "save"];

/// Numbers that follow from a seed, which is not 0.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % sides
    }
}

/// Ranks and settings of a layout.
type Layout = (usize, Vec<String>);

fn layout(schedule: Option<&str>, zero: usize) -> Layout {
    let mut keys = vec!["parallel.dp=2".to_owned(), format!("parallel.zero={zero}")];
    if let Some(schedule) = schedule {
        keys.push("parallel.pp=2".to_owned());
        keys.push(format!("parallel.schedule={schedule}"));
    }
    (if schedule.is_some() { 4 } else { 2 }, keys)
}

fn arguments(name: &str, keys: &[String]) -> Vec<String> {
    let mut all: Vec<String> = ["train", "--preset", "tiny", "--json"].map(str::to_owned).into();
    let own = [
        format!("run.name={name}"),
        format!("train.steps={STEPS}"),
        "train.batch_size=16".to_owned(),
        "train.microbatches=4".to_owned(),
        "run.threads=1".to_owned(),
        "run.checkpoint_every=2".to_owned(),
    ];
    for key in own.iter().chain(keys) {
        all.extend(["--set".to_owned(), key.clone()]);
    }
    all
}

fn run(dir: &Path, before: &[String], args: &[String], faults: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(dir).args(before).args(args).env("PHALANX_FAULT", faults);
    let done = command.env("TMPDIR", dir).output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{faults}: {text}");
}

/// The lines of a run's metrics: losses and norms by step, and restarts.
fn metrics(dir: &Path, name: &str) -> (BTreeMap<u64, String>, Vec<Value>) {
    let text = fs::read_to_string(dir.join("runs").join(name).join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (mut steps, mut restarts) = (BTreeMap::new(), Vec::new());
    for line in lines {
        if let Some(step) = line["step"].as_u64() {
            let seen = steps.insert(step, format!("{} {}", line["loss"], line["grad_norm"]));
            assert!(seen.is_none(), "step {step} is there twice");
        } else if line["event"] == "restart" {
            restarts.push(line);
        }
    }
    (steps, restarts)
}

/// One kill in each phase, each in another epoch and step.
fn kills(dice: &mut Dice, ranks: usize) -> String {
    let mut phases = PHASES.to_vec();
    for at in (1..phases.len()).rev() {
        phases.swap(at, dice.roll(at + 1));
    }
    let kill = |(epoch, phase): (usize, &str)| {
        // Steps after one that asks for a checkpoint, which is written beside them; the one before
        // it is whole.
        let (rank, step) = (dice.roll(ranks), 5 + 2 * epoch);
        // Not always the first action of the phase; but a rank may have only one of some phases.
        let several = matches!(phase, "F" | "B" | "save");
        let nth = if several { 1 + dice.roll(2) } else { 1 };
        format!("kill rank={rank} step={step} phase={phase} nth={nth} epoch={epoch}")
    };
    phases.into_iter().enumerate().map(kill).collect::<Vec<_>>().join("; ")
}

/// Kills ranks of one run; gives its restarts and the seconds they took.
fn disturb(dice: &mut Dice, (ranks, keys): &Layout) -> (Vec<Value>, f64) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &[], &arguments("whole", keys), "");
    let faults = kills(dice, *ranks);
    let launch = ["launch", "-n", &ranks.to_string(), "--"].map(str::to_owned);
    run(dir, &launch, &arguments("a", keys), &faults);
    let ((whole, none), (steps, restarts)) = (metrics(dir, "whole"), metrics(dir, "a"));
    assert_eq!((whole.len(), none.len()), (STEPS, 0));
    assert_eq!(steps, whole, "{keys:?} {faults}");
    let weights = |name| fs::read(dir.join("runs").join(name).join("model.safetensors")).unwrap();
    assert!(weights("a") == weights("whole"), "{keys:?} {faults}");
    assert_eq!(restarts.len(), PHASES.len(), "{keys:?} {faults}: {restarts:?}");
    let ledger = fs::read_to_string(dir.join("runs/a/ledger.json")).unwrap();
    let ledger: Value = serde_json::from_str(&ledger).unwrap();
    assert_eq!(ledger["restarts"], 5);
    (restarts, ledger["recovery"].as_f64().unwrap())
}

#[test]
fn killed_in_every_phase_a_run_ends_with_the_same_bits() {
    let all = std::env::var("PHALANX_CHAOS").is_ok_and(|asked| asked == "all");
    let layouts: Vec<(Option<&str>, usize)> = match all {
        false => vec![(None, 1)],
        true => [None, Some("gpipe"), Some("1f1b"), Some("interleaved"), Some("zb-h1")]
            .into_iter()
            .flat_map(|schedule| (0..4).map(move |zero| (schedule, zero)))
            .collect(),
    };
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let (mut hits, mut kills) = (BTreeMap::<String, usize>::new(), 0);
    println!(
        "| schedule | ZeRO | ranks | kills | from memory | from a checkpoint | s per recovery |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (schedule, zero) in layouts {
        let layout = layout(schedule, zero);
        let (restarts, seconds) = disturb(&mut dice, &layout);
        let from = |place: &str| restarts.iter().filter(|line| line["from"] == place).count();
        println!(
            "| {} | {zero} | {} | {} | {} | {} | {:.2} |",
            schedule.unwrap_or("none"),
            layout.0,
            restarts.len(),
            from("memory"),
            from("checkpoint"),
            seconds / restarts.len() as f64
        );
        assert_eq!(from("beginning"), 0);
        for line in &restarts {
            *hits.entry(line["phase"].as_str().unwrap().to_owned()).or_default() += 1;
            // Only inside updates is memory of no use.
            assert_eq!(line["from"] == "memory", line["phase"] != "update", "{line}");
        }
        kills += restarts.len();
    }
    println!("{kills} kills, by phase: {hits:?}");
    let each = if all { 10 } else { 1 };
    for phase in PHASES {
        assert!(hits.get(phase).is_some_and(|&count| count >= each), "{phase}: {hits:?}");
    }
}
