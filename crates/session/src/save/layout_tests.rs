//! Random layouts: what they write, and that any other layout can read it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use phalanx_checkpoint::{
    Checkpoint, FULL, FileSink, FileSource, FileWriter, Manifest, PlacedEntry,
};
use phalanx_config::{Config, Sources};
use phalanx_ir::random::Stream;

use super::*;
use crate::network::Network;
use crate::{Lowered, Settings};

/// What each rank of a layout writes.
type Written = Vec<phalanx_checkpoint::Header>;

fn headers(sets: &[String]) -> Written {
    let sources = Sources::default().preset("tiny").set("run.checkpoint_every=1");
    let small =
        "model.layers=4 model.width=32 model.heads=8 model.kv_heads=8 model.ffn=26 model.vocab=61";
    let sources = small.split(' ').fold(sources, |sources, set| sources.set(set));
    let sources = sets.iter().fold(sources, |s, set| s.set(set.as_str()));
    let loaded = Config::load(&sources).unwrap_or_else(|error| panic!("{sets:?}: {error}"));
    let models = Network::new(&loaded).unwrap().models(&loaded.config, false).unwrap();
    let lowered = Lowered::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
    let planner = Planner::new(&lowered).unwrap();
    let header = |rank: usize| {
        let plan = planner.plan(rank).unwrap();
        Saves::new(&planner, rank, plan.state(), plan.scripts()).unwrap().disk.header
    };
    (0..lowered.ranks()).map(header).collect()
}

