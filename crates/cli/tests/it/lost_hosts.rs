//! Ranks and hosts that are lost, where ranks are on several hosts. As in `hosts.rs`, two names of this
//! machine are two hosts; one is lost when its agent is killed, and its ranks with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::{Done, SMALL};
use crate::processes::sets;

/// Makes the remote shell and the file of hosts. A host that is in the file `gone` is not reached any
/// more once its agent was started.
fn prepare(dir: &Path, hosts: &str) {
    let shell = "#!/bin/sh\nhost=$1\nshift\n\
                 if grep -qx \"$host\" gone 2>/dev/null && grep -qx \"$host\" reached 2>/dev/null; then exit 255; fi\n\
                 echo \"$host\" >> reached\nsh -c \"$*\"\n";
    fs::write(dir.join("rsh"), shell).unwrap();
    fs::set_permissions(dir.join("rsh"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(dir.join("hosts"), hosts).unwrap();
}

const TWO_HOSTS: &str = "127.0.0.1 slots=1\nlocalhost slots=1\n";

/// A small run of two ranks with faults, as `name`.
fn train(dir: &Path, before: &[&str], name: &str, keys: &str, faults: &str) -> Done {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(dir).args(before).args(["train", "--json"]).args(SMALL);
    command.args(sets("train.steps=8 parallel.dp=2 parallel.zero=3")).args(sets(keys));
    command.args(["--set", &format!("run.name={name}")]).env("PHALANX_FAULT", faults);
    let output = command.output().unwrap();
    let _ = fs::remove_file(dir.join("reached"));
    Done {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

const LAUNCH: &[&str] = &["launch", "-n", "2", "--hosts", "hosts", "--rsh", "./rsh", "--"];

fn weights(dir: &Path, name: &str) -> Vec<u8> {
    fs::read(dir.join("runs").join(name).join("model.safetensors")).unwrap()
}

/// The only restart that a run has printed.
fn restart(done: &Done) -> Value {
    let mut found: Vec<Value> =
        done.json().into_iter().filter(|line| line["event"] == "restart").collect();
    assert_eq!(found.len(), 1, "{}", done.err);
    found.remove(0)
}

#[test]
fn the_loss_of_a_rank_or_of_a_host_is_survived_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepare(dir, TWO_HOSTS);
    train(dir, &[], "whole", "", "").ok();
    // Copies are taken after steps 2, 4 and 6, and are whole two steps later; a shard of ZeRO-3 is on one
    // host alone.
    for (number, (fault, keys, from, at_step, words)) in [
        ("host rank=1 step=6 phase=B", "run.copy_every=2", "copies", 2, "host localhost is lost"),
        ("host rank=0 step=7 phase=update", "run.copy_every=2", "copies", 4, "host 127.0.0.1 is"),
        (
            "kill rank=1 step=5 phase=F",
            "run.copy_every=2",
            "memory",
            4,
            "rank 1 was ended by SIGKILL in step 5, in `embed F mb 0`; its last call was all_",
        ),
        // Agents hold the memory of their ranks, which cannot be used in the midst of an update or after a fault.
        ("kill rank=0 step=4 phase=reduce", "", "memory", 3, "going on from memory after step 3"),
        (
            "kill rank=0 step=6 phase=update",
            "run.copy_every=2",
            "copies",
            2,
            "by SIGKILL in step 6",
        ),
        ("segv rank=1 step=5 phase=B", "run.copy_every=2", "copies", 2, "by SIGSEGV in step 5"),
        ("host rank=1 step=6 phase=F", "run.checkpoint_every=3", "checkpoint", 3, "is lost"),
        ("host rank=1 step=3 phase=F", "", "beginning", 0, "rank 1 was ended by the loss of host"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("a{number}");
        let done = train(dir, LAUNCH, &name, keys, fault).ok();
        let found = restart(&done);
        assert_eq!((&found["from"], &found["at_step"]), (&from.into(), &at_step.into()), "{fault}");
        assert!(done.err.contains(words), "{fault}: `{words}` is not in {}", done.err);
        assert!(done.err.contains("(restart 1 of 10)"), "{fault}: {}", done.err);
        assert!(weights(dir, &name) == weights(dir, "whole"), "{fault}");
        let text = fs::read_to_string(dir.join("runs").join(&name).join("metrics.jsonl")).unwrap();
        assert_eq!(text.matches("{\"step\":").count(), 8, "{fault}");
    }
}

#[test]
fn a_host_that_does_not_come_back_is_replaced_by_another_or_done_without() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let f64 = "precision.compute=f64 run.copy_every=2";
    prepare(dir, TWO_HOSTS);
    let whole = train(dir, &[], "whole", "precision.compute=f64", "").ok();
    fs::write(dir.join("gone"), "localhost\n").unwrap();
    let fault = "host rank=1 step=6 phase=B";
    // Without another host, the layout of one rank goes on.
    let fewer = format!("{f64} run.min_ranks=1");
    let done = train(dir, LAUNCH, "fewer", &fewer, fault).ok();
    assert!(done.err.contains("copies after step 2 with 1 rank instead of 2"), "{}", done.err);
    let losses = |done: &Done| -> Vec<f64> {
        let mut all = vec![0.0; 8];
        for line in done.json().iter().filter(|line| line.get("step").is_some()) {
            all[line["step"].as_u64().unwrap() as usize - 1] = line["loss"].as_f64().unwrap();
        }
        all
    };
    for (a, b) in losses(&whole).iter().zip(losses(&done)) {
        assert!((a - b).abs() <= 1e-10 * a.abs(), "{a} {b}");
    }
    // Where a layout needs all its ranks, that is the end, with the reason.
    let done = train(dir, LAUNCH, "all", f64, fault);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("room for 1 of 2 ranks"), "{}", done.err);
    // A host that was not needed so far takes the place.
    fs::write(dir.join("hosts"), format!("{TWO_HOSTS}127.0.0.2 slots=1\n")).unwrap();
    let done = train(dir, LAUNCH, "spare", f64, fault).ok();
    assert_eq!(restart(&done)["from"], "copies", "{}", done.err);
    assert!(weights(dir, "spare") == weights(dir, "whole"));
}

/// Agents that another program has started: the one of rank 0 coordinates.
#[test]
fn agents_that_find_each_other_survive_the_loss_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    train(dir, &[], "whole", "", "").ok();
    let port = 20_000 + std::process::id() % 10_000;
    let agent = |host: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir).args(["agent", "-n", "1", "--", "train", "--json"]).args(SMALL);
        command
            .args(sets("train.steps=8 parallel.dp=2 parallel.zero=3 run.copy_every=2 run.name=a"));
        command.env("PHALANX_FAULT", "kill rank=1 step=6 phase=B");
        let slurm = "SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_ID=0 SLURM_JOB_ID=5 \
                     SLURM_STEP_NODELIST=n[1-2] MASTER_ADDR=127.0.0.1";
        command.envs(slurm.split_whitespace().filter_map(|pair| pair.split_once('=')));
        command.env("SLURM_PROCID", host).env("MASTER_PORT", port.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [second, first] = ["1", "0"].map(agent).map(|agent| agent.wait_with_output().unwrap());
    let err = String::from_utf8_lossy(&first.stderr);
    assert!(first.status.success() && second.status.success(), "{err}");
    assert!(err.contains("going on from memory after step 5 (restart 1"), "{err}");
    assert!(weights(dir, "a") == weights(dir, "whole"));
    // The run knows the job that it belongs to.
    assert_eq!(fs::read_to_string(dir.join("runs/a/started_by")).unwrap(), "slurm 5");
}

/// Ends what stands still in a folder, also when a test fails.
struct Frozen<'a>(&'a Path);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let here = fs::canonicalize(self.0).unwrap();
        for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()) {
            let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
            let own = fs::read_link(process.join("cwd")).is_ok_and(|folder| folder == here);
            if own && stat.contains(") T ") {
                let id = process.file_name().unwrap();
                Command::new("kill").arg("-9").arg(id).status().unwrap();
            }
        }
    }
}

