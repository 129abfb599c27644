//! Errors are reported by the right rank, name the other ranks, and stop all ranks.

use std::time::{Duration, Instant};

use phalanx_ir::DType;

use super::{Case, Settings, Transport, must_run};
use phalanx_comm::Blocks;
use phalanx_comm::Collectives;
use phalanx_comm::CommError;
use phalanx_comm::Site;
use phalanx_comm::{Call, CollectiveOp, ReduceOp};
use phalanx_comm::{Group, GroupId};

pub(super) const CASES: &[Case] = &[
    ("a mismatch is reported by all, before data move", mismatch),
    ("a message that does not fit", message),
    ("a rank that never arrives is named", never_comes),
    ("a rank that arrives and never continues is named", never_goes_on),
    ("a panic is reported first and once", panic),
    ("an error stops all ranks", error),
    ("calls that make no sense are refused", bad_calls),
    ("ranks outside a group cannot use it", outsiders),
];

const SUM: ReduceOp = ReduceOp::Sum;
const LONG: Duration = Duration::from_secs(60);

fn settings(timeout: Duration) -> Settings {
    Settings { timeout, planted_copy: None }
}

/// A call over the world, of `count` elements.
fn world(op: CollectiveOp<'_>, dtype: DType, count: usize) -> Call<'_> {
    Call::new(GroupId::WORLD, op, dtype, Blocks::contiguous(count))
}

fn must_contain(text: &str, words: &[&str]) -> Result<(), String> {
    match words.iter().find(|word| !text.contains(**word)) {
        Some(word) => Err(format!("`{text}` does not say `{word}`")),
        None => Ok(()),
    }
}

/// Rank 0 and 1 call one thing, rank 2 another; all three must report both, and keep their data.
fn mismatch(transport: &mut dyn Transport) -> Result<(), String> {
    let sum = || world(CollectiveOp::AllReduce(SUM), DType::F32, 8);
    let (few, more) = ([1, 1, 1], [1, 2, 1]);
    let ragged = |send| {
        let op = CollectiveOp::AllToAllRagged { cell: 2, unit: 1, send, receive: &few };
        world(op, DType::F32, 2)
    };
    let permute = |to, from| world(CollectiveOp::Permute { to, from }, DType::F32, 8);
    let broadcast = |root| world(CollectiveOp::Broadcast { root }, DType::F32, 8);
    type Pair<'a> = (Call<'a>, Call<'a>, [&'a str; 2]);
    let pairs: [Pair<'_>; 9] = [
        (sum(), world(CollectiveOp::AllReduce(SUM), DType::F32, 9), ["f32 x 8", "f32 x 9"]),
        (sum(), world(CollectiveOp::AllReduce(SUM), DType::I32, 8), ["f32 x 8", "i32 x 8"]),
        (sum(), world(CollectiveOp::AllReduce(ReduceOp::Max), DType::F32, 8), ["sum", "max"]),
        (sum(), world(CollectiveOp::AllGather, DType::F32, 8), ["all_reduce", "all_gather"]),
        (sum(), world(CollectiveOp::Barrier, DType::Bool, 0), ["all_reduce", "barrier"]),
        (sum(), sum().accumulating(), ["rank 0 calls all_reduce sum of", "added"]),
        (broadcast(1), broadcast(0), ["root 1", "root 0"]),
        (permute(None, None), permute(Some(1), None), ["to rank 1", "from nobody"]),
        (ragged(&few), ragged(&more), ["ragged", "sends 2 rows"]),
    ];
    for (one, other, words) in pairs {
        must_run(transport, 3, &|endpoint| {
            let me = endpoint.rank();
            let call = if me == 2 { other } else { one };
            let site = if me == 2 { "elsewhere" } else { "here" };
            let (send, mut receive) = ([1u64; 32], [7u64; 32]);
            let call = call.at(Site::named(site));
            // SAFETY: both arrays are larger than any side of these calls, and live until `wait`
            // has returned.
            let started =
                unsafe { endpoint.start(&call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) };
            let error = match started.and_then(|handle| endpoint.wait(handle)) {
                Err(error @ CommError::Mismatch { .. }) => error.to_string(),
                other => return Err(format!("{call:?} gave {other:?}")),
            };
            must_contain(&error, &["#0", "[0,1,2]", "rank 2"])?;
            must_contain(&error, &["`here`", "`elsewhere`"])?;
            must_contain(&error, &words)?;
            if receive != [7; 32] {
                return Err(format!("data moved: {receive:?}"));
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn message(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 2, &|endpoint| {
        let result = match endpoint.rank() {
            0 => endpoint.send(GroupId::WORLD, 1, &[1f32; 4]),
            _ => endpoint.receive(GroupId::WORLD, 0, &mut [0f32; 5]),
        };
        let error = result.err().ok_or("a message of 4 was received as 5")?;
        must_contain(&error.to_string(), &["send of f32 x 4", "receive of f32 x 5", "0->1"])
    })
}

/// Tries a case that depends on time with ever longer timeouts: on a busy machine even a healthy
/// rank may be late.
fn with_time(mut case: impl FnMut(Duration) -> Result<(), String>) -> Result<(), String> {
    let mut last = Ok(());
    for timeout in [200, 1000, 5000] {
        last = case(Duration::from_millis(timeout));
        if last.is_ok() {
            break;
        }
    }
    last
}

fn never_comes(transport: &mut dyn Transport) -> Result<(), String> {
    with_time(|timeout| never_comes_within(transport, timeout))
}

fn never_comes_within(transport: &mut dyn Transport, timeout: Duration) -> Result<(), String> {
    let failure = transport.run(4, settings(timeout), &|endpoint| {
        let mut x = [1f32; 16];
        endpoint.all_reduce(GroupId::WORLD, SUM, &mut x).map_err(|e| e.to_string())?;
        if endpoint.rank() == 3 {
            std::thread::sleep(5 * timeout);
            return Ok(());
        }
        let site = Site::named("blocks.3 grad");
        let call = world(CollectiveOp::AllReduce(SUM), DType::F32, 16).at(site);
        match endpoint.run_in_place(&call, &mut x) {
            Err(error) => Err(error.to_string()),
            Ok(()) => Err("went on without rank 3".to_string()),
        }
    });
    let text = failure.err().ok_or("nobody noticed")?.to_string();
    must_contain(&text, &["rank 3 never arrived at all_reduce #1 of group [0,1,2,3]"])?;
    must_contain(&text, &["f32 x 16", "`blocks.3 grad`", "last finished all_reduce #0"])?;
    // It waited as long as it should, and says so.
    let waited = text.split("waited ").nth(1).and_then(|rest| rest.split(" s").next());
    match waited.and_then(|seconds| seconds.parse::<f64>().ok()) {
        Some(seconds) if seconds + 0.05 >= timeout.as_secs_f64() => Ok(()),
        _ => Err(format!("`{text}` does not say that it waited {timeout:?}")),
    }
}

fn never_goes_on(transport: &mut dyn Transport) -> Result<(), String> {
    with_time(|timeout| never_goes_on_within(transport, timeout))
}

fn never_goes_on_within(transport: &mut dyn Transport, timeout: Duration) -> Result<(), String> {
    // Three ranks: between two, streams give everything together with the call.
    let failure = transport.run(3, settings(timeout), &|endpoint| {
        let (send, mut receive) = ([1f32; 16], [0f32; 16]);
        let call = world(CollectiveOp::AllReduce(SUM), DType::F32, 16);
        // SAFETY: the arrays live until `wait` has returned, whatever it returns.
        let handle =
            unsafe { endpoint.start(&call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) };
        let handle = handle.map_err(|error| error.to_string())?;
        if endpoint.rank() == 1 {
            std::thread::sleep(5 * timeout);
        }
        endpoint.wait(handle).map_err(|error| error.to_string())
    });
    let text = failure.err().ok_or("nobody noticed")?.to_string();
    must_contain(&text, &["rank 1 arrived at but never finished all_reduce #0"])
}

fn panic(transport: &mut dyn Transport) -> Result<(), String> {
    for culprit in 0..3 {
        let start = Instant::now();
        let failure = transport.run(3, settings(LONG), &|endpoint| {
            let mut x = [1f32; 16];
            endpoint.all_reduce(GroupId::WORLD, SUM, &mut x).map_err(|e| e.to_string())?;
            assert!(endpoint.rank() != culprit, "row {} is missing", 40 + culprit);
            let error = endpoint.all_reduce(GroupId::WORLD, SUM, &mut x).err();
            Err(error.map_or_else(|| "went on".to_string(), |error| error.to_string()))
        });
        let failure = failure.err().ok_or("nobody noticed")?;
        let want = format!("panicked: row {} is missing", 40 + culprit);
        if failure.rank != culprit || *failure.message != *want {
            return Err(format!("the reported failure was `{failure}`"));
        }
        if start.elapsed() > LONG / 2 {
            return Err("the others waited for the timeout".to_string());
        }
    }
    Ok(())
}

fn error(transport: &mut dyn Transport) -> Result<(), String> {
    let failure = transport.run(4, settings(LONG), &|endpoint| {
        if endpoint.rank() == 2 {
            return Err("the disk is full".to_string());
        }
        let error = endpoint.barrier(GroupId::WORLD).err().ok_or("went on without rank 2")?;
        must_contain(&error.to_string(), &["rank 2 failed: the disk is full"])?;
        // Every later call fails too.
        let error = endpoint.barrier(GroupId::WORLD).err().ok_or("went on without rank 2")?;
        Err(error.to_string())
    });
    let text = failure.err().ok_or("nobody noticed")?.to_string();
    if text == "rank 2 failed: the disk is full" { Ok(()) } else { Err(text) }
}

fn bad_calls(transport: &mut dyn Transport) -> Result<(), String> {
    let mut blocks = Blocks { rows: 4, len: 2, ..Blocks::contiguous(8) };
    (blocks.source.row, blocks.target.row) = (2, 4);
    let strided = Call::new(GroupId::WORLD, CollectiveOp::AllReduce(SUM), DType::F32, blocks);
    let ragged = |cell, send| {
        let op = CollectiveOp::AllToAllRagged { cell, unit: 1, send, receive: &[1, 1] };
        world(op, DType::F32, 4)
    };
    let cases: [(Call<'_>, &str); 10] = [
        (
            world(CollectiveOp::Broadcast { root: 2 }, DType::F32, 8),
            "place 2 is not in a group of 2",
        ),
        (world(CollectiveOp::Send { to: 0, channel: 0 }, DType::F32, 8), "to itself"),
        (world(CollectiveOp::AllReduce(SUM), DType::Bool, 8), "cannot be reduced; f64, f32"),
        (world(CollectiveOp::AllGather, DType::F32, 2).accumulating(), "only reductions"),
        (strided, "contiguous"),
        (world(CollectiveOp::AllGather, DType::F32, 2).tagged(u32::MAX), "tag 4294967295"),
        (world(CollectiveOp::AllGather, DType::F32, 9), "9"),
        (ragged(4, &[1]), "2 counts"),
        (ragged(3, &[1, 1]), "rows of 4 elements in cells of 3"),
        (ragged(4, &[1, 5]), "5 units of a cell that has room for 4"),
    ];
    for (call, words) in cases {
        must_run(transport, 2, &|endpoint| {
            if endpoint.rank() == 1 {
                return Ok(());
            }
            let error = match call.dtype {
                DType::Bool => {
                    let (send, mut receive) = ([0u8; 8], [0u8; 8]);
                    // SAFETY: as long as the call says, and alive until it is over.
                    let started =
                        unsafe { endpoint.start(&call, send.as_ptr(), receive.as_mut_ptr()) };
                    started.and_then(|handle| endpoint.wait(handle))
                }
                _ => endpoint.run(&call, &[0f32; 8], &mut [0f32; 16]),
            };
            let error = error.err().ok_or_else(|| format!("{call:?} was done"))?.to_string();
            must_contain(&error, &["on rank 0", words])
        })?;
    }
    Ok(())
}

fn outsiders(transport: &mut dyn Transport) -> Result<(), String> {
    must_run(transport, 2, &|endpoint| {
        let other = Group::new([1 - endpoint.rank()]).map_err(|error| error.to_string())?;
        let error = endpoint.group(&other).err().ok_or("joined a group of others")?;
        must_contain(&error.to_string(), &["it is not a member"])?;
        let far = Group::new([endpoint.rank(), 2]).map_err(|error| error.to_string())?;
        let error = endpoint.group(&far).err().ok_or("joined a group with nobody")?;
        must_contain(&error.to_string(), &["[", ",2]", "does not exist"])
    })
}
