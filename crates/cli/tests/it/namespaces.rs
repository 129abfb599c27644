//! Two hosts as network namespaces of this one, joined by a virtual cable: each has addresses of its own,
//! and no other way to the other. Where that is not allowed (it takes root), two names of the loopback
//! device are the two hosts, and the test says so.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::command::phalanx;
use crate::processes::{TINY, numbers, sets};

/// Two namespaces; they are removed with everything in them.
pub(crate) struct Cable {
    names: [String; 2],
}

const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];

/// How many pairs of namespaces were made.
static PAIRS: AtomicUsize = AtomicUsize::new(0);

fn ip(words: &str) -> Result<(), String> {
    let output = Command::new("ip").args(words.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Cable {
    fn new() -> Result<Self, String> {
        let own = format!("{}{}", std::process::id(), PAIRS.fetch_add(1, Ordering::Relaxed));
        let cable = Self { names: [format!("phx{own}a"), format!("phx{own}b")] };
        let [one, other] = &cable.names;
        ip(&format!("netns add {one}"))?;
        ip(&format!("netns add {other}"))?;
        ip(&format!("link add {one} netns {one} type veth peer name {other} netns {other}"))?;
        for (name, address) in cable.names.iter().zip(ADDRESSES) {
            ip(&format!("-n {name} addr add {address}/24 dev {name}"))?;
            ip(&format!("-n {name} link set {name} up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(cable)
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| drop(ip(&format!("netns del {name}"))));
    }
}

/// A remote shell that enters the namespace of an address, and the file of hosts, each with so many ranks.
pub(crate) fn prepare(dir: &Path, slots: usize) -> Option<Cable> {
    let cable = Cable::new().map_err(|why| {
        println!("no network namespaces, so both hosts are the loopback device: {why}");
    });
    let (enter, hosts) = match &cable {
        Ok(Cable { names: [one, other] }) => (
            format!(
                "case $host in {}) ns={one};; *) ns={other};; esac\nexec ip netns exec $ns",
                ADDRESSES[0]
            ),
            ADDRESSES,
        ),
        Err(()) => ("exec".to_owned(), ["127.0.0.1", "localhost"]),
    };
    let shell = format!("#!/bin/sh\nhost=$1\nshift\n{enter} sh -c \"$*\"\n");
    std::fs::write(dir.join("rsh"), shell).unwrap();
    std::fs::set_permissions(dir.join("rsh"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(dir.join("hosts"), hosts.map(|host| format!("{host} slots={slots}\n")).concat())
        .unwrap();
    cable.ok()
}

#[test]
fn two_hosts_have_the_bits_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let _cable = prepare(dir.path(), 1);
    let launch = ["launch", "-n", "2", "--hosts", "hosts", "--rsh", "./rsh", "--"];
    for keys in ["parallel.dp=2 parallel.zero=3", "parallel.pp=2 train.microbatches=4"] {
        let train = |name: &str, before: &[&str]| {
            let own = format!("{keys} train.steps=2 run.name={name}");
            phalanx(dir.path(), &[before, &["train"], TINY, &sets(&own)]).ok()
        };
        assert_eq!(numbers(&train("threads", &[])), numbers(&train("hosts", &launch)), "{keys}");
        let weights =
            |name| std::fs::read(dir.path().join("runs").join(name).join("model.safetensors"));
        assert!(weights("threads").unwrap() == weights("hosts").unwrap(), "{keys}");
        std::fs::remove_dir_all(dir.path().join("runs")).unwrap();
    }
    let keys = sets("parallel.tp=2 model.layers=2");
    let found = phalanx(dir.path(), &[&launch, &["verify"], TINY, &keys]).ok().json().remove(0);
    assert_eq!(found["ok"], true, "{found}");
}

/// A host is lost with its agent; copies of its shards have crossed the cable before.
#[test]
fn the_loss_of_one_of_two_hosts_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let _cable = prepare(dir.path(), 1);
    let train = |name: &str, before: &[&str], fault: &str| {
        let keys = format!(
            "parallel.dp=2 parallel.zero=3 model.layers=2 train.steps=6 run.copy_every=2 run.name={name}"
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir.path()).args(before).arg("train").args(TINY).args(sets(&keys));
        let output = command.env("PHALANX_FAULT", fault).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{err}");
        (err, std::fs::read(dir.path().join("runs").join(name).join("model.safetensors")).unwrap())
    };
    let (_, whole) = train("whole", &[], "");
    let launch = ["launch", "-n", "2", "--hosts", "hosts", "--rsh", "./rsh", "--"];
    let (err, weights) = train("a", &launch, "host rank=1 step=5 phase=B");
    assert!(err.contains("going on from the hosts' copies after step 2 (restart 1"), "{err}");
    assert!(weights == whole);
}
