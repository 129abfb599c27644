//! Fully sharded data parallelism: what is gathered when, how much of it is there at a time, and
//! what each rank asks for at the start.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use phalanx_error::Result;
use phalanx_inspect::verify::CommRow;
use phalanx_ir::{DType, Param};
use phalanx_script::{BufferId, BufferKey, Category, Kind};
use phalanx_session::{Prepared, initial};
use phalanx_spmd::strategies::Fsdp;

use crate::support::{
    Laid, agrees, gpt, is_gather, is_reduce, laid, llama, models, on, settings, shared,
};

fn fsdp(loaded: &phalanx_config::Loaded, mesh: &str, fsdp: Fsdp) -> Laid {
    laid(loaded, Some(on(mesh, [shared(fsdp)])))
}

/// By unit: how often it is gathered in a step.
fn gathers(laid: &Laid) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for action in laid.script().actions.iter().filter(|a| is_gather(a)) {
        *counts.entry(action.label.replace("gather ", "")).or_default() += 1;
    }
    counts
}

#[test]
fn the_root_unit_is_kept_and_blocks_are_gathered_twice() {
    for parts in [1, 2] {
        let loaded = llama(&[&format!("train.microbatches={parts}")]);
        let expected = |blocks: usize| {
            let all = [("embed", 1), ("blocks.0", blocks), ("blocks.1", blocks), ("head", 1)];
            all.map(|(name, times)| (name.to_owned(), times * parts)).into()
        };
        assert_eq!(gathers(&fsdp(&loaded, "dp=2", Fsdp::default())), expected(2));
        // Without resharding every unit is gathered once for each micro-batch.
        let kept = Fsdp { reshard_after_forward: false, ..Fsdp::default() };
        assert_eq!(gathers(&fsdp(&loaded, "dp=2", kept)), expected(1));
    }
}

/// A unit of two layers is gathered once for both, there and back.
#[test]
fn layers_can_be_gathered_together() {
    let loaded = llama(&["train.microbatches=2", "model.layers=3"]);
    let pairs = Fsdp { layers_per_unit: 2, ..Fsdp::default() };
    let all = [("embed", 1), ("blocks.0", 2), ("blocks.2", 2), ("head", 1)];
    let expected = all.map(|(name, times)| (name.to_owned(), times * 2)).into();
    assert_eq!(gathers(&fsdp(&loaded, "dp=2", pairs.clone())), expected);
    agrees("two layers a unit", &loaded, Some(on("dp=4", [shared(pairs)])));
}

/// The gathered buffers with the action that gathers each and the one that releases it.
fn gathered(laid: &Laid) -> BTreeMap<BufferId, (usize, usize)> {
    let actions = laid.script().actions.iter().enumerate();
    let mut spans = BTreeMap::new();
    for (index, action) in actions {
        match &action.kind {
            Kind::Gather(run) => drop(spans.insert(run.outputs[0].0.buffer, (index, usize::MAX))),
            Kind::Release { buffer } => spans.get_mut(buffer).unwrap().1 = index,
            _ => {}
        }
    }
    assert!(spans.values().all(|&(_, end)| end < usize::MAX), "everything is released");
    spans
}

/// The runs of segments, and for each the gathered buffers that it reads first.
fn first_reads(laid: &Laid) -> Vec<(usize, Vec<BufferId>)> {
    let spans = gathered(laid);
    let mut seen = Vec::new();
    let mut runs = Vec::new();
    for (index, action) in laid.script().actions.iter().enumerate() {
        let Kind::Run(run) = &action.kind else { continue };
        if run.contributes.is_empty() && !action.label.contains(" F") {
            continue;
        }
        let new: Vec<BufferId> = (run.inputs.iter().map(|v| v.buffer))
            .filter(|b| spans.contains_key(b) && !seen.contains(b))
            .collect();
        seen.extend(new.iter().copied());
        runs.push((index, new));
    }
    runs
}

