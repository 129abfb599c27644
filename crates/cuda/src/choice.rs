//! Which of a library's proposals is taken: the fastest on this kind of GPU, measured once and kept on disk.
//!
//! The first proposal is mostly as good as any, and what a short measurement finds is lost in the step, where the GPU
//! runs at its limit of power. So all proposals run in turns on a GPU that is kept busy, and the first one stays
//! unless another is clearly faster.
//!
//! Ranks must compute the same bits, so there is one choice for all ranks of a host: the first that needs it measures,
//! and the others wait. Ranks on several hosts, which have no cache in common, take the first proposals.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use phalanx_ir::random::philox;

use crate::cache::Cache;
use crate::device::{DeviceMemory, Stream};
use crate::error::CudaError;

/// A proposal, as the library knows it again.
pub(crate) type Proposal = [u64; 8];

/// Rounds in which every proposal runs in its turn, and how long it runs each time.
const ROUNDS: usize = 5;
const TURN: Duration = Duration::from_millis(8);

/// What the first proposal has to be beaten by: its time is at least so much longer.
const CLEARLY: f64 = 1.04;

/// The choices that this process has made or found.
static CHOSEN: Mutex<Option<HashMap<String, Proposal>>> = Mutex::new(None);

/// The best of some proposals, as it is measured now or was by an earlier run. `measure` has the number of the
/// fastest; none if the GPU has no room to measure.
pub(crate) fn chosen(
    key: String,
    proposals: &[Proposal],
    measure: impl FnOnce() -> Result<Option<usize>, CudaError>,
) -> Result<Proposal, CudaError> {
    // Others wait: what runs beside a measurement would change it, and they may need the same choice.
    let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = chosen.get_or_insert_default();
    if let Some(known) = chosen.get(&key) {
        return Ok(*known);
    }
    let proposal = kept_or_measured(&Cache::here(), &key, proposals, measure)?;
    chosen.insert(key, proposal);
    Ok(proposal)
}

