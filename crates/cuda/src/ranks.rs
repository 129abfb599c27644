//! How ranks on GPUs exchange.
//!
//! | where ranks are | how |
//! |---|---|
//! | all share a GPU, as threads or as processes of its host | through the GPU's memory: [`mover`] |
//! | each has a GPU of its own, and all have NCCL | by NCCL: [`nccl`] |
//! | anywhere else | through the host's memory, by the transport that they came with |
//!
//! Ranks tell each other where they are over the transport of the host's memory that they have anyway, so all
//! decide the same.

#[cfg(test)]
mod conformance;
mod mapped;
mod marks;
mod mover;
mod nccl;

use std::fmt;
use std::sync::Arc;

use phalanx_comm::{Collectives, Communicator, GroupId};
use phalanx_engine::EngineError;
use phalanx_ir::random::fnv1a;

use crate::device::{Device, Stream};
pub(crate) use mover::CudaMover;
#[cfg(test)]
pub(crate) use mover::kernels;
use nccl::NcclEndpoint;

/// How ranks on GPUs exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuLink {
    /// What fits where the ranks are.
    #[default]
    Auto,
    /// Through the memory of the GPU that all ranks share.
    Device,
    /// By NCCL, with a GPU for each rank.
    Nccl,
    /// Through the host's memory.
    Host,
}

impl fmt::Display for GpuLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GpuLink::Auto => "auto",
            GpuLink::Device => "device",
            GpuLink::Nccl => "nccl",
            GpuLink::Host => "host",
        })
    }
}

/// Where a rank is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Whereabouts {
    host: u64,
    gpu: [i32; 4],
    process: i32,
    /// The version of NCCL there; zero if there is none.
    nccl: i32,
}

/// An endpoint, and what it moves.
pub(crate) struct Linked {
    pub(crate) comm: Box<dyn Communicator>,
    /// Whether messages move the host's memory, even if collectives do not.
    pub(crate) messages_through_host: bool,
    /// Whether all ranks are known to be on this host.
    pub(crate) one_host: bool,
}

/// The endpoint as the engine of a rank uses it.
pub(crate) fn linked(
    mut comm: Box<dyn Communicator>,
    device: &Arc<Device>,
    stream: &Arc<Stream>,
    wish: GpuLink,
) -> Result<Linked, EngineError> {
    let (rank, failed) = (comm.rank(), |why: String| EngineError::Failed {
        program: "finding the other ranks' GPUs".to_owned(),
        why,
    });
    let plain = |comm, one_host| Linked { comm, messages_through_host: false, one_host };
    if wish == GpuLink::Host || comm.world() == 1 {
        let alone = comm.world() == 1;
        return Ok(plain(comm, alone));
    }
    let all = gathered(&mut *comm, Whereabouts::of(device)).map_err(|e| failed(e.to_string()))?;
    let one_host = all.iter().all(|at| at.host == all[0].host);
    match chosen(&all, wish).map_err(|why| failed(why.to_owned()))? {
        GpuLink::Nccl => {
            let made = NcclEndpoint::new(comm, device, stream);
            let comm: Box<dyn Communicator> = Box::new(made.map_err(|e| failed(e.to_string()))?);
            return Ok(Linked { comm, messages_through_host: true, one_host });
        }
        GpuLink::Device => {}
        GpuLink::Auto | GpuLink::Host => return Ok(plain(comm, one_host)),
    }
    let processes = all.iter().any(|at| at.process != all[0].process);
    let mover = CudaMover::new(rank, processes, device, stream);
    match (comm.attach(Box::new(mover)), wish) {
        (Ok(()), _) | (Err(_), GpuLink::Auto) => Ok(plain(comm, one_host)),
        (Err(_), _) => Err(failed(
            "the transport between these ranks cannot move a GPU's memory; phalanx launch starts \
             ranks whose transport can"
                .to_owned(),
        )),
    }
}

