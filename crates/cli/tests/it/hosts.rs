//! Ranks on the hosts of a file. The remote shell is a stand-in that runs commands on this host, so two
//! names of this host are two hosts, which meet over TCP.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::command::{Done, another_build, first_step, phalanx};
use crate::processes::{TINY, kill, numbers, sets};

const TWO_HOSTS: &str = "# both are here\n127.0.0.1 slots=1\nlocalhost slots=1\n";

/// Makes the remote shell, which does not stand between a command and its input, and the file of hosts.
fn prepare(dir: &Path, hosts: &str) {
    let shell = "#!/bin/sh\nhost=$1\nshift\necho \"$host\" >> reached\n\
                 [ \"$host\" != far ] || { echo no route to far >&2; exit 255; }\nsh -c \"$*\"\n";
    std::fs::write(dir.join("rsh"), shell).unwrap();
    std::fs::set_permissions(dir.join("rsh"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(dir.join("hosts"), hosts).unwrap();
}

const LAUNCH: &[&str] = &["launch", "-n", "2", "--hosts", "hosts", "--rsh", "./rsh"];

fn train(dir: &Path, before: &[&str], name: &str) -> Done {
    let keys = format!("train.steps=2 run.name={name} parallel.dp=2 parallel.zero=2");
    phalanx(dir, &[before, &["train"], TINY, &sets(&keys)]).ok()
}

#[test]
fn ranks_on_two_hosts_have_the_bits_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let threads = train(dir.path(), &[], "threads");
    let hosts = train(dir.path(), &[LAUNCH, &["--"]].concat(), "hosts");
    assert_eq!(numbers(&threads), numbers(&hosts));
    let weights =
        |name| std::fs::read(dir.path().join("runs").join(name).join("model.safetensors"));
    assert!(weights("threads").unwrap() == weights("hosts").unwrap());
    let mut reached = std::fs::read_to_string(dir.path().join("reached")).unwrap();
    reached.make_ascii_lowercase();
    let mut reached: Vec<&str> = reached.lines().collect();
    reached.sort_unstable();
    assert_eq!(reached, ["127.0.0.1", "localhost"]);
}

#[test]
fn a_bad_file_of_hosts_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    for (hosts, words) in [
        ("a\nb slots=many\n", ["hosts, line 2: slots=many is not a number of ranks", "1 or more"]),
        (
            "a slots=1\n",
            ["2 ranks need as many slots, and all hosts together have 1", "fewer ranks"],
        ),
        ("a\n-oProxyCommand=x\n", ["hosts, line 2", "is not the name of a host"]),
    ] {
        prepare(dir.path(), hosts);
        let done = phalanx(dir.path(), &[LAUNCH, &["--", "train"], TINY]);
        done.refused(&words);
        assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
        assert!(!dir.path().join("reached").exists());
    }
    std::fs::remove_file(dir.path().join("hosts")).unwrap();
    phalanx(dir.path(), &[LAUNCH, &["--", "train"], TINY]).refused(&["cannot read the hosts in"]);
}

#[test]
fn a_host_that_is_not_reached_is_named() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), "127.0.0.1\nfar\n");
    let start = Instant::now();
    let done = phalanx(dir.path(), &[LAUNCH, &["--", "train"], TINY, &sets("parallel.dp=2")]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("the remote shell did not reach far"), "{}", done.err);
    assert!(done.err.contains("ssh far true"), "{}", done.err);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn a_remote_shell_that_says_nothing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let launch = ["launch", "-n", "2", "--hosts", "hosts", "--rsh", "false", "--", "train"];
    let done = phalanx(dir.path(), &[&launch, TINY, &sets("parallel.dp=2")]);
    assert_eq!(done.code, 1, "{}", done.err);
    // Whichever of the two is seen first.
    let said = "ended with exit code 1 before an agent was there";
    assert!(done.err.contains(said), "{}", done.err);
    // One that hangs is named while it is waited for.
    let hang = "#!/bin/sh\nhost=$1\nshift\n[ $host != localhost ] || exec sleep 8\nsh -c \"$*\"\n";
    std::fs::write(dir.path().join("rsh"), hang).unwrap();
    let start = Instant::now();
    let done = phalanx(dir.path(), &[LAUNCH, &["--", "train"], TINY, &sets("parallel.dp=2")]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("note: no agent has come from localhost yet"), "{}", done.err);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

