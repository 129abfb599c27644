//! A stream of frames between the coordinator of a job and the agent of a host: over the input and
//! output of a remote shell, or over TCP. Both ends say several times a second that they live.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use phalanx_recovery::{BEAT, Silence};
use phalanx_sys::machine_nanos;

use super::frame::{read_frame, write_frame};
use crate::codec::{Code, decoded, encoded};

/// How long a frame may take to be written over TCP.
const PATIENCE: Duration = Duration::from_secs(2);

type Writer = Mutex<Box<dyn Write + Send>>;

/// One end of the stream. It is closed when it is dropped.
pub(crate) struct Link {
    writer: Arc<Writer>,
    frames: Receiver<Vec<u8>>,
    /// When something came last, on the machine's clock.
    heard: Arc<AtomicU64>,
    silence: Silence,
    closed: bool,
    socket: Option<TcpStream>,
}

/// Writes frames from other threads, as long as the link is there.
#[derive(Clone)]
pub(crate) struct LinkWriter(Weak<Writer>);

impl LinkWriter {
    /// Whether the link is still there.
    pub(crate) fn send(&self, what: &impl Code) -> bool {
        self.0.upgrade().is_some_and(|writer| put(&writer, &encoded(what)))
    }
}

impl Link {
    /// A link over any two streams.
    pub(crate) fn new(
        reader: impl Read + Send + 'static,
        writer: impl Write + Send + 'static,
    ) -> io::Result<Self> {
        let writer: Arc<Writer> = Arc::new(Mutex::new(Box::new(writer)));
        let (to, frames) = channel();
        let heard = Arc::new(AtomicU64::new(machine_nanos()));
        let (hears, beats) = (heard.clone(), Arc::downgrade(&writer));
        let threads = std::thread::Builder::new;
        threads().name("hears".to_owned()).spawn(move || listen(reader, &to, &hears))?;
        threads().name("beats".to_owned()).spawn(move || beat(&beats))?;
        let silence = Silence::begin(now());
        Ok(Self { writer, frames, heard, silence, closed: false, socket: None })
    }

    /// A link over TCP.
    pub(crate) fn over_tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut link = Self::new(stream.try_clone()?, stream.try_clone()?)?;
        link.socket = Some(stream);
        Ok(link)
    }

    /// Sends something. If that fails, the link is closed.
    pub(crate) fn send(&mut self, what: &impl Code) {
        self.closed |= !put(&self.writer, &encoded(what));
    }

    /// Sends from other threads.
    pub(crate) fn writer(&self) -> LinkWriter {
        LinkWriter(Arc::downgrade(&self.writer))
    }

    /// What has come next, if anything has. What cannot be read closes the link.
    pub(crate) fn next<T: Code>(&mut self) -> Option<T> {
        let bytes = match self.frames.try_recv() {
            Ok(bytes) => bytes,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => {
                self.closed = true;
                return None;
            }
        };
        let told = decoded(&bytes);
        self.closed |= told.is_none();
        told
    }

    /// Whether nothing will come any more, once all that has come is read.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// How long nothing has come, if that is longer than `most`.
    pub(crate) fn silence(&mut self, most: Duration) -> Option<Duration> {
        let heard = Duration::from_nanos(self.heard.load(Ordering::Relaxed));
        self.silence.look(heard, now(), most)
    }
}

/// The machine's clock.
fn now() -> Duration {
    Duration::from_nanos(machine_nanos())
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn put(writer: &Writer, body: &[u8]) -> bool {
    let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
    write_frame(&mut *writer, body).is_ok()
}

fn listen(mut reader: impl Read, to: &Sender<Vec<u8>>, heard: &AtomicU64) {
    while let Ok(Some(body)) = read_frame(&mut reader) {
        heard.store(machine_nanos(), Ordering::Relaxed);
        if !body.is_empty() && to.send(body).is_err() {
            return;
        }
    }
}

fn beat(writer: &Weak<Writer>) {
    let mut last = Instant::now();
    loop {
        std::thread::sleep(BEAT.saturating_sub(last.elapsed()).max(BEAT / 4));
        last = Instant::now();
        match writer.upgrade() {
            Some(writer) if put(&writer, &[]) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use std::net::TcpListener;

    use super::super::frame::Order;
    use super::*;

    fn pair() -> (Link, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Link::over_tcp(listener.accept().unwrap().0).unwrap(), far)
    }

    fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn both_ends_hear_each_other_until_one_is_gone() {
        let (mut one, far) = pair();
        let mut other = Link::over_tcp(far).unwrap();
        one.send(&Order::End(3));
        assert_eq!(wait(|| other.next::<Order>()), Order::End(3));
        // Nothing is said, but each knows that the other lives.
        one.heard.store(0, Ordering::Relaxed);
        wait(|| (one.heard.load(Ordering::Relaxed) > 0).then_some(()));
        assert_eq!(one.silence(Duration::from_secs(60)), None);
        let writer = one.writer();
        drop(one);
        wait(|| {
            other.next::<Order>();
            other.is_closed().then_some(())
        });
        assert!(!writer.send(&Order::End(0)));
    }

    #[test]
    fn other_bytes_close_a_link() {
        for bytes in [&[0xff; 8][..], &[1, 0, 0, 0, 9], b"GET / HTTP/1.1\r\n\r\n"] {
            let (mut link, mut far) = pair();
            far.write_all(bytes).unwrap();
            wait(|| {
                assert_eq!(link.next::<Order>(), None);
                link.is_closed().then_some(())
            });
        }
    }
}