/// A random layout of up to 32 ranks; `tied` says whether the embedding is the head.
fn layout(of: &mut impl FnMut(&[&'static str]) -> &'static str, tied: &str) -> Vec<String> {
    let (dp, tp, pp) = (of(&["1", "2", "4"]), of(&["1", "2", "4"]), of(&["1", "2", "4"]));
    let cp = of(&["1", "1", "2"]);
    let mut sets = vec![
        format!("parallel.dp={dp}"),
        format!("parallel.tp={tp}"),
        format!("parallel.cp={cp}"),
        format!("parallel.pp={pp}"),
        format!("parallel.zero={}", of(&["0", "1", "2", "3"])),
        format!("model.tied={tied}"),
        "train.microbatches=4".to_owned(),
    ];
    match of(&["line", "shape"]) {
        "shape" if tp == "4" => {
            sets.push(format!("parallel.tp_kind={}", of(&["2d", "gspmd"])));
        }
        "shape" if tp == "2" => {
            let kind = of(&["2.5d", "3d"]);
            let depth = if kind == "3d" { 1 } else { 2 };
            sets[1] = "parallel.tp=8".to_owned();
            sets.push(format!("parallel.tp_kind={kind}"));
            sets.push(format!("parallel.tp_depth={depth}"));
            sets.push("train.batch_size=64".to_owned());
        }
        _ if tp != "1" => sets.push(format!("parallel.sp={}", of(&["true", "false"]))),
        _ => {}
    }
    if pp != "1" {
        let schedule = of(&["1f1b", "gpipe", "zb-h1", "interleaved", "chimera"]);
        let schedule = if pp == "4" && schedule == "interleaved" { "1f1b" } else { schedule };
        sets.push(format!("parallel.schedule={schedule}"));
    }
    if of(&["f32", "bf16"]) == "bf16" {
        sets.push("precision.weights=bf16".to_owned());
        sets.push("precision.compute=bf16".to_owned());
    }
    sets
}

/// A file in memory.
#[derive(Clone, Debug, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl FileSink for Memory {
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let (mut held, at) = (self.0.lock().unwrap(), at as usize);
        let end = held.len().max(at + bytes.len());
        held.resize(end, 0);
        held[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        Ok(())
    }
}

impl FileSource for Memory {
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        let held = self.0.lock().unwrap();
        let found = held.get(at as usize..at as usize + out.len());
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// The value of an element, which no other has.
fn value(param: &str, kind: &str, element: usize) -> f32 {
    let name =
        param.bytes().chain(kind.bytes()).fold(7_u32, |n, b| n.wrapping_mul(31) ^ u32::from(b));
    f32::from_bits(
        (name.wrapping_add(element as u32).wrapping_mul(2_654_435_761) >> 2) | 0x2000_0000,
    )
}

/// The checkpoint of a layout, in memory.
fn checkpoint(written: &Written) -> Checkpoint {
    let (mut files, mut sources) = (Vec::new(), Vec::<Box<dyn FileSource>>::new());
    for (rank, header) in written.iter().enumerate() {
        let memory = Memory::default();
        let name = format!("rank-{rank:04}.safetensors");
        let encoded = header.encode();
        memory.write_all_at(&vec![0; encoded.len() + header.data], 0).unwrap();
        let sink = Box::new(memory.clone());
        let writer = FileWriter::over(Path::new("memory"), &name, header, &encoded, sink).unwrap();
        let mut data = vec![0; header.data];
        for PlacedEntry { entry, at, .. } in &header.placed {
            for run in entry.block.runs(&entry.elements) {
                for element in 0..run.len {
                    let bytes =
                        value(&entry.param, &entry.kind, run.global + element).to_ne_bytes();
                    let at = at + 4 * (run.at + element);
                    data[at..at + 4].copy_from_slice(&bytes);
                }
            }
        }
        writer.write(0, &data).unwrap();
        files.push(writer.finish().unwrap());
        sources.push(Box::new(memory));
    }
    let manifest = Manifest { files, ..manifest() };
    Checkpoint::over(Path::new("memory"), manifest, sources).unwrap()
}

fn manifest() -> Manifest {
    Manifest {
        format: phalanx_checkpoint::FORMAT,
        step: 1,
        samples: 0,
        seed: 0,
        corpus: String::new(),
        model: None,
        layout: String::new(),
        products: String::new(),
        scalars: BTreeMap::new(),
        records: Vec::new(),
        experts: None,
        kinds: BTreeMap::new(),
        files: Vec::new(),
    }
}

/// Each layout writes every element once, and the ranks of any other layout together read every element
/// once, with its value: 450 random pairs.
#[test]
fn every_layout_reads_what_any_other_has_written() {
    let random = Stream::named(12, "layouts");
    let mut draws = 0;
    let mut draw = |end: usize| {
        draws += 1;
        random.below(draws, end as u64) as usize
    };
    for (tied, optimizer) in [("true", "adamw"), ("false", "adamw"), ("true", "adafactor")] {
        let mut layouts = Vec::new();
        for _ in 0..15 {
            let mut sets = layout(&mut |values| values[draw(values.len())], tied);
            sets.push(format!("optim.kind={optimizer}"));
            let written = headers(&sets);
            let saved = checkpoint(&written);
            let checked = saved.check(|_| {}).unwrap_or_else(|error| panic!("{sets:?}: {error}"));
            assert!(checked.elements > 10_000, "{sets:?}");
            let entries = written.iter().flat_map(|header| &header.placed);
            let kinds: BTreeSet<&str> = entries.map(|own| own.entry.kind.as_str()).collect();
            let kept = match optimizer {
                "adamw" => ["exp_avg", "exp_avg_sq"],
                _ => ["row_var", "col_var"],
            };
            assert_eq!(kinds, BTreeSet::from([kept[0], kept[1], FULL]), "{sets:?}");
            layouts.push((sets, written, saved, checked.elements));
        }
        for _ in 0..150 {
            let (from, into) = (draw(layouts.len()), draw(layouts.len()));
            let ((from, _, saved, elements), (into, reads, ..)) = (&layouts[from], &layouts[into]);
            let mut seen = BTreeMap::<(&str, &str), Vec<bool>>::new();
            for PlacedEntry { entry, .. } in reads.iter().flat_map(|header| &header.placed) {
                let runs = entry.block.runs(&entry.elements);
                let ranges: Vec<_> =
                    runs.iter().map(|run| run.global..run.global + run.len).collect();
                let (dtype, bytes) = saved.read(&entry.param, &entry.kind, &ranges).unwrap();
                assert_eq!(dtype.size(), 4);
                let seen = seen.entry((&entry.param, &entry.kind)).or_default();
                seen.resize(entry.block.shape.iter().product(), false);
                for (element, found) in ranges.into_iter().flatten().zip(bytes.chunks_exact(4)) {
                    let expected = value(&entry.param, &entry.kind, element).to_ne_bytes();
                    assert_eq!(
                        found, expected,
                        "{from:?} to {into:?}: {}/{}",
                        entry.param, entry.kind
                    );
                    assert!(!std::mem::replace(&mut seen[element], true), "{into:?}: read twice");
                }
            }
            let all: usize =
                seen.values().map(|seen| seen.iter().filter(|seen| **seen).count()).sum();
            assert_eq!(all as u64, *elements, "{from:?} to {into:?}");
        }
    }
}