#[test]
fn the_next_run_is_gathered_for_while_one_runs() {
    for prefetch in [0, 1] {
        let laid = fsdp(&llama(&[]), "dp=2", Fsdp { prefetch, ..Fsdp::default() });
        let spans = gathered(&laid);
        let runs = first_reads(&laid);
        assert!(runs.iter().filter(|(_, new)| !new.is_empty()).count() >= 6, "{runs:?}");
        for pair in runs.windows(2) {
            for buffer in &pair[1].1 {
                let issued = spans[buffer].0;
                let ahead = issued < pair[0].0;
                assert_eq!(ahead, prefetch == 1, "{} before {}", issued, pair[0].0);
            }
        }
    }
}

/// The rate limit: of runs whose units are gathered and not yet released there are never more than
/// `in_flight`, however far ahead gathers would like to be, and the plan has room for no more.
#[test]
fn no_more_units_are_there_than_are_allowed() {
    let loaded = llama(&["model.layers=6"]);
    let mut peaks = Vec::new();
    for (in_flight, prefetch) in [(1, 1), (2, 1), (2, 5), (3, 2), (4, 9)] {
        let laid = fsdp(&loaded, "dp=2", Fsdp { in_flight, prefetch, ..Fsdp::default() });
        let blocks = |buffer: &BufferId| laid.script().name(*buffer).starts_with("blocks.");
        let spans: Vec<(usize, usize)> = (laid.memory.live_ranges.iter().enumerate())
            .filter(|(i, _)| gathered(&laid).contains_key(&BufferId(*i)) && blocks(&BufferId(*i)))
            .map(|(_, life)| life.unwrap())
            .collect();
        let most = (0..laid.script().actions.len())
            .map(|at| spans.iter().filter(|(first, last)| *first <= at && at <= *last).count())
            .max()
            .unwrap();
        assert!(most <= in_flight, "{most} runs' units with {in_flight} allowed");
        // Where gathers may be as far ahead, the limit is used.
        if prefetch + 1 >= in_flight {
            assert_eq!(most, in_flight);
        }
        peaks.push(laid.memory.peak(Category::Communication));
    }
    assert!(peaks[0] < peaks[1] && peaks[1] == peaks[2] && peaks[2] < peaks[4], "{peaks:?}");
}

/// Hybrid sharding: gathers and scatters stay within groups of F ranks, and what is left of a
/// gradient is summed between the R groups once.
#[test]
fn hybrid_sharding_splits_the_bytes() {
    let (ranks, within) = (4, 2);
    let loaded = llama(&["train.microbatches=2"]);
    let hybrid = || Fsdp { shard: Some(within), ..Fsdp::default() };
    let laid = fsdp(&loaded, "dp=4", hybrid());
    let psi = laid.elements();
    let root: u64 = (laid.plan.units.iter().filter(|u| !u.name.starts_with("blocks")))
        .map(|u| u.elements as u64)
        .sum();
    let f = within as u64;
    // Blocks are gathered twice in each micro-batch and the root once; all is scattered in each.
    let gathered = 2 * (2 * psi - root) * 8 * (f - 1) / f;
    let scattered = 2 * psi * 8 * (f - 1) / f;
    let r = (ranks / within) as u64;
    let summed = 2 * (psi / f) * 8 * (r - 1) / r;
    assert_eq!(laid.moved("all_gather", is_gather).bytes, gathered);
    assert_eq!(laid.moved("reduce_scatter", is_reduce).bytes, scattered);
    assert_eq!(laid.moved("all_reduce", is_reduce).bytes, summed);
    let found = agrees("hybrid", &loaded, Some(on("dp=4", [shared(hybrid())])));
    // On the axes they belong to: `dp` is cut into groups and the ranks of a group.
    let measured = |op: &str, axis: &str| -> u64 {
        let rows = found.comm.iter().filter(|row| row.op == op && row.axes == [axis]);
        rows.map(|row| row.bytes_measured).sum()
    };
    let all = 2 * ranks as u64;
    assert_eq!(measured("all_gather", "dp.1"), all * gathered);
    assert_eq!(measured("reduce_scatter", "dp.1"), all * scattered);
    assert_eq!(measured("all_reduce", "dp.0"), all * summed);
    let elsewhere = |row: &&CommRow| row.axes != ["dp.0"] && row.axes != ["dp.1"];
    // Beside that two numbers, the loss and the norm, are summed over all ranks.
    let rest: u64 = found.comm.iter().filter(elsewhere).map(|row| row.bytes_measured).sum();
    assert_eq!(rest, 2 * 2 * (ranks as u64 - 1) * 2 * 8);
    // A group's shards are those of one copy.
    assert_eq!(laid.memory.peak(Category::Weights), psi as usize * 8 / within);
}

