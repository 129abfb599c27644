//! The memory of an agent in which copies lie, and the port at which ranks of the job reach it.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_comm::Token;

use super::{PUBLISHED, published, wire};
use crate::hosts::HeldVersion;

/// Connections at once: the most that ranks of a large job need, and no more for strangers.
const CONNECTIONS: usize = 4096;

/// Copies of the state in the memory of this process.
pub(crate) struct Store {
    held: Mutex<Held>,
    pub(super) token: Token,
    port: u16,
    connections: AtomicUsize,
}

#[derive(Default)]
struct Held {
    /// The epoch whose ranks may write and read.
    epoch: u64,
    /// By step and name.
    versions: BTreeMap<u64, BTreeMap<String, Arc<Vec<u8>>>>,
}

impl Store {
    /// Opens a port for the ranks of a job.
    pub(crate) fn open(token: Token) -> io::Result<Arc<Self>> {
        let everywhere = [SocketAddr::from(([0_u16; 8], 0)), SocketAddr::from(([0_u8; 4], 0))];
        let listener = TcpListener::bind(&everywhere[..])?;
        let port = listener.local_addr()?.port();
        let (held, connections) = (Mutex::default(), AtomicUsize::new(0));
        let store = Arc::new(Self { held, token, port, connections });
        let own = Arc::downgrade(&store);
        let listen = move || {
            for stream in listener.incoming().flatten() {
                let Some(store) = own.upgrade() else { return };
                store.take(stream);
            }
        };
        std::thread::Builder::new().name("copies".to_owned()).spawn(listen)?;
        Ok(store)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// An epoch begins after this step. Processes of other epochs can no longer write or read, and copies of later steps,
    /// which the epoch will take again, are dropped.
    pub(crate) fn begin(&self, epoch: u64, step: u64) {
        let mut held = self.held_now();
        held.epoch = epoch;
        held.versions.retain(|other, _| *other <= step);
    }

    /// What is held, for the coordinator.
    pub(crate) fn held(&self) -> Vec<HeldVersion> {
        let held = self.held_now();
        let version = |(step, files): (&u64, &BTreeMap<String, Arc<Vec<u8>>>)| HeldVersion {
            step: *step,
            names: files.keys().cloned().collect(),
            needs: files.get(PUBLISHED).and_then(|text| published(text)).map(|(_, needs)| needs),
        };
        held.versions.iter().map(version).collect()
    }

    pub(super) fn epoch(&self) -> u64 {
        self.held_now().epoch
    }

    /// Makes room for a new copy: what is older than the newest whole one goes.
    pub(super) fn make_room(&self) {
        let mut held = self.held_now();
        let whole = held.versions.iter().rev().find(|(_, files)| files.contains_key(PUBLISHED));
        let whole = whole.map_or(0, |(step, _)| *step);
        held.versions.retain(|step, _| *step >= whole);
    }

    /// Keeps a file, unless its epoch is over.
    pub(super) fn keep(&self, epoch: u64, step: u64, name: String, bytes: Vec<u8>) -> bool {
        let mut held = self.held_now();
        let current = held.epoch == epoch;
        if current {
            held.versions.entry(step).or_default().insert(name, Arc::new(bytes));
        }
        current
    }

    pub(super) fn file(&self, step: u64, name: &str) -> Option<Arc<Vec<u8>>> {
        self.held_now().versions.get(&step)?.get(name).cloned()
    }

    fn held_now(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a connection on a thread of its own.
    fn take(self: Arc<Self>, stream: TcpStream) {
        if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            self.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let serve = move || {
            // Who breaks off has ended, which others notice.
            let _ = wire::serve(&self, stream);
            self.connections.fetch_sub(1, Ordering::Relaxed);
        };
        let _ = std::thread::Builder::new().name("copy".to_owned()).spawn(serve);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::super::wire::Connection;
    use super::*;

    fn put(to: &mut Connection, step: u64, name: &str, bytes: &[u8]) -> io::Result<()> {
        to.put(step, name, bytes.len() as u64)?;
        to.write(0, bytes)?;
        to.done()
    }

    fn steps(store: &Store) -> Vec<u64> {
        store.held().iter().map(|held| held.step).collect()
    }

    const WHOLE: &[u8] =
        br#"{"manifest": {"format": 1, "step": 4, "samples": 0, "seed": 0, "corpus": "",
        "model": null, "layout": "", "kinds": {}, "files": []}, "needs": [["a"]]}"#;

    #[test]
    fn the_newest_whole_copy_stays_until_the_next_one_is_whole() {
        let store = Store::open(Token::of("job")).unwrap();
        let address = format!("127.0.0.1:{}", store.port());
        let mut rank = Connection::open(&address, Token::of("job"), 0).unwrap();
        for step in [4, 8] {
            put(&mut rank, step, "a", &[step as u8; 100_000]).unwrap();
            put(&mut rank, step, PUBLISHED, WHOLE).unwrap();
        }
        assert_eq!(store.held()[0].needs, Some(vec![vec!["a".to_owned()]]));
        // Until the next one is whole, nothing takes its place.
        put(&mut rank, 12, "a", &[12; 10]).unwrap();
        assert_eq!(steps(&store), [8, 12]);
        put(&mut rank, 12, "b", &[12; 10]).unwrap();
        assert_eq!(steps(&store), [8, 12]);
        let mut found = [0; 3];
        rank.get(8, "a", 99_997, &mut found).unwrap();
        assert_eq!(found, [8; 3]);
        assert!(rank.get(8, "a", 99_998, &mut found).is_err());
        let mut rank = Connection::open(&address, Token::of("job"), 0).unwrap();
        assert!(rank.get(8, "b", 0, &mut found).is_err());
    }

    #[test]
    fn other_epochs_and_strangers_neither_write_nor_read() {
        let store = Store::open(Token::of("job")).unwrap();
        let address = format!("127.0.0.1:{}", store.port());
        let mut old = Connection::open(&address, Token::of("job"), 0).unwrap();
        put(&mut old, 4, "a", b"old").unwrap();
        put(&mut old, 8, "a", b"old").unwrap();
        store.begin(1, 4);
        assert_eq!(steps(&store), [4]);
        assert!(put(&mut old, 12, "a", b"late").is_err());
        assert_eq!(steps(&store), [4]);
        assert!(Connection::open(&address, Token::of("job"), 0).is_err());
        assert!(Connection::open(&address, Token::of("other"), 1).is_err());
        let mut new = Connection::open(&address, Token::of("job"), 1).unwrap();
        put(&mut new, 6, "a", b"new").unwrap();
    }
}
