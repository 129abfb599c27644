//! Ranks that are processes: this program, started again for each rank.
//!
//! A case is code, which cannot be sent to another process. So each process runs the same case, and
//! is told which of its worlds it belongs to, and how the worlds before it ended.

use std::os::fd::{AsRawFd, RawFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use phalanx_comm::{
    Collectives, CommError, Communicator, Failure, GroupId, Launcher, LocalRank, Options, ReduceOp,
    SharedWorld, Waiting, run_ranks,
};

use super::same;
use super::suite::{self, Settings, Transport, Work};

/// What a process of a test is told by the one that started it.
struct Told {
    rank: usize,
    fd: RawFd,
    /// Which of several things the test does.
    part: String,
}

/// `None` in the process that the test began in.
fn told() -> Option<Told> {
    let text = std::env::var("PHALANX_TEST_RANK").ok()?;
    let mut words = text.splitn(3, ' ');
    let rank = words.next()?.parse().ok()?;
    Some(Told { rank, fd: words.next()?.parse().ok()?, part: words.next()?.to_string() })
}

/// Starts this program again as a rank, to run one test.
fn start(world: &SharedWorld, rank: usize, test: &str, part: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads", "1"]);
    command.env("PHALANX_TEST_RANK", format!("{rank} {} {part}", world.fd().as_raw_fd()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    world.pass_to(&mut command);
    command.spawn().unwrap()
}

/// The rank that this process was started as.
struct Joined {
    ranks: usize,
    rank: usize,
    fd: RawFd,
    options: Options,
}

impl Launcher for Joined {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        Ok(vec![SharedWorld::attach(self.fd, self.rank, self.options.clone())?])
    }
}

/// Waits for the processes of all ranks, and tells the others how each ended.
fn reap(world: &SharedWorld, children: Vec<Child>) -> Vec<(ExitStatus, String)> {
    std::thread::scope(|scope| {
        let wait = |(rank, child): (usize, Child)| {
            scope.spawn(move || {
                let output = child.wait_with_output().unwrap();
                let how = (!output.status.success()).then(|| output.status.to_string());
                world.ended(rank, how.as_deref());
                (output.status, String::from_utf8_lossy(&output.stdout).into_owned())
            })
        };
        let threads: Vec<_> = children.into_iter().enumerate().map(wait).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The suite's transport: in the first process it starts others, in those it is one rank.
struct Processes {
    test: &'static str,
    case: usize,
    waiting: Waiting,
    /// How the worlds of this case have ended, apart from the one that this process belongs to.
    ended: Vec<Result<(), Failure>>,
    /// Of the worlds so far.
    ran: usize,
    told: Option<Told>,
}

impl Processes {
    fn of(test: &'static str, case: usize, waiting: Waiting) -> Self {
        Self { test, case, waiting, ended: Vec::new(), ran: 0, told: None }
    }

    /// The transport of a process that was started by another, from what that one has written.
    fn joined(test: &'static str, told: Told) -> Self {
        let part: serde_json::Value = serde_json::from_str(&told.part).unwrap();
        let waiting = if part["spin"] == true { Waiting::Spin } else { Waiting::Park };
        let case = part["case"].as_u64().unwrap() as usize;
        let failure = |ended: &serde_json::Value| match ended["rank"].as_u64() {
            None => Ok(()),
            Some(rank) => Err(Failure {
                rank: rank as usize,
                message: ended["message"].as_str().unwrap().into(),
            }),
        };
        let ended = part["ended"].as_array().unwrap().iter().map(failure).collect();
        Self { test, case, waiting, ended, ran: 0, told: Some(told) }
    }

    fn part(&self) -> String {
        let ended = self.ended.iter().map(|ended| match ended {
            Ok(()) => serde_json::json!({}),
            Err(Failure { rank, message }) => {
                serde_json::json!({ "rank": rank, "message": &**message })
            }
        });
        let (spin, ended) = (self.waiting == Waiting::Spin, ended.collect::<Vec<_>>());
        serde_json::json!({ "case": self.case, "spin": spin, "ended": ended }).to_string()
    }
}

impl Transport for Processes {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let Settings { timeout, planted_copy } = settings;
        let options =
            Options { timeout, planted_copy, waiting: self.waiting, ..Options::default() };
        self.ran += 1;
        if let Some(Told { rank, fd, .. }) = self.told {
            return match self.ended.get(self.ran - 1) {
                Some(ended) => ended.clone(),
                None => {
                    let done = run_ranks(&Joined { ranks, rank, fd, options }, work);
                    std::process::exit(if done.is_ok() { 0 } else { 1 });
                }
            };
        }
        let world = SharedWorld::create(ranks, &options).unwrap();
        let part = self.part();
        let children = (0..ranks).map(|rank| start(&world, rank, self.test, &part)).collect();
        let statuses = reap(&world, children);
        // A rank may expect an error, and go on: then the world has failed, and its work has not.
        let lost = statuses.iter().any(|(status, _)| !status.success());
        let ended = world.failure().filter(|_| lost).map_or(Ok(()), Err);
        self.ended.push(ended.clone());
        ended
    }
}

fn conform(test: &'static str, waiting: Waiting) {
    if let Some(told) = told() {
        let mut transport = Processes::joined(test, told);
        let case = suite::cases()[transport.case].1;
        panic!("a rank has ended without its world: {:?}", case(&mut transport));
    }
    let mut wrong = Vec::new();
    for (case, (name, run)) in suite::cases().into_iter().enumerate() {
        if let Err(message) = run(&mut Processes::of(test, case, waiting)) {
            wrong.push(format!("{name}: {message}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn spinning_processes_conform() {
    conform("shared::spinning_processes_conform", Waiting::Spin);
}

#[test]
fn sleeping_processes_conform() {
    conform("shared::sleeping_processes_conform", Waiting::Park);
}

/// Random calls give the same bits, and count the same bytes, as on threads.
#[test]
fn processes_have_the_bits_of_threads() {
    let ranks = same::RANKS;
    if let Some(Told { rank, fd, .. }) = told() {
        let seen = same::all_calls(&Joined { ranks, rank, fd, options: Options::default() });
        println!("\nseen {}", same::digest(&seen[0]));
        return;
    }
    let world = SharedWorld::create(ranks, &Options::default()).unwrap();
    let test = "shared::processes_have_the_bits_of_threads";
    let ended = reap(&world, (0..ranks).map(|rank| start(&world, rank, test, "")).collect());
    let threads = same::all_calls(&phalanx_comm::Threads::new(ranks));
    assert_eq!(world.failure(), None);
    for (rank, (seen, (_, said))) in threads.iter().zip(ended).enumerate() {
        let line = said.lines().find(|line| line.starts_with("seen "));
        assert_eq!(line, Some(&*format!("seen {}", same::digest(seen))), "rank {rank}: {said}");
    }
}

/// How soon those who wait for a killed rank must know, on a machine that is not overloaded.
const SOON: Duration = Duration::from_secs(1);

/// A rank is killed amid large calls. Nobody may wait for it for ever, whether it is missed by its
/// peers or whoever started it says how it ended.
#[test]
fn a_killed_process_is_named_soon() {
    const TEST: &str = "shared::a_killed_process_is_named_soon";
    if let Some(Told { rank, fd, part }) = told() {
        let waiting = if part == "spin" { Waiting::Spin } else { Waiting::Park };
        let options = Options { waiting, ..Options::default() };
        let done = run_ranks(&Joined { ranks: 3, rank, fd, options }, work_for_ever);
        println!("\nfailed {}", done.unwrap_err());
        return;
    }
    for (round, part) in ["spin", "park", "spin", "park"].into_iter().enumerate() {
        let is_told = round < 2;
        let mut slow = Vec::new();
        for _ in 0..3 {
            let took = kill_one(TEST, part, is_told);
            if took < SOON {
                slow.clear();
                break;
            }
            slow.push(took);
        }
        assert!(slow.is_empty(), "{part}, told: {is_told}: {slow:?}");
    }
}

fn work_for_ever(endpoint: &mut dyn Communicator) -> Result<(), CommError> {
    let mut arena = endpoint.arena(4 << 20)?.unwrap();
    let values: &mut [f32] = bytemuck::cast_slice_mut(arena.as_mut_slice());
    loop {
        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, values)?;
    }
}

/// Kills rank 1 of three while it works; gives the time until both others have ended.
fn kill_one(test: &str, part: &str, is_told: bool) -> Duration {
    let world = SharedWorld::create(3, &Options::default()).unwrap();
    let mut children: Vec<Child> = (0..3).map(|rank| start(&world, rank, test, part)).collect();
    while world.last_finished(1) == "has finished no call yet" {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    let mut lost = children.remove(1);
    lost.kill().unwrap();
    let start = Instant::now();
    if is_told {
        let how = lost.wait().unwrap().to_string();
        world.ended(1, Some(&how));
    }
    for child in children {
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let how = if is_told { "signal: 9 (SIGKILL)" } else { "its process has ended" };
        assert!(said.contains(&format!("failed rank 1 failed: {how}; it last finished")), "{said}");
        assert!(said.contains("all_reduce #"), "{said}");
    }
    let took = start.elapsed();
    lost.wait().unwrap();
    took
}
