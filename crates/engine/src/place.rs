//! Where an engine stands among the ranks of a program.

use phalanx_ir::Program;

use crate::EngineError;

/// The place of rank `rank` of `world` in a program's mesh, which has these ranks; fails if it is not
/// one of them. `maker` makes an engine for a rank, for the message.
pub fn place_in_mesh(
    program: &Program,
    ranks: &[usize],
    (rank, world): (usize, usize),
    maker: &str,
) -> Result<usize, EngineError> {
    let place = ranks.iter().position(|&member| member == rank);
    let known = ranks.iter().all(|&member| member < world);
    match place {
        _ if program.mesh().ranks() == 1 => Ok(0),
        Some(place) if known && ranks.len() == program.mesh().ranks() => Ok(place),
        _ => Err(EngineError::Failed {
            program: program.name.clone(),
            why: format!(
                "its mesh ({}) has {} ranks, given as {ranks:?}, but this engine is rank {rank} of \
                 {world}; make one engine for each rank with {maker}",
                program.mesh(),
                program.mesh().ranks(),
            ),
        }),
    }
}
