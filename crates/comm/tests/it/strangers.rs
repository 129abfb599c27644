//! What others send to the port at which ranks meet. Whatever it is, the ranks of the job meet, and
//! compute what they should.
//!
//! Each round has its own seed. PHALANX_FUZZ_ROUNDS sets how many there are.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use phalanx_comm::{
    Collectives, CommError, Environment, GroupId, MeetingPoint, Membership, Options, Processes,
    ReduceOp, StateMemory, Token, run_ranks,
};

const ROUNDS: u64 = 6;
const WAIT: Duration = Duration::from_secs(60);

/// Numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 24
    }

    fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// Bytes that look more or less like a hello, or like another program's.
fn attempt(dice: &mut Dice) -> Vec<u8> {
    let mut bytes = match dice.below(6) {
        0 => b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
        1 => Vec::new(),
        2 => {
            let count = dice.below(300);
            dice.bytes(count)
        }
        // A good start, and the token of another job.
        3 => [&b"PHALANX1"[..], &dice.bytes(72)].concat(),
        // The longest frame that a length can say.
        4 => [&b"PHALANX1"[..], &[255; 200]].concat(),
        _ => {
            let count = dice.below(1 << 16);
            dice.bytes(count)
        }
    };
    let whole = bytes.len();
    bytes.truncate(if dice.below(2) == 0 { whole } else { dice.below(whole + 1) });
    bytes
}

/// Connects and sends without end; some connections are left open, silent.
fn disturb(at: SocketAddr, seed: u64, over: &AtomicBool) {
    let (mut dice, mut open) = (Dice(seed), Vec::new());
    while !over.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect_timeout(&at, Duration::from_millis(100)) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let _ = stream.set_read_timeout(Some(Duration::from_millis(2)));
        let _ = stream.write_all(&attempt(&mut dice));
        let mut answer = [0; 64];
        if let Ok(count @ 1..) = stream.read(&mut answer) {
            // A refusal without a reason, and nothing else: kind 1 and no bytes.
            assert_eq!(answer[..count], [1, 0, 0, 0, 0][..count.min(5)], "seed {seed}");
        }
        if dice.below(3) == 0 && open.len() < 100 {
            open.push(stream);
        }
    }
}

/// A process of the same job and build whose processor rounds differently is refused at once, and both are told why.
#[test]
fn a_rank_with_other_instructions_is_refused_with_what_to_do() {
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let meet = MeetingPoint::Host { host: "127.0.0.1".into(), ports: vec![at.port()] };
    let token = Token::of("own");
    let own =
        Environment { rank: 0, ranks: 2, local: None, meet, token, launched: false, epoch: 0 };
    let other = std::thread::spawn(move || {
        let mut stream = loop {
            match TcpStream::connect(at) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let units = u32::MAX;
        let hello = [&b"PHALANX1"[..], &token.bytes(), &phalanx_comm::build().to_le_bytes()];
        let numbers = [units, 1, 2].map(u32::to_le_bytes).concat();
        stream.write_all(&[&hello.concat()[..], &numbers, &[0; 20]].concat()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    });
    let error = Membership::meet(&own, WAIT).map(drop).unwrap_err().to_string();
    let told = other.join().unwrap();
    for text in [error, told] {
        assert!(text.contains("rank 1 computes with avx2+fma+avx512f"), "{text}");
        assert!(text.contains("use hosts with the same kind of processor"), "{text}");
    }
}

#[test]
fn strangers_do_not_disturb_a_meeting_or_its_worlds() {
    let rounds = std::env::var("PHALANX_FUZZ_ROUNDS").ok().and_then(|text| text.parse().ok());
    for seed in 0..rounds.unwrap_or(ROUNDS) {
        let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let over = AtomicBool::new(false);
        let meet = MeetingPoint::Host { host: "127.0.0.1".into(), ports: vec![at.port()] };
        let own = |rank| {
            let (meet, token) = (meet.clone(), Token::of("own"));
            Environment { rank, ranks: 2, local: None, meet, token, launched: false, epoch: 0 }
        };
        let rank = |rank: usize| {
            if rank == 1 {
                // The others are there first.
                std::thread::sleep(Duration::from_millis(50));
            }
            let job = Arc::new(Membership::meet(&own(rank), WAIT).unwrap());
            for _ in 0..5 {
                let options = Options::default();
                let sums = run_ranks(
                    &Processes {
                        job: job.clone(),
                        options,
                        memory: StateMemory::Own,
                        recorder: None,
                    },
                    |endpoint| {
                        let mut values = vec![endpoint.rank() as f64 + 1.0; 1000];
                        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, &mut values)?;
                        Ok::<_, CommError>(values)
                    },
                );
                assert_eq!(sums.unwrap(), [vec![3.0; 1000]], "seed {seed}");
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..2)
                .map(|n| {
                    let over = &over;
                    scope.spawn(move || disturb(at, 1000 * n + seed, over))
                })
                .collect();
            let ranks: Vec<_> = (0..2).map(|n| scope.spawn(move || rank(n))).collect();
            let ended: Vec<_> = ranks.into_iter().map(|thread| thread.join()).collect();
            over.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok), "seed {seed}");
            others.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
