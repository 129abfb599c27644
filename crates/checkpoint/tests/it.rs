//! Checkpoints as files: what is read back, what is refused, and what a killed run leaves.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

use std::fs;
use std::ops::Range;
use std::path::Path;

use phalanx_checkpoint::{
    Checkpoint, FORMAT, FileWriter, Folder, Header, LATEST, MANIFEST, Manifest, ParamBlock,
    PlacedEntry, SavedEntry, newest,
};
use phalanx_ir::DType;
use phalanx_ir::random::Stream;

/// Random numbers of a test.
struct Draws(Stream, u64);

impl Draws {
    fn new(seed: u64) -> Self {
        Self(Stream::named(seed, "checkpoints"), 0)
    }

    fn below(&mut self, end: usize) -> usize {
        self.1 += 1;
        self.0.below(self.1, end as u64) as usize
    }
}

/// The value of an element.
fn value(param: usize, element: usize) -> f32 {
    (param * 100_000 + element) as f32
}

/// A random division of a parameter: blocks of a padded grid, each cut into shards.
fn divided(draws: &mut Draws, shape: &[usize]) -> Vec<(ParamBlock, Range<usize>)> {
    let parts: Vec<usize> = shape.iter().map(|_| 1 + draws.below(3)).collect();
    let extent: Vec<usize> = shape.iter().zip(&parts).map(|(n, p)| n.div_ceil(*p)).collect();
    let blocks: usize = parts.iter().product();
    let mut all = Vec::new();
    for number in 0..blocks {
        let (mut rest, mut start) = (number, vec![0; shape.len()]);
        for dim in (0..shape.len()).rev() {
            start[dim] = rest % parts[dim] * extent[dim];
            rest /= parts[dim];
        }
        let block = ParamBlock { shape: shape.to_vec(), start, extent: extent.clone(), dealt: 1 };
        let shards = 1 + draws.below(4);
        let size = block.elements().div_ceil(shards);
        for shard in 0..shards {
            let range =
                (shard * size).min(block.elements())..((shard + 1) * size).min(block.elements());
            if !range.is_empty() {
                all.push((block.clone(), range));
            }
        }
    }
    all
}

/// Writes parameters, each divided at random, to some files.
fn write(root: &Path, step: u64, draws: &mut Draws, shapes: &[Vec<usize>]) -> std::path::PathBuf {
    let folder = Folder::new(root, step);
    folder.create().unwrap();
    let files = 1 + draws.below(4);
    let mut pieces: Vec<Vec<(usize, ParamBlock, Range<usize>)>> = vec![Vec::new(); files];
    for (param, shape) in shapes.iter().enumerate() {
        for (block, range) in divided(draws, shape) {
            pieces[draws.below(files)].push((param, block, range));
        }
    }
    let mut summaries = Vec::new();
    for (number, pieces) in pieces.into_iter().enumerate() {
        let (mut at, mut placed, mut contents) = (0, Vec::new(), Vec::new());
        for (param, block, elements) in pieces {
            let mut values = vec![f32::NAN; elements.len()];
            for run in block.runs(&elements) {
                (0..run.len).for_each(|i| values[run.at + i] = value(param, run.global + i));
            }
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            let entry = SavedEntry {
                param: format!("p{param}"),
                kind: "master".to_owned(),
                version: 0,
                replica: 0,
                block,
                elements,
            };
            placed.push(PlacedEntry { entry, dtype: DType::F32, at });
            contents.push((at, bytes.clone()));
            at += bytes.len() + draws.below(3) * 64;
        }
        let header = Header::new(placed, at);
        let name = format!("rank-{number:04}.safetensors");
        let writer = FileWriter::create(&folder.temporary(), &name, &header).unwrap();
        contents.reverse();
        contents.iter().for_each(|(at, bytes)| writer.write(*at as u64, bytes).unwrap());
        summaries.push(writer.finish().unwrap());
    }
    folder.commit(&manifest(step, summaries), "[run]\n", 3).unwrap()
}

