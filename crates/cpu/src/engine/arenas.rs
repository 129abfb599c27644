//! The memory of an engine: an arena for each tier that this machine has.

use std::ops::Range;

use phalanx_call::Tier;
use phalanx_engine::{EngineError, Span};
use phalanx_sys::Arena;

use crate::tasks::Bases;

/// The arenas. Device and host are both memory of this machine; the tier `Disk` is not memory.
#[derive(Default)]
pub(super) struct Arenas([Option<Arena>; Tier::ALL.len()]);

impl Arenas {
    pub(super) fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        offered(tier, "arena")?;
        self.0[tier.index()] = Some(allocate(bytes.max(1))?);
        Ok(())
    }

    /// Where the arenas begin.
    pub(super) fn bases(&self) -> Bases {
        let base =
            |arena: &Option<Arena>| arena.as_ref().map_or(std::ptr::null_mut(), Arena::as_ptr);
        Bases(std::array::from_fn(|tier| base(&self.0[tier])))
    }

    /// The address of a piece of an arena.
    pub(super) fn address(&mut self, span: Span) -> Result<*const u8, EngineError> {
        let (arena, range) = self.piece(span)?;
        // Not by way of a slice: others may be reading the arena.
        Ok(arena.as_ptr().wrapping_add(range.start))
    }

    pub(super) fn write(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        into.holds(bytes.len())?;
        let (arena, range) = self.piece(into)?;
        arena.as_mut_slice()[range].copy_from_slice(bytes);
        Ok(())
    }

    pub(super) fn read(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        from.holds(out.len())?;
        let (arena, range) = self.piece(from)?;
        out.copy_from_slice(&arena.as_mut_slice()[range]);
        Ok(())
    }

    fn piece(&mut self, span: Span) -> Result<(&mut Arena, Range<usize>), EngineError> {
        let arena = self.0[span.tier.index()].as_mut();
        let end = arena.as_ref().map_or(0, |arena| arena.len());
        match arena.filter(|_| span.end() <= end) {
            Some(arena) => Ok((arena, span.offset..span.end())),
            None => Err(EngineError::Failed {
                program: format!("{} arena", span.tier),
                why: format!("bytes {}..{} lie outside its {end}", span.offset, span.end()),
            }),
        }
    }
}

/// Fails for a tier that this engine does not have.
pub(super) fn offered(tier: Tier, what: &str) -> Result<(), EngineError> {
    match tier {
        Tier::Device | Tier::Host => Ok(()),
        Tier::Disk => Err(EngineError::Unsupported {
            engine: "cpu",
            program: what.to_owned(),
            op: format!("the tier `{tier}`"),
            why: "it only writes to a disk; keep what is read in the host's memory".to_owned(),
        }),
    }
}

pub(super) fn allocate(bytes: usize) -> Result<Arena, EngineError> {
    Arena::new(bytes).map_err(|e| EngineError::Memory { bytes, why: e.to_string() })
}
