//! ZeRO and weight-update sharding: bytes per rank and bytes sent, against the closed forms.

use phalanx_script::Category;
use phalanx_session::SharedStrategy;
use phalanx_spmd::strategies::{WeightUpdateSharding, Zero};

use crate::support::{agrees, gpt, is_gather, is_reduce, laid, llama, on, shared};

const RANKS: usize = 4;
const MESH: &str = "dp=4";

/// Precisions as (w, g, k), bytes per parameter of weights, gradients and optimizer state.
const PRECISIONS: [(usize, usize, usize, [&str; 3]); 3] = [
    (2, 2, 12, ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"]),
    (2, 4, 12, ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"]),
    (4, 4, 8, ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"]),
];

fn stage(stage: u8) -> SharedStrategy {
    match stage {
        0 => shared(WeightUpdateSharding::default()),
        _ => shared(Zero::stage(stage)),
    }
}

/// Weights, gradients and state per rank are (w+g)Ψ + kΨ/N, wΨ + (g+k)Ψ/N and (w+g+k)Ψ/N, where Ψ
/// counts the padding of units; what is formed and gathered of units on top is stated.
#[test]
fn memory_is_that_of_the_closed_forms() {
    for (w, g, k, sets) in PRECISIONS {
        for number in 0..=3 {
            let laid = laid(&llama(&sets), Some(on(MESH, [stage(number)])));
            let units = laid.padded(RANKS);
            let own: Vec<usize> = laid.plan.units.iter().map(|u| u.elements).collect();
            assert_eq!(own, units, "units are padded as the test pads them");
            let psi: usize = units.iter().sum();
            let part = |from: u8| if number.max(1) >= from { psi / RANKS } else { psi };
            let what = format!("stage {number} with {sets:?}");
            let peak = |category| laid.memory.peak(category);
            assert_eq!(peak(Category::Weights), w * part(3), "{what}");
            assert_eq!(peak(Category::Gradients), g * part(2), "{what}");
            assert_eq!(peak(Category::Optimizer), k * part(1), "{what}");
            // Units in flight: gradients of what a run forms and of what is still being summed,
            // weights of two runs.
            let largest = *units.iter().max().unwrap();
            let buffers = match number {
                0 | 1 => 0,
                2 => 2 * g * largest,
                _ => 2 * (w + g) * largest,
            };
            let communication = peak(Category::Communication);
            assert!(communication <= buffers, "{what}: {communication} of {buffers}");
            assert_eq!(communication == 0, number < 2, "{what}");
        }
    }
}

/// What a rank sends in a step with m micro-batches: stage 1 scatters and gathers once, stage 2
/// scatters in each micro-batch, stage 3 also gathers every unit twice in each.
#[test]
fn volumes_are_those_of_the_sheet() {
    for (w, g, _, sets) in PRECISIONS {
        for parts in [1, 2] {
            let sets: Vec<String> = (sets.iter().map(|s| (*s).to_owned()))
                .chain([format!("train.microbatches={parts}")])
                .collect();
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            for number in 0..=3 {
                let laid = laid(&llama(&sets), Some(on(MESH, [stage(number)])));
                let psi = laid.elements() as usize;
                let once = |bytes: usize| (psi * bytes / RANKS * (RANKS - 1)) as u64;
                let (scatters, gathers) = match number {
                    0 | 1 => (1, 1),
                    2 => (parts, 1),
                    _ => (parts, 2 * parts),
                };
                let what = format!("stage {number} with {sets:?}");
                let reduced = laid.moved("reduce_scatter", is_reduce);
                let gathered = laid.moved("all_gather", is_gather);
                assert_eq!(reduced.bytes, scatters * once(g), "{what}");
                assert_eq!(gathered.bytes, gathers * once(w), "{what}");
                let units = laid.plan.units.len() as u64;
                assert_eq!((reduced.calls, gathered.calls), (scatters * units, gathers * units));
                assert_eq!(laid.moved("all_reduce", is_reduce).calls, 0, "{what}");
            }
        }
    }
}

/// A unit is reduced in ⌈Ψ/size⌉ calls and gathered in ⌈Ψ/size⌉, whatever the stage; the numbers
/// do not change, and the transport counts as many calls as were predicted.
#[test]
fn bucket_sizes_set_the_number_of_collectives() {
    let (reduce, gather) = (1000, 300);
    let buckets = |number| Zero {
        reduce_bucket_size: reduce,
        allgather_bucket_size: gather,
        ..Zero::stage(number)
    };
    for number in 1..=3 {
        let parallel = || Some(on("dp=2", [shared(buckets(number))]));
        let laid = laid(&llama(&[]), parallel());
        let calls = |size: usize| -> u64 {
            laid.plan.units.iter().map(|u| u.elements.div_ceil(size) as u64).sum()
        };
        let (reduced, gathered) =
            (laid.moved("reduce_scatter", is_reduce), laid.moved("all_gather", is_gather));
        assert_eq!(reduced.calls, calls(reduce), "stage {number}");
        assert_eq!(gathered.calls, calls(gather) * if number == 3 { 2 } else { 1 });
        assert_eq!(reduced.bytes, laid.elements() * 8 / 2);
        let found = agrees("in pieces", &llama(&[]), parallel());
        // Two ranks and two steps.
        let rows = |op| found.comm.iter().filter(move |row| row.op == op);
        let counted: u64 = rows("reduce_scatter").map(|row| row.count).sum();
        assert_eq!(counted, 4 * reduced.calls, "{found:#?}");
    }
}

/// The configuration's bucket sizes are those of the strategy.
#[test]
fn bucket_sizes_come_from_the_configuration() {
    let sets = ["parallel.dp=2", "parallel.zero=2", "parallel.reduce_bucket_size=1000"];
    let own = laid(&llama(&sets), None);
    let zero = Zero { reduce_bucket_size: 1000, ..Zero::stage(2) };
    let same = laid(&llama(&[]), Some(on("dp=2", [shared(zero)])));
    assert_eq!(own.moved("reduce_scatter", is_reduce), same.moved("reduce_scatter", is_reduce));
    assert!(own.moved("reduce_scatter", is_reduce).calls > own.plan.units.len() as u64);
}

/// Gradients in pieces have the same bits as gradients in one.
#[test]
fn pieces_change_no_bits() {
    let run = |size: usize| {
        let zero = Zero { reduce_bucket_size: size, allgather_bucket_size: size, ..Zero::stage(2) };
        crate::bits::params(&llama(&[]), Some(on("dp=4", [shared(zero)])), 2)
    };
    assert_eq!(run(usize::MAX), run(77));
}

#[test]
fn every_stage_does_what_one_rank_does() {
    for number in 0..=3 {
        for loaded in [llama(&["train.microbatches=2"]), gpt(&[])] {
            agrees(&format!("stage {number}"), &loaded, Some(on(MESH, [stage(number)])));
        }
    }
    // Shards over data and context parallelism together: N = dp · cp.
    let loaded = llama(&["parallel.dp=2", "parallel.cp=2", "parallel.zero=3"]);
    let laid = laid(&loaded, None);
    let psi: usize = laid.padded(4).iter().sum();
    assert_eq!(laid.memory.peak(Category::Weights), psi * 8 / 4);
    agrees("dp and cp", &loaded, None);
}
