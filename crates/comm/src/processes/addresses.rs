//! Where processes listen, and how rank 0 tells all of it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use super::environment::{Environment, MeetingPoint};
use super::job::meeting_error;
use super::socket::Address;
use crate::error::CommError;

/// The addresses of a meeting point, in the order in which they are tried.
pub(super) fn candidates(meet: &MeetingPoint) -> Result<Vec<Address>, CommError> {
    let (host, ports) = match meet {
        MeetingPoint::Path(path) => return Ok(vec![Address::Path(path.clone())]),
        MeetingPoint::Host { host, ports } => (host, ports),
        MeetingPoint::Mpi => return Ok(Vec::new()),
    };
    let found = (host.as_str(), 0).to_socket_addrs().map(|mut found| found.next());
    match found {
        Ok(Some(address)) => {
            let at = |&port: &u16| Address::Tcp(SocketAddr::new(address.ip(), port));
            Ok(ports.iter().map(at).collect())
        }
        Ok(None) | Err(_) => Err(meeting_error(
            format!("MASTER_ADDR = {host} is not a host that can be found"),
            "set it to the name or the address of rank 0's host",
        )),
    }
}

/// Where a rank other than 0 listens, if ranks meet at a path.
pub(super) fn path_of(meet: &Path, rank: usize) -> PathBuf {
    let mut path = meet.as_os_str().to_owned();
    path.push(format!(".{rank}"));
    path.into()
}

/// For each rank 16 bytes of its host and 2 of its port; paths are the same everywhere.
pub(super) fn write_table(addresses: &[Address]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(18 * addresses.len());
    for address in addresses {
        let (host, port) = match address {
            Address::Path(_) => ([0; 16], 0),
            Address::Tcp(address) => {
                let host = match address.ip() {
                    IpAddr::V4(host) => host.to_ipv6_mapped(),
                    IpAddr::V6(host) => host,
                };
                (host.octets(), address.port())
            }
        };
        bytes.extend_from_slice(&host);
        bytes.extend_from_slice(&port.to_le_bytes());
    }
    bytes
}

/// `reached` is the address at which this process reached rank 0.
pub(super) fn read_table(
    bytes: &[u8],
    me: &Environment,
    reached: Option<IpAddr>,
) -> Option<Vec<Address>> {
    if bytes.len() != 18 * me.ranks {
        return None;
    }
    let entry = |(rank, entry): (usize, &[u8])| match &me.meet {
        MeetingPoint::Path(path) if rank == 0 => Some(Address::Path(path.clone())),
        MeetingPoint::Path(path) => Some(Address::Path(path_of(path, rank))),
        MeetingPoint::Host { .. } => {
            let host: [u8; 16] = entry[..16].try_into().ok()?;
            let host = IpAddr::from(host).to_canonical();
            // A process that rank 0 sees at its own host is, from elsewhere, where rank 0 is.
            let host = if host.is_loopback() || rank == 0 { reached? } else { host };
            Some(Address::Tcp(SocketAddr::new(host, u16::from_le_bytes([entry[16], entry[17]]))))
        }
        MeetingPoint::Mpi => None,
    };
    bytes.chunks_exact(18).enumerate().map(entry).collect()
}
