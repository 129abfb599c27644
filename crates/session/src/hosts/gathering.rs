//! Agents that another program has started find each other: the agent of the first rank listens, and
//! the others connect to it.
//!
//! A connection begins with a hello of fixed size, whose token is compared before anything else in it is
//! read.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_comm::{HostShare, Token};
use phalanx_error::{Error, Problem, Result};

use super::agent::AgentLoop;
use super::crew::{Host, HostCrew};
use super::link::Link;
use super::no_thread;
use crate::job::TIMEOUT;
use crate::launch::{JobLoop, Launched};

/// Ports, from the first one on, that are tried for agents; ranks use those that follow.
const PORTS: u16 = 16;

/// The first bytes of a connection: what it is for, the token, and the ranks of its host.
const MAGIC: [u8; 8] = *b"PHXAGNT1";
const HELLO: usize = 48;
const WELCOME: u8 = 1;

/// How long a hello or the answer to it may take, and a connection.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long an agent waits before it says what for.
const NOTICE: Duration = Duration::from_secs(5);

/// Runs the agent of a host, and in that of the first rank the coordinator too.
pub(super) fn run(share: &HostShare, token: Token, program: &Launched) -> Result<u8> {
    if share.first > 0 {
        let link = find(share, token)?;
        return AgentLoop::new(program, token, link, false)?.run();
    }
    let (listener, port) = open(share)?;
    let (to, newcomers) = channel();
    let listens = move || listen(&listener, token, &to);
    std::thread::Builder::new().name("agents".to_owned()).spawn(listens).map_err(no_thread)?;
    let own = own_agent(port, token, program, share.count)?;
    let hosts = gather(share, &newcomers)?;
    // Ranks meet at the ports after those of agents.
    let meet = share.meet.1.saturating_add(PORTS);
    let mut crew = HostCrew::new(hosts, None, Some(newcomers), share.ranks, meet);
    let code = match crew.come()? {
        Some(code) => code,
        None => JobLoop::spread(share.ranks, program, Box::new(crew))?.run()?,
    };
    // Its ranks have ended; it hears so at once.
    let _ = own.join();
    Ok(code)
}

/// The agent of the coordinator's own host, on a thread of its own.
fn own_agent(
    port: u16,
    token: Token,
    program: &Launched,
    count: usize,
) -> Result<std::thread::JoinHandle<()>> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let link = introduce(address, token, 0, count).ok_or_else(|| {
        Error::failed(Problem::new(format!("the agent cannot reach itself at {address}")))
    })?;
    let program = program.clone();
    let run = move || {
        let agent = AgentLoop::new(&program, token, link, false);
        if let Err(error) = agent.and_then(AgentLoop::run) {
            let _ = writeln!(std::io::stderr(), "{error}");
        }
    };
    std::thread::Builder::new().name("agent".to_owned()).spawn(run).map_err(no_thread)
}

/// Opens the first free port for agents.
fn open(share: &HostShare) -> Result<(TcpListener, u16)> {
    let (host, first) = &share.meet;
    let mut last = String::new();
    for port in *first..first.saturating_add(PORTS) {
        let everywhere =
            [SocketAddr::from(([0_u16; 8], port)), SocketAddr::from(([0_u8; 4], port))];
        match TcpListener::bind(&everywhere[..]) {
            Ok(listener) => return Ok((listener, port)),
            Err(error) => last = error.to_string(),
        }
    }
    let problem = format!("the agent of rank 0 cannot listen at {host}:{first}: {last}");
    Err(Error::refused(Problem::new(problem).fix("choose another port with --meet or MASTER_PORT")))
}

/// Takes connections of agents, for as long as the process lives.
fn listen(listener: &TcpListener, token: Token, to: &Sender<Host>) {
    for stream in listener.incoming().flatten() {
        let to = to.clone();
        let welcome = move || {
            if let Some(host) = welcome(stream, token) {
                let _ = to.send(host);
            }
        };
        // A stranger that says nothing holds up nobody else, and is forgotten after a while.
        let _ = std::thread::Builder::new().spawn(welcome);
    }
}

fn welcome(mut stream: TcpStream, token: Token) -> Option<Host> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello).ok()?;
    let (first, count) = read_hello(&hello, token)?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    stream.write_all(&[WELCOME]).ok()?;
    let seen = plain(stream.peer_addr().ok()?.ip());
    let link = Link::over_tcp(stream).ok()?;
    let mut host = Host::new(seen.clone(), seen, count, Some(link));
    host.order = first;
    Some(host)
}

