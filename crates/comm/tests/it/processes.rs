//! Ranks that meet at a socket or a port, as processes do; here each is a thread with a job of its own.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_comm::{
    CommError, Environment, Failure, MeetingPoint, Membership, Options, Processes, RankPool, Token,
    run_ranks,
};

use super::suite::{self, Settings, Transport, Work};

const WAIT: Duration = Duration::from_secs(30);

fn path() -> MeetingPoint {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let (own, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let name = format!("phalanx-test-{own}-{number}");
    MeetingPoint::Path(std::env::temp_dir().join(name))
}

fn port() -> MeetingPoint {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    MeetingPoint::Host { host: "127.0.0.1".into(), ports: vec![free] }
}

fn environment(rank: usize, ranks: usize, meet: &MeetingPoint) -> Environment {
    let (meet, token) = (meet.clone(), Token::of("test"));
    Environment { rank, ranks, local: None, meet, token, launched: false, epoch: 0 }
}

/// Lets processes meet, each on a thread of its own; gives what each found.
fn meet(all: Vec<Environment>, wait: Duration) -> Vec<Result<Membership, CommError>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            all.iter().map(|own| scope.spawn(move || Membership::meet(own, wait))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn jobs(ranks: usize, at: &MeetingPoint) -> Vec<Arc<Membership>> {
    let all = (0..ranks).map(|rank| environment(rank, ranks, at)).collect();
    meet(all, WAIT).into_iter().map(|job| Arc::new(job.unwrap())).collect()
}

/// A transport whose worlds are all made by the same meeting of a number of ranks.
struct Met {
    at: fn() -> MeetingPoint,
    known: Vec<Vec<Arc<Membership>>>,
}

impl Transport for Met {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        if !self.known.iter().any(|jobs| jobs.len() == ranks) {
            self.known.push(jobs(ranks, &(self.at)()));
        }
        let jobs = self.known.iter().find(|jobs| jobs.len() == ranks).unwrap();
        let Settings { timeout, planted_copy } = settings;
        let options = Options { timeout, planted_copy, ..Options::default() };
        let run = |job: &Arc<Membership>| {
            let launcher = Processes::new(job.clone(), options.clone());
            run_ranks(&launcher, work).map(drop)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(move || run(job))).collect();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            // All are told of the same failure; the rank where it happened has the error.
            ended.collect::<Vec<_>>().into_iter().find(Result::is_err).unwrap_or(Ok(()))
        })
    }
}

#[test]
fn ranks_that_met_at_a_socket_conform() {
    suite::run(&mut Met { at: path, known: Vec::new() }).unwrap();
}

#[test]
fn ranks_that_met_at_a_port_conform() {
    suite::run(&mut Met { at: port, known: Vec::new() }).unwrap();
}

#[test]
fn processes_exchange_bytes_and_failures() {
    let jobs = jobs(3, &path());
    let texts: Vec<String> = std::thread::scope(|scope| {
        let run = |job: &Arc<Membership>| {
            let (job, options) = (job.clone(), Options::default());
            let rank = job.rank();
            let mut pool =
                RankPool::new(&Processes::new(job, options), Ok::<_, CommError>).unwrap();
            assert_eq!((pool.ranks(), pool.local()), (3, &[rank][..]));
            // Rank 1 may have read all and failed before this rank has read what it sent.
            let all = match pool.exchange::<CommError>(&vec![rank as u8; 5 * rank]) {
                Ok(all) => all.unwrap(),
                Err(lost) => return lost.failure.to_string(),
            };
            assert_eq!(all, [vec![], vec![1; 5], vec![2; 10]]);
            // One fails in its work, the others wait for its answer.
            let done = pool.run(|rank, _| if rank == 1 { Err("no luck") } else { Ok(()) });
            let lost = match done {
                Err(lost) => lost.failure,
                Ok(_) => pool.exchange::<CommError>(&[]).unwrap_err().failure,
            };
            lost.to_string()
        };
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(move || run(job))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(texts, ["rank 1 failed: no luck"; 3]);
}

#[test]
fn rank_0_gives_all_what_it_has() {
    for meet in [path(), port()] {
        let jobs = jobs(3, &meet);
        let given = |job: &Membership| job.from_first(vec![job.rank() as u8 + 7]).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(move || given(job))).collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), [7]));
        });
        jobs[2].end("the disk is full");
        assert_eq!(jobs[0].ended(2, WAIT).unwrap(), "the disk is full");
        assert_eq!(jobs[0].ended(1, Duration::from_millis(1)), None);
        assert_eq!(jobs[1].ended(0, Duration::from_millis(1)), None);
    }
}

fn errors(all: Vec<Environment>, wait: Duration) -> Vec<String> {
    let told =
        |job: Result<Membership, CommError>| job.err().map_or("met".into(), |e| e.to_string());
    meet(all, wait).into_iter().map(told).collect()
}

