//! Copies of the state in the memory of hosts, so that the loss of a host is survived without its disk.
//!
//! Every `run.copy_every` steps each rank writes its part of the state as for a checkpoint, but to the
//! agents of hosts: what only its own host holds goes to that host's agent and to the agent of the next
//! host, its buddy; what ranks of several hosts hold is kept by two of them, each at its own agent, and
//! crosses no network. An agent keeps the newest whole copy and the one that is being written.
//!
//! Reading a copy is reading a checkpoint whose files lie behind connections: any layout can go on.

mod plan;
mod store;
mod wire;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use phalanx_checkpoint::{Checkpoint, FileSource, Manifest};
use phalanx_comm::{Token, names};
use phalanx_error::{Error, Problem, Result};
use serde_json::json;

use crate::hosts::HeldVersion;
pub(crate) use plan::{CopyPlan, Holders, kept_name, sent_name};
pub(crate) use store::Store;
use wire::Connection;
pub(crate) use wire::CopySink;

/// The file that makes a copy whole: the manifest, and which files are needed.
const PUBLISHED: &str = "manifest.json";

/// The agents of a job's hosts, as a rank knows them.
#[derive(Clone, Debug)]
pub(crate) struct Stores {
    /// The address of each, and how many ranks its host has.
    list: Vec<(String, usize)>,
    token: Token,
    epoch: u64,
}

/// The agents as text, for a variable.
pub(crate) fn write_stores(list: &[(String, usize)]) -> String {
    let each: Vec<String> =
        list.iter().map(|(address, ranks)| format!("{address}={ranks}")).collect();
    each.join(",")
}

impl Stores {
    /// The agents that the variables of this process name, if there are several.
    pub(crate) fn find() -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        let one = |text: &str| {
            let (address, ranks) = text.rsplit_once('=')?;
            Some((address.to_owned(), ranks.parse().ok()?))
        };
        let list: Option<Vec<_>> = variable(names::STORES)?.split(',').map(one).collect();
        let token = Token::from_hex(&variable(names::TOKEN)?)?;
        let epoch = variable(names::EPOCH)?.parse().ok()?;
        Some(Self { list: list?, token, epoch })
    }

    /// The host of a rank.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        let mut end = 0;
        let ends = self.list.iter().map(|(_, ranks)| {
            end += ranks;
            end
        });
        ends.take_while(|end| *end <= rank).count()
    }

    /// Whether the state can be copied to another host.
    pub(crate) fn are_several(&self) -> bool {
        self.list.len() > 1
    }

    fn open(&self, host: usize) -> Result<Connection> {
        let (address, _) = &self.list[host];
        Connection::open(address, self.token, self.epoch)
            .map_err(|error| unreached(address, &error))
    }

    /// A file of a copy that is written to the agent of a host, and to its buddy's if it is to be.
    pub(crate) fn sink(
        &self,
        (host, buddy): (usize, bool),
        (step, name, bytes): (u64, &str, u64),
    ) -> Result<CopySink> {
        let next = (host + 1) % self.list.len();
        let hosts = [Some(host), Some(next).filter(|next| buddy && *next != host)];
        let open = |host: usize| {
            let mut connection = self.open(host)?;
            let begun = connection.put(step, name, bytes);
            begun.map_err(|error| unreached(&self.list[host].0, &error))?;
            Ok(connection)
        };
        let connections = hosts.into_iter().flatten().map(open).collect::<Result<Vec<_>>>()?;
        Ok(CopySink::new(connections))
    }

    /// Tells all agents that a copy is whole. `needs` are the files of which one each is needed.
    pub(crate) fn publish(&self, manifest: &Manifest, needs: &[Vec<String>]) -> Result<()> {
        let text = json!({"manifest": manifest, "needs": needs}).to_string();
        for (host, (address, _)) in self.list.iter().enumerate() {
            let mut connection = self.open(host)?;
            let put = connection.put(manifest.step, PUBLISHED, text.len() as u64);
            let put = put.and_then(|()| connection.write(0, text.as_bytes()));
            let put = put.and_then(|()| connection.done());
            put.map_err(|error| unreached(address, &error))?;
        }
        Ok(())
    }

    /// Opens the copy that was taken after a step, wherever its files are.
    pub(crate) fn read(&self, step: u64) -> Result<Checkpoint> {
        let place = PathBuf::from(format!("the hosts' copies after step {step}"));
        let mut holders: BTreeMap<String, usize> = BTreeMap::new();
        for (host, (address, _)) in self.list.iter().enumerate() {
            let held = self.open(host)?.list().map_err(|error| unreached(address, &error))?;
            let own = held.into_iter().filter(|version| version.step == step);
            own.flat_map(|version| version.names).for_each(|name| {
                holders.entry(name).or_insert(host);
            });
        }
        let file = |name: &str, host: usize| -> Result<RemoteFile> {
            let connection = Mutex::new(self.open(host)?);
            Ok(RemoteFile { connection, step, name: name.to_owned() })
        };
        let missing = || Error::failed(Problem::new(format!("{} are not there", place.display())));
        let host = *holders.get(PUBLISHED).ok_or_else(missing)?;
        let text = self.open(host)?.whole(step, PUBLISHED);
        let text = text.map_err(|error| unreached(&self.list[host].0, &error))?;
        let mut manifest = published(&text).ok_or_else(missing)?.0;
        manifest.files.retain(|file| holders.contains_key(&file.name));
        let sources = manifest.files.iter().map(|summary| {
            Ok(Box::new(file(&summary.name, holders[&summary.name])?) as Box<dyn FileSource>)
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        Checkpoint::over(&place, manifest, sources)
    }
}

/// What [`Stores::publish`] wrote.
fn published(text: &[u8]) -> Option<(Manifest, Vec<Vec<String>>)> {
    let mut all: serde_json::Value = serde_json::from_slice(text).ok()?;
    let manifest = serde_json::from_value(all["manifest"].take()).ok()?;
    Some((manifest, serde_json::from_value(all["needs"].take()).ok()?))
}

/// The newest copy that is whole on the hosts that are left, by its step.
pub(crate) fn newest_whole<'a>(
    hosts: impl Iterator<Item = &'a [HeldVersion]> + Clone,
) -> Option<u64> {
    let all = hosts.flatten();
    let is_there = |step: u64, name: &String| {
        all.clone().any(|held| held.step == step && held.names.contains(name))
    };
    let whole = all.clone().filter(|held| {
        let needs = held.needs.as_ref();
        needs.is_some_and(|needs| {
            needs.iter().all(|any| any.iter().any(|name| is_there(held.step, name)))
        })
    });
    whole.map(|held| held.step).max()
}