/// An address as others write it.
fn plain(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(own) => own.to_string(),
        IpAddr::V6(own) => format!("[{own}]"),
    }
}

/// A hello of the agent of a host with so many ranks from a first one on.
fn hello(token: Token, first: usize, count: usize) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..40].copy_from_slice(&token.bytes());
    bytes[40..44].copy_from_slice(&(first as u32).to_le_bytes());
    bytes[44..].copy_from_slice(&(count as u32).to_le_bytes());
    bytes
}

/// The first rank of the host that says hello, and how many it has, if it belongs to the job.
fn read_hello(bytes: &[u8; HELLO], own: Token) -> Option<(usize, usize)> {
    let token = Token::from_bytes(std::array::from_fn(|at| bytes[8 + at]));
    // The token is compared first; without it the rest is not looked at.
    if token != own || bytes[..8] != MAGIC {
        return None;
    }
    let word =
        |from: usize| u32::from_le_bytes(std::array::from_fn(|at| bytes[from + at])) as usize;
    Some((word(40), word(44)))
}

fn introduce(address: SocketAddr, token: Token, first: usize, count: usize) -> Option<Link> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.write_all(&hello(token, first, count)).ok()?;
    let mut answer = [0];
    stream.read_exact(&mut answer).ok()?;
    (answer == [WELCOME]).then(|| Link::over_tcp(stream).ok()).flatten()
}

/// Waits until the hosts that have come have room for all ranks.
fn gather(share: &HostShare, newcomers: &Receiver<Host>) -> Result<Vec<Host>> {
    let (start, mut told, mut hosts) = (Instant::now(), false, Vec::<Host>::new());
    loop {
        if let Ok(host) = newcomers.recv_timeout(Duration::from_millis(50)) {
            hosts.push(host);
        }
        let room: usize = hosts.iter().map(|host| host.slots).sum();
        if room >= share.ranks {
            break;
        }
        let (ranks, time) = (share.ranks, start.elapsed());
        if time > TIMEOUT {
            let waited = time.as_secs();
            let problem =
                format!("agents with {room} of {ranks} ranks have come within {waited} s");
            let fix = "see whether the other agents were started, and can reach this host";
            return Err(Error::failed(Problem::new(problem).fix(fix)));
        }
        if time > NOTICE && !std::mem::replace(&mut told, true) {
            let (host, port) = &share.meet;
            let text =
                format!("agents with {room} of {ranks} ranks have come to {host}:{port} so far");
            let _ = writeln!(std::io::stderr(), "note: {text}");
        }
    }
    hosts.sort_by_key(|host| host.order);
    for host in hosts.iter_mut().filter(|host| host.order == 0) {
        // It has reached itself by an address that no other host can use.
        (host.name, host.address) = (share.meet.0.clone(), share.meet.0.clone());
    }
    Ok(hosts)
}

/// Finds the coordinator.
fn find(share: &HostShare, token: Token) -> Result<Link> {
    let (host, first) = &share.meet;
    let (start, mut told) = (Instant::now(), false);
    while start.elapsed() < TIMEOUT {
        for port in *first..first.saturating_add(PORTS) {
            let addresses = (host.as_str(), port).to_socket_addrs().into_iter().flatten();
            let link = addresses
                .into_iter()
                .find_map(|address| introduce(address, token, share.first, share.count));
            if let Some(link) = link {
                return Ok(link);
            }
        }
        if start.elapsed() > NOTICE && !std::mem::replace(&mut told, true) {
            let text = format!("no agent of rank 0 was found at {host}:{first} so far");
            let _ = writeln!(std::io::stderr(), "note: {text}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let waited = start.elapsed().as_secs();
    let problem =
        Problem::new(format!("no agent of rank 0 was found at {host}:{first} in {waited} s"));
    Err(Error::failed(
        problem.fix("see whether it was started, and whether this host can reach it"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_are_not_read() {
        let own = Token::of("job");
        assert_eq!(read_hello(&hello(own, 4, 2), own), Some((4, 2)));
        for at in 0..40 {
            let mut bytes = hello(own, 4, 2);
            bytes[at] ^= 1;
            assert_eq!(read_hello(&bytes, own), None, "{at}");
        }
    }
}
