//! The number that the linker gave a program (`NT_GNU_BUILD_ID`), read from the head of its ELF file.
//!
//! It differs between builds, stays when debug information is stripped, and is there in microseconds, where a hash of the
//! whole file takes every rank of a host a tenth of a second.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// The linker's number for the program in this file, if it left one.
pub(super) fn build_id(path: &str) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let header = read(&mut file, 0, HEADER)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) =
        (number(&header, 32, 8)?, number(&header, 54, 2)?, number(&header, 56, 2)?);
    (0..count).find_map(|entry| {
        let at = table.checked_add(entry.checked_mul(size)?)?;
        let entry = read(&mut file, at, usize::try_from(size).ok()?)?;
        let (kind, from, len) =
            (number(&entry, 0, 4)?, number(&entry, 8, 8)?, number(&entry, 32, 8)?);
        (kind == NOTES && len <= LONGEST).then_some(())?;
        find(&read(&mut file, from, usize::try_from(len).ok()?)?)
    })
}

/// Bytes of the header of a 64-bit ELF file.
const HEADER: usize = 64;
/// `PT_NOTE`: the part of a program that holds notes.
const NOTES: u64 = 4;
/// Notes are some tens of bytes; what claims to be much longer is no program of ours.
const LONGEST: u64 = 1 << 16;
/// `NT_GNU_BUILD_ID`.
const BUILD_ID: u64 = 3;

/// The build's number among notes: each has the lengths of its name and of its content, its kind, and both, padded to words.
fn find(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let [name, content, kind] = [0, 4, 8].map(|at| number(notes, at, 4));
        let (name, content) = (usize::try_from(name?).ok()?, usize::try_from(content?).ok()?);
        let start = 12 + name.next_multiple_of(4);
        let found = notes.get(start..start.checked_add(content)?)?;
        if kind? == BUILD_ID && notes.get(12..12 + name)? == b"GNU\0" {
            return Some(found.to_vec());
        }
        notes = notes.get(start + content.next_multiple_of(4)..)?;
    }
}

fn read(file: &mut File, from: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.seek(SeekFrom::Start(from)).ok()?;
    file.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// The little-endian number of `len` bytes at this place.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + len)?;
    Some(bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
        let padded = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let lengths = [name.len() as u32, content.len() as u32, kind];
        let mut all: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        all.extend(padded(name));
        all.extend(padded(content));
        all
    }

    #[test]
    fn the_note_is_found_among_others_and_nothing_is_read_beyond_them() {
        let mut notes = note(b"GNU\0", 1, &[7; 16]);
        notes.extend(note(b"Go\0", 3, b"other"));
        assert_eq!(find(&notes), None);
        notes.extend(note(b"GNU\0", 3, b"number of a build"));
        assert_eq!(find(&notes).unwrap(), b"number of a build");
        for cut in 0..notes.len() - 4 {
            assert_eq!(find(&notes[..cut]), None, "{cut}");
        }
        let mut lies = notes.clone();
        lies[4..8].fill(0xff);
        assert_eq!(find(&lies), None);
    }

    #[test]
    fn programs_have_one_and_other_files_none() {
        let own = build_id("/proc/self/exe");
        let again = std::env::current_exe().unwrap();
        assert_eq!(own, build_id(again.to_str().unwrap()));
        let mut file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(build_id(file.path().to_str().unwrap()), None);
        file.write_all(b"\x7fELF\x02\x01").unwrap();
        file.write_all(&[0xff; 200]).unwrap();
        assert_eq!(build_id(file.path().to_str().unwrap()), None);
        assert_eq!(build_id("/nowhere"), None);
    }
}
