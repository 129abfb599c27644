//! What a rank publishes on a wall besides its state: rings of slots, each under its group and
//! channel, and names of call sites. A list for each rank, to which only that rank adds.

use std::ptr::NonNull;

use super::board::Ring;
use super::wall::Wall;
use crate::error::CommError;
use crate::group::Group;
use crate::site::Site;
use crate::sync::{AtomicU64, Ordering};

/// One entry; what it is about follows it.
#[repr(C, align(128))]
pub(super) struct Entry {
    /// The spot of the next entry; 0 while there is none.
    next: AtomicU64,
    kind: u64,
    /// Of a ring: one more than the channel, or 0 for a group. Of a name: the site's number.
    number: u64,
    /// Of a ring: how many ranks follow, each a word. Of a name: how many bytes follow.
    len: usize,
}

const RING: u64 = 1;
const NAME: u64 = 2;

/// The group or channel that a ring belongs to.
#[derive(Clone, Copy)]
pub(super) struct Key<'a> {
    pub(super) group: &'a Group,
    pub(super) channel: Option<u32>,
}

impl Key<'_> {
    fn number(&self) -> u64 {
        self.channel.map_or(0, |channel| u64::from(channel) + 1)
    }

    /// The name of a group or channel, for messages.
    pub(super) fn name(&self) -> String {
        match (self.channel, self.group.ranks()) {
            (Some(channel), [from, to]) => format!("{from}->{to} (channel {channel})"),
            _ => self.group.to_string(),
        }
    }
}

/// One rank's own list: it alone adds to it.
#[derive(Default)]
pub(super) struct Publisher {
    pub(super) rank: usize,
    /// The spot of its last entry; 0 before the first.
    last: u64,
    /// The sites whose names are published.
    named: Vec<bool>,
}

impl Publisher {
    pub(super) fn new(rank: usize) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Publishes a ring with this many slots; gives its entry's spot and the ring.
    pub(super) fn ring(
        &mut self,
        wall: &Wall,
        key: Key<'_>,
        depth: usize,
    ) -> Result<(u64, NonNull<Ring>), CommError> {
        let ranks = key.group.ranks();
        let before = ring_at(ranks.len());
        let bytes = Ring::bytes(depth, ranks.len()).and_then(|bytes| bytes.checked_add(before));
        let start = bytes.and_then(|bytes| wall.allocate(self.rank, bytes));
        let start = start.ok_or_else(|| self.full(wall, &format!("group {}", key.name())))?;
        let head = Entry::new(RING, key.number(), ranks.len());
        // SAFETY: there is room for entry, ranks and ring, which nobody else knows yet.
        let ring = unsafe {
            let entry = start.cast::<Entry>();
            entry.write(head);
            entry.add(1).cast::<usize>().copy_from(NonNull::from_ref(ranks).cast(), ranks.len());
            let ring = start.add(before).cast::<Ring>();
            Ring::write(ring, depth);
            ring
        };
        Ok((self.append(wall, start), ring))
    }

    /// Publishes the name of a site, unless that was done, or all ranks know it anyway.
    pub(super) fn name(&mut self, wall: &Wall, site: Site) -> Result<(), CommError> {
        let id = site.id() as usize;
        if wall.shared().is_none() || site == Site::default() || self.named.get(id) == Some(&true) {
            return Ok(());
        }
        if self.named.len() <= id {
            self.named.resize(id + 1, false);
        }
        self.named[id] = true;
        let name = site.name().as_bytes();
        let start = wall.allocate(self.rank, size_of::<Entry>() + name.len());
        let start = start.ok_or_else(|| self.full(wall, &format!("the name `{site}`")))?;
        // SAFETY: there is room for entry and name, which nobody else knows yet.
        unsafe {
            let entry = start.cast::<Entry>();
            entry.write(Entry::new(NAME, id as u64, name.len()));
            entry.add(1).cast::<u8>().copy_from(NonNull::from_ref(name).cast(), name.len());
        }
        self.append(wall, start);
        Ok(())
    }

