//! Counted bytes equal the closed forms, and one byte too many is detected.

use std::time::Duration;

use phalanx_ir::DType;

use super::data::values;
use super::{Case, Settings, Transport, must_run};
use phalanx_comm::Blocks;
use phalanx_comm::Collectives;
use phalanx_comm::Communicator;
use phalanx_comm::GroupId;
use phalanx_comm::TrafficCount;
use phalanx_comm::volume;
use phalanx_comm::{Call, CollectiveOp, OpKind, ReduceOp};

pub(super) const CASES: &[Case] = &[
    ("counted bytes are the predicted ones", counted),
    ("a planted copy of 64 bytes is counted", planted),
];

/// Every call, with `count` elements per block.
fn calls<'a>(
    n: usize,
    me: usize,
    count: usize,
    [send, receive]: [&'a [usize]; 2],
) -> Vec<Call<'a>> {
    let reduction = ReduceOp::Sum;
    let ring = CollectiveOp::Permute { to: Some((me + 1) % n), from: Some((me + n - 1) % n) };
    let mut ops = vec![
        CollectiveOp::AllReduce(reduction),
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter(reduction),
        CollectiveOp::AllToAll,
        CollectiveOp::AllToAllRagged { cell: count, unit: 1, send, receive },
        CollectiveOp::Broadcast { root: n - 1 },
        CollectiveOp::Reduce { root: n / 2, reduction },
        CollectiveOp::Gather { root: 0 },
        CollectiveOp::Scatter { root: 0 },
        ring,
        CollectiveOp::Barrier,
    ];
    if n > 1 {
        match me {
            0 => ops.push(CollectiveOp::Send { to: 1, channel: 4 }),
            1 => ops.push(CollectiveOp::Receive { from: 0, channel: 4 }),
            _ => {}
        }
    }
    let call = |op: CollectiveOp<'a>| match op {
        CollectiveOp::Barrier => Call::new(GroupId::WORLD, op, DType::Bool, Blocks::contiguous(0)),
        _ => Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(count)),
    };
    ops.into_iter().map(call).collect()
}

/// Does every call once under tag 3, and compares what was counted with the closed form plus what
/// was planted for calls that read anything.
fn compare(
    endpoint: &mut dyn Communicator,
    n: usize,
    count: usize,
    planted: Option<OpKind>,
) -> Result<(), String> {
    let me = endpoint.rank();
    // Of a block of rank i for rank j, other parts than of the way back.
    let units = |i: usize, j: usize| (7 * i + 3 * j) % (count + 1);
    let send: Vec<usize> = (0..n).map(|j| units(me, j)).collect();
    let receive: Vec<usize> = (0..n).map(|i| units(i, me)).collect();
    for call in calls(n, me, count, [&send, &receive]) {
        let (send, mut receive) = (values::<f32>(me, 2 * n * count), vec![0f32; 2 * n * count]);
        endpoint.reset_traffic();
        let call = call.tagged(3);
        let done = endpoint.run(&call, &send, &mut receive);
        done.map_err(|error| error.to_string())?;
        let kind = call.op.kind();
        let predicted = volume(&call, n, me, endpoint.algorithm(&call));
        let extra = if planted == Some(kind) && predicted > 0 { 64 } else { 0 };
        let want = TrafficCount { calls: 1, bytes: predicted + extra };
        let got: Vec<_> = endpoint.traffic().entries().collect();
        if got != [(3, kind, want)] {
            return Err(format!("{kind} of {n} x {count}: counted {got:?}, not {want:?}"));
        }
    }
    Ok(())
}

fn counted(transport: &mut dyn Transport) -> Result<(), String> {
    for n in 1..=5 {
        must_run(transport, n, &|endpoint| {
            for count in [1, 5, 60, 1001] {
                compare(endpoint, n, count, None)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn planted(transport: &mut dyn Transport) -> Result<(), String> {
    for kind in OpKind::ALL {
        let settings = Settings { timeout: Duration::from_secs(60), planted_copy: Some(kind) };
        let work = |endpoint: &mut dyn Communicator| compare(endpoint, 3, 33, Some(kind));
        transport.run(3, settings, &work).map_err(|failure| failure.to_string())?;
    }
    Ok(())
}
