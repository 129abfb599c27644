//! What replicas that train by themselves give: each its own, and the mean of them.

use phalanx_error::{Error, Problem, Result};
use phalanx_ir::DType;

use super::codec::{decoded, encoded};
use super::numbers::{decode, encode};
use super::store::assemble;
use super::{Session, StateRange};

impl Session {
    /// The mean over replicas of numbers that the local ranks give.
    pub(super) fn over_replicas(&mut self, local: Vec<Vec<f64>>) -> Result<Vec<f64>> {
        let own = local.first().map(encoded).unwrap_or_default();
        let by_rank: Vec<Vec<f64>> = match self.ranks.exchange(&own)? {
            None => local,
            Some(all) => {
                let broken = || Error::failed(Problem::new("a rank sent numbers nobody can read"));
                let read = |bytes: &Vec<u8>| decoded(bytes).ok_or_else(broken);
                all.iter().map(read).collect::<Result<_>>()?
            }
        };
        let firsts = &self.known.first_ranks;
        let count = by_rank.first().map_or(0, Vec::len);
        let mean = |i: usize| {
            firsts.iter().map(|&rank| by_rank[rank][i]).sum::<f64>() / firsts.len() as f64
        };
        Ok((0..count).map(mean).collect())
    }

    /// Some values of a state in every replica that trains by itself: their element type and their bytes.
    pub fn read_replicas(&mut self, range: &StateRange) -> Result<Vec<(DType, Vec<u8>)>> {
        let held = self.held(range)?;
        let (name, known) = (&self.known.params[range.param].name, &self.known);
        let whole = |replica: usize| {
            let own = held.iter().enumerate().filter(|(rank, _)| known.replicas[*rank] == replica);
            let pieces = own.flat_map(|(_, pieces)| pieces.iter().cloned());
            assemble(name, &range.elements, pieces)
        };
        (0..known.first_ranks.len()).map(whole).collect()
    }
}

/// The mean of the values of several replicas, rounded once. Equal values stay as they are.
pub(super) fn mean(replicas: &[(DType, Vec<u8>)]) -> (DType, Vec<u8>) {
    let (dtype, first) = &replicas[0];
    if replicas.iter().all(|(_, bytes)| bytes == first) {
        return (*dtype, first.clone());
    }
    let mut sums = vec![0.0; first.len() / dtype.size()];
    for (dtype, bytes) in replicas {
        sums.iter_mut().zip(decode(*dtype, bytes)).for_each(|(sum, x)| *sum += x);
    }
    let mut bytes = vec![0; first.len()];
    let means: Vec<f64> = sums.iter().map(|sum| sum / replicas.len() as f64).collect();
    encode(*dtype, &means, &mut bytes);
    (*dtype, bytes)
}