    /// Makes an entry visible to all; gives its spot.
    fn append(&mut self, wall: &Wall, entry: NonNull<u8>) -> u64 {
        let spot = wall.origin.spot(entry.as_ptr());
        // As strong as the stamps of slots: a sleeper must not miss a ring any more than a call.
        link(wall, self.rank, self.last).store(spot, Ordering::SeqCst);
        self.last = spot;
        spot
    }

    #[cold]
    fn full(&self, wall: &Wall, what: &str) -> CommError {
        let shelf = wall.head().layout.shelf;
        CommError::System {
            what: format!("rank {} cannot publish {what}", self.rank),
            error: format!(
                "the {shelf} bytes for its groups and names are full; use fewer groups, or fewer \
                outstanding calls (depth {})",
                wall.head().depth
            ),
        }
    }
}

/// The ring that a rank has published under a key, looked for behind an entry of its list (0: from
/// the beginning); if there is none yet, the entry to continue from.
pub(super) fn find_ring(
    wall: &Wall,
    rank: usize,
    key: Key<'_>,
    mut after: u64,
) -> Result<NonNull<Ring>, u64> {
    while let Some((spot, entry)) = next(wall, rank, after) {
        if entry.kind == RING
            && entry.number == key.number()
            && entry.ranks() == key.group.ranks()
            && let Some(start) = NonNull::new(wall.origin.at(spot))
        {
            // SAFETY: the ring follows the ranks, as `Publisher::ring` has written it.
            return Ok(unsafe { start.add(ring_at(entry.len)).cast() });
        }
        after = spot;
    }
    Err(after)
}

/// The name of the group or channel whose ring an entry holds.
pub(super) fn group_name(wall: &Wall, spot: u64) -> String {
    let entry = entry(wall, spot);
    let channel = entry.number.checked_sub(1).map(|channel| channel as u32);
    match Group::new(entry.ranks()) {
        Ok(group) => Key { group: &group, channel }.name(),
        Err(error) => error.to_string(),
    }
}

/// The site that a rank means by a number.
pub(super) fn site(wall: &Wall, rank: usize, id: u32) -> Site {
    let site = Site::from_id(id);
    if wall.shared().is_none() || site == Site::default() {
        return site;
    }
    let mut after = 0;
    while let Some((spot, entry)) = next(wall, rank, after) {
        if entry.kind == NAME && entry.number == u64::from(id) {
            return Site::named(&String::from_utf8_lossy(entry.bytes()));
        }
        after = spot;
    }
    Site::default()
}

fn next(wall: &Wall, rank: usize, after: u64) -> Option<(u64, &Entry)> {
    let spot = link(wall, rank, after).load(Ordering::SeqCst);
    (spot != 0).then(|| (spot, entry(wall, spot)))
}

/// The word that holds the spot of the entry after this one.
fn link(wall: &Wall, rank: usize, after: u64) -> &AtomicU64 {
    if after == 0 { &wall.state(rank).first } else { &entry(wall, after).next }
}

fn entry(wall: &Wall, spot: u64) -> &Entry {
    // SAFETY: spots of entries come from `append`, and entries live as long as the wall.
    unsafe { &*wall.origin.at(spot).cast::<Entry>() }
}

/// Where a ring begins, behind an entry with this many ranks.
fn ring_at(ranks: usize) -> usize {
    (size_of::<Entry>() + ranks * size_of::<usize>()).next_multiple_of(align_of::<Ring>())
}

impl Entry {
    fn new(kind: u64, number: u64, len: usize) -> Self {
        Self { next: AtomicU64::new(0), kind, number, len }
    }

    fn ranks(&self) -> &[usize] {
        let len = if self.kind == RING { self.len } else { 0 };
        // SAFETY: this many words follow, written before the entry was published.
        unsafe { std::slice::from_raw_parts((&raw const *self).add(1).cast(), len) }
    }

    fn bytes(&self) -> &[u8] {
        let len = if self.kind == NAME { self.len } else { 0 };
        // SAFETY: this many bytes follow, written before the entry was published.
        unsafe { std::slice::from_raw_parts((&raw const *self).add(1).cast(), len) }
    }
}
