//! Ranks in shared memory, within one process: each has its own view of it, as processes have.

use std::os::fd::AsRawFd;

use phalanx_comm::{
    Collectives, CommError, Communicator, GroupId, Launcher, LocalRank, Options, ReduceOp,
    SharedWorld, run_ranks,
};

/// Ranks of this process that see only shared memory of each other.
pub(crate) struct Attached {
    pub(crate) ranks: usize,
    pub(crate) options: Options,
}

impl Launcher for Attached {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let world = SharedWorld::create(self.ranks, &self.options)?;
        let fd = world.fd().as_raw_fd();
        (0..self.ranks).map(|rank| SharedWorld::attach(fd, rank, self.options.clone())).collect()
    }
}

fn attached(ranks: usize) -> Attached {
    Attached { ranks, options: Options::default() }
}

/// An arena is zero, whoever used its memory before, and two arenas do not overlap.
#[test]
fn arenas_are_new_each_time() {
    let sums = run_ranks(&attached(2), |endpoint| {
        for round in 0..3 {
            let take = |endpoint: &mut dyn Communicator| endpoint.arena((3 << 20) + 5);
            let mut two = [take(endpoint)?.unwrap(), take(endpoint)?.unwrap()];
            for (i, arena) in two.iter_mut().enumerate() {
                assert_eq!(arena.len(), (3 << 20) + 5);
                assert!(arena.as_mut_slice().iter().all(|&byte| byte == 0), "round {round}");
                arena.as_mut_slice().fill(i as u8 + 1);
            }
            assert!(two[0].as_mut_slice().iter().all(|&byte| byte == 1), "round {round}");
            endpoint.barrier(GroupId::WORLD)?;
        }
        Ok::<_, CommError>(())
    });
    sums.unwrap();
}

/// What lies in an arena is reduced where it lies, and what lies elsewhere is copied: the results
/// are the same.
#[test]
fn staged_and_shared_buffers_meet() {
    let results = run_ranks(&attached(3), |endpoint| {
        let me = endpoint.rank();
        let mut arena = endpoint.arena(1 << 20)?.unwrap();
        let mut own = vec![me as f64 + 0.25; 5000];
        let shared: &mut [f64] = bytemuck::cast_slice_mut(&mut arena.as_mut_slice()[..40_000]);
        shared.copy_from_slice(&own);
        // Some ranks have it here, some there.
        let used = if me == 1 { shared } else { &mut own };
        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, used)?;
        Ok::<_, CommError>(used.to_vec())
    });
    assert_eq!(results.unwrap(), vec![vec![3.75; 5000]; 3]);
}

#[test]
fn a_world_is_joined_by_each_rank_once() {
    let world = SharedWorld::create(2, &Options::default()).unwrap();
    let fd = world.fd().as_raw_fd();
    let attach = |fd, rank| SharedWorld::attach(fd, rank, Options::default());
    let refusal = |fd, rank| match attach(fd, rank) {
        Ok(_) => panic!("rank {rank} was attached"),
        Err(error) => error.to_string(),
    };
    let first = attach(fd, 1).unwrap();
    assert_eq!((first.endpoint.rank(), first.endpoint.world(), world.ranks()), (1, 2, 2));
    assert_eq!(refusal(fd, 1), "joining a world as rank 1: another process is this rank");
    drop(first);
    let error = refusal(fd, 1);
    assert!(error.contains("its process has ended; start a new world"), "{error}");
    assert!(refusal(fd, 2).contains("it has 2 ranks, numbered from 0"));
    let file = tempfile();
    assert!(refusal(file.as_raw_fd(), 0).contains("not of a world"));
    assert!(refusal(9999, 0).contains("/proc/self/fd/9999"));
}

/// A file that is no world.
fn tempfile() -> std::fs::File {
    let path = std::env::temp_dir().join(format!("phalanx-no-world-{}", std::process::id()));
    std::fs::write(&path, [7; 4096]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

/// Where address space or files are limited, rooms are smaller; where even that does not fit, the
/// message says what to allow.
#[test]
fn a_world_takes_what_the_system_allows() {
    const TEST: &str = "attached::a_world_takes_what_the_system_allows";
    if std::env::var_os("PHALANX_TEST_LIMITED").is_some() {
        let sums = run_ranks(&attached(1), |endpoint| {
            let mut arena = endpoint.arena(4096)?.unwrap();
            let values: &mut [f32] = bytemuck::cast_slice_mut(arena.as_mut_slice());
            values.fill(2.0);
            endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, values)?;
            Ok::<_, CommError>(values[1023])
        });
        println!("\nsums {sums:?}");
        return;
    }
    for (limit, expected) in [
        ("true", "Ok([2.0])"),
        ("ulimit -v 4000000", "Ok([2.0])"),
        ("ulimit -f 100000", "Ok([2.0])"),
        ("ulimit -f 10", "allow more address space (ulimit -v) and larger files (ulimit -f)"),
    ] {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &format!("{limit} && exec \"$@\""), "sh"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", TEST, "--nocapture"]);
        let output = command.env("PHALANX_TEST_LIMITED", "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(expected), "{limit}: {output:?}");
    }
}