/// The number of the fastest of so many proposals, which `issue` issues once on this stream.
pub(crate) fn fastest(
    stream: &Stream,
    proposals: usize,
    mut issue: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<usize, CudaError> {
    let mut run = |proposal: usize, times: usize| -> Result<Duration, CudaError> {
        let begin = stream.mark()?;
        for _ in 0..times {
            issue(proposal)?;
        }
        let end = stream.mark()?;
        stream.wait()?;
        end.since(&begin)
    };
    run(0, 1)?;
    let one = run(0, 3)?.as_secs_f64() / 3.0;
    let times = ((TURN.as_secs_f64() / one.max(1e-6)) as usize).clamp(1, 1000);
    run(0, ROUNDS * times)?;
    let mut found = vec![Vec::new(); proposals];
    for _ in 0..ROUNDS {
        for (proposal, found) in found.iter_mut().enumerate() {
            found.push(run(proposal, times)?);
        }
    }
    Ok(best(found))
}

/// Memory to measure with; nothing if the GPU has no room. Its numbers are random: a GPU computes with zeros at
/// less power.
pub(crate) fn random_memory(
    stream: &Stream,
    bytes: usize,
) -> Result<Option<DeviceMemory>, CudaError> {
    let Ok(memory) = DeviceMemory::new(stream.device(), bytes) else { return Ok(None) };
    let block = random_block();
    for done in (0..bytes).step_by(block.len()) {
        let bytes = block.len().min(bytes - done);
        // SAFETY: the memory is new, and the part lies within it.
        unsafe { stream.upload(memory.address() + done as u64, &block[..bytes])? };
    }
    Ok(Some(memory))
}

/// What an earlier run chose, or else what is measured now, by one process of a host at a time; the first
/// proposal where no choice can be kept, because others could not learn of it.
fn kept_or_measured(
    cache: &Cache,
    key: &str,
    proposals: &[Proposal],
    measure: impl FnOnce() -> Result<Option<usize>, CudaError>,
) -> Result<Proposal, CudaError> {
    let kept = || {
        let bytes = cache.find(key)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let proposal: Proposal = words.collect::<Vec<_>>().try_into().ok()?;
        proposals.contains(&proposal).then_some(proposal)
    };
    if let Some(proposal) = kept() {
        return Ok(proposal);
    }
    let Some(_held) = cache.lock("products.lock") else { return Ok(proposals[0]) };
    // Another process may have measured while this one waited.
    if let Some(proposal) = kept() {
        return Ok(proposal);
    }
    // Without room to measure the first stays, for those who come later too.
    let best = measure()?.unwrap_or(0);
    cache.keep(key, &proposals[best].map(u64::to_le_bytes).concat());
    Ok(kept().unwrap_or(proposals[0]))
}

/// The proposal with the least median, if it clearly beats the first one.
fn best(mut found: Vec<Vec<Duration>>) -> usize {
    let medians = found.iter_mut().map(|times| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    });
    let medians: Vec<f64> = medians.collect();
    let least = (0..medians.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    least.filter(|&least| medians[0] >= CLEARLY * medians[least]).unwrap_or(0)
}

/// Numbers of both signs and about the same size, in every type of 16 bits.
fn random_block() -> Vec<u8> {
    let numbers = (0..1u32 << 18).flat_map(|i| philox([1, 2], [i, 0, 0, 0]));
    let of = |word: u32| [word & 0x807f | 0x3f00, word >> 16 & 0x807f | 0x3f00];
    numbers.flat_map(of).flat_map(|bits| (bits as u16).to_le_bytes()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn proposals() -> [Proposal; 3] {
        [1, 2, 3].map(|number| [number; 8])
    }

    /// A cache in a folder of its own, and the same one without a file system.
    fn caches() -> (tempfile::TempDir, Cache, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().to_path_buf()));
        (folder, cache, Cache::at(None))
    }

    #[test]
    fn a_choice_is_measured_once_and_then_the_same_for_all() {
        let ([first, _, third], (folder, cache, none)) = (proposals(), caches());
        let choose = |cache: &Cache, measured| {
            kept_or_measured(cache, "key", &proposals(), || Ok(measured)).unwrap()
        };
        assert_eq!(choose(&none, Some(2)), first, "nobody else would learn of it");
        let crowded = |measured| kept_or_measured(&cache, "other", &proposals(), || Ok(measured));
        assert_eq!(crowded(None).unwrap(), first, "no room to measure");
        assert_eq!(crowded(Some(2)).unwrap(), first, "another rank must choose the same");
        assert_eq!(choose(&cache, Some(2)), third);
        assert_eq!(choose(&cache, Some(1)), third, "it was kept");
        // A library that no longer proposes it, and a file that was cut short.
        let shorter = kept_or_measured(&cache, "key", &proposals()[..2], || Ok(Some(0))).unwrap();
        assert_eq!(shorter, first);
        std::fs::write(folder.path().join("key"), [1, 2, 3]).unwrap();
        assert_eq!(choose(&cache, Some(2)), third);
    }

    #[test]
    fn processes_that_choose_at_once_choose_the_same() {
        let (folder, ..) = caches();
        let measured = std::sync::atomic::AtomicUsize::new(0);
        let one = |rank: usize| {
            // A lock of its own, as another process has.
            let cache = Cache::at(Some(folder.path().to_path_buf()));
            let measure = || {
                measured.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
                Ok(Some(rank % 3))
            };
            kept_or_measured(&cache, "key", &proposals(), measure).unwrap()
        };
        let one = &one;
        let chosen: Vec<Proposal> = std::thread::scope(|scope| {
            let ranks = [0, 1, 2, 3].map(|rank| scope.spawn(move || one(rank)));
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(chosen.iter().all(|one| *one == chosen[0]), "{chosen:?}");
        assert_eq!(measured.into_inner(), 1);
    }

    #[test]
    fn another_proposal_must_be_clearly_faster_than_the_first() {
        let of = |micros: [u64; 3]| micros.map(Duration::from_micros).to_vec();
        let first = of([100, 90, 300]);
        assert_eq!(best(vec![first.clone(), of([90, 97, 101])]), 0);
        assert_eq!(best(vec![first.clone(), of([95, 100, 95]), of([90, 94, 98])]), 2);
        assert_eq!(best(vec![first]), 0);
    }

    #[test]
    fn random_numbers_are_numbers() {
        let block = random_block();
        let of = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        let (numbers, rest) = block.as_chunks::<2>();
        assert!(rest.is_empty() && numbers.iter().all(|n| (0.5..1.0).contains(&of(n).abs())));
        let sum: f32 = numbers.iter().map(of).sum();
        assert!(sum.abs() < 1e-2 * numbers.len() as f32, "{sum}");
    }
}
