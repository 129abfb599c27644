//! What processes give each other between commands: bytes of any length, from all to all.

use crate::blocking::Collectives;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::group::GroupId;

/// What every rank gives, by rank.
pub(crate) fn gather(
    endpoint: &mut dyn Communicator,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, CommError> {
    let (ranks, me) = (endpoint.world(), endpoint.rank());
    let mut sizes = vec![0_i32; 2 * ranks];
    let size = own.len() as u64;
    endpoint.all_gather(GroupId::WORLD, &[size as i32, (size >> 32) as i32], &mut sizes)?;
    let size = |rank: usize| {
        let [low, high] = [sizes[2 * rank], sizes[2 * rank + 1]].map(|half| u64::from(half as u32));
        (low | high << 32) as usize
    };
    let mut all = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let mut words = vec![0_i32; size(rank).div_ceil(4)];
        if rank == me {
            bytemuck::cast_slice_mut::<i32, u8>(&mut words)[..own.len()].copy_from_slice(own);
        }
        if !words.is_empty() {
            endpoint.broadcast(GroupId::WORLD, rank, &mut words)?;
        }
        let mut bytes = bytemuck::cast_slice::<i32, u8>(&words).to_vec();
        bytes.truncate(size(rank));
        all.push(bytes);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Streams, run_ranks};

    #[test]
    fn lists_of_any_length_reach_all() {
        let list =
            |rank: usize| -> Vec<u8> { (0..[0, 1, 7, 300_001][rank]).map(|i| i as u8).collect() };
        let all = run_ranks(&Streams::new(4), |endpoint| {
            let own = list(endpoint.rank());
            gather(endpoint, &own)
        });
        let expected: Vec<Vec<u8>> = (0..4).map(list).collect();
        assert_eq!(all.unwrap(), vec![expected; 4]);
    }
}
