//! Ctrl-C while a file is written: one lets it be finished, two leave nothing of it. A test binary of
//! its own, for a signal concerns the whole process.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::fs;

use phalanx_sys::{interrupt, write_atomic};

fn press_ctrl_c() {
    // SAFETY: the signal is caught, by a handler that only counts.
    assert_eq!(unsafe { libc::raise(libc::SIGINT) }, 0);
}

#[test]
fn one_lets_a_file_be_finished_and_two_leave_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    let listening = interrupt::listen();
    assert!(!interrupt::requested());
    write_atomic(&path, |out| {
        press_ctrl_c();
        out.write_all(b"whole")
    })
    .unwrap();
    assert!(interrupt::requested());
    assert_eq!(fs::read(&path).unwrap(), b"whole");

    drop(listening);
    let _listening = interrupt::listen();
    assert!(!interrupt::requested(), "who listens anew has heard nothing yet");
    let error = write_atomic(&path, |out| {
        press_ctrl_c();
        press_ctrl_c();
        out.write_all(b"another")
    })
    .unwrap_err();
    assert!(error.to_string().contains("interrupted: stop was requested twice"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"whole");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary is left");
}
