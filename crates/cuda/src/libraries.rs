//! NVIDIA's libraries, opened at run time: the same binary runs on machines without them.
//!
//! Each library is a table of the few C functions that are used here. Zero is success in all of them.

mod cublaslt;
mod cudnn;
mod driver;
mod nccl;
mod nvml;
mod nvrtc;

use std::ffi::{CStr, CString, c_void};

use crate::error::CudaError;

pub(crate) use cublaslt::{CublasLt, Heuristic};
pub(crate) use cudnn::Cudnn;
pub(crate) use driver::{Driver, IpcHandle, driver_call};
pub(crate) use nccl::{Nccl, UniqueId};
pub(crate) use nvml::{Nvml, RunningProcess};
pub(crate) use nvrtc::Nvrtc;

/// A handle of a library.
pub(crate) type Handle = *mut c_void;

/// An address in a GPU's memory.
pub(crate) type Address = u64;

/// Folders that are searched after those that the system's loader knows.
const FOLDERS: [&str; 3] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
];

/// An open library; it stays open until the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Opened {
    handle: Handle,
    pub(crate) library: &'static str,
    pub(crate) package: &'static str,
}

impl Opened {
    /// Opens the first file of these names that exists.
    pub(crate) fn first_of(
        library: &'static str,
        names: &[&str],
        package: &'static str,
    ) -> Result<Self, CudaError> {
        let plain = names.iter().map(|name| (*name).to_owned());
        let below = FOLDERS.iter().flat_map(|f| names.iter().map(move |n| format!("{f}/{n}")));
        let files: Vec<String> = plain.chain(below).collect();
        let mut found = None;
        for file in &files {
            let Ok(path) = CString::new(file.as_str()) else { continue };
            // SAFETY: the path is a string that outlives the call; these libraries may be opened by
            // any thread, and are never closed.
            let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            if !handle.is_null() {
                return Ok(Self { handle, library, package });
            }
            let why = why_not();
            let absent = why.starts_with(file) && why.ends_with("No such file or directory");
            if !absent && found.is_none() {
                found = Some((file.clone(), why));
            }
        }
        match found {
            Some((file, why)) => Err(CudaError::Unloadable { library, file, why, package }),
            None => Err(CudaError::Missing { library, files, package }),
        }
    }

    /// The address of a function.
    pub(crate) fn function(
        &self,
        name: &'static CStr,
        function: &'static str,
    ) -> Result<*mut c_void, CudaError> {
        let Self { library, package, .. } = *self;
        // SAFETY: the library is open, and the name is a string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        match address.is_null() {
            true => Err(CudaError::Old { library, function, package }),
            false => Ok(address),
        }
    }
}

/// What the system's loader says about the file that it did not open: a library may lack another one.
fn why_not() -> String {
    // SAFETY: the text is this thread's own until it calls the loader again.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "for a reason that the loader does not tell".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// A table of functions, opened once for the whole process.
macro_rules! library {
    (
        $(#[$doc:meta])*
        $table:ident: $name:literal in $files:expr, $package:literal;
        $(fn $function:ident($($argument:ty),* $(,)?);)*
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the names of the library's header")]
        pub(crate) struct $table {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl $table {
            /// The table, or why there is none.
            pub(crate) fn get() -> Result<&'static Self, crate::error::CudaError> {
                use std::sync::OnceLock;
                static TABLE: OnceLock<Result<$table, crate::error::CudaError>> = OnceLock::new();
                TABLE.get_or_init(Self::open).as_ref().map_err(Clone::clone)
            }

            fn open() -> Result<Self, crate::error::CudaError> {
                let opened = crate::libraries::Opened::first_of($name, $files, $package)?;
                Ok(Self {
                    $($function: {
                        let name = const {
                            match std::ffi::CStr::from_bytes_with_nul(
                                concat!(stringify!($function), "\0").as_bytes(),
                            ) {
                                Ok(name) => name,
                                Err(_) => panic!("a name has no zero inside"),
                            }
                        };
                        let address = opened.function(name, stringify!($function))?;
                        // SAFETY: the signature is the one of the library's header.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($argument),*) -> i32,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}
use library;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn refused(names: &[&str]) -> String {
        match Opened::first_of("a library", names, "its package") {
            Ok(_) => "it was opened".to_owned(),
            Err(why) => why.to_string(),
        }
    }

    #[test]
    fn a_file_that_is_absent_and_one_that_does_not_load_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let [absent, broken] = ["absent.so", "broken.so"].map(|name| folder.path().join(name));
        std::fs::write(&broken, [7; 100]).unwrap();
        let [absent, broken] = [absent, broken].map(|path| path.to_str().unwrap().to_owned());
        let why = refused(&[&absent]);
        assert!(why.contains("looked for") && why.contains("its package"), "{why}");
        let why = refused(&[&absent, &broken]);
        assert!(why.contains("broken.so is there") && why.contains("ELF"), "{why}");
    }
}
