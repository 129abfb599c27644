//! The shim as this process has opened it.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_sys::SharedLibrary;

use super::flow::Flow;
use super::stream::MpiStream;
use crate::error::CommError;
use crate::launch::{LocalRank, share_cores};
use crate::streams::over_streams;
use crate::threads::Options;

/// The functions' meaning that this file knows; the shim says which it has.
const ABI: i32 = 1;

/// The tags of lines between processes, and of their worlds. MPI promises at least 32767.
const LINE_TAG: i32 = 0;
const FIRST_WORLD: i32 = 1;
const WORLDS: i32 = 32_000;

/// What functions of the shim return.
const DONE: i32 = 1;
const PENDING: i32 = 0;
const TOO_FEW_THREADS: i32 = -2;

/// The functions of the shim.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut i32, *mut i32) -> i32,
    version: unsafe extern "C" fn(*mut c_char, i32) -> i32,
    send: unsafe extern "C" fn(*const c_void, i64, i32, i32) -> i64,
    receive: unsafe extern "C" fn(*mut c_void, i64, i32, i32) -> i64,
    test: unsafe extern "C" fn(i64, *mut i64) -> i32,
    cancel: unsafe extern "C" fn(i64) -> i32,
    abort: unsafe extern "C" fn(i32) -> i32,
}

/// An MPI job that this process has joined, as one rank of it. A process can do that once.
pub struct Mpi {
    /// The shim expects one call at a time.
    functions: Mutex<Functions>,
    rank: usize,
    ranks: usize,
    version: String,
    /// How many worlds were made; all processes make them in the same order.
    worlds: AtomicI32,
    /// Streams that are not used any more, until both ends know it.
    leaving: Mutex<Vec<Flow>>,
}

