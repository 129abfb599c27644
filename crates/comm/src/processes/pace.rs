//! The pace at which the kernel sends on TCP connections.
//!
//! The congestion control `bbr` sends at a rate that it estimates over about ten round trips. Within a cluster these
//! are over sooner than the pause between two calls of a step, so the estimate is one of the pauses, and blocks leave
//! at a fraction of the speed (docs/communication.md has numbers). `reno` sends as acknowledgements return, and
//! every Linux has it, and nearly all let all users choose it. The choice must be made before the connection: one that `bbr` has
//! begun keeps its pace.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Connects, for at most this time.
pub(super) fn connect(to: &SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(*to), Type::STREAM, Some(Protocol::TCP))?;
    send_at_once(SockRef::from(&socket), to.ip());
    socket.connect_timeout(&(*to).into(), patience)?;
    Ok(socket.into())
}

/// Listens. The connections that come have the listener's congestion control.
pub(super) fn listen(at: &SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    send_at_once(SockRef::from(&listener), at.ip());
    Ok(listener)
}

/// Within a cluster, replaces `bbr` if it is what the host gives to connections. Another choice of the host stays, and
/// so does `bbr` on ways through networks that are shared with strangers.
#[cfg(target_os = "linux")]
fn send_at_once(socket: SockRef<'_>, address: IpAddr) {
    let is_bbr = || socket.tcp_congestion().is_ok_and(|own| own.starts_with(b"bbr"));
    if in_cluster(address) && is_bbr() {
        // A host may keep it from its users. That costs speed, and nothing else.
        let _ = socket.set_tcp_congestion(b"reno");
    }
}

/// Other systems have no `bbr`.
#[cfg(not(target_os = "linux"))]
fn send_at_once(_: SockRef<'_>, _: IpAddr) {}

/// Whether an address is one of those that no public network uses.
#[cfg(target_os = "linux")]
fn in_cluster(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_private() || v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local(),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// `bbr` goes wherever the kernel has it; what else a host chose stays, and so does `bbr` far away.
    #[test]
    fn only_bbr_is_replaced_and_only_in_a_cluster() {
        for (address, replaced) in
            [("10.1.2.3", true), ("127.0.0.1", true), ("fd00::1", true), ("8.8.8.8", false)]
        {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
            let socket = SockRef::from(&socket);
            // Kernels without bbr, and hosts that keep it for themselves, have nothing to replace.
            for name in ["bbr", "cubic", "reno"] {
                if socket.set_tcp_congestion(name.as_bytes()).is_err() {
                    continue;
                }
                send_at_once(SockRef::from(&*socket), address.parse().unwrap());
                let now = String::from_utf8(socket.tcp_congestion().unwrap()).unwrap();
                let expected = if name == "bbr" && replaced { "reno" } else { name };
                assert_eq!(now.trim_end_matches('\0'), expected, "{address}");
            }
        }
    }

    /// Both ends of a connection have what was chosen before it.
    #[test]
    fn connections_have_the_choice_at_both_ends() {
        let listener = listen(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let here = connect(&listener.local_addr().unwrap(), Duration::from_secs(1)).unwrap();
        let there = listener.accept().unwrap().0;
        for end in [&here, &there] {
            assert!(!SockRef::from(end).tcp_congestion().unwrap().starts_with(b"bbr"));
        }
    }
}
