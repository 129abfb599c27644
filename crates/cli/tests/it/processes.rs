//! Ranks as processes: the same bits as threads, one report, and every failure named once.

use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::command::{Done, SMALL, another_build, first_step, phalanx, under};

/// `tiny`, a few steps, one thread for each rank.
pub(crate) const TINY: &[&str] =
    &["--preset", "tiny", "--set", "run.threads=1", "--set", "train.batch_size=16", "--json"];

const TWO: &[&str] = &["--set", "parallel.dp=2"];

pub(crate) fn sets(keys: &str) -> Vec<&str> {
    keys.split_whitespace().flat_map(|key| ["--set", key]).collect()
}

/// Losses and norms of all steps, and held-out losses, as they are printed.
pub(crate) fn numbers(done: &Done) -> Vec<String> {
    let shown = |line: &serde_json::Value| {
        let names = ["step", "loss", "grad_norm", "after_step", "val_loss"];
        names.map(|name| line[name].to_string()).join(" ")
    };
    done.json().iter().filter(|line| line["summary"].is_null()).map(shown).collect()
}

/// Trains in a layout on threads and on processes, and compares every bit.
fn same_bits(dir: &Path, ranks: &str, keys: &str) {
    let settings = sets(keys);
    let train = |name: &str, before: &[&str]| {
        let name = format!("run.name={name}");
        let own = ["--set", "train.steps=2", "--set", &name];
        phalanx(dir, &[before, &["train"], TINY, &own, &settings]).ok()
    };
    let threads = train("threads", &[]);
    let processes = train("processes", &["launch", "-n", ranks, "--"]);
    assert_eq!(numbers(&threads), numbers(&processes), "{keys}");
    let weights = |name| std::fs::read(dir.join("runs").join(name).join("model.safetensors"));
    assert!(weights("threads").unwrap() == weights("processes").unwrap(), "{keys}");
    std::fs::remove_dir_all(dir.join("runs")).unwrap();
}

#[test]
fn replicas_and_tensor_parallel_ranks_have_the_same_bits_as_threads() {
    let dir = tempfile::tempdir().unwrap();
    for keys in [
        "parallel.dp=2 train.eval_every=1",
        "parallel.tp=2 parallel.sp=true",
        "parallel.dp=2 parallel.zero=1",
        "parallel.dp=2 parallel.zero=2",
        "parallel.dp=2 parallel.zero=3",
    ] {
        same_bits(dir.path(), "2", keys);
    }
}

#[test]
fn pipelines_and_context_parallel_ranks_have_the_same_bits_as_threads() {
    let dir = tempfile::tempdir().unwrap();
    for (ranks, keys) in [
        ("2", "parallel.pp=2 train.microbatches=4"),
        ("2", "parallel.pp=2 train.microbatches=4 parallel.schedule=zb-h1"),
        ("4", "parallel.cp=2 parallel.dp=2"),
        // Steps that go ahead of their norms, and a row of steps without a flush.
        (
            "2",
            "parallel.pp=2 train.microbatches=4 parallel.schedule=zb-h2 parallel.post_validation=true \
             train.steps=9 model.layers=2 train.eval_every=0",
        ),
        (
            "2",
            "parallel.pp=2 train.microbatches=4 parallel.schedule=pipedream train.steps=5 model.layers=2 \
             train.eval_every=0",
        ),
    ] {
        same_bits(dir.path(), ranks, keys);
    }
}

/// The memory of a process stands beside the plans of its own ranks.
#[test]
fn a_step_line_has_the_plan_of_its_own_process() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.dp=2 train.steps=1 run.copy_every=1");
    let before: [&[&str]; 2] = [&[], &["launch", "-n", "2", "--"]];
    for (before, whose) in before.into_iter().zip([" on all together", " on each rank"]) {
        let said = phalanx(dir.path(), &[before, &["train"], TINY, &keys]).ok().err;
        let plan = said.lines().find(|line| line.starts_with("plan ")).unwrap();
        let bytes = plan.split(whose).next().unwrap().rsplit([',', 'n']).next().unwrap().trim();
        assert!(bytes.ends_with("MiB"), "{plan}");
        assert!(said.contains(&format!("(plan {bytes})")), "{whose}: {said}");
        // One host has nobody to give copies to.
        assert!(said.contains("note   run.copy_every = 1 has no effect with ranks"), "{said}");
    }
}

#[test]
fn a_measured_split_is_the_same_in_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.pp=2 train.microbatches=4 parallel.split=measured train.steps=1");
    phalanx(dir.path(), &[&["launch", "-n", "2", "--", "train"], TINY, &keys]).ok();
}

