//! From kernels to machine code, by NVRTC, with a cache on disk.
//!
//! Compiling needs no GPU. What was compiled is kept under a hash of everything that it depends on:
//! source, options, compiler. A file that is damaged is compiled again.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

use crate::cache::{self, Cache};
use crate::error::CudaError;
use crate::kernels::{KernelSpec, Source};
use crate::libraries::{Handle, Nvrtc};

/// Machine code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Cubin {
    /// For each kernel that was asked for: its name in the code.
    pub(crate) names: Vec<String>,
    pub(crate) bytes: Vec<u8>,
}

/// The code of these kernels.
pub(crate) fn compile(specs: &[&KernelSpec], architecture: &str) -> Result<Cubin, CudaError> {
    let nvrtc = Nvrtc::get()?;
    let source = source(specs);
    let entries: Vec<&str> = specs.iter().map(|spec| spec.entry.as_str()).collect();
    let options = options(architecture);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the out-pointers are valid.
    check("nvrtcVersion", unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) })?;
    let compiler = format!("nvrtc {major}.{minor}");
    let key = cache::key("cubin", &[&compiler, &options.join(" "), &entries.join("\n"), &source]);
    let cache = Cache::here();
    let kept = cache.find(&key).and_then(|bytes| Cubin::unpacked(&bytes));
    if let Some(kept) = kept.filter(|cubin| cubin.names.len() == entries.len()) {
        return Ok(kept);
    }
    let made = Unit::new(nvrtc, &source)?.compile(&entries, &options)?;
    cache.keep(&key, &made.packed());
    Ok(made)
}

impl Cubin {
    /// The names, one in a line, then an empty line and the code.
    fn packed(&self) -> Vec<u8> {
        [self.names.join("\n").as_bytes(), b"\n\n", &self.bytes].concat()
    }

    fn unpacked(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(2).position(|two| two == b"\n\n")?;
        let names = std::str::from_utf8(&bytes[..end]).ok()?.lines().map(str::to_owned).collect();
        Some(Self { names, bytes: bytes[end + 2..].to_vec() })
    }
}

/// The same without the cache, to see whether kernels compile.
#[cfg(test)]
pub(crate) fn compile_again(specs: &[&KernelSpec], architecture: &str) -> Result<Cubin, CudaError> {
    let entries: Vec<&str> = specs.iter().map(|spec| spec.entry.as_str()).collect();
    Unit::new(Nvrtc::get()?, &source(specs))?.compile(&entries, &options(architecture))
}

/// Products and sums are contracted only where a kernel says so: a fused group must give the bits of
/// separate ops.
fn options(architecture: &str) -> Vec<String> {
    vec![
        format!("--gpu-architecture={architecture}"),
        "--fmad=false".to_owned(),
        "--std=c++17".to_owned(),
    ]
}

/// The files that some kernels need, each once, and the generated ones after them.
pub(crate) fn source(specs: &[&KernelSpec]) -> String {
    let files: BTreeSet<Source> = specs.iter().flat_map(|spec| spec.source.with_used()).collect();
    let mut texts: Vec<&str> = files.into_iter().map(Source::text).collect();
    texts.extend(specs.iter().filter_map(|spec| spec.generated.as_deref()));
    texts.join("\n")
}

/// A text that is being compiled.
struct Unit {
    nvrtc: &'static Nvrtc,
    program: Handle,
}

impl Unit {
    fn new(nvrtc: &'static Nvrtc, source: &str) -> Result<Self, CudaError> {
        let (text, mut program) = (string(source)?, null_mut());
        // SAFETY: the strings outlive the call, which copies them; the out-pointer is valid.
        let status = unsafe {
            let name = c"kernels.cu".as_ptr();
            (nvrtc.nvrtcCreateProgram)(&mut program, text.as_ptr(), name, 0, null(), null())
        };
        check("nvrtcCreateProgram", status)?;
        Ok(Self { nvrtc, program })
    }

    fn compile(&self, entries: &[&str], options: &[String]) -> Result<Cubin, CudaError> {
        let nvrtc = self.nvrtc;
        let entries: Vec<CString> = entries.iter().map(|e| string(e)).collect::<Result<_, _>>()?;
        for entry in &entries {
            // SAFETY: the program is valid, and the name is a string.
            let status = unsafe { (nvrtc.nvrtcAddNameExpression)(self.program, entry.as_ptr()) };
            check("nvrtcAddNameExpression", status)?;
        }
        let options: Vec<CString> = options.iter().map(|o| string(o)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the options are as many strings as is said, and outlive the call.
        let status = unsafe {
            (nvrtc.nvrtcCompileProgram)(self.program, pointers.len() as i32, pointers.as_ptr())
        };
        if status != 0 {
            let log = self.log();
            let architecture = options[0].to_string_lossy();
            return Err(match log.contains("invalid value for --gpu-architecture") {
                true => CudaError::UnknownGpu {
                    architecture: architecture.rsplit('=').next().unwrap_or_default().to_owned(),
                },
                false => CudaError::Compile { log },
            });
        }
        let names = entries.iter().map(|entry| self.lowered(entry)).collect::<Result<_, _>>()?;
        Ok(Cubin { names, bytes: self.code()? })
    }

    /// The name of a kernel in the machine code.
    fn lowered(&self, entry: &CStr) -> Result<String, CudaError> {
        let mut name: *const c_char = null();
        // SAFETY: the entry was added to this program, which keeps the name.
        unsafe {
            let status = (self.nvrtc.nvrtcGetLoweredName)(self.program, entry.as_ptr(), &mut name);
            check("nvrtcGetLoweredName", status)?;
            Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }

    fn code(&self) -> Result<Vec<u8>, CudaError> {
        let mut size = 0;
        // SAFETY: the out-pointer is valid, and the buffer has the size that NVRTC says.
        unsafe {
            check("nvrtcGetCUBINSize", (self.nvrtc.nvrtcGetCUBINSize)(self.program, &mut size))?;
            let mut bytes = vec![0; size];
            check("nvrtcGetCUBIN", (self.nvrtc.nvrtcGetCUBIN)(self.program, bytes.as_mut_ptr()))?;
            Ok(bytes)
        }
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the out-pointer is valid, and the buffer has the size that NVRTC says.
        unsafe {
            (self.nvrtc.nvrtcGetProgramLogSize)(self.program, &mut size);
            let mut text = vec![0; size];
            (self.nvrtc.nvrtcGetProgramLog)(self.program, text.as_mut_ptr());
            String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
        }
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: the program is this value's own.
        unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.program) };
    }
}

fn string(text: &str) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError::Compile { log: "a zero in a source".to_owned() })
}

fn check(function: &'static str, status: i32) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Call { function, why: format!("status {status}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_unpacked_as_it_was_packed() {
        let names = vec!["a".to_owned(), "b".to_owned()];
        let cubin = Cubin { names, bytes: vec![b'\n', b'\n', 3] };
        assert_eq!(Cubin::unpacked(&cubin.packed()), Some(cubin));
        assert_eq!(Cubin::unpacked(b"a\nb"), None);
    }
}
