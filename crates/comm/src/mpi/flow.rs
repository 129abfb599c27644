//! Both directions between two ranks: pieces of bytes as messages of one tag.
//!
//! A message without bytes says that its sender is not there any more.

use std::collections::VecDeque;

use super::library::{Mpi, Tested};

/// The most bytes of a message: a data frame of a stream with what precedes it.
pub(super) const PIECE: usize = 132 << 10;

/// Messages that may be in flight in each direction.
const SENDS: usize = 4;
const RECEIVES: usize = 2;

/// Bytes on their way to a rank and from it.
pub(super) struct Flow {
    peer: usize,
    tag: i32,
    /// What is being sent.
    out: Vec<(i64, Box<[u8]>)>,
    spare: Vec<Box<[u8]>>,
    /// Where messages will be received, in this order.
    posted: VecDeque<(i64, Box<[u8]>)>,
    /// A message that came and was not read to its end.
    held: Option<Held>,
    /// Whether the other has said that it is not there any more, or this side.
    ended: bool,
    left: bool,
}

/// A message: how much of it was read, and how much there is.
struct Held {
    piece: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Flow {
    pub(super) fn new(peer: usize, tag: i32) -> Self {
        let (out, spare, posted) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { peer, tag, out, spare, posted, held: None, ended: false, left: false }
    }

    /// Takes bytes to be sent; how many, or nothing if as many as may be are in flight. An error means
    /// that nothing can be sent any more.
    pub(super) fn write<'a>(
        &mut self,
        mpi: &Mpi,
        slices: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Option<usize>, ()> {
        self.reap(mpi)?;
        if self.out.len() >= SENDS {
            return Ok(None);
        }
        let mut piece = self.spare.pop().unwrap_or_else(|| vec![0; PIECE].into());
        let mut count = 0;
        for slice in slices {
            let now = slice.len().min(PIECE - count);
            piece[count..count + now].copy_from_slice(&slice[..now]);
            count += now;
        }
        if count > 0 {
            self.send(mpi, piece, count)?;
        }
        Ok(Some(count))
    }

    fn send(&mut self, mpi: &Mpi, piece: Box<[u8]>, count: usize) -> Result<(), ()> {
        // SAFETY: the piece is kept in `out`, where its bytes do not move, until the request is done; a
        // flow is kept by its job until then.
        let request = unsafe { mpi.send(&piece[..count], self.peer, self.tag) };
        self.out.push((request.ok_or(())?, piece));
        Ok(())
    }

    /// Takes back what was sent.
    fn reap(&mut self, mpi: &Mpi) -> Result<(), ()> {
        let mut at = 0;
        while at < self.out.len() {
            match mpi.test(self.out[at].0) {
                Tested::Pending => at += 1,
                Tested::Done(_) => self.spare.push(self.out.swap_remove(at).1),
                // What the library does with the bytes is not known: they are never freed.
                Tested::Failed => {
                    std::mem::forget(self.out.swap_remove(at));
                    return Err(());
                }
            }
        }
        Ok(())
    }

    /// Reads bytes that came; zero at the end, and nothing if none are there yet.
    pub(super) fn read(&mut self, mpi: &Mpi, into: &mut [u8]) -> Option<usize> {
        if self.held.is_none() && !self.ended {
            self.held = self.next(mpi)?;
        }
        let Some(Held { piece, at, end }) = &mut self.held else { return Some(0) };
        let count = into.len().min(*end - *at);
        into[..count].copy_from_slice(&piece[*at..*at + count]);
        *at += count;
        if at == end
            && let Some(Held { piece, .. }) = self.held.take()
        {
            self.post(mpi, piece);
        }
        Some(count)
    }

    /// The next message: nothing if it has not come yet, and no message at the end.
    fn next(&mut self, mpi: &Mpi) -> Option<Option<Held>> {
        while !self.ended && self.posted.len() < RECEIVES {
            self.post(mpi, vec![0; PIECE].into());
        }
        let came = self.posted.front().map_or(Tested::Failed, |(request, _)| mpi.test(*request));
        match came {
            Tested::Pending => None,
            Tested::Done(count) if count > 0 => {
                self.posted.pop_front().map(|(_, piece)| Some(Held { piece, at: 0, end: count }))
            }
            Tested::Done(_) => {
                self.posted.pop_front();
                self.end(mpi);
                Some(None)
            }
            Tested::Failed => {
                // The library may still write there: the memory is never freed.
                std::mem::forget(self.posted.pop_front());
                self.end(mpi);
                Some(None)
            }
        }
    }

    /// Nothing follows: what was to be received is given up.
    fn end(&mut self, mpi: &Mpi) {
        self.ended = true;
        for (request, piece) in self.posted.drain(..) {
            if !mpi.cancel(request) {
                std::mem::forget(piece);
            }
        }
    }

    /// Lets a message be received.
    fn post(&mut self, mpi: &Mpi, mut piece: Box<[u8]>) {
        if self.ended {
            return;
        }
        // SAFETY: the piece is kept in `posted`, where its bytes do not move and nothing touches them,
        // until the request is done; what may still be written to is never freed.
        match unsafe { mpi.receive(&mut piece, self.peer, self.tag) } {
            Some(request) => self.posted.push_back((request, piece)),
            None => self.ended = true,
        }
    }

    /// Whether both sides know that nothing follows. What still comes is thrown away.
    pub(super) fn is_over(&mut self, mpi: &Mpi) -> bool {
        if !self.left {
            self.left = true;
            if self.send(mpi, Box::default(), 0).is_err() {
                self.ended = true;
            }
        }
        let sent = self.reap(mpi).is_err() || self.out.is_empty();
        let mut waste = [0; 4096];
        while !self.ended && self.read(mpi, &mut waste).is_some() {}
        sent && self.ended
    }
}