/// A file of a copy, at an agent.
#[derive(Debug)]
struct RemoteFile {
    connection: Mutex<Connection>,
    step: u64,
    name: String,
}

impl FileSource for RemoteFile {
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.get(self.step, &self.name, at, out)
    }
}

fn unreached(address: &str, error: &io::Error) -> Error {
    let problem = Problem::new(format!("the agent at {address} does not take part: {error}"));
    Error::failed(problem.because("it keeps copies of the state for other hosts (run.copy_every)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(step: u64, names: &[&str], needs: Option<&[&[&str]]>) -> HeldVersion {
        let owned = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let needs = needs.map(|needs| needs.iter().map(|any| owned(any)).collect());
        HeldVersion { step, names: owned(names), needs }
    }

    #[test]
    fn a_copy_is_whole_if_one_of_each_needed_file_is_left() {
        let needs: &[&[&str]] = &[&["a"], &["b", "c"]];
        let newest = |hosts: &[Vec<HeldVersion>]| newest_whole(hosts.iter().map(Vec::as_slice));
        let one = vec![held(4, &["a", "b"], Some(needs)), held(8, &["a", "b"], Some(needs))];
        let two = vec![held(4, &["a", "c"], Some(needs)), held(8, &["a", "c"], None)];
        assert_eq!(newest(&[one.clone(), two.clone()]), Some(8));
        assert_eq!(newest(std::slice::from_ref(&one)), Some(8));
        // Nobody who is left knows that the newer one is whole.
        assert_eq!(newest(std::slice::from_ref(&two)), Some(4));
        let part = vec![held(8, &["b"], Some(needs)), held(4, &["a"], Some(needs))];
        assert_eq!(newest(&[part]), None);
        assert_eq!(newest(&[]), None);
    }

    #[test]
    fn ranks_know_their_hosts() {
        let list = vec![("a:1".to_owned(), 2), ("[::1]:2".to_owned(), 1), ("c:3".to_owned(), 3)];
        assert_eq!(write_stores(&list), "a:1=2,[::1]:2=1,c:3=3");
        let stores = Stores { list, token: Token::of("job"), epoch: 0 };
        let hosts: Vec<usize> = (0..6).map(|rank| stores.host_of(rank)).collect();
        assert_eq!(hosts, [0, 0, 1, 2, 2, 2]);
    }
}
