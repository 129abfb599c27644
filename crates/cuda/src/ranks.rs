//! How ranks on GPUs exchange.
//!
//! | where ranks are | how |
//! |---|---|
//! | all share a GPU, as threads or as processes of its host | through the GPU's memory: [`mover`] |
//! | anywhere else | through the host's memory, by the transport that they came with |
//!
//! Ranks tell each other where they are over the transport of the host's memory that they have anyway, so all
//! decide the same.

#[cfg(test)]
mod conformance;
mod mapped;
mod marks;
mod mover;

use std::fmt;
use std::sync::Arc;

use phalanx_comm::{Collectives, Communicator, GroupId};
use phalanx_engine::EngineError;
use phalanx_ir::random::fnv1a;

use crate::device::{Device, Stream};
pub(crate) use mover::CudaMover;
#[cfg(test)]
pub(crate) use mover::kernels;

/// How ranks on GPUs exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuLink {
    /// What fits where the ranks are.
    #[default]
    Auto,
    /// Through the memory of the GPU that all ranks share.
    Device,
    /// Through the host's memory.
    Host,
}

impl fmt::Display for GpuLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GpuLink::Auto => "auto",
            GpuLink::Device => "device",
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
}

/// The endpoint as the engine of a rank uses it.
pub(crate) fn linked(
    mut comm: Box<dyn Communicator>,
    device: &Arc<Device>,
    stream: &Arc<Stream>,
    wish: GpuLink,
) -> Result<Box<dyn Communicator>, EngineError> {
    let (rank, failed) = (comm.rank(), |why: String| EngineError::Failed {
        program: "finding the other ranks' GPUs".to_owned(),
        why,
    });
    if wish == GpuLink::Host || comm.world() == 1 {
        return Ok(comm);
    }
    let all = gathered(&mut *comm, Whereabouts::of(device)).map_err(|e| failed(e.to_string()))?;
    let shared = all.iter().all(|at| (at.host, at.gpu) == (all[0].host, all[0].gpu));
    match (shared, wish) {
        (true, _) => {}
        (false, GpuLink::Auto) => return Ok(comm),
        (false, _) => return Err(failed("they do not share one GPU".to_owned())),
    }
    let processes = all.iter().any(|at| at.process != all[0].process);
    let mover = CudaMover::new(rank, processes, device, stream);
    match (comm.attach(Box::new(mover)), wish) {
        (Ok(()), _) | (Err(_), GpuLink::Auto) => Ok(comm),
        (Err(_), _) => Err(failed(
            "the transport between these ranks cannot move a GPU's memory; phalanx launch starts \
             ranks whose transport can"
                .to_owned(),
        )),
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
        Self { host: fnv1a(&boot), gpu, process: std::process::id() as i32 }
    }

    fn words(self) -> [i32; 7] {
        let [a, b, c, d] = self.gpu;
        [self.host as i32, (self.host >> 32) as i32, a, b, c, d, self.process]
    }

    fn read(words: &[i32]) -> Self {
        let half = |word: i32| u64::from(word as u32);
        Self {
            host: half(words[0]) | half(words[1]) << 32,
            gpu: [words[2], words[3], words[4], words[5]],
            process: words[6],
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
        let at = Whereabouts { host: 0xFEDC_BA98_7654_3210, gpu: [-1, 2, 3, i32::MIN], process: 7 };
        assert_eq!(Whereabouts::read(&at.words()), at);
    }
}