fn manifest(step: u64, files: Vec<phalanx_checkpoint::FileSummary>) -> Manifest {
    Manifest {
        format: FORMAT,
        step,
        samples: 10 * step,
        seed: 0,
        corpus: String::new(),
        model: None,
        layout: String::new(),
        products: String::new(),
        scalars: Default::default(),
        records: Vec::new(),
        experts: None,
        kinds: Default::default(),
        files,
    }
}

/// 60 random divisions, each read by the runs of five others.
#[test]
fn any_division_is_read_by_any_other() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..60 {
        let mut draws = Draws::new(seed);
        let mut shape = || (0..1 + draws.below(3)).map(|_| 1 + draws.below(9)).collect();
        let shapes: Vec<Vec<usize>> = (0..3).map(|_| shape()).collect();
        let path = write(dir.path(), seed, &mut draws, &shapes);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let elements: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
        assert_eq!(checkpoint.check(|_| ()).unwrap().elements, elements as u64);
        let all = shapes.iter().enumerate();
        for (param, shape) in all.flat_map(|own| [own; 5]) {
            let mut seen = vec![0; shape.iter().product()];
            for (block, range) in divided(&mut draws, shape) {
                let runs = block.runs(&range);
                let ranges: Vec<_> = runs.iter().map(|r| r.global..r.global + r.len).collect();
                let (dtype, bytes) =
                    checkpoint.read(&format!("p{param}"), "master", &ranges).unwrap();
                assert_eq!(dtype, DType::F32);
                let mut values =
                    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
                for element in ranges.into_iter().flatten() {
                    assert_eq!(values.next(), Some(value(param, element)), "seed {seed}");
                    seen[element] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "seed {seed}");
        }
    }
}

#[test]
fn damage_is_named_and_the_checkpoint_before_it_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let shapes = [vec![40, 30], vec![17]];
    let mut draws = Draws::new(1);
    let first = write(dir.path(), 1, &mut draws, &shapes);
    let second = write(dir.path(), 2, &mut draws, &shapes);
    assert_eq!(newest(dir.path()), Some(second.clone()));
    let file = second.join("rank-0000.safetensors");
    let whole = fs::read(&file).unwrap();
    let refused = |expected: &str| {
        let error = Checkpoint::open(&second).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("take another checkpoint"), "{error}");
        assert_eq!(newest(dir.path()), Some(first.clone()));
    };
    fs::write(&file, &whole[..whole.len() - 5]).unwrap();
    refused("instead of");
    fs::remove_file(&file).unwrap();
    refused("No such file");
    let mut spoilt = whole.clone();
    spoilt[30] ^= 1;
    fs::write(&file, &spoilt).unwrap();
    assert!(
        Checkpoint::open(&second).is_err()
            || Checkpoint::open(&second).unwrap().check(|_| ()).is_err()
    );
    let mut flipped = whole.clone();
    let at = whole.len() - 1;
    flipped[at] ^= 1;
    fs::write(&file, &flipped).unwrap();
    // Sizes and headers are right, so it opens; who reads the damaged bytes is told.
    let checkpoint = Checkpoint::open(&second).unwrap();
    let error = checkpoint.check(|_| ()).unwrap_err().to_string();
    assert!(error.contains("have changed") && error.contains("rank-0000"), "{error}");
    fs::write(&file, &whole).unwrap();
    let text = fs::read_to_string(second.join(MANIFEST)).unwrap();
    for (from, to, expected) in [
        ("\"format\": 1", "\"format\": 9", "has the format 9"),
        ("\"step\"", "\"stop\"", "cannot be parsed"),
        ("rank-0000.safetensors", "../rank.safetensors", "no name of a file"),
    ] {
        fs::write(second.join(MANIFEST), text.replace(from, to)).unwrap();
        let error = Checkpoint::open(&second).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Every state of the folder that a run can be killed in, one after the other.
#[test]
fn a_whole_checkpoint_is_found_whenever_a_run_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, shapes) = (dir.path(), [vec![8, 3]]);
    let mut draws = Draws::new(2);
    assert_eq!(newest(root), None);
    let first = write(root, 100, &mut draws, &shapes);
    let found = |expected: &Path| {
        assert_eq!(newest(root).as_deref(), Some(expected));
        Checkpoint::open(expected).unwrap().check(|_| ()).unwrap();
    };
    // Its folder is made; a file is there in part; a manifest, too.
    let next = Folder::new(root, 200);
    next.create().unwrap();
    found(&first);
    fs::write(next.temporary().join("rank-0000.safetensors"), [1, 2, 3]).unwrap();
    found(&first);
    fs::copy(first.join(MANIFEST), next.temporary().join(MANIFEST)).unwrap();
    found(&first);
    // Renamed, but `latest` still names the one before: the newer one is whole, the older one is
    // a checkpoint as well.
    let second = write(root, 200, &mut draws, &shapes);
    fs::write(root.join(LATEST), "step-00000100\n").unwrap();
    found(&first);
    fs::write(root.join(LATEST), "step-00000200\n").unwrap();
    found(&second);
    // `latest` is lost or damaged.
    for text in ["", "\u{1}", "step-99999999", "../../etc"] {
        fs::write(root.join(LATEST), text).unwrap();
        found(&second);
    }
    fs::remove_file(root.join(LATEST)).unwrap();
    found(&second);
    // The same step is saved again: moved away, and the new one not there yet.
    let replaced = root.join("step-00000200.replaced");
    fs::rename(&second, &replaced).unwrap();
    found(&replaced);
    fs::rename(&replaced, &second).unwrap();
    // Half removed while it is pruned.
    fs::remove_file(first.join(MANIFEST)).unwrap();
    found(&second);
}

