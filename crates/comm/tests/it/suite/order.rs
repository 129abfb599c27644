//! Calls that overlap: waits in any order, many groups at once, messages on channels, and results
//! that do not depend on which rank was late.

use std::time::Duration;

use phalanx_ir::DType;

use super::data::{reduced, values};
use super::{Case, Transport, expect, must_run};
use phalanx_comm::Blocks;
use phalanx_comm::Collectives;
use phalanx_comm::CommError;
use phalanx_comm::{Call, CollectiveOp, ReduceOp};
use phalanx_comm::{Communicator, Handle};
use phalanx_comm::{Group, GroupId};

pub(super) const CASES: &[Case] = &[
    ("waits in any order", any_order),
    ("more calls than there is room for", many_calls),
    ("messages", messages),
    ("messages that cross", crossing),
    ("a finished call is seen without waiting", testing),
    ("the same bits whichever rank is late", same_bits),
];

const SUM: ReduceOp = ReduceOp::Sum;

/// Starts a call over slices that the caller keeps until it is over.
fn start(
    endpoint: &mut dyn Communicator,
    call: &Call<'_>,
    send: &[f32],
    receive: &mut [f32],
) -> Result<Handle, String> {
    // SAFETY: every case keeps both slices untouched until it has waited for the handle, and they
    // are as long as their calls say.
    let handle = unsafe { endpoint.start(call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) };
    handle.map_err(|error| error.to_string())
}

fn sum_of(group: GroupId, count: usize) -> Call<'static> {
    Call::new(group, CollectiveOp::AllReduce(SUM), DType::F32, Blocks::contiguous(count))
}

fn any_order(transport: &mut dyn Transport) -> Result<(), String> {
    // A 2×2 grid with rows and columns as groups: every rank is in three groups.
    let lists: [[usize; 2]; 4] = [[0, 1], [2, 3], [0, 2], [1, 3]];
    must_run(transport, 4, &|endpoint| {
        let me = endpoint.rank();
        let mut groups = vec![(GroupId::WORLD, vec![0, 1, 2, 3])];
        for list in lists.iter().filter(|list| list.contains(&me)) {
            let group = Group::new(*list).map_err(|error| error.to_string())?;
            groups.push((endpoint.group(&group).map_err(|e| e.to_string())?, list.to_vec()));
        }
        for round in 0..30 {
            let counts: Vec<usize> = (0..9).map(|i| 1 + (round * 31 + i * 57) % 400).collect();
            let send: Vec<Vec<f32>> = counts.iter().map(|&count| values(me, count)).collect();
            let mut receive: Vec<Vec<f32>> = counts.iter().map(|&count| vec![0.0; count]).collect();
            let mut handles = Vec::new();
            for (i, receive) in receive.iter_mut().enumerate() {
                let call = sum_of(groups[i % 3].0, counts[i]);
                handles.push((i, start(endpoint, &call, &send[i], receive)?));
            }
            // Every rank waits in a different order.
            handles.sort_by_key(|(i, _)| (i * (me + 2) + round) % 9);
            for (_, handle) in handles {
                endpoint.wait(handle).map_err(|error| error.to_string())?;
            }
            for (i, got) in receive.iter().enumerate() {
                expect("sum", got, &reduced::<f32>(&groups[i % 3].1, counts[i], SUM))?;
            }
        }
        Ok(())
    })
}

fn many_calls(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 3, &|endpoint| {
        let me = endpoint.rank();
        let send: Vec<Vec<f32>> = (0..200).map(|i| values(me + 3 * i, 5)).collect();
        let mut receive = vec![vec![0f32; 5]; 200];
        let mut handles = Vec::new();
        for (send, receive) in send.iter().zip(&mut receive) {
            handles.push(start(endpoint, &sum_of(GroupId::WORLD, 5), send, receive)?);
        }
        while let Some(handle) = handles.pop() {
            endpoint.wait(handle).map_err(|error| error.to_string())?;
        }
        for (i, got) in receive.iter().enumerate() {
            expect("sum", got, &reduced::<f32>(&[3 * i, 3 * i + 1, 3 * i + 2], 5, SUM))?;
        }
        Ok(())
    })
}

