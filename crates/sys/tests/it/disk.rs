//! Replacing a file: all of it, or nothing.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use phalanx_sys::{SysError, write_atomic};

use crate::scratch::Scratch;

#[test]
fn new_content_replaces_old() {
    let scratch = Scratch::new("replace");
    let path = scratch.file("weights");
    for content in ["first", "second, and longer"] {
        write_atomic(&path, |out| out.write_all(content.as_bytes())).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
    assert_eq!(scratch.names(), ["weights"]);
}

#[test]
fn a_failing_writer_leaves_the_old_file() {
    let scratch = Scratch::new("failing");
    let path = scratch.file("weights");
    fs::write(&path, "good").unwrap();
    let error = write_atomic(&path, |out| {
        out.write_all(&[0; 3 << 20])?;
        Err(io::Error::other("a broken source"))
    })
    .unwrap_err();
    assert!(error.to_string().contains("a broken source"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "good");
    assert_eq!(scratch.names(), ["weights"]);
}

#[test]
fn a_panicking_writer_leaves_the_old_file() {
    let scratch = Scratch::new("panicking");
    let path = scratch.file("weights");
    fs::write(&path, "good").unwrap();
    let outcome = std::panic::catch_unwind(|| {
        let _ = write_atomic(&path, |_| panic!("a bug in the writer"));
    });
    assert!(outcome.is_err());
    assert_eq!(fs::read_to_string(&path).unwrap(), "good");
    assert_eq!(scratch.names(), ["weights"]);
}

/// `/dev/full` answers every write with the system's own "no space left".
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_called_that() {
    let scratch = Scratch::new("full");
    let path = scratch.file("weights");
    fs::write(&path, "good").unwrap();
    let error = write_atomic(&path, |out| {
        out.write_all(b"half of it")?;
        fs::OpenOptions::new().write(true).open("/dev/full")?.write_all(b"x")
    })
    .unwrap_err();
    assert!(matches!(error, SysError::DiskFull { .. }), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("disk full") && message.contains("weights"), "{message}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "good");
    assert_eq!(scratch.names(), ["weights"]);
}

#[test]
fn a_missing_folder_is_named() {
    let scratch = Scratch::new("nofolder");
    let path = scratch.file("nowhere").join("weights");
    let message = write_atomic(&path, |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("nowhere does not exist"), "{message}");
}

#[test]
fn paths_that_name_no_file_are_refused() {
    let scratch = Scratch::new("folder");
    fs::create_dir(scratch.file("weights")).unwrap();
    let error = write_atomic(&scratch.file("weights"), |_| Ok(())).unwrap_err();
    assert!(matches!(error, SysError::NotAFile { .. }), "{error:?}");
    assert!(write_atomic(Path::new("/"), |_| Ok(())).is_err());
    assert_eq!(scratch.names(), ["weights"]);
}

#[cfg(unix)]
#[test]
fn a_link_is_followed_and_the_file_keeps_its_permissions() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let scratch = Scratch::new("links");
    let (file, link) = (scratch.file("file"), scratch.file("link"));
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", &link).unwrap();
    write_atomic(&link, |out| out.write_all(b"new")).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    assert!(link.is_symlink());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o440)).unwrap();
    let error = write_atomic(&link, |out| out.write_all(b"newer")).unwrap_err();
    assert!(matches!(error, SysError::ReadOnly { .. }), "{error:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    assert_eq!(scratch.names(), ["file", "link"]);
}

#[cfg(unix)]
#[test]
fn a_link_to_a_file_of_the_future_makes_that_file() {
    use phalanx_sys::disk::goal_of;
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new("future");
    symlink("second", scratch.file("first")).unwrap();
    symlink("file", scratch.file("second")).unwrap();
    assert_eq!(goal_of(&scratch.file("first")).unwrap(), goal_of(&scratch.file("file")).unwrap());
    write_atomic(&scratch.file("first"), |out| out.write_all(b"new")).unwrap();
    assert_eq!(fs::read_to_string(scratch.file("file")).unwrap(), "new");
    assert_eq!(scratch.names(), ["file", "first", "second"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_pipe_is_written_to_and_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let scratch = Scratch::new("pipe");
    let pipe = scratch.file("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Trying whether it could be written does not disturb who reads.
    drop(phalanx_sys::Staged::write(&pipe, |_| Ok(())).unwrap());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    write_atomic(&pipe, |out| out.write_all(b"whole")).unwrap();
    assert_eq!(reader.join().unwrap(), "whole");
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(scratch.names(), ["pipe"]);
}
