//! The memory of an engine: an arena for each tier that this machine has.

use std::ops::Range;

use phalanx_call::Tier;
use phalanx_comm::Communicator;
use phalanx_engine::{EngineError, Span};
use phalanx_sys::Arena;

use crate::tasks::Bases;

/// The arenas. Device and host are both memory of this machine; the tier `Disk` is not memory.
#[derive(Default)]
pub(super) struct Arenas([Option<Arena>; Tier::ALL.len()]);

impl Arenas {
    /// Reserves the arena of a tier. Collectives and messages use that of the device, which
    /// therefore lies where other ranks see it, if the endpoint knows such memory.
    pub(super) fn reserve(
        &mut self,
        tier: Tier,
        bytes: usize,
        comm: Option<&mut dyn Communicator>,
    ) -> Result<(), EngineError> {
        offered(tier, "arena")?;
        let bytes = bytes.max(1);
        let lent = match comm.filter(|_| tier == Tier::Device) {
            Some(comm) => comm
                .arena(bytes)
                .map_err(|error| EngineError::Memory { bytes, why: error.to_string() })?,
            None => None,
        };
        let arena = lent.map_or_else(|| allocate(bytes), Ok)?;
        self.0[tier.index()] = Some(arena);
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

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::os::fd::AsRawFd;

    use phalanx_comm::{Options, SharedWorld};

    use super::*;

    /// What the system says about the memory that an address lies in.
    fn mapping(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let holds = |line: &&str| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
            (start..end).contains(&address)
        };
        maps.lines().find(holds).unwrap().to_string()
    }

    #[test]
    fn what_collectives_use_lies_where_other_processes_see_it() {
        let world = SharedWorld::create(1, &Options::default()).unwrap();
        let fd = world.fd().as_raw_fd();
        let mut local = SharedWorld::attach(fd, 0, Options::default()).unwrap();
        let mut arenas = Arenas::default();
        for (tier, shared) in [(Tier::Device, true), (Tier::Host, false)] {
            arenas.reserve(tier, 10_000, Some(local.endpoint.as_mut())).unwrap();
            let said = mapping(arenas.bases().0[tier.index()].addr());
            assert_eq!(said.contains("memfd:phalanx"), shared, "{tier}: {said}");
            let mut out = [7; 16];
            arenas.read(Span { tier, ..Span::device(9984, 16) }, &mut out).unwrap();
            assert_eq!(out, [0; 16]);
        }
    }
}
