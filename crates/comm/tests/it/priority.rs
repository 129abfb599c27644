//! Exchanges go before reductions among the calls that can move, and keep nobody waiting who needs a reduction
//! first.

use std::sync::{Arc, Mutex};

use phalanx_comm::{
    Blocks, Call, CallWatch, CollectiveOp, Collectives, CommError, Communicator, GroupId, Handle,
    Launcher, OpKind, Options, ReduceOp, Site, Threads, run_ranks,
};
use phalanx_ir::DType;

use super::attached::Attached;

/// The kinds of calls in the order in which they have ended, on all ranks that share it.
#[derive(Default)]
struct Ended(Mutex<Vec<OpKind>>);

impl CallWatch for Ended {
    fn began(&self, _op: OpKind, _group: &str, _number: u64, _site: Site) {}

    fn ended(&self, op: OpKind, _group: &str, _number: u64, _site: Site) {
        self.0.lock().unwrap().push(op);
    }

    fn waits(&self, _rank: Option<usize>) {}
}

const RANKS: usize = 2;
const PIECES: usize = 3;
const COUNT: usize = 1024;

fn reduction() -> Call<'static> {
    let sum = CollectiveOp::AllReduce(ReduceOp::Sum);
    Call::new(GroupId::WORLD, sum, DType::F32, Blocks::contiguous(COUNT))
}

fn exchange() -> Call<'static> {
    let blocks = Blocks::all_to_all(RANKS, &[RANKS, COUNT], 1, 0).unwrap();
    Call::new(GroupId::WORLD, CollectiveOp::AllToAll, DType::F32, blocks)
}

/// Starts a call over memory that the test keeps.
fn start(endpoint: &mut dyn Communicator, call: &Call<'_>, room: &mut [Vec<f32>; 2]) -> Handle {
    let [send, receive] = room;
    // SAFETY: both are as long as the longest call, and live until all calls have ended.
    unsafe { endpoint.start(call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) }.unwrap()
}

fn room() -> [Vec<f32>; 2] {
    [vec![1.0; RANKS * COUNT], vec![0.0; RANKS * COUNT]]
}

/// Both ranks start three reductions and then an exchange before anything moves: the kinds in the order of
/// their ends, first on one rank and then on the other.
fn order(launcher: impl Fn(Options) -> Box<dyn Launcher>, exchanges_first: bool) -> Vec<OpKind> {
    let ended = Arc::new(Ended::default());
    let watch: Arc<dyn CallWatch> = ended.clone();
    let options = Options { watch: Some(watch), exchanges_first, ..Options::default() };
    let mut ranks = launcher(options).launch().unwrap();
    let mut rooms: Vec<Vec<[Vec<f32>; 2]>> =
        (0..RANKS).map(|_| (0..=PIECES).map(|_| room()).collect()).collect();
    let mut handles = Vec::new();
    for (rank, rooms) in ranks.iter_mut().zip(&mut rooms) {
        for (piece, room) in rooms.iter_mut().enumerate() {
            let call = if piece < PIECES { reduction() } else { exchange() };
            handles.push(start(&mut *rank.endpoint, &call, room));
        }
    }
    // One thread moves both, in turns.
    let all = RANKS * (PIECES + 1);
    while ended.0.lock().unwrap().len() < all {
        for (rank, handles) in ranks.iter_mut().zip(handles.chunks(PIECES + 1)) {
            rank.endpoint.test(&handles[PIECES]).unwrap();
        }
    }
    for (i, handle) in handles.into_iter().enumerate() {
        ranks[i / (PIECES + 1)].endpoint.wait(handle).unwrap();
    }
    // Sums of two ones, and each rank's own ones.
    let (sums, moved) = (&rooms[1][0][1][..COUNT], &rooms[1][PIECES][1]);
    assert!(sums.iter().all(|x| *x == 2.0) && moved.iter().all(|x| *x == 1.0));
    let found = ended.0.lock().unwrap();
    found.clone()
}

#[test]
fn no_reduction_moves_while_an_exchange_could() {
    use OpKind::{AllReduce, AllToAll};
    let threads = |options| -> Box<dyn Launcher> { Box::new(Threads { ranks: RANKS, options }) };
    let shared = |options| -> Box<dyn Launcher> { Box::new(Attached { ranks: RANKS, options }) };
    let first = [AllToAll, AllReduce, AllReduce, AllReduce];
    let last = [AllReduce, AllReduce, AllReduce, AllToAll];
    for (exchanges_first, each) in [(true, first), (false, last)] {
        let expected = [each, each].concat();
        assert_eq!(order(threads, exchanges_first), expected);
        assert_eq!(order(shared, exchanges_first), expected);
    }
}

/// As a rule that excludes reductions this would deadlock: rank 0 has started its exchange, and rank 1 waits for
/// the reduction before it does.
#[test]
fn who_needs_a_reduction_first_gets_it() {
    let options = Options { exchanges_first: true, ..Options::default() };
    let done = run_ranks(&Threads { ranks: RANKS, options }, |endpoint| {
        for _ in 0..20 {
            let [mut sums, mut moved] = [room(), room()];
            let reduced = start(endpoint, &reduction(), &mut sums);
            if endpoint.rank() == 1 {
                endpoint.wait(reduced)?;
                let exchanged = start(endpoint, &exchange(), &mut moved);
                endpoint.wait(exchanged)?;
            } else {
                let exchanged = start(endpoint, &exchange(), &mut moved);
                endpoint.wait(exchanged)?;
                endpoint.wait(reduced)?;
            }
            endpoint.barrier(GroupId::WORLD)?;
        }
        Ok::<_, CommError>(())
    });
    assert_eq!(done.unwrap().len(), RANKS);
}