/// How ranks at these places exchange.
fn chosen(all: &[Whereabouts], wish: GpuLink) -> Result<GpuLink, &'static str> {
    let same = |a: &Whereabouts, b: &Whereabouts| (a.host, a.gpu) == (b.host, b.gpu);
    let shared = all.iter().all(|at| same(at, &all[0]));
    let apart = (0..all.len()).all(|a| all[..a].iter().all(|at| !same(at, &all[a])));
    let nccl = all.iter().all(|at| at.nccl > 0 && at.nccl == all[0].nccl);
    match wish {
        GpuLink::Auto | GpuLink::Device if shared => Ok(GpuLink::Device),
        GpuLink::Auto | GpuLink::Nccl if apart && nccl => Ok(GpuLink::Nccl),
        GpuLink::Auto | GpuLink::Host => Ok(GpuLink::Host),
        GpuLink::Device => Err("they do not share one GPU"),
        GpuLink::Nccl if apart => Err("not all of them have the same version of NCCL"),
        GpuLink::Nccl => Err("NCCL needs a GPU for each rank, and some share one"),
    }
}

impl Whereabouts {
    fn of(device: &Device) -> Self {
        // The same in all containers of a machine, and new whenever it starts.
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let gpu = std::array::from_fn(|i| {
            let bytes = std::array::from_fn(|j| device.uuid()[4 * i + j]);
            i32::from_le_bytes(bytes)
        });
        let (process, nccl) = (std::process::id() as i32, nccl::version());
        Self { host: fnv1a(&boot), gpu, process, nccl }
    }

    fn words(self) -> [i32; 8] {
        let [a, b, c, d] = self.gpu;
        [self.host as i32, (self.host >> 32) as i32, a, b, c, d, self.process, self.nccl]
    }

    fn read(words: &[i32]) -> Self {
        let half = |word: i32| u64::from(word as u32);
        Self {
            host: half(words[0]) | half(words[1]) << 32,
            gpu: [words[2], words[3], words[4], words[5]],
            process: words[6],
            nccl: words[7],
        }
    }
}

/// Where all ranks are.
fn gathered(
    comm: &mut dyn Communicator,
    own: Whereabouts,
) -> Result<Vec<Whereabouts>, phalanx_comm::CommError> {
    let own = own.words();
    let mut all = vec![0; own.len() * comm.world()];
    comm.all_gather(GroupId::WORLD, &own, &mut all)?;
    comm.reset_traffic();
    Ok(all.chunks(own.len()).map(Whereabouts::read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whereabouts_are_read_as_written() {
        let at = Whereabouts {
            host: 0xFEDC_BA98_7654_3210,
            gpu: [-1, 2, 3, i32::MIN],
            process: 7,
            nccl: 22803,
        };
        assert_eq!(Whereabouts::read(&at.words()), at);
    }

    #[test]
    fn ranks_exchange_as_fits_where_they_are() {
        let at = |host, gpu, nccl| Whereabouts { host, gpu: [gpu; 4], process: 1, nccl };
        let same = [at(1, 1, 3), at(1, 1, 3)];
        let apart = [at(1, 1, 3), at(1, 2, 3), at(2, 1, 3)];
        let mixed = [at(1, 1, 3), at(1, 1, 3), at(1, 2, 3)];
        let without = [at(1, 1, 3), at(1, 2, 0)];
        let auto = |all: &[Whereabouts]| chosen(all, GpuLink::Auto);
        assert_eq!(auto(&same), Ok(GpuLink::Device));
        assert_eq!(auto(&apart), Ok(GpuLink::Nccl));
        assert_eq!([auto(&mixed), auto(&without)], [Ok(GpuLink::Host); 2]);
        assert!(chosen(&apart, GpuLink::Device).is_err());
        assert!(chosen(&same, GpuLink::Nccl).is_err() && chosen(&without, GpuLink::Nccl).is_err());
    }
}
