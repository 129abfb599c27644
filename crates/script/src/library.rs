//! The programs of a plan, each identified by a hash.
//!
//! Scripts run the same few programs again and again, and ranks that communicate must run the same
//! one. So the slots of a program are found once ([`Slots`]), with the engine's requirements, and
//! programs are compared by their [`ProgramHash`] alone.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::{self, Write};
use std::hash::Hasher;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_call::{Requirements, Slots};
use phalanx_ir::Program;

/// Identifies a program on every rank: equal programs have equal hashes. Two different programs
/// have the same hash with probability 2⁻¹²⁸.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProgramHash(u128);

impl ProgramHash {
    /// The hash of everything in a program.
    pub fn of(program: &Program) -> Self {
        let mut text = Hashed([DefaultHasher::new(), DefaultHasher::new()]);
        text.0[1].write_u8(1);
        write!(text, "{program:?}").expect("hashing text does not fail");
        let [high, low] = text.0.map(|hasher| u128::from(hasher.finish()));
        Self(high << 64 | low)
    }
}

impl fmt::Debug for ProgramHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Text that is hashed instead of kept.
struct Hashed([DefaultHasher; 2]);

impl Write for Hashed {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.iter_mut().for_each(|hasher| hasher.write(text.as_bytes()));
        Ok(())
    }
}

/// A program with the places of its values.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Its hash.
    pub hash: ProgramHash,
    /// The program.
    pub program: Arc<Program>,
    /// Where its values lie.
    pub slots: Arc<Slots>,
}

impl PartialEq for Placed {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.slots == other.slots
    }
}

impl Placed {
    /// A program whose values lie where these slots say.
    pub fn new(program: Program, slots: Slots) -> Self {
        let hash = ProgramHash::of(&program);
        Self { hash, program: Arc::new(program), slots: Arc::new(slots) }
    }
}

/// Programs whose slots are known already, for an engine with these requirements.
pub struct Library {
    requirements: Arc<dyn Requirements>,
    known: Mutex<HashMap<ProgramHash, Placed>>,
}

impl Library {
    /// An empty library.
    pub fn new(requirements: Arc<dyn Requirements>) -> Self {
        Self { requirements, known: Mutex::default() }
    }

    /// The program with its slots, which are found when it is first asked for.
    pub fn placed(&self, program: &Program) -> Placed {
        let hash = ProgramHash::of(program);
        // A thread that panicked while it held the lock left complete entries.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let placed = known.entry(hash).or_insert_with(|| Placed {
            hash,
            slots: Arc::new(Slots::assign_for(program, &*self.requirements)),
            program: Arc::new(program.clone()),
        });
        placed.clone()
    }

    /// Bytes that an engine keeps outside of its arena to run the programs that were asked for so far.
    pub fn beside(&self) -> usize {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.values().map(|placed| self.requirements.beside(&placed.program)).fold(0, usize::max)
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}
