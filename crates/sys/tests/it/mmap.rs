//! Mapped files: the bytes, and the complaints.

use std::fs;

use phalanx_sys::{FileMap, SysError};

use crate::scratch::Scratch;

#[test]
fn the_map_shows_the_bytes() {
    let scratch = Scratch::new("map");
    let content: Vec<u8> = (0..100_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
    fs::write(scratch.file("data"), &content).unwrap();
    let map = FileMap::open(&scratch.file("data")).unwrap();
    assert_eq!(&map[..], &content[..]);
    assert_eq!(map.path(), scratch.file("data"));
    fs::write(scratch.file("empty"), b"").unwrap();
    assert!(FileMap::open(&scratch.file("empty")).unwrap().is_empty());
}

#[test]
fn what_is_not_a_file_is_refused() {
    let scratch = Scratch::new("nomap");
    let missing = FileMap::open(&scratch.file("absent")).unwrap_err();
    assert!(matches!(missing, SysError::Missing { .. }), "{missing:?}");
    assert!(missing.to_string().contains("absent"));
    fs::create_dir(scratch.file("folder")).unwrap();
    let folder = FileMap::open(&scratch.file("folder")).unwrap_err();
    assert!(matches!(folder, SysError::NotAFile { found: "a folder", .. }), "{folder:?}");
}

#[test]
fn a_file_that_changes_length_is_noticed() {
    let scratch = Scratch::new("changed");
    fs::write(scratch.file("data"), [1; 1000]).unwrap();
    let map = FileMap::open(&scratch.file("data")).unwrap();
    map.check_unchanged().unwrap();
    fs::OpenOptions::new().write(true).open(map.path()).unwrap().set_len(10).unwrap();
    let error = map.check_unchanged().unwrap_err();
    assert!(matches!(error, SysError::Changed { mapped: 1000, now: 10, .. }), "{error:?}");
}