impl Mpi {
    /// Opens a shim and joins the job that `mpirun` has started; must be called once, by the main
    /// thread. At the end of the process the job is left.
    pub fn join(shim: &Path) -> Result<Arc<Self>, CommError> {
        let fail = |error: String| CommError::Meeting {
            problem: format!("the MPI shim {} cannot be used: {error}", shim.display()),
            fix: "remove the file, so that it is built again, or build it with tools/mpi"
                .to_owned(),
        };
        // SAFETY: the file is the shim, built by this program or named by the user.
        let library = unsafe { SharedLibrary::open(shim) }.map_err(fail)?;
        let functions = Functions::find(&library).map_err(fail)?;
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: both places may be written.
        match unsafe { (functions.init)(&mut rank, &mut ranks) } {
            DONE => {}
            TOO_FEW_THREADS => {
                return Err(fail("the MPI library is not built for programs with threads".into()));
            }
            _ => return Err(fail("the MPI library does not start".into())),
        }
        let mut text = [0; 512];
        // SAFETY: the text has this much room, and ends with a zero.
        unsafe { (functions.version)(text.as_mut_ptr(), text.len() as i32) };
        // SAFETY: the last byte is zero, whatever was written.
        let version = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        let version = version.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(Arc::new(Self {
            functions: Mutex::new(functions),
            rank: rank as usize,
            ranks: ranks as usize,
            version,
            worlds: AtomicI32::new(0),
            leaving: Mutex::default(),
        }))
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks the job has.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// What the MPI library calls itself.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// This process's rank in a new world of the first so many; nothing if it is not one of them. All
    /// processes of the job must call it together.
    pub fn world(self: &Arc<Self>, ranks: usize, options: &Options) -> Option<LocalRank> {
        let streams = self.streams(ranks)?;
        let endpoint = over_streams(self.rank, streams, options.clone(), 1, None);
        let cores = share_cores(1, options.threads_per_rank, false).remove(0);
        Some(LocalRank { endpoint, cores })
    }

    /// A stream to each of the first so many processes, by rank, none to itself. They are of a new
    /// world, so what is left of others does not reach them.
    pub(crate) fn streams(self: &Arc<Self>, ranks: usize) -> Option<Vec<Option<MpiStream>>> {
        let tag = FIRST_WORLD + self.worlds.fetch_add(1, Ordering::Relaxed) % WORLDS;
        let stream = |peer: usize| {
            (peer != self.rank).then(|| MpiStream::new(self.clone(), Flow::new(peer, tag)))
        };
        (self.rank < ranks).then(|| (0..ranks).map(stream).collect())
    }

    /// The stream over which processes talk besides any world.
    pub(crate) fn line(self: &Arc<Self>, peer: usize) -> MpiStream {
        MpiStream::new(self.clone(), Flow::new(peer, LINE_TAG))
    }

    /// Ends all processes of the job, at once.
    pub fn abort(&self, code: i32) {
        let functions = self.functions();
        // SAFETY: only one call at a time.
        unsafe { (functions.abort)(code) };
    }

    /// Starts to send; gives the request.
    ///
    /// # Safety
    /// The bytes stay where they are, unchanged, until the request is done.
    pub(super) unsafe fn send(&self, bytes: &[u8], to: usize, tag: i32) -> Option<i64> {
        let functions = self.functions();
        // SAFETY: the caller keeps the bytes.
        let request =
            unsafe { (functions.send)(bytes.as_ptr().cast(), bytes.len() as i64, to as i32, tag) };
        (request >= 0).then_some(request)
    }

    /// Starts to receive; gives the request.
    ///
    /// # Safety
    /// The room stays where it is, and nothing else uses it, until the request is done.
    pub(super) unsafe fn receive(&self, room: &mut [u8], from: usize, tag: i32) -> Option<i64> {
        let functions = self.functions();
        let (base, len) = (room.as_mut_ptr().cast(), room.len() as i64);
        // SAFETY: the caller keeps the room.
        let request = unsafe { (functions.receive)(base, len, from as i32, tag) };
        (request >= 0).then_some(request)
    }

    /// How many bytes came, once a request is done; then it is over.
    pub(super) fn test(&self, request: i64) -> Tested {
        let (functions, mut length) = (self.functions(), 0);
        // SAFETY: the length may be written.
        match unsafe { (functions.test)(request, &mut length) } {
            DONE => Tested::Done(length as usize),
            PENDING => Tested::Pending,
            _ => Tested::Failed,
        }
    }

    /// Gives up a receive; says whether its room is free now.
    pub(super) fn cancel(&self, request: i64) -> bool {
        let functions = self.functions();
        // SAFETY: only one call at a time.
        unsafe { (functions.cancel)(request) == DONE }
    }

    /// Keeps a stream that is not used any more until the other end knows it.
    pub(super) fn leave(&self, flow: Flow) {
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.push(flow);
    }

    /// Goes on with streams that are not used any more.
    pub(super) fn clear(&self) {
        if let Ok(mut leaving) = self.leaving.try_lock() {
            leaving.retain_mut(|flow| !flow.is_over(self));
        }
    }

    fn functions(&self) -> MutexGuard<'_, Functions> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tested {
    Pending,
    Done(usize),
    Failed,
}

impl Functions {
    fn find(library: &SharedLibrary) -> Result<Self, String> {
        // SAFETY: the types are those of tools/mpi/shim.c, whose number is checked first.
        unsafe {
            let abi: unsafe extern "C" fn() -> i32 = function(library, c"phx_abi")?;
            let found = abi();
            if found != ABI {
                return Err(format!("it has version {found}, and this program needs {ABI}"));
            }
            Ok(Self {
                init: function(library, c"phx_init")?,
                version: function(library, c"phx_version")?,
                send: function(library, c"phx_send")?,
                receive: function(library, c"phx_receive")?,
                test: function(library, c"phx_test")?,
                cancel: function(library, c"phx_cancel")?,
                abort: function(library, c"phx_abort")?,
            })
        }
    }
}

/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn function<F: Copy>(library: &SharedLibrary, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let found = library.find(name)?.as_ptr();
    // SAFETY: a function's address has the size of a pointer, and the caller knows its type.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}