fn messages(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 4, &|endpoint| {
        let (me, n) = (endpoint.rank(), 4);
        // A chain: each rank passes on what it receives.
        let mut buffer = values::<f32>(7, 50);
        if me > 0 {
            buffer.fill(0.0);
            endpoint.receive(GroupId::WORLD, me - 1, &mut buffer).map_err(|e| e.to_string())?;
        }
        if me + 1 < n {
            endpoint.send(GroupId::WORLD, me + 1, &buffer).map_err(|e| e.to_string())?;
        }
        expect("passed on", &buffer, &values::<f32>(7, 50))?;
        // Messages of a channel keep their order; channels do not wait for each other. Places are
        // those of the group that is named.
        let group = Group::new([3, 2, 1, 0]).map_err(|error| error.to_string())?;
        let id = endpoint.group(&group).map_err(|error| error.to_string())?;
        match me {
            0 => {
                let send: Vec<Vec<f32>> = (0..20).map(|i| values(i, 30)).collect();
                let mut handles = Vec::new();
                for (i, send) in send.iter().enumerate() {
                    let op = CollectiveOp::Send { to: 0, channel: (i % 2) as u32 };
                    let call = Call::new(id, op, DType::F32, Blocks::contiguous(30));
                    handles.push(start(endpoint, &call, send, &mut [])?);
                }
                for handle in handles {
                    endpoint.wait(handle).map_err(|error| error.to_string())?;
                }
            }
            3 => {
                for i in (1..20).step_by(2).chain((0..20).step_by(2)) {
                    let op = CollectiveOp::Receive { from: 3, channel: (i % 2) as u32 };
                    let call = Call::new(id, op, DType::F32, Blocks::contiguous(30));
                    let mut got = vec![0.0; 30];
                    endpoint.run(&call, &[], &mut got).map_err(|error| error.to_string())?;
                    expect("message", &got, &values::<f32>(i, 30))?;
                }
            }
            _ => {}
        }
        Ok(())
    })
}

fn crossing(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 2, &|endpoint| {
        let (me, other) = (endpoint.rank(), 1 - endpoint.rank());
        let message = |op| Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(64));
        for _ in 0..100 {
            let (send, mut got) = (values::<f32>(me, 64), vec![0.0; 64]);
            let out = message(CollectiveOp::Send { to: other, channel: 0 });
            let sent = start(endpoint, &out, &send, &mut [])?;
            let back = message(CollectiveOp::Receive { from: other, channel: 0 });
            let received = start(endpoint, &back, &[], &mut got)?;
            // One rank first waits for its send, the other for its receive.
            let (first, second) = if me == 0 { (sent, received) } else { (received, sent) };
            endpoint.wait(first).map_err(|error| error.to_string())?;
            endpoint.wait(second).map_err(|error| error.to_string())?;
            expect("message", &got, &values::<f32>(other, 64))?;
        }
        Ok(())
    })
}

fn testing(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 2, &|endpoint| {
        let me = endpoint.rank();
        let (send, mut got) = (values::<f32>(me, 64), vec![0.0; 64]);
        if me == 1 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let handle = start(endpoint, &sum_of(GroupId::WORLD, 64), &send, &mut got)?;
        while !endpoint.test(&handle).map_err(|error| error.to_string())? {
            std::thread::yield_now();
        }
        let again = Handle::new(handle.number());
        endpoint.wait(handle).map_err(|error| error.to_string())?;
        expect("sum", &got, &reduced::<f32>(&[0, 1], 64, SUM))?;
        match endpoint.wait(again) {
            Err(CommError::UnknownHandle { rank }) if rank == me => Ok(()),
            other => Err(format!("a handle was waited for twice: {other:?}")),
        }
    })
}

fn same_bits(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 7, &|endpoint| {
        let (me, count) = (endpoint.rank(), 501);
        let want = reduced::<f32>(&[0, 1, 2, 3, 4, 5, 6], count, SUM);
        for round in 0..20 {
            if round % 7 == me {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut buffer = values::<f32>(me, count);
            endpoint.all_reduce(GroupId::WORLD, SUM, &mut buffer).map_err(|e| e.to_string())?;
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
            expect("bits", &bits(&buffer), &bits(&want))?;
        }
        Ok(())
    })
}