/// The agent and the rank of a host stand still: no connection is closed, and only the silence tells.
#[test]
fn a_host_that_says_nothing_any_more_is_lost_and_survived() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepare(dir, TWO_HOSTS);
    train(dir, &[], "whole", "", "").ok();
    let _frozen = Frozen(dir);
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(dir).args(LAUNCH).args(["train", "--json"]).args(SMALL);
    command.args(sets("train.steps=8 parallel.dp=2 parallel.zero=3 run.copy_every=2 run.name=a"));
    command.env("PHALANX_FAULT", "freeze rank=1 step=6 phase=B").stdout(Stdio::null());
    // What stands still would keep a pipe open.
    command.stderr(fs::File::create(dir.join("err")).unwrap());
    let status = command.status().unwrap();
    let err = fs::read_to_string(dir.join("err")).unwrap();
    assert!(status.success(), "{err}");
    let silence = "host localhost is lost: nothing was heard of it for ";
    let (_, seconds) = err.split_once(silence).unwrap_or_else(|| panic!("{err}"));
    let seconds: f64 = seconds.split_once(" s").unwrap().0.parse().unwrap();
    // It is told as soon as it is known; the upper end is a guard.
    assert!((2.0..20.0).contains(&seconds), "{err}");
    assert!(err.contains("rank 1 was ended by the loss of host localhost"), "{err}");
    assert!(err.contains("going on from the hosts' copies after step 2 (restart 1"), "{err}");
    assert!(weights(dir, "a") == weights(dir, "whole"));
}