#[test]
fn verify_compares_numbers_bytes_and_memory_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.dp=2 parallel.zero=2 model.layers=2");
    let verify = |before: &[&str]| {
        let done = phalanx(dir.path(), &[before, &["verify"], TINY, &keys]).ok();
        let found = done.json().remove(0);
        assert_eq!(found["ok"], true, "{found}");
        (found["comm"].clone(), found["memory"].clone())
    };
    assert_eq!(verify(&["launch", "-n", "2", "--"]), verify(&[]));
}

#[test]
fn a_command_may_start_its_own_processes_and_trace_them() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.pp=2 train.microbatches=4 run.ranks=processes train.steps=2");
    let done = phalanx(dir.path(), &[&["train"], TINY, &keys, &["--trace", "trace.json"]]).ok();
    assert_eq!(done.json().len(), 3, "{}", done.out);
    let trace = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in [0, 1] {
        assert!(events.iter().any(|event| event["pid"] == rank && event["ph"] == "X"), "{rank}");
    }
}

/// The configuration that a run leaves says nothing of how its ranks were started, unless the user did.
#[test]
fn the_configuration_of_a_run_can_be_launched() {
    let dir = tempfile::tempdir().unwrap();
    let steps = sets("train.steps=1 run.name=a");
    let launch: &[&str] = &["launch", "-n", "2", "--", "train"];
    phalanx(dir.path(), &[&["train"], TINY, TWO, &steps]).ok();
    let again = ["runs/a/config.toml", "--json"];
    let done = phalanx(dir.path(), &[launch, &again, &sets("run.name=b")]).ok();
    assert_eq!(done.json().iter().filter(|line| line["step"] == 1).count(), 1, "{}", done.out);
    assert_eq!(std::fs::read_dir(dir.path().join("runs")).unwrap().count(), 2);
    let asked = sets("run.name=c run.ranks=processes train.steps=1");
    phalanx(dir.path(), &[&["train"], TINY, TWO, &asked]).ok();
    let kept = std::fs::read_to_string(dir.path().join("runs/c/config.toml")).unwrap();
    assert!(kept.contains("ranks = \"processes\""), "{kept}");
}

#[test]
fn commands_of_one_process_are_done_once() {
    let dir = tempfile::tempdir().unwrap();
    let train = sets("train.steps=1 run.name=a");
    phalanx(dir.path(), &[&["launch", "-n", "2", "--", "train"], TINY, TWO, &train]).ok();
    let launch: &[&str] = &["launch", "-n", "2", "--"];
    let eval = phalanx(dir.path(), &[launch, &["eval", "--model", "run:runs/a", "--json"]]).ok();
    assert_eq!(eval.json().len(), 1);
    let export = phalanx(dir.path(), &[launch, &["export", "--run", "runs/a", "--out", "hf"]]).ok();
    assert_eq!(export.out.matches("config.json").count(), 1, "{}", export.out);
}

