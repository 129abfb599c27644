//! What the processes of a session do together besides commands. If all ranks are in one process,
//! nothing of this does anything.

use super::codec::{decoded, encoded};
use super::command::{Command, LocalRanks, StateRange};
use super::{Session, job};
use phalanx_error::{Error, Problem, Result};

/// Refuses processes that do not have the same of something, by its digest.
pub(super) fn agree(ranks: &mut dyn LocalRanks, what: &str, digest: u64) -> Result<()> {
    let Some(all) = ranks.exchange(&encoded(&digest))? else { return Ok(()) };
    let other = all.iter().position(|own| decoded(own) != decoded::<u64>(&all[0]));
    let Some(other) = other else { return Ok(()) };
    Err(Error::refused(
        Problem::new(format!("{what} of rank {other} is not that of rank 0"))
            .because("every process plans for itself, from what it is given")
            .fix("give all processes the same configuration, arguments and files"),
    ))
}

impl Session {
    /// Refuses to go on if processes do not have the same of something, by its digest.
    pub fn agree(&mut self, what: &str, digest: u64) -> Result<()> {
        agree(&mut *self.ranks, what, digest)
    }

    /// The largest of the numbers that processes give: an order, such as to stop, that one of them has
    /// got and all must follow after the same step.
    pub fn largest(&mut self, own: u64) -> Result<u64> {
        let Some(all) = self.ranks.exchange(&encoded(&own))? else { return Ok(own) };
        Ok(all.iter().filter_map(|bytes| decoded(bytes)).max().unwrap_or(own))
    }

    /// What the process of rank 0 gives, on every process.
    pub fn from_first(&mut self, own: &[u8]) -> Result<Vec<u8>> {
        Ok(self.from_each(own)?.into_iter().next().unwrap_or_else(|| own.to_vec()))
    }

    /// What each process gives, by rank, on every process; one for all ranks if they are in one.
    pub fn from_each(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.ranks.exchange(own)?.unwrap_or_else(|| vec![own.to_vec()]))
    }

    /// Runs `work` on one process, which may read state, but nothing else; the other processes give
    /// what they hold of it. There the result is nothing.
    pub fn led<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Result<Option<T>> {
        if !self.lead() {
            self.follow()?;
            return Ok(None);
        }
        let done = work(self);
        self.release()?;
        Ok(Some(done))
    }

    /// Begins to lead the other processes, on the one that writes files; says whether this one is it.
    /// The others must [`follow`](Self::follow).
    pub fn lead(&mut self) -> bool {
        self.leads = self.is_spread() && job::is_first();
        self.leads || !self.is_spread()
    }

    /// Ends what [`lead`](Self::lead) began.
    pub fn release(&mut self) -> Result<()> {
        if std::mem::take(&mut self.leads) {
            self.ranks.exchange(&encoded(&None::<StateRange>))?;
        }
        Ok(())
    }

    /// Gives the process that leads what it asks for, until it releases this one.
    pub fn follow(&mut self) -> Result<()> {
        loop {
            let asked = self.ranks.exchange(&[])?;
            let asked = asked.and_then(|all| decoded::<Option<StateRange>>(all.first()?));
            let Some(range) = asked.flatten() else { return Ok(()) };
            self.ranks.ask(Command::Read(&range))?;
        }
    }

    /// Tells processes that follow what is read next.
    pub(super) fn tell_followers(&mut self, range: &StateRange) -> Result<()> {
        if self.leads {
            self.ranks.exchange(&encoded(&Some(range.clone())))?;
        }
        Ok(())
    }

    /// Whether other processes have ranks of this session.
    fn is_spread(&self) -> bool {
        self.ranks.local().len() < self.ranks.world()
    }
}
