//! Starts ranks that share no memory: all of one process, or one whose streams are open already.

use std::io;
use std::os::unix::net::UnixStream;

use super::computing::StreamRank;
use super::endpoint::Endpoint;
use super::wire::Stream;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::launch::{Launcher, LocalRank, share_cores};
use crate::threads::Options;

/// Ranks of this process that communicate only over socket pairs.
///
/// The option `depth` has no effect: ranks may have any number of calls outstanding.
#[derive(Clone, Debug)]
pub struct Streams {
    /// How many; at least one.
    pub ranks: usize,
    /// How long they wait, and where they run.
    pub options: Options,
}

impl Streams {
    /// This many ranks, with default options.
    pub fn new(ranks: usize) -> Self {
        Self { ranks, options: Options::default() }
    }

    /// The ranks of a new world, connected by these streams.
    pub(crate) fn over<S: Stream + 'static>(
        &self,
        pair: impl Fn() -> io::Result<(S, S)>,
    ) -> Result<Vec<LocalRank>, CommError> {
        let (ranks, options) = (Launcher::ranks(self), &self.options);
        let mut streams: Vec<Vec<Option<Box<dyn Stream>>>> =
            (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
        let pairs = (0..ranks).flat_map(|one| (one + 1..ranks).map(move |other| (one, other)));
        for (one, other) in pairs {
            let (near, far) = pair().map_err(|error| CommError::System {
                what: format!("a stream between ranks {one} and {other} of {ranks}"),
                error: error.to_string(),
            })?;
            streams[one][other] = Some(Box::new(near));
            streams[other][one] = Some(Box::new(far));
        }
        let cores = share_cores(ranks, options.threads_per_rank, options.bind);
        let local = |(rank, (streams, cores))| {
            let endpoint = Endpoint::new(rank, streams, options.clone(), ranks);
            let endpoint: Box<dyn Communicator> = Box::new(StreamRank::new(endpoint, None));
            LocalRank { endpoint, cores }
        };
        Ok(streams.into_iter().zip(cores).enumerate().map(local).collect())
    }
}

/// The endpoint of a rank with these streams, by rank; none to itself. `local` ranks share this host's
/// cores; a world of one rank has its arenas, if they are to outlive it.
pub(crate) fn over_streams<S: Stream + 'static>(
    rank: usize,
    streams: Vec<Option<S>>,
    options: Options,
    local: usize,
    kept: Option<Box<dyn Communicator>>,
) -> Box<dyn Communicator> {
    let boxed = |stream: Option<S>| stream.map(|stream| -> Box<dyn Stream> { Box::new(stream) });
    let streams = streams.into_iter().map(boxed).collect();
    Box::new(StreamRank::new(Endpoint::new(rank, streams, options, local), kept))
}

impl Launcher for Streams {
    fn ranks(&self) -> usize {
        self.ranks.max(1)
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        self.over(sockets)
    }
}

fn sockets() -> io::Result<(UnixStream, UnixStream)> {
    let (near, far) = UnixStream::pair()?;
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    Ok((near, far))
}
