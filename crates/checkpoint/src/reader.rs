//! Reading a checkpoint: global ranges of a parameter's state, from whatever files they lie in.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_error::{Error, Problem, Result, bytes};
use phalanx_ir::{DType, halves};

use crate::entry::{FULL, LOWER, UPPER};

use crate::folder::{MANIFEST, before};
use crate::header::{Header, PlacedEntry};
use crate::manifest::{FORMAT, FileSummary, Manifest, Piece};
use crate::storage::{FileSource, FromStart};

/// A whole checkpoint: its manifest, and the headers of its files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<OpenFile>,
    /// By parameter, kind and version: the entries, as file and place.
    index: BTreeMap<String, KindEntries>,
    /// Where the elements of parameters lie, as far as they were asked for.
    known: Mutex<HashMap<KnownKey, Runs>>,
    /// The pieces whose hashes were compared.
    verified: Mutex<HashSet<(usize, u64)>>,
    /// Whether several files may hold the same elements.
    repeats: bool,
}

#[derive(Debug)]
struct OpenFile {
    summary: FileSummary,
    source: Box<dyn FileSource>,
    /// Where its data begin.
    data: u64,
}

/// A parameter, a kind with its version, and a replica.
type KnownKey = (String, (String, usize), usize);

/// By kind and version: entries, as file and place.
type KindEntries = BTreeMap<(String, usize), Vec<(usize, PlacedEntry)>>;

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
        let files = manifest.files.iter().map(|summary| open_file(path, summary));
        let files = files.collect::<Result<Vec<_>>>()?;
        Self::of(path, manifest, files)
    }

    /// A checkpoint whose files lie elsewhere, each behind a source; `path` says where, for people. What
    /// several files hold is read from the first of them.
    pub fn over(
        path: &Path,
        manifest: Manifest,
        sources: Vec<Box<dyn FileSource>>,
    ) -> Result<Self> {
        let mut checkpoint = Self::of(path, manifest, sources)?;
        checkpoint.repeats = true;
        Ok(checkpoint)
    }

    fn of(path: &Path, manifest: Manifest, sources: Vec<Box<dyn FileSource>>) -> Result<Self> {
        let mut files = Vec::new();
        let mut index: BTreeMap<String, KindEntries> = BTreeMap::new();
        for (summary, source) in manifest.files.iter().zip(sources) {
            let (header, data) = read_header(path, summary, &*source)?;
            for placed in header.placed {
                let kinds = index.entry(placed.entry.param.clone()).or_default();
                let kind = (placed.entry.kind.clone(), placed.entry.version);
                kinds.entry(kind).or_default().push((files.len(), placed));
            }
            files.push(OpenFile { summary: summary.clone(), source, data });
        }
        let (known, verified, repeats) = (Mutex::default(), Mutex::default(), false);
        Ok(Self { path: path.to_path_buf(), manifest, files, index, known, verified, repeats })
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
            // Other kinds may have shapes of their own.
            let entries = [FULL, UPPER].iter().find_map(|kind| kinds.get(&((*kind).to_owned(), 0)));
            let (_, placed) = entries?.first()?;
            Some((name.as_str(), &placed.entry.block.shape[..]))
        })
    }

    /// The kinds that can be read of a parameter, with their element types in the newest version. Two halves
    /// are one kind.
    pub fn kinds(&self, param: &str) -> impl Iterator<Item = (&str, DType)> {
        let kinds = self.index.get(param).into_iter().flatten();
        let newest = kinds.filter(|((kind, version), _)| *version == 0 && kind != LOWER);
        newest.filter_map(|((kind, _), entries)| match kind.as_str() {
            UPPER => Some((FULL, DType::F32)),
            kind => Some((kind, entries.first()?.1.dtype)),
        })
    }

    /// The age of the oldest version of a kind that is stored of a parameter; 0 if there is only the newest.
    pub fn oldest(&self, param: &str, kind: &str) -> usize {
        let kinds = self.index.get(param).into_iter().flatten();
        let ages = kinds.filter(|((own, _), _)| own == kind).map(|((_, version), _)| *version);
        ages.max().unwrap_or(0)
    }

    /// How many replicas it holds, which differ; one if there is nothing to differ.
    pub fn replicas(&self) -> usize {
        let entries = self.index.values().flat_map(BTreeMap::values).flatten();
        entries.map(|(_, placed)| placed.entry.replica).max().map_or(1, |last| last + 1)
    }

    /// Elements of one kind of a parameter's state in the first replica; see [`Checkpoint::read_of`].
    pub fn read(
        &self,
        param: &str,
        kind: &str,
        ranges: &[Range<usize>],
    ) -> Result<(DType, Vec<u8>)> {
        self.read_of(param, (kind, 0), 0, ranges)
    }

    /// Elements of one kind and version of a parameter's state in a replica, in ranges of row-major indices, one
    /// range after the other: their element type and their bytes. What is read has the hashes that
    /// were recorded. Values of which both halves are stored are read as they were before they were split.
    pub fn read_of(
        &self,
        param: &str,
        (kind, version): (&str, usize),
        replica: usize,
        ranges: &[Range<usize>],
    ) -> Result<(DType, Vec<u8>)> {
        let stored = |kind: &str| {
            let kinds = self.index.get(param);
            kinds.is_some_and(|kinds| kinds.contains_key(&(kind.to_owned(), version)))
        };
        if kind != FULL || stored(FULL) || !stored(UPPER) {
            return self.read_stored(param, (kind, version), replica, ranges);
        }
        let half = |kind| self.read_stored(param, (kind, version), replica, ranges);
        let (upper, lower) = (half(UPPER)?, half(LOWER)?);
        if (upper.0, lower.0) != (DType::Bf16, DType::U16) {
            let what = format!("the halves of {param}/{FULL} are {} and {}", upper.0, lower.0);
            return Err(self.damaged(&what));
        }
        Ok((DType::F32, halves::join_bytes(&upper.1, &lower.1)))
    }

    /// Elements of a kind as it is stored.
    fn read_stored(
        &self,
        param: &str,
        (kind, version): (&str, usize),
        replica: usize,
        ranges: &[Range<usize>],
    ) -> Result<(DType, Vec<u8>)> {
        let stored = self.stored(param, (kind, version), replica)?;
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
    /// `look` gets the number of bytes read so far.
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
        let all = self.index.iter().flat_map(|(param, kinds)| {
            let replicas =
                (0..self.replicas()).flat_map(move |r| kinds.iter().map(move |k| (r, k)));
            replicas.map(move |(replica, kind)| (param, replica, kind))
        });
        for (param, replica, ((kind, version), entries)) in all {
            let elements: usize = entries[0].1.entry.block.shape.iter().product();
            let mut at = 0;
            for run in self.stored(param, (kind, *version), replica)?.iter() {
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
        Ok(checked)
    }

    /// Where the elements of one kind of a parameter lie, in their order.
    fn stored(&self, param: &str, (kind, version): (&str, usize), replica: usize) -> Result<Runs> {
        let own = (kind.to_owned(), version);
        let key = (param.to_owned(), own.clone(), replica);
        if let Some(known) = lock(&self.known).get(&key) {
            return Ok(known.clone());
        }
        let entries = self.index.get(param).and_then(|kinds| kinds.get(&own));
        let entries = entries.ok_or_else(|| self.unknown(param, kind))?;
        let (dtype, shape) = (entries[0].1.dtype, &entries[0].1.entry.block.shape);
        let mut runs = Vec::new();
        for (file, placed) in entries.iter().filter(|(_, own)| own.entry.replica == replica) {
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
        if self.repeats {
            runs.dedup_by_key(|run| (run.global, run.len));
        }
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
        let OpenFile { source, summary, .. } = &self.files[file];
        source.read_exact_at(out, at).map_err(|error| self.unreadable(&summary.name, &error))
    }

    fn verify(&self, number: usize, piece: &Piece) -> Result<()> {
        let OpenFile { source, summary, .. } = &self.files[number];
        let mut contents = vec![0; piece.bytes as usize];
        let read = source.read_exact_at(&mut contents, piece.at);
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
        let problem = Problem::io("cannot read", &self.path.join(name), error);
        Error::refused(with_remedy(&self.path, problem))
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
    let text = std::fs::read_to_string(&file).map_err(|error| {
        Error::refused(with_remedy(path, Problem::io("cannot read", &file, &error)))
    })?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|error| damaged(path, &format!("its {MANIFEST} cannot be parsed: {error}")))?;
    if manifest.format != FORMAT {
        let what = format!("{} has the format {}", path.display(), manifest.format);
        let problem = Problem::new(what).because(format!("this program reads format {FORMAT}"));
        return Err(Error::refused(problem.fix("use the version of phalanx that wrote it")));
    }
    Ok(manifest)
}

fn open_file(path: &Path, summary: &FileSummary) -> Result<Box<dyn FileSource>> {
    let place = path.join(&summary.name);
    let told = |error: io::Error| {
        Error::refused(with_remedy(path, Problem::io("cannot read", &place, &error)))
    };
    let plain =
        Path::new(&summary.name).components().count() == 1 && !summary.name.starts_with('.');
    if !plain {
        return Err(damaged(path, &format!("`{}` is no name of a file in it", summary.name)));
    }
    let file = File::open(&place).map_err(told)?;
    let found = file.metadata().map_err(told)?.len();
    if found != summary.bytes {
        let (found, wanted) = (bytes(found), bytes(summary.bytes));
        return Err(damaged(path, &format!("{} has {found} instead of {wanted}", summary.name)));
    }
    Ok(Box::new(file))
}

fn read_header(
    path: &Path,
    summary: &FileSummary,
    source: &dyn FileSource,
) -> Result<(Header, u64)> {
    let mut file = FromStart { source, at: 0, end: summary.bytes };
    let (header, data) = Header::read(&mut file).map_err(|error| {
        let problem = Problem::io("cannot read", &path.join(&summary.name), &error);
        Error::refused(with_remedy(path, problem))
    })?;
    match data + header.data as u64 == summary.bytes {
        true => Ok((header, data)),
        false => Err(damaged(path, &format!("the header of {} does not fit it", summary.name))),
    }
}

fn damaged(path: &Path, what: &str) -> Error {
    let problem = Problem::new(format!("the checkpoint {} is damaged", path.display()));
    Error::refused(with_remedy(path, problem.because(what)))
}

/// What to do about a checkpoint that cannot be used.
fn with_remedy(path: &Path, problem: Problem) -> Problem {
    match before(path) {
        Some(other) => {
            problem.fix(format!("take another checkpoint of the run, such as {}", other.display()))
        }
        None => problem.fix("take another checkpoint of the run: there is none before it"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
