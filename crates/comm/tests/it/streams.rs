//! Ranks that share no memory: lost ranks are named, and what is large or late gets through.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use phalanx_comm::{
    Blocks, Call, CallWatch, CollectiveOp, Collectives, CommError, Communicator, GroupId, Launcher,
    OpKind, Options, ReduceOp, Site, Streams, run_ranks,
};
use phalanx_ir::DType;

fn endpoints(ranks: usize) -> Vec<Box<dyn Communicator>> {
    // A timeout that would be noticed: nothing here is found out by waiting.
    let options = Options { timeout: Duration::from_secs(600), ..Options::default() };
    let locals = Streams { ranks, options }.launch().unwrap();
    locals.into_iter().map(|local| local.endpoint).collect()
}

/// A rank whose process dies says nothing any more: its streams are closed.
#[test]
fn a_rank_that_is_gone_is_named_at_once() {
    let mut endpoints = endpoints(3);
    drop(endpoints.remove(1));
    let errors: Vec<String> = std::thread::scope(|scope| {
        let wait = |mut endpoint: Box<dyn Communicator>| {
            scope.spawn(move || endpoint.barrier(GroupId::WORLD).unwrap_err().to_string())
        };
        let threads: Vec<_> = endpoints.into_iter().map(wait).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        // Whoever notices first tells the other.
        assert!(error.contains("rank 1 never arrived at barrier #0 of group [0,1,2]"), "{error}");
        assert!(error.contains("rank 1 has closed its stream"), "{error}");
    }
}

/// Both send far more than a stream holds before either receives, and wait in opposite orders.
#[test]
fn large_messages_cross() {
    const COUNT: usize = 3 << 20;
    let sums = run_ranks(&Streams::new(2), |endpoint| {
        let (me, other) = (endpoint.rank(), 1 - endpoint.rank());
        let (send, mut receive) = (vec![me as f32 + 1.0; COUNT], vec![0f32; COUNT]);
        let call = |op| Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(COUNT));
        let out = call(CollectiveOp::Send { to: other, channel: 0 });
        let back = call(CollectiveOp::Receive { from: other, channel: 0 });
        // SAFETY: both lists live, untouched, until both calls were waited for.
        let (sent, received) = unsafe {
            (
                endpoint.start(&out, send.as_ptr().cast(), std::ptr::null_mut())?,
                endpoint.start(&back, std::ptr::null(), receive.as_mut_ptr().cast())?,
            )
        };
        let (first, second) = if me == 0 { (sent, received) } else { (received, sent) };
        endpoint.wait(first)?;
        endpoint.wait(second)?;
        endpoint.all_reduce(GroupId::WORLD, ReduceOp::Sum, &mut receive)?;
        Ok::<_, CommError>(receive.iter().map(|&x| f64::from(x)).sum::<f64>())
    });
    assert_eq!(sums.unwrap(), [3.0 * COUNT as f64; 2]);
}

/// A rank that is stopped while a block is half written still says why, and is understood.
#[test]
fn last_words_follow_half_a_block() {
    let mut endpoints = endpoints(2);
    let (mut other, mut one) = (endpoints.pop().unwrap(), endpoints.pop().unwrap());
    let (send, mut receive) = (vec![1f32; 1 << 20], vec![0f32; 1 << 20]);
    let call = |op| Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(1 << 20));
    let out = call(CollectiveOp::Send { to: 1, channel: 0 });
    let back = call(CollectiveOp::Receive { from: 0, channel: 0 });
    // SAFETY: both lists live, untouched, until the calls have failed.
    let (sent, received) = unsafe {
        (
            one.start(&out, send.as_ptr().cast(), std::ptr::null_mut()).unwrap(),
            other.start(&back, std::ptr::null(), receive.as_mut_ptr().cast()).unwrap(),
        )
    };
    // The stream takes some of the block, and then no more, because nobody reads.
    assert!(!one.test(&sent).unwrap());
    assert!(!one.test(&sent).unwrap());
    let stopper = one.stopper();
    std::thread::scope(|scope| {
        scope.spawn(move || stopper.stop("no more"));
        let error = other.wait(received).unwrap_err().to_string();
        assert_eq!(error, "stopped because rank 0 failed: no more");
    });
    assert!(one.wait(sent).unwrap_err().to_string().contains("rank 0 failed: no more"));
}

/// Tells when calls end.
struct Ends(Sender<u64>);

impl CallWatch for Ends {
    fn began(&self, _op: OpKind, _group: &str, _number: u64, _site: Site) {}

    fn ended(&self, _op: OpKind, _group: &str, number: u64, _site: Site) {
        self.0.send(number).unwrap();
    }

    fn waits(&self, _rank: Option<usize>) {}
}

/// Ranks that say that they compute, and do not call again, get what they have started all the same.
#[test]
fn large_calls_end_while_ranks_compute() {
    const COUNT: usize = 3 << 20;
    for ranks in [2, 3] {
        let (tell, hear) = channel();
        let options = Options { watch: Some(Arc::new(Ends(tell))), ..Options::default() };
        let locals = Streams { ranks, options }.launch().unwrap();
        let mut endpoints: Vec<_> = locals.into_iter().map(|local| local.endpoint).collect();
        let sum = CollectiveOp::AllReduce(ReduceOp::Sum);
        let call = Call::new(GroupId::WORLD, sum, DType::F32, Blocks::contiguous(COUNT));
        let numbers = || (0..ranks).map(|rank| vec![rank as f32; COUNT]).collect::<Vec<_>>();
        let (mut firsts, mut seconds) = (numbers(), numbers());
        let (mut waited, mut left) = (Vec::new(), Vec::new());
        for (rank, endpoint) in endpoints.iter_mut().enumerate() {
            for (sums, handles) in [(&mut firsts, &mut waited), (&mut seconds, &mut left)] {
                let memory = sums[rank].as_mut_ptr().cast::<u8>();
                // SAFETY: the list lives, untouched, until the call was waited for.
                handles.push(unsafe { endpoint.start(&call, memory, memory).unwrap() });
            }
            endpoint.computes().unwrap();
        }
        // Waiting for one call does not stop the other, which ends without any more of the rank's help.
        let all = endpoints.iter_mut().zip(waited);
        all.for_each(|(endpoint, handle)| endpoint.wait(handle).unwrap());
        let mut ended: Vec<u64> =
            (0..2 * ranks).map(|_| hear.recv_timeout(Duration::from_secs(100)).unwrap()).collect();
        ended.sort_unstable();
        assert_eq!(ended, [vec![0; ranks], vec![1; ranks]].concat());
        let all = endpoints.iter_mut().zip(left);
        all.for_each(|(endpoint, handle)| endpoint.wait(handle).unwrap());
        let expected = (0..ranks).sum::<usize>() as f32;
        assert!(firsts.iter().chain(&seconds).flatten().all(|&sum| sum == expected));
    }
}