/// 16-bit weights are gathered; their f32 masters lie in shards and are never gathered.
#[test]
fn mixed_precision_gathers_the_narrow_copy() {
    let sets = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"];
    let laid = fsdp(&llama(&sets), "dp=4", Fsdp::default());
    let psi = laid.elements() as usize;
    assert_eq!(laid.memory.peak(Category::Weights), 2 * psi / 4);
    assert_eq!(laid.memory.peak(Category::Optimizer), 12 * psi / 4);
    for buffer in gathered(&laid).keys() {
        let buffer = &laid.script().buffers[buffer.0];
        let BufferKey::Gathered { unit, .. } = buffer.key else { panic!("{:?}", buffer.key) };
        let unit = &laid.plan.units[unit];
        assert_eq!(buffer.bytes, 2 * unit.elements, "{}", unit.name);
    }
    agrees("bf16", &llama(&sets), Some(on("dp=4", [shared(Fsdp::default())])));
}

/// Deferred initialisation: each rank asks for the values of its own shards alone, so no rank ever
/// holds the model.
#[test]
fn no_rank_reads_the_whole_model() {
    let loaded = llama(&[]);
    let models = models(&loaded);
    let total: usize = models.train.elements();
    type Asked = HashMap<ThreadId, Vec<(String, Range<usize>)>>;
    let asked: Mutex<Asked> = Mutex::default();
    let values = initial(loaded.config.run.seed);
    let read = |param: &Param, ranges: &[Range<usize>], dtype: DType| -> Result<Vec<u8>> {
        let entries = ranges.iter().map(|range| (param.name.clone(), range.clone()));
        asked.lock().unwrap().entry(thread::current().id()).or_default().extend(entries);
        values(param, ranges, dtype)
    };
    let parallel = on("dp=4", [shared(Fsdp::default())]);
    let session = Prepared::new(&models, settings(&loaded, Some(parallel))).unwrap();
    drop(session.start(&read).unwrap());
    let asked = asked.into_inner().unwrap();
    assert_eq!(asked.len(), 4, "one thread for each rank");
    let psi = laid(&loaded, Some(on("dp=4", [shared(Fsdp::default())]))).elements() as usize;
    let mut seen: BTreeMap<&str, Vec<bool>> = (models.train.params().iter())
        .map(|p| (p.name.as_str(), vec![false; p.elements()]))
        .collect();
    for ranges in asked.values() {
        let elements: usize = ranges.iter().map(|(_, range)| range.len()).sum();
        assert!(elements <= psi / 4, "{elements} of {total} on one rank");
        for (name, range) in ranges {
            for seen in &mut seen.get_mut(name.as_str()).unwrap()[range.clone()] {
                assert!(!std::mem::replace(seen, true), "{name} is read twice");
            }
        }
    }
    assert!(seen.values().flatten().all(|&seen| seen), "every value is read by one rank");
}

#[test]
fn fsdp_does_what_one_rank_does() {
    let kept = Fsdp { reshard_after_forward: false, ..Fsdp::default() };
    for strategy in [Fsdp::default(), kept] {
        for loaded in [llama(&["train.microbatches=2"]), gpt(&[])] {
            agrees("fsdp", &loaded, Some(on("dp=4", [shared(strategy.clone())])));
        }
    }
}