#[test]
fn a_rank_that_never_comes_is_named_by_all() {
    let at = path();
    let come = [0, 2].map(|rank| environment(rank, 4, &at));
    let start = Instant::now();
    for text in errors(come.to_vec(), Duration::from_millis(300)) {
        assert!(text.contains("ranks 1, 3 of 4 did not come to "), "{text}");
        assert!(text.contains("within 0.3 s: see whether they were started"), "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(10));
    let alone = errors(vec![environment(1, 2, &port())], Duration::from_millis(50));
    assert!(alone[0].contains("rank 1 of 2 found no rank 0 at 127.0.0.1:"), "{alone:?}");
}

#[test]
fn what_cannot_take_part_is_named_by_all() {
    let at = port();
    let mut all = [0, 1, 1].map(|rank| environment(rank, 3, &at)).to_vec();
    let texts = errors(all.clone(), WAIT);
    assert!(
        texts.iter().all(|t| t.contains("two processes say that they are rank 1 of 3")),
        "{texts:?}"
    );
    all[2] = environment(2, 4, &at);
    let texts = errors(all, WAIT);
    assert!(
        texts.iter().all(|t| t.contains("one of 4 ranks, but rank 0 as one of 3")),
        "{texts:?}"
    );
}

/// A process that comes after the meeting is told so when rank 0 looks at its door again; the others
/// are not disturbed.
#[test]
fn a_second_process_of_a_rank_is_told_after_the_meeting() {
    let at = port();
    let jobs = jobs(2, &at);
    std::thread::scope(|scope| {
        let late = scope.spawn(|| Membership::meet(&environment(1, 2, &at), WAIT));
        std::thread::sleep(Duration::from_millis(200));
        let run = |job: &Arc<Membership>| {
            let launcher = Processes::new(job.clone(), Options::default());
            run_ranks(&launcher, |_| Ok::<_, CommError>(())).unwrap();
        };
        jobs.iter().for_each(|job| drop(scope.spawn(move || run(job))));
        let text = late.join().unwrap().err().unwrap().to_string();
        assert!(text.contains("another process is rank 1 of 2 already"), "{text}");
    });
}

#[test]
fn a_second_job_at_the_same_port_is_refused_and_does_not_disturb() {
    let at = port();
    let second = |rank| Environment { token: Token::of("second"), ..environment(rank, 2, &at) };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Membership::meet(&environment(0, 2, &at), WAIT));
        while TcpStream::connect(address(&at)).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let text = errors(vec![second(0)], WAIT).remove(0);
        assert!(text.contains("rank 0 cannot listen at 127.0.0.1:"), "{text}");
        assert!(text.contains("choose another MASTER_PORT"), "{text}");
        let text = errors(vec![second(1)], WAIT).remove(0);
        assert!(text.contains("another job or program listens there"), "{text}");
        assert!(Membership::meet(&environment(1, 2, &at), WAIT).is_ok());
        assert!(first.join().unwrap().is_ok());
    });
}

fn address(at: &MeetingPoint) -> (String, u16) {
    let MeetingPoint::Host { host, ports } = at else { panic!("a path") };
    (host.clone(), ports[0])
}

/// Whatever strangers send, and however slowly, ranks meet; strangers learn nothing.
#[test]
fn strangers_are_refused_before_anything_is_parsed() {
    let at = port();
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Membership::meet(&environment(0, 2, &at), WAIT));
        let mut slow = Vec::new();
        let mut word = 5_u64;
        for length in [0, 1, 79, 80, 81, 4096, 300_000] {
            let mut stream = loop {
                match TcpStream::connect(address(&at)) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (word >> 56) as u8
                })
                .collect();
            // The other end may be closed before all is written.
            let _ = stream.write_all(&bytes);
            if length >= 80 {
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer);
                assert!(answer.is_empty() || answer == [1, 0, 0, 0, 0], "{answer:?}");
            } else {
                slow.push(stream);
            }
        }
        assert!(Membership::meet(&environment(1, 2, &at), WAIT).is_ok());
        assert!(host.join().unwrap().is_ok());
    });
}

/// torchrun's own store has the first port, or any other program that does not answer.
#[test]
fn other_programs_at_the_first_ports_are_passed_over() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let MeetingPoint::Host { host, ports } = port() else { panic!("a path") };
    let ports = vec![silent.local_addr().unwrap().port(), ports[0]];
    let at = MeetingPoint::Host { host, ports };
    assert_eq!(jobs(2, &at).len(), 2);
}

#[test]
fn sockets_are_removed_at_the_end() {
    let at = path();
    let MeetingPoint::Path(file) = &at else { panic!("a port") };
    let files = || -> Vec<PathBuf> {
        let own = file.file_name().unwrap().to_string_lossy().into_owned();
        let all = std::fs::read_dir(file.parent().unwrap()).unwrap().flatten();
        all.map(|entry| entry.path())
            .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&own)))
            .collect()
    };
    let met = jobs(2, &at);
    assert_eq!(files().len(), 2);
    drop(met);
    assert_eq!(files().len(), 0);
}
