//! A library that is opened while the program runs.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// An open library. It stays open until the process ends: what it has started may still run.
#[derive(Clone, Copy, Debug)]
pub struct SharedLibrary(NonNull<libc::c_void>);

// SAFETY: the handle is only given to `dlsym`, which any thread may call.
unsafe impl Send for SharedLibrary {}
// SAFETY: as above.
unsafe impl Sync for SharedLibrary {}

impl SharedLibrary {
    /// Opens a library whose functions, and those of the libraries it needs, are visible to libraries
    /// that it opens itself. The error is what the system says.
    ///
    /// # Safety
    /// Opening a library runs its code: it must be one that may run in this process.
    pub unsafe fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the name ends with a zero; the rest is the caller's promise.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        NonNull::new(handle).map(Self).ok_or_else(last_error)
    }

    /// The address of a function.
    pub fn find(&self, name: &CStr) -> Result<NonNull<libc::c_void>, String> {
        // SAFETY: the library is open, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        NonNull::new(found).ok_or_else(last_error)
    }
}

fn last_error() -> String {
    // SAFETY: the text, if there is one, is valid until this thread's next such call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "for an unknown reason".to_owned();
    }
    // SAFETY: as above; it ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_opened_or_found_is_named() {
        // SAFETY: neither is a library that would run.
        let open = |path: &str| unsafe { SharedLibrary::open(Path::new(path)) };
        let error = open("/no/such.so").unwrap_err();
        assert!(error.contains("/no/such.so"), "{error}");
        assert!(open("/dev/null").is_err());
        assert!(open("a\0b").is_err());
    }
}
