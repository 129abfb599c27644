//! Waiting until one of several streams can be read or written.
//!
//! What has no descriptor, such as a message of another library, can only be looked at again and
//! again: then a wait is short.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Streams to wait for; the list is reused, so that it allocates only once.
#[derive(Default)]
pub struct Poll {
    streams: Vec<libc::pollfd>,
    pause: Option<Duration>,
}

impl Poll {
    /// Forgets all streams.
    pub fn clear(&mut self) {
        self.streams.clear();
        self.pause = None;
    }

    /// The wait also ends after this time, because something is waited for that is no stream. If it is
    /// zero, other threads may run meanwhile, and that is all.
    pub fn look_again(&mut self, after: Duration) {
        self.pause = Some(self.pause.map_or(after, |pause| pause.min(after)));
    }

    /// Adds a stream that is waited for until it can be read, or also written. It must stay open
    /// until the wait is over, or the wait may end for another reason.
    pub fn add(&mut self, stream: impl AsFd, write: bool) {
        let events = libc::POLLIN | if write { libc::POLLOUT } else { 0 };
        let fd = stream.as_fd().as_raw_fd();
        self.streams.push(libc::pollfd { fd, events, revents: 0 });
    }

    /// Whether one of the streams is ready now. What is no stream may be, so the answer is yes with it.
    pub fn is_ready(&mut self) -> bool {
        self.pause.is_some() || self.ask(0) > 0
    }

    /// Waits until one of the streams is ready, for at most this time. It may return early without
    /// a reason: check again.
    pub fn wait(&mut self, timeout: Duration) {
        // Rounded up, so that a short rest is not spent in a loop.
        let milliseconds = match self.pause {
            Some(_) => 0,
            None => timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        };
        let ready = self.ask(milliseconds);
        match self.pause.map(|pause| pause.min(timeout)) {
            Some(pause) if ready <= 0 && !pause.is_zero() => std::thread::sleep(pause),
            Some(_) => std::thread::yield_now(),
            None => {}
        }
    }

    /// How many streams are ready, within at most this time; a negative number after an error.
    fn ask(&mut self, milliseconds: i32) -> i32 {
        let (list, count) = (self.streams.as_mut_ptr(), self.streams.len() as libc::nfds_t);
        // SAFETY: the list has as many entries as is said, all initialised, and is ours alone.
        // Failures mean that there is nothing to wait for, which callers detect themselves.
        unsafe { libc::poll(list, count, milliseconds) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_stream_that_can_be_read_ends_the_wait() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let mut poll = Poll::default();
        poll.add(&other, false);
        poll.wait(Duration::from_millis(1));
        assert_eq!((poll.streams[0].revents, poll.is_ready()), (0, false));
        one.write_all(&[1]).unwrap();
        assert!(poll.is_ready());
        poll.wait(Duration::from_secs(60));
        assert_ne!(poll.streams[0].revents & libc::POLLIN, 0);
        poll.clear();
        poll.add(&one, true);
        poll.wait(Duration::from_secs(60));
        assert_ne!(poll.streams[0].revents & libc::POLLOUT, 0);
    }
    #[test]
    fn what_is_no_stream_ends_the_wait_soon() {
        let (_one, other) = UnixStream::pair().unwrap();
        let (start, mut poll) = (std::time::Instant::now(), Poll::default());
        for pause in [Duration::ZERO, Duration::from_micros(50)] {
            poll.clear();
            poll.add(&other, false);
            poll.look_again(pause);
            poll.wait(Duration::from_secs(600));
        }
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
