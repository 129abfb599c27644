//! Queues of a rank, and kinds of memory.

use std::fmt;

/// The queue on which an action is issued. Actions of one lane start in order; lanes run
/// concurrently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Programs.
    Compute,
    /// Units that are gathered for the programs that read them.
    Gather,
    /// Gradients that are summed over ranks.
    Reduce,
    /// Messages to other ranks.
    Send,
    /// Messages from other ranks.
    Receive,
    /// Values that another stage group keeps for a while: there, and back.
    Park,
    /// The same, where they arrive.
    Take,
    /// Copies to the tier `Device`: batches, and what was moved out of it before.
    Up,
    /// Copies out of the tier `Device`.
    Down,
    /// Copies between the host's memory and files.
    Disk,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Lane; 10] = [
        Lane::Compute,
        Lane::Gather,
        Lane::Reduce,
        Lane::Send,
        Lane::Receive,
        Lane::Park,
        Lane::Take,
        Lane::Up,
        Lane::Down,
        Lane::Disk,
    ];

    /// Whether its actions end in order. A message ends when its other end takes part, which may be
    /// long after the next one was issued: the lanes of messages keep only the order of starts.
    pub const fn ends_in_order(self) -> bool {
        !matches!(self, Lane::Send | Lane::Receive | Lane::Park | Lane::Take)
    }
}

/// A kind of memory of a rank, by its distance from where programs run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Tier {
    /// Where programs run. On a CPU engine that is the host's memory.
    #[default]
    Device,
    /// The host's memory, next to a device that cannot address it.
    Host,
    /// A file.
    Disk,
}

impl Tier {
    /// Every tier, the nearest first.
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Disk];

    /// Its place in [`Tier::ALL`], for tables by tier.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The lane of copies from this tier to another one; none within a tier.
    pub const fn lane_to(self, into: Tier) -> Option<Lane> {
        match (self, into) {
            (Tier::Device, Tier::Device) | (Tier::Host, Tier::Host) | (Tier::Disk, Tier::Disk) => {
                None
            }
            (Tier::Disk, _) | (_, Tier::Disk) => Some(Lane::Disk),
            (Tier::Host, Tier::Device) => Some(Lane::Up),
            (Tier::Device, Tier::Host) => Some(Lane::Down),
        }
    }

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A kind of memory that programs compute in and transports move, such as the host's or a GPU's.
///
/// An engine and a transport fit together if they are of the same kind. The set is open: an engine
/// for another kind of memory defines its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryKind(&'static str);

impl MemoryKind {
    /// Memory that the processor's cores address.
    pub const HOST: MemoryKind = MemoryKind::named("host");

    /// The kind of this name.
    pub const fn named(name: &'static str) -> Self {
        Self(name)
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
