//! Ranks that communicate through an MPI library, or through the stand-in for one.
//!
//! All ranks are processes of one job, which runs the whole suite: a world has the first so many of
//! them, and after each world all tell each other how it ended. The stand-in is built and started here;
//! with an MPI library, `tools/hosts/check.sh` starts the test `rank` under its `mpirun`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use phalanx_comm::{
    Collectives, CommError, Communicator, Failure, GroupId, Launcher, LocalRank, Mpi, Options,
    Threads, find_shim, run_ranks,
};

use super::same;
use super::suite::{self, Settings, Transport, Work};

/// As many as the largest world of the suite.
const PROCESSES: usize = 8;

/// The first ranks of the job, in a new world.
struct First<'a> {
    mpi: &'a Arc<Mpi>,
    ranks: usize,
    options: Options,
}

impl Launcher for First<'_> {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        Ok(self.mpi.world(self.ranks, &self.options).into_iter().collect())
    }
}

/// The suite's transport in one process of the job.
struct Job {
    mpi: Arc<Mpi>,
    /// Over which processes tell each other how a world ended.
    all: Box<dyn Communicator>,
}

impl Job {
    fn new(mpi: Arc<Mpi>) -> Self {
        let options = Options { timeout: Duration::from_secs(600), ..Options::default() };
        let all = mpi.world(mpi.ranks(), &options).unwrap().endpoint;
        Self { mpi, all }
    }

    /// What all processes say, by rank.
    fn exchange(&mut self, own: &str) -> Vec<String> {
        let ranks = self.all.world();
        let mut sizes = vec![0; ranks];
        self.all.all_gather(GroupId::WORLD, &[own.len() as i32], &mut sizes).unwrap();
        let room = *sizes.iter().max().unwrap() as usize + 1;
        let mut padded: Vec<i32> = own.bytes().map(i32::from).collect();
        padded.resize(room, 0);
        let mut all = vec![0; room * ranks];
        self.all.all_gather(GroupId::WORLD, &padded, &mut all).unwrap();
        let text = |(said, &size): (&[i32], &i32)| {
            said[..size as usize].iter().map(|&byte| byte as u8).collect::<Vec<u8>>()
        };
        let bytes = all.chunks_exact(room).zip(&sizes).map(text);
        bytes.map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }
}

impl Transport for Job {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let Settings { timeout, planted_copy } = settings;
        let options = Options { timeout, planted_copy, ..Options::default() };
        let first = First { mpi: &self.mpi, ranks, options };
        let own = match self.mpi.rank() < ranks {
            true => run_ranks(&first, work).map(drop),
            // The world is counted here too.
            false => {
                first.launch().map(drop).map_err(|_| unreachable!("a world without this rank"))
            }
        };
        let text = |failure: Failure| format!("{} {}", failure.rank, failure.message);
        let said = self.exchange(&own.err().map(text).unwrap_or_default());
        let failure = |text: String| {
            let (rank, message) = text.split_once(' ')?;
            Some(Failure { rank: rank.parse().ok()?, message: message.into() })
        };
        // All are told of the same failure; the rank where it happened has the error.
        said.into_iter().find_map(failure).map_or(Ok(()), Err)
    }
}

/// One process of a job: runs the suite, and compares bits with threads.
#[test]
fn rank() {
    if std::env::var_os("PHALANX_TEST_MPI").is_none() {
        return;
    }
    let mpi = Mpi::join(&find_shim().unwrap()).unwrap();
    assert_eq!(mpi.ranks(), PROCESSES, "start {PROCESSES} processes");
    let mut job = Job::new(mpi.clone());
    suite::run(&mut job).unwrap();
    let (ranks, options) = (same::RANKS, Options::default());
    let first = First { mpi: &mpi, ranks, options };
    if mpi.rank() < ranks {
        let expected = same::digest(&same::all_calls(&Threads::new(ranks))[mpi.rank()]);
        assert_eq!(same::digest(&same::all_calls(&first)[0]), expected);
    }
    job.exchange("done");
    if mpi.rank() == 0 {
        println!("\n{PROCESSES} processes conform over {}", mpi.version());
    }
}

/// Builds the stand-in with the system's compiler.
fn stand_in(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/mpi/stand_in.c");
    let library = folder.join("stand_in.so");
    let mut command = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    command.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(command.status().unwrap().success());
    library
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn folder(name: &str) -> Folder {
    let path = std::env::temp_dir().join(format!("phalanx-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    Folder(path)
}

#[test]
fn the_stand_in_for_mpi_conforms() {
    let folder = folder("stand-in");
    let library = stand_in(&folder.0);
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "mpi::rank", "--nocapture", "--test-threads=1"]);
        command.env("PHALANX_TEST_MPI", "1").env("PHALANX_MPI_SHIM", &library);
        let place = format!("{rank} {PROCESSES} {}", folder.0.display());
        command.env("PHALANX_STAND_IN", place);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let children: Vec<Child> = (0..PROCESSES).map(start).collect();
    let ended: Vec<_> =
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, output) in ended.iter().enumerate() {
        let (out, err) = (&output.stdout, &output.stderr);
        let text = [out, err].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
        assert!(output.status.success(), "rank {rank}: {text}");
        assert_eq!(rank == 0, text.contains("8 processes conform over stand-in"), "{text}");
    }
}

#[test]
fn what_is_no_shim_is_named_with_what_to_do() {
    let folder = folder("no-shim");
    let text = |path: &Path| Mpi::join(path).err().unwrap().to_string();
    let error = text(Path::new("/no/shim.so"));
    assert!(error.contains("/no/shim.so cannot be used") && error.contains("tools/mpi"), "{error}");
    let source = folder.0.join("old.c");
    std::fs::write(&source, "int phx_abi(void) { return 0; }\n").unwrap();
    let library = folder.0.join("old.so");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    assert!(command.status().unwrap().success());
    let error = text(&library);
    assert!(error.contains("it has version 0, and this program needs 1"), "{error}");
}
