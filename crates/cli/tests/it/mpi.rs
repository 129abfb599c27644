//! `run.ranks = "mpi"`, over the stand-in for an MPI library; `tools/hosts/check.sh` does the same over
//! real ones.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::command::phalanx;
use crate::processes::{TINY, sets};

fn stand_in(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/mpi/stand_in.c");
    let library = dir.join("stand_in.so");
    let mut command = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    command.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(command.status().unwrap().success());
    library
}

/// Runs a command as the ranks of a job of the stand-in.
fn job(dir: &Path, ranks: usize, args: &[&[&str]]) -> Vec<Output> {
    let library = stand_in(dir);
    let start = |rank: usize| -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir).args(args.concat()).env("PHALANX_MPI_SHIM", &library);
        command.env("PHALANX_STAND_IN", format!("{rank} {ranks} {}", dir.display()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    let ended = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    (0..ranks).for_each(|rank| drop(std::fs::remove_file(dir.join(rank.to_string()))));
    ended
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn ranks_of_mpi_have_the_bits_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    for keys in ["parallel.dp=2 parallel.zero=3", "parallel.pp=2 train.microbatches=4"] {
        let own = format!("{keys} train.steps=2 run.ranks=mpi run.name=mpi");
        let all = job(dir.path(), 2, &[&["train"], TINY, &sets(&own)]);
        assert!(all.iter().all(|one| one.status.success()), "{}", text(&all[0].stderr));
        // Rank 0 alone reports.
        assert!(!all[0].stdout.is_empty() && all[1].stdout.is_empty());
        assert_eq!(text(&all[1].stderr), "");
        let own = format!("{keys} train.steps=2 run.name=threads");
        phalanx(dir.path(), &[&["train"], TINY, &sets(&own)]).ok();
        let weights =
            |name| std::fs::read(dir.path().join("runs").join(name).join("model.safetensors"));
        assert!(weights("mpi").unwrap() == weights("threads").unwrap(), "{keys}");
        std::fs::remove_dir_all(dir.path().join("runs")).unwrap();
    }
    let keys = sets("parallel.dp=2 model.layers=2 run.ranks=mpi");
    let all = job(dir.path(), 2, &[&["verify"], TINY, &keys]);
    assert!(text(&all[0].stdout).contains("\"ok\":true"), "{}", text(&all[0].stderr));
}

#[test]
fn what_is_wrong_with_an_mpi_job_is_said_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sets("parallel.dp=2 run.ranks=mpi");
    let args: &[&[&str]] = &[&["train"], TINY, &keys];
    // Another number of ranks than processes.
    let three = job(dir.path(), 3, args);
    let told: String = three.iter().map(|one| text(&one.stderr)).collect();
    assert!(three.iter().all(|one| one.status.code() == Some(2)), "{told}");
    assert_eq!(
        told.matches("the layout has 2 ranks, but the job has 3 processes").count(),
        1,
        "{told}"
    );
    // Without mpirun.
    let alone = text(&job(dir.path(), 1, args)[0].stderr);
    assert!(alone.contains("knows one process") && alone.contains("mpirun -n 2"), "{alone}");
    // Without a compiler.
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(dir.path()).args(args.concat()).env("MPICC", "/no/mpicc");
    let output = command.env_remove("PHALANX_MPI_SHIM").output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("needs the compiler /no/mpicc") && told.contains("MASTER_ADDR"),
        "{told}"
    );
}
