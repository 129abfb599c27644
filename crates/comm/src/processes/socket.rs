//! Unix sockets, TCP connections and streams of an MPI job behind one type, none of which ever blocks once
//! it is open.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use phalanx_sys::Poll;

use super::pace;
use crate::mpi::MpiStream;
use crate::streams::Stream;

/// Where a process listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Path(PathBuf),
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Path(path) => write!(f, "{}", path.display()),
            Address::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// A connection.
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
    Mpi(MpiStream),
}

impl Socket {
    /// Opens a connection, for at most this time.
    pub(super) fn connect(to: &Address, patience: Duration) -> io::Result<Self> {
        match to {
            Address::Path(path) => Self::unix(UnixStream::connect(path)?),
            Address::Tcp(address) => {
                let patience = patience.max(Duration::from_millis(1));
                Self::tcp(pace::connect(address, patience)?)
            }
        }
    }

    fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Socket::Unix(stream))
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        // Frames are small and answered at once.
        stream.set_nodelay(true)?;
        Ok(Socket::Tcp(stream))
    }

    /// The addresses of the other end and of this one.
    pub(super) fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        match self {
            Socket::Unix(_) | Socket::Mpi(_) => None,
            Socket::Tcp(stream) => {
                Some((stream.peer_addr().ok()?.ip(), stream.local_addr().ok()?.ip()))
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.read(bytes),
            Socket::Tcp(stream) => stream.read(bytes),
            Socket::Mpi(stream) => stream.read(bytes),
        }
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.read_vectored(slices),
            Socket::Tcp(stream) => stream.read_vectored(slices),
            Socket::Mpi(stream) => stream.read_vectored(slices),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.write(bytes),
            Socket::Tcp(stream) => stream.write(bytes),
            Socket::Mpi(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.write_vectored(slices),
            Socket::Tcp(stream) => stream.write_vectored(slices),
            Socket::Mpi(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for Socket {
    fn watch(&self, poll: &mut Poll, write: bool) {
        match self {
            Socket::Unix(stream) => poll.add(stream, write),
            Socket::Tcp(stream) => poll.add(stream, write),
            Socket::Mpi(stream) => stream.watch(poll, write),
        }
    }
}

/// Where other processes connect to this one.
pub(super) enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn open(at: &Address) -> io::Result<Self> {
        match at {
            Address::Path(path) => {
                let listener = UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Unix(listener, path.clone()))
            }
            Address::Tcp(address) => {
                let listener = pace::listen(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    /// The port, if it has one.
    pub(super) fn port(&self) -> u16 {
        match self {
            Listener::Unix(..) => 0,
            Listener::Tcp(listener) => listener.local_addr().map_or(0, |address| address.port()),
        }
    }

    /// The next connection, if there is one.
    pub(super) fn accept(&self) -> Option<Socket> {
        // A connection that was closed again is none.
        match self {
            Listener::Unix(listener, _) => Socket::unix(listener.accept().ok()?.0).ok(),
            Listener::Tcp(listener) => Socket::tcp(listener.accept().ok()?.0).ok(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}