#[test]
fn refusals_are_told_once() {
    let dir = tempfile::tempdir().unwrap();
    let launch: &[&str] = &["launch", "-n", "2", "--", "train"];
    let once = |args: &[&[&str]], words: &[&str]| {
        let done = phalanx(dir.path(), args);
        done.refused(words);
        assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
    };
    once(&[launch, TINY], &["the layout has 1 rank, but the job has 2 processes"]);
    once(&[launch, TINY, &["--set", "train.stepps=3"]], &["train.stepps", "train.steps"]);
    once(&[launch, TINY, TWO, &["--set", "run.dir=/proc/no"]], &["/proc/no"]);
    once(
        &[launch, TINY, TWO, &["--set", "run.ranks=nccl"]],
        &["find by themselves how they exchange"],
    );
    once(
        &[&["launch", "-n", "2", "--", "verify"], TINY, &["--set", "parallel.dp=4"]],
        &["the layout has 4 ranks, but the job has 2 processes"],
    );
    once(&[&["train"], TINY, TWO, &["--set", "run.ranks=env"]], &["no variable says which rank"]);
    once(&[&["launch", "-n", "2", "--", "fly"]], &["`fly` is not a command", "--exec"]);
    once(&[&["launch", "-n", "2", "--", "trian"]], &["`trian` is not", "did you mean `train`?"]);
    for kind in ["run.ranks=threads", "run.ranks=mpi"] {
        let said = ["but phalanx has launched 2 processes", "leave run.ranks out"];
        once(&[launch, TINY, TWO, &["--set", kind]], &said);
    }
    once(&[&["launch", "-n", "2", "--exec", "/no/such"]], &["cannot start /no/such"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn another_program_gets_its_rank_and_its_failure_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo $RANK of $WORLD_SIZE; [ $RANK != 1 ] || exit 7";
    let done = phalanx(dir.path(), &[&["launch", "-n", "3", "--exec", "sh", "-c", script]]);
    let mut lines: Vec<&str> = done.out.lines().collect();
    lines.sort_unstable();
    assert_eq!((done.code, &lines[..]), (1, &["0 of 3", "1 of 3", "2 of 3"][..]));
    assert!(done.err.contains("rank 1 of 3 ended with exit code 7"), "{}", done.err);
    // Who has to be told to end is not the one to look at.
    let script = "[ $RANK != 1 ] || exit 7; exec sleep 600";
    let done = phalanx(dir.path(), &[&["launch", "-n", "2", "--exec", "sh", "-c", script]]);
    assert_eq!(done.err.trim(), "error: rank 1 of 2 ended with exit code 7: sh");
}

/// A long run of two processes after its first step.
struct Long {
    launcher: Child,
    out: std::io::BufReader<std::process::ChildStdout>,
}

impl Long {
    fn start(dir: &Path) -> Self {
        let mut run = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        run.current_dir(dir).args(["launch", "-n", "2", "--", "train"]).args(TINY).args(TWO);
        run.args(sets("train.steps=100000 run.name=a run.restarts=0"));
        // A launcher that is killed leaves its sockets behind.
        run.env("TMPDIR", dir);
        let (launcher, out) = first_step(&mut run);
        Self { launcher, out }
    }

    /// The process of a rank.
    fn process(&self, rank: usize) -> String {
        let id = self.launcher.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        let is = |child: &&str| {
            let variables = std::fs::read_to_string(format!("/proc/{child}/environ")).unwrap();
            variables.split('\0').any(|variable| variable == format!("RANK={rank}"))
        };
        children.split_whitespace().find(is).unwrap().to_owned()
    }

    fn end(mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        self.launcher.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (self.launcher.wait().unwrap().code(), out, err)
    }
}

pub(crate) fn kill(signal: &str, process: &str) {
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}

#[test]
fn a_killed_process_is_named_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    for rank in [1, 0] {
        let run = Long::start(dir.path());
        let process = run.process(rank);
        let start = Instant::now();
        kill("-KILL", &process);
        let (code, _, err) = run.end();
        // A second, and what a busy machine adds.
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert_eq!(code, Some(1));
        assert_eq!(err.matches("error:").count(), 1, "{err}");
        assert!(err.contains(&format!("rank {rank} of 2 was ended by SIGKILL")), "{err}");
    }
}

#[test]
fn a_request_to_stop_reaches_all_and_weights_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    // The launcher passes it on; and if only one process gets it, all stop after the same step.
    for rank in [None, Some(1)] {
        let run = Long::start(dir.path());
        let process = rank.map_or(run.launcher.id().to_string(), |rank| run.process(rank));
        kill("-INT", &process);
        let (code, out, err) = run.end();
        assert_eq!(code, Some(1), "{err}");
        assert_eq!(err.matches("stopped on request after step").count(), 1, "{err}");
        assert!(out.lines().last().unwrap().contains("summary"), "{out}");
        let eval = phalanx(dir.path(), &[&["eval", "--model", "run:runs/a"]]);
        eval.ok();
        std::fs::remove_dir_all(dir.path().join("runs")).unwrap();
    }
}

/// A shell lets what it starts in the background ignore Ctrl-C. What a batch system sends must reach its
/// ranks all the same.
#[test]
fn a_run_in_the_background_of_a_script_stops_when_it_is_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Command::new("sh");
    let script = "trap '' INT; exec \"$0\" \"$@\"";
    run.current_dir(dir.path()).args(["-c", script, env!("CARGO_BIN_EXE_phalanx")]);
    run.args(["launch", "-n", "2", "--", "train"]).args(TINY).args(TWO);
    run.args(sets("train.steps=100000 run.name=a run.checkpoint_every=100000"));
    let (launcher, out) = first_step(&mut run);
    let run = Long { launcher, out };
    kill("-INT", &run.launcher.id().to_string());
    kill("-TERM", &run.launcher.id().to_string());
    let (code, _, err) = run.end();
    assert_eq!(code, Some(1), "{err}");
    assert_eq!(err.matches("stopped on request after step").count(), 1, "{err}");
    assert!(err.contains("next: phalanx train --resume runs/a"), "{err}");
}

#[test]
fn processes_end_with_their_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Long::start(dir.path());
    let processes = [run.process(0), run.process(1)];
    run.launcher.kill().unwrap();
    run.launcher.wait().unwrap();
    let runs = |process: &String| {
        let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        status.contains(") R ") || status.contains(") S ")
    };
    let start = Instant::now();
    while processes.iter().any(runs) {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The weights of all ranks are saved though the process that writes metrics cannot go on.
#[test]
fn a_full_disk_does_not_take_the_weights_of_any_rank() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.zero=3 train.steps=100000 run.name=a");
    // The weights fit below the limit; the metrics reach it after a while.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // Started by hand: memory that ranks share counts as a file.
    let before = format!(
        "trap '' XFSZ; mkdir runs; ulimit -f 64
         export WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}
         RANK=1 \"$0\" \"$@\" &
         export RANK=0"
    );
    let done = under(dir.path(), &before, &[&["train"], SMALL, TWO, &keys]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
    assert!(done.err.contains("are safe in runs/a/model.safetensors"), "{}", done.err);
}