#[test]
fn old_checkpoints_and_those_of_an_abandoned_future_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, shapes) = (dir.path(), [vec![4]]);
    let mut draws = Draws::new(3);
    for step in [10, 20, 30, 40, 50] {
        write(root, step, &mut draws, &shapes);
    }
    let names = || {
        let entries =
            fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.filter(|name| name != LATEST).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["step-00000030", "step-00000040", "step-00000050"]);
    // The run went back to step 30 and saves after step 35.
    let path = write(root, 35, &mut draws, &shapes);
    assert_eq!(names(), ["step-00000030", "step-00000035"]);
    assert_eq!(newest(root), Some(path));
    // A step that is saved again replaces its checkpoint.
    write(root, 35, &mut draws, &shapes);
    assert_eq!(names(), ["step-00000030", "step-00000035"]);
}

/// Whichever way bytes take to the disk, the file has them at their places: on a disk, and in memory, where
/// nothing can go past the cache.
#[test]
fn a_file_has_the_bytes_that_were_written_wherever_they_begin_and_end() {
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for folder in [disk, Path::new("/dev/shm")].into_iter().filter(|folder| folder.is_dir()) {
        let dir = tempfile::tempdir_in(folder).unwrap();
        let mut draws = Draws::new(5);
        for file in 0..4 {
            let bytes: Vec<u8> = (0..(5 << 20) + 77 * file).map(|n| ((n * 7) >> 3) as u8).collect();
            let mut cuts: Vec<usize> = (0..12).map(|_| draws.below(bytes.len())).collect();
            // Also at blocks, and around them.
            cuts.extend([0, 1 << 16, (1 << 20) - 1, 1 << 20, (2 << 20) + 1, bytes.len()]);
            cuts.sort_unstable();
            let mut parts: Vec<Range<usize>> = cuts
                .windows(2)
                .map(|ends| ends[0]..ends[1])
                .filter(|part| !part.is_empty())
                .collect();
            for at in (1..parts.len()).rev() {
                parts.swap(at, draws.below(at + 1));
            }
            let header = Header { placed: Vec::new(), data: bytes.len() };
            let name = format!("{file}");
            let writer = FileWriter::create(dir.path(), &name, &header).unwrap();
            for part in parts {
                writer.write(part.start as u64, &bytes[part]).unwrap();
            }
            writer.finish().unwrap();
            let found = fs::read(dir.path().join(name)).unwrap();
            assert!(found[found.len() - bytes.len()..] == bytes, "{}", folder.display());
        }
    }
}
