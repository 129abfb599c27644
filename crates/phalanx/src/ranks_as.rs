//! What the ranks of a trainer are: threads of this process, or processes.

use std::process::exit;

use phalanx_error::Result;
use phalanx_session::{job, launch};

use crate::mistake::Mistake;

/// What ranks are; given to [`Trainer::ranks`](crate::Trainer::ranks).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RanksAs {
    /// Threads of this process, whatever its environment says.
    Threads,
    /// This many processes, which the program starts itself: it runs once more for each rank, with
    /// the same arguments. Where the program was started as one of several processes already
    /// (`phalanx launch`, `torchrun`, `srun`, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by
    /// hand), those are the ranks.
    Processes(usize),
    /// Processes that `mpirun` has started. Their bytes go through the MPI library.
    Mpi,
}

impl RanksAs {
    /// Finds or starts the ranks of a layout with this many.
    ///
    /// A process that starts others does not return: it waits for them, and ends as they do.
    pub(crate) fn begin(asked: Option<Self>, ranks: usize) -> Result<()> {
        match asked {
            None => {
                job::join(job::TIMEOUT)?;
            }
            Some(Self::Threads) => job::stay_alone(),
            Some(Self::Mpi) => {
                job::join_mpi(job::TIMEOUT, ranks)?;
            }
            Some(Self::Processes(processes)) => {
                if processes != ranks {
                    return Err(Mistake::Processes { processes, ranks }.into());
                }
                if job::join(job::TIMEOUT)?.is_none() && ranks > 1 {
                    let program = launch::this_program(std::env::args_os().skip(1))?;
                    exit(launch::launch(ranks, &program)?.into());
                }
            }
        }
        job::fits(ranks)
    }
}