/// Starts processes by hand, each with its variables, and waits for them.
fn by_hand(
    dir: &Path,
    variables: &[(&str, &str)],
    args: &[&[&str]],
    ranks: &[&str],
) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: &&str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir).args(args.concat());
        command.env("RANK", rank).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", port.to_string());
        command.envs(variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let all: Vec<Child> = ranks.iter().map(start).collect();
    all.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn variables_set_by_hand_or_by_torchrun_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let train = sets("train.steps=2 run.name=a");
    for variables in [&[][..], &[("TORCHELASTIC_RUN_ID", "none"), ("LOCAL_RANK", "0")][..]] {
        let all = by_hand(dir.path(), variables, &[&["train"], TINY, TWO, &train], &["0", "1"]);
        assert!(all.iter().all(|one| one.status.success()), "{}", text(&all[0]));
        assert!(!all[0].stdout.is_empty());
        // The process of the other rank is silent.
        assert_eq!((all[1].stdout.len(), text(&all[1])), (0, String::new()));
    }
}

#[test]
fn what_is_wrong_with_processes_started_by_hand_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let train = sets("train.steps=2 run.timeout_s=1");
    let args: &[&[&str]] = &[&["train"], TINY, TWO, &train];
    let alone = by_hand(dir.path(), &[], args, &["0"]);
    let err = text(&alone[0]);
    assert!(err.contains("rank 1 of 2 did not come to localhost:"), "{err}");
    let twice = by_hand(dir.path(), &[("WORLD_SIZE", "3")], args, &["1", "1", "0"]);
    let errors: Vec<String> = twice.iter().map(text).filter(|text| !text.is_empty()).collect();
    assert!(
        errors.iter().any(|e| e.contains("two processes say that they are rank 1")),
        "{errors:?}"
    );
    let odd = by_hand(dir.path(), &[("PMI_RANK", "7"), ("PMI_SIZE", "9")], args, &["0"]);
    assert_eq!(odd[0].status.code(), Some(2));
    let err = text(&odd[0]);
    assert!(err.contains("RANK = 0 and WORLD_SIZE = 2, but also PMI_RANK = 7"), "{err}");
    // Threads are used where they are asked for, whatever the variables are.
    let threads = sets("train.steps=1 run.ranks=threads");
    let one = by_hand(dir.path(), &[], &[&["train"], TINY, TWO, &threads], &["1"]);
    assert!(one[0].status.success() && !one[0].stdout.is_empty(), "{}", text(&one[0]));
}

/// A byte more at the end of its file makes a program another build.
#[test]
fn a_rank_of_another_build_is_named_by_all() {
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("other");
    std::fs::write(&other, another_build()).unwrap();
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = "if [ $RANK = 1 ]; then exec ./other \"$@\"; else exec \"$0\" \"$@\"; fi";
    let words = [&["launch", "-n", "2", "--exec", "sh", "-c", script][..]];
    let train = sets("parallel.dp=2 train.steps=1");
    let own = [env!("CARGO_BIN_EXE_phalanx"), "train"];
    let done = phalanx(dir.path(), &[&words.concat(), &own, TINY, &train]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert_eq!(done.err.matches("rank 1 runs another build").count(), 1, "{}", done.err);
}

/// Two jobs by hand at one port: the second is refused, at once.
#[test]
fn a_second_job_at_the_same_port_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let train = sets("train.steps=1");
    let place = [("MASTER_PORT", &*port), ("MASTER_ADDR", "127.0.0.1")];
    let all = by_hand(dir.path(), &place, &[&["train"], TINY, TWO, &train], &["0"]);
    let err = text(&all[0]);
    assert_eq!(all[0].status.code(), Some(2), "{err}");
    assert!(err.contains("rank 0 cannot listen at 127.0.0.1"), "{err}");
    assert!(err.contains("choose another MASTER_PORT"), "{err}");
}

/// Nobody knows whether a rank will come; but people are told soon whom the others wait for.
#[test]
fn ranks_that_are_waited_for_are_named_while_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let train = sets("train.steps=1 run.timeout_s=6");
    let alone = by_hand(dir.path(), &[], &[&["train"], TINY, TWO, &train], &["0"]);
    let err = text(&alone[0]);
    let (note, error) = err.split_once("error:").unwrap();
    assert!(note.contains("note: rank 1 of 2 did not come to localhost:"), "{err}");
    assert!(note.contains("see whether they were started"), "{err}");
    assert!(error.contains("rank 1 of 2 did not come"), "{err}");
}