/// A byte more at the end of its file makes a program another build.
#[test]
fn a_host_with_another_build_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let own = env!("CARGO_BIN_EXE_phalanx");
    std::fs::write(dir.path().join("other"), another_build()).unwrap();
    let shell = format!(
        "#!/bin/sh\nhost=$1\nshift\nchmod +x other\n\
         [ $host != localhost ] || set -- $(echo \"$*\" | sed \"s,{own},./other,\")\nsh -c \"$*\"\n"
    );
    std::fs::write(dir.path().join("rsh"), shell).unwrap();
    let start = Instant::now();
    let done = phalanx(dir.path(), &[LAUNCH, &["--", "train"], TINY, &sets("parallel.dp=2")]);
    assert_eq!(done.code, 1, "{}", done.err);
    let said = "localhost runs another build of this program: install the same file there";
    assert_eq!(done.err.matches(said).count(), 1, "{}", done.err);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_dies_on_a_host_is_named_and_all_end() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let script = "echo $RANK of $WORLD_SIZE; [ $RANK != 1 ] || kill -9 $$; exec sleep 600";
    let start = Instant::now();
    let done = phalanx(dir.path(), &[LAUNCH, &["--exec", "sh", "-c", script]]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("the process of rank 1 of 2 was ended by SIGKILL"), "{}", done.err);
    assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn a_request_to_stop_reaches_all_hosts() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let mut run = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    run.current_dir(dir.path()).args(LAUNCH).args(["--", "train"]).args(TINY);
    run.args(sets("train.steps=100000 run.name=a parallel.dp=2"));
    let (mut launcher, mut rest) = first_step(&mut run);
    kill("-INT", &launcher.id().to_string());
    let (mut out, mut err) = (String::new(), String::new());
    rest.read_to_string(&mut out).unwrap();
    launcher.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(1), "{err}");
    assert_eq!(err.matches("stopped on request after step").count(), 1, "{err}");
    assert!(out.lines().last().unwrap().contains("summary"), "{out}");
}

/// The agents read the end of their input, whatever has become of the launcher.
#[test]
fn no_rank_outlives_its_launcher() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path(), TWO_HOSTS);
    let mut run = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    run.current_dir(dir.path()).args(LAUNCH).args(["--exec", "sh", "-c"]);
    run.arg("echo $$ > rank$RANK.part; mv rank$RANK.part rank$RANK; exec sleep 600");
    let mut launcher = run.spawn().unwrap();
    let start = Instant::now();
    let ranks = ["rank0", "rank1"].map(|name| {
        loop {
            if let Ok(text) = std::fs::read_to_string(dir.path().join(name)) {
                break text.trim().to_owned();
            }
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    while ranks.iter().any(|rank| Path::new("/proc").join(rank).exists()) {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn agents_are_tasks_of_srun_or_told_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir.path()).arg("agent").args(args).envs(variables.iter().copied());
        let output = command.output().unwrap();
        (
            output.status.code(),
            [output.stdout, output.stderr].map(|b| String::from_utf8(b).unwrap()),
        )
    };
    let words = ["--exec", "sh", "-c", "echo $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR"];
    let port = (20_000 + std::process::id() % 10_000).to_string();
    let host = |number: &'static str| {
        let slurm = [
            ("SLURM_PROCID", number),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
            ("SLURM_JOB_ID", "5"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ];
        run(&[&["-n", "2"][..], &words].concat(), &slurm)
    };
    let both = std::thread::scope(|scope| {
        let other = scope.spawn(|| host("1"));
        [host("0"), other.join().unwrap()]
    });
    for (first, (code, [out, err])) in [0, 2].into_iter().zip(&both) {
        let mut lines: Vec<&str> = out.lines().collect();
        lines.sort_unstable();
        let expected = [0, 1].map(|at| format!("{}/4 {at} 127.0.0.1", first + at));
        assert_eq!(
            (*code, &lines[..]),
            (Some(0), &expected.each_ref().map(|l| &l[..])[..]),
            "{err}"
        );
    }
    let (code, [_, err]) = run(&[&["-n", "2"][..], &words].concat(), &[]);
    assert!(code == Some(2) && err.contains("this process is not a task of srun"), "{err}");
    let place = ["-n", "2", "--first", "3", "--ranks", "4", "--meet", "a:7000"];
    let (code, [_, err]) = run(&[&place[..], &words].concat(), &[]);
    assert!(code == Some(2) && err.contains("more than --ranks 4"), "{err}");
}
