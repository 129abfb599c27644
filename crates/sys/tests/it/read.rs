//! Reading files that people name: only regular ones, of a bounded size.

use std::fs;
use std::path::Path;

use phalanx_sys::{SysError, open_regular, read_regular, read_stream, read_text};

use crate::scratch::Scratch;

#[test]
fn a_file_is_read_up_to_its_limit() {
    let scratch = Scratch::new("read");
    let path = scratch.file("text");
    fs::write(&path, "twelve bytes").unwrap();
    assert_eq!(read_text(&path, 12).unwrap(), "twelve bytes");
    assert_eq!(read_stream(&path, 12).unwrap(), b"twelve bytes");
    let error = read_regular(&path, 11).unwrap_err();
    assert!(matches!(error, SysError::TooLarge { limit: 11, .. }), "{error:?}");
    fs::write(&path, [0xff]).unwrap();
    let message = read_text(&path, 12).unwrap_err().to_string();
    assert!(message.contains("not text"), "{message}");
}

#[test]
fn what_is_no_regular_file_is_not_opened() {
    let scratch = Scratch::new("irregular");
    let folder = scratch.file("folder");
    fs::create_dir(&folder).unwrap();
    // A device that never ends, and one that would block.
    for path in [folder.as_path(), Path::new("/dev/zero"), Path::new("/dev/tty")] {
        for error in [open_regular(path).unwrap_err(), read_stream(path, 9).unwrap_err()] {
            assert!(matches!(error, SysError::NotAFile { .. }), "{error:?}");
        }
    }
    let missing = open_regular(&scratch.file("gone")).unwrap_err();
    assert!(matches!(missing, SysError::Missing { .. }), "{missing:?}");
}

#[cfg(unix)]
#[test]
fn a_link_to_nothing_names_what_is_missing() {
    let scratch = Scratch::new("dead");
    std::os::unix::fs::symlink("/no/such/blob", scratch.file("link")).unwrap();
    std::os::unix::fs::symlink("round", scratch.file("round")).unwrap();
    let message = open_regular(&scratch.file("link")).unwrap_err().to_string();
    assert!(message.contains("/no/such/blob") && message.contains("cp -L"), "{message}");
    let message = open_regular(&scratch.file("round")).unwrap_err().to_string();
    assert!(message.contains("leads back to itself"), "{message}");
}
