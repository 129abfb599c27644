//! A byte stream to another rank of an MPI job.

use std::cell::Cell;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use phalanx_sys::Poll;

use super::flow::Flow;
use super::library::Mpi;
use crate::streams::Stream;

/// How many times in a row a stream is found empty before its rank sleeps between looks, and how long
/// it sleeps then. MPI makes progress only when it is called, and has nothing to sleep on.
const LOOKS: u32 = 500;
const PAUSE: Duration = Duration::from_micros(50);

/// A byte stream to another rank, which never blocks.
pub(crate) struct MpiStream {
    mpi: Arc<Mpi>,
    flow: ManuallyDrop<Flow>,
    /// How many reads in a row have found nothing.
    quiet: Cell<u32>,
}

impl MpiStream {
    pub(super) fn new(mpi: Arc<Mpi>, flow: Flow) -> Self {
        Self { mpi, flow: ManuallyDrop::new(flow), quiet: Cell::new(0) }
    }
}

impl Read for MpiStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.flow.read(&self.mpi, into) {
            Some(count) => {
                self.quiet.set(0);
                Ok(count)
            }
            None => {
                let quiet = self.quiet.get().saturating_add(1);
                self.quiet.set(quiet);
                if quiet.is_multiple_of(64) {
                    self.mpi.clear();
                }
                Err(ErrorKind::WouldBlock.into())
            }
        }
    }
}

impl Write for MpiStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.flow.write(&self.mpi, slices.iter().map(|slice| &**slice)) {
            Ok(Some(count)) => Ok(count),
            Ok(None) => Err(ErrorKind::WouldBlock.into()),
            Err(()) => Err(ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for MpiStream {
    fn watch(&self, poll: &mut Poll, _write: bool) {
        poll.look_again(if self.quiet.get() < LOOKS { Duration::ZERO } else { PAUSE });
    }
}

impl Drop for MpiStream {
    fn drop(&mut self) {
        // SAFETY: it is taken once, here, and not used afterwards.
        let mut flow = unsafe { ManuallyDrop::take(&mut self.flow) };
        if !flow.is_over(&self.mpi) {
            self.mpi.leave(flow);
        }
    }
}
