//! Names of call sites, stored as small numbers.
//!
//! A call knows where it was made, only for error messages. Names are stored once for the life of
//! the process, so that a call carries a small number and no hot path formats text.

use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The name of a place in a script or in code, such as `blocks.3 grad`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site(u32);

impl Site {
    /// The site of this name. Every distinct name is kept for the life of the process: make sites
    /// when a plan is built, from names that repeat, not from counters that grow.
    pub fn named(name: &str) -> Self {
        let mut names = lock();
        if let Some(&id) = names.ids.get(name) {
            return Self(id);
        }
        let id = names.list.len() as u32;
        let name: &'static str = Box::leak(name.into());
        names.list.push(name);
        names.ids.insert(name, id);
        Self(id)
    }

    pub(crate) fn id(self) -> u32 {
        self.0
    }

    pub(crate) fn from_id(id: u32) -> Self {
        Self(id)
    }

    /// The name it was made with.
    pub fn name(self) -> &'static str {
        lock().list.get(self.0 as usize).copied().unwrap_or("an unnamed place")
    }
}

impl Default for Site {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Site({})", self.name())
    }
}

#[derive(Default)]
struct Names {
    list: Vec<&'static str>,
    ids: HashMap<&'static str, u32>,
}

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, Names> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once() {
        let (a, b, c) = (Site::named("here"), Site::named("there"), Site::named("here"));
        assert_eq!((a, a.name(), b.to_string()), (c, "here", "there".to_string()));
        assert_eq!(Site::default().name(), "an unnamed place");
    }
}
