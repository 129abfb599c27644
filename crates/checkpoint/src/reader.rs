//! Reading a checkpoint: global ranges of a parameter's state, from whatever files they lie in.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_error::{Error, Problem, Result, bytes};
use phalanx_ir::DType;

use crate::folder::MANIFEST;
use crate::header::{Header, PlacedEntry};
use crate::manifest::{FORMAT, FileSummary, Manifest, Piece};

/// A whole checkpoint: its manifest, and the headers of its files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<OpenFile>,
    /// By parameter and kind: the entries, as file and place.
    index: BTreeMap<String, BTreeMap<String, Vec<(usize, PlacedEntry)>>>,
    /// Where the elements of parameters lie, as far as they were asked for.
    known: Mutex<HashMap<(String, String), Runs>>,
    /// The pieces whose hashes were compared.
    verified: Mutex<HashSet<(usize, u64)>>,
}

#[derive(Debug)]
struct OpenFile {
    summary: FileSummary,
    file: File,
    /// Where its data begin.
    data: u64,
}

/// Where the elements of one kind of a parameter lie, in their order.
type Runs = Arc<Vec<Stored>>;

/// Consecutive elements, and where they lie.
#[derive(Clone, Copy, Debug)]
struct Stored {
    global: usize,
    len: usize,
    file: usize,
    /// The first byte in the file.
    at: u64,
    dtype: DType,
}

/// What a complete check has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checked {
    /// Files.
    pub files: usize,
    /// Bytes, all of which have the hashes that were recorded.
    pub bytes: u64,
    /// Elements, each of which is there exactly once.
    pub elements: u64,
}

impl Checkpoint {
    /// Opens a checkpoint: reads its manifest and the headers of its files, and makes sure that all
    /// files are there and have their sizes.
    pub fn open(path: &Path) -> Result<Self> {
        let manifest = read_manifest(path)?;
        let mut files = Vec::new();
        let mut index: BTreeMap<String, BTreeMap<String, Vec<(usize, PlacedEntry)>>> =
            BTreeMap::new();
        for summary in &manifest.files {
            let (file, header, data) = open_file(path, summary)?;
            for placed in header.placed {
                let kinds = index.entry(placed.entry.param.clone()).or_default();
                kinds.entry(placed.entry.kind.clone()).or_default().push((files.len(), placed));
            }
            files.push(OpenFile { summary: summary.clone(), file, data });
        }
        let (known, verified) = (Mutex::default(), Mutex::default());
        Ok(Self { path: path.to_path_buf(), manifest, files, index, known, verified })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of the run.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The parameters by name, with their shapes.
    pub fn params(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.index.iter().filter_map(|(name, kinds)| {
            let (_, placed) = kinds.values().next()?.first()?;
            Some((name.as_str(), &placed.entry.block.shape[..]))
        })
    }

    /// The kinds that are stored of a parameter, with their element types.
    pub fn kinds(&self, param: &str) -> impl Iterator<Item = (&str, DType)> {
        let kinds = self.index.get(param).into_iter().flatten();
        kinds.filter_map(|(kind, entries)| Some((kind.as_str(), entries.first()?.1.dtype)))
    }

    /// Elements of one kind of a parameter's state, in ranges of row-major indices, one range after
    /// the other: their element type and their bytes. What is read has the hashes that were
    /// recorded.
    pub fn read(
        &self,
        param: &str,
        kind: &str,
        ranges: &[Range<usize>],
    ) -> Result<(DType, Vec<u8>)> {
        let stored = self.stored(param, kind)?;
        let dtype = stored.first().map_or(DType::F32, |run| run.dtype);
        let size = dtype.size();
        let mut out = vec![0; ranges.iter().map(Range::len).sum::<usize>() * size];
        let mut rest = &mut out[..];
        for range in ranges {
            let mut at = range.start;
            let mut next = stored.partition_point(|run| run.global + run.len <= at);
            while at < range.end {
                let run = stored.get(next).filter(|run| run.global <= at);
                let run = run.ok_or_else(|| self.missing(param, kind, at))?;
                let skip = at - run.global;
                let count = (run.len - skip).min(range.end - at);
                let (own, others) = rest.split_at_mut(count * size);
                self.read_bytes(run.file, run.at + (skip * size) as u64, own)?;
                rest = others;
                at += count;
                next += 1;
            }
        }
        Ok((dtype, out))
    }

    /// Reads everything: all hashes hold, and each element of each kind is there exactly once.
    /// `look` is told the bytes read so far.
    pub fn check(&self, mut look: impl FnMut(u64)) -> Result<Checked> {
        let mut checked = Checked { files: self.files.len(), bytes: 0, elements: 0 };
        for (number, OpenFile { summary, .. }) in self.files.iter().enumerate() {
            if let Some(at) = summary.gap() {
                let what = format!("its manifest has no hash of byte {at} of {}", summary.name);
                return Err(self.damaged(&what));
            }
            for piece in &summary.pieces {
                self.verify(number, piece)?;
                checked.bytes += piece.bytes;
                look(checked.bytes);
            }
        }
        for (param, kinds) in &self.index {
            for (kind, entries) in kinds {
                let elements: usize = entries[0].1.entry.block.shape.iter().product();
                let mut at = 0;
                for run in self.stored(param, kind)?.iter() {
                    if run.global > at {
                        return Err(self.missing(param, kind, at));
                    }
                    if run.global < at {
                        let twice = format!("element {} of {param}/{kind} twice", run.global);
                        return Err(self.damaged(&format!("it has {twice}")));
                    }
                    at += run.len;
                }
                if at != elements {
                    return Err(self.missing(param, kind, at));
                }
                checked.elements += elements as u64;
            }
        }
        Ok(checked)
    }

    /// Where the elements of one kind of a parameter lie, in their order.
    fn stored(&self, param: &str, kind: &str) -> Result<Runs> {
        let key = (param.to_owned(), kind.to_owned());
        if let Some(known) = lock(&self.known).get(&key) {
            return Ok(known.clone());
        }
        let entries = self.index.get(param).and_then(|kinds| kinds.get(kind));
        let entries = entries.ok_or_else(|| self.unknown(param, kind))?;
        let (dtype, shape) = (entries[0].1.dtype, &entries[0].1.entry.block.shape);
        let mut runs = Vec::new();
        for (file, placed) in entries {
            let PlacedEntry { entry, at, .. } = placed;
            if placed.dtype != dtype || entry.block.shape != *shape {
                let what = format!("its files disagree on the shape or type of {param}/{kind}");
                return Err(self.damaged(&what));
            }
            let first = self.files[*file].data + *at as u64;
            runs.extend(entry.block.runs(&entry.elements).into_iter().map(|run| Stored {
                global: run.global,
                len: run.len,
                file: *file,
                at: first + (run.at * dtype.size()) as u64,
                dtype,
            }));
        }
        runs.sort_by_key(|run| run.global);
        let runs = Arc::new(runs);
        lock(&self.known).insert(key, runs.clone());
        Ok(runs)
    }

    /// Reads bytes of a file whose pieces have their hashes.
    fn read_bytes(&self, file: usize, at: u64, out: &mut [u8]) -> Result<()> {
        let end = at + out.len() as u64;
        let pieces = &self.files[file].summary.pieces;
        let from = pieces.partition_point(|piece| piece.at + piece.bytes <= at);
        for piece in pieces[from..].iter().take_while(|piece| piece.at < end) {
            if !lock(&self.verified).contains(&(file, piece.at)) {
                self.verify(file, piece)?;
            }
        }
        let OpenFile { file, summary, .. } = &self.files[file];
        file.read_exact_at(out, at).map_err(|error| self.unreadable(&summary.name, &error))
    }

    fn verify(&self, number: usize, piece: &Piece) -> Result<()> {
        let OpenFile { file, summary, .. } = &self.files[number];
        let mut contents = vec![0; piece.bytes as usize];
        let read = file.read_exact_at(&mut contents, piece.at);
        read.map_err(|error| self.unreadable(&summary.name, &error))?;
        if Piece::of(piece.at, &contents) != *piece {
            let end = piece.at + piece.bytes;
            let what = format!("bytes {}..{end} of {} have changed", piece.at, summary.name);
            return Err(self.damaged(&what));
        }
        lock(&self.verified).insert((number, piece.at));
        Ok(())
    }

    fn unreadable(&self, name: &str, error: &io::Error) -> Error {
        Error::refused(with_remedy(Problem::io("cannot read", &self.path.join(name), error)))
    }

    fn missing(&self, param: &str, kind: &str, at: usize) -> Error {
        self.damaged(&format!("it has no element {at} of {param}/{kind}"))
    }

    fn unknown(&self, param: &str, kind: &str) -> Error {
        let kinds: Vec<&str> = self.kinds(param).map(|(kind, _)| kind).collect();
        let there = match kinds.is_empty() {
            true => format!("it knows no parameter `{param}`"),
            false => format!("of `{param}` it has {}", kinds.join(", ")),
        };
        let what = format!("{} has no `{kind}` of `{param}`", self.path.display());
        Error::refused(Problem::new(what).because(there))
    }

    fn damaged(&self, what: &str) -> Error {
        damaged(&self.path, what)
    }
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let text = std::fs::read_to_string(&file)
        .map_err(|error| Error::refused(with_remedy(Problem::io("cannot read", &file, &error))))?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|error| damaged(path, &format!("its {MANIFEST} cannot be parsed: {error}")))?;
    if manifest.format != FORMAT {
        let what = format!("{} has the format {}", path.display(), manifest.format);
        let problem = Problem::new(what).because(format!("this program reads format {FORMAT}"));
        return Err(Error::refused(problem.fix("use the version of phalanx that wrote it")));
    }
    Ok(manifest)
}

fn open_file(path: &Path, summary: &FileSummary) -> Result<(File, Header, u64)> {
    let place = path.join(&summary.name);
    let told =
        |error: io::Error| Error::refused(with_remedy(Problem::io("cannot read", &place, &error)));
    let plain =
        Path::new(&summary.name).components().count() == 1 && !summary.name.starts_with('.');
    if !plain {
        return Err(damaged(path, &format!("`{}` is no name of a file in it", summary.name)));
    }
    let mut file = File::open(&place).map_err(told)?;
    let found = file.metadata().map_err(told)?.len();
    if found != summary.bytes {
        let (found, wanted) = (bytes(found), bytes(summary.bytes));
        return Err(damaged(path, &format!("{} has {found} instead of {wanted}", summary.name)));
    }
    let (header, data) = Header::read(&mut file).map_err(told)?;
    if data + header.data as u64 != summary.bytes {
        return Err(damaged(path, &format!("the header of {} does not fit it", summary.name)));
    }
    Ok((file, header, data))
}

fn damaged(path: &Path, what: &str) -> Error {
    let problem = Problem::new(format!("the checkpoint {} is damaged", path.display()));
    Error::refused(with_remedy(problem.because(what)))
}

fn with_remedy(problem: Problem) -> Problem {
    problem.fix("take another checkpoint of the run, such as the one before it")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
