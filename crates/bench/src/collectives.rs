//! How fast ranks of this machine communicate.

use phalanx_sys::memory::machine;
use serde::Serialize;

use phalanx_config::Config;
use phalanx_error::bytes;
use phalanx_error::{Error, Problem, Result};
use phalanx_session::host;
use phalanx_session::job;
use phalanx_session::lost;

use crate::transport::{self, SIZES};

/// A row of `bench collectives`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CollectiveRow {
    /// The op.
    pub op: &'static str,
    /// Bytes of the full tensor.
    pub bytes: usize,
    /// The median time of a call.
    pub median_us: f64,
    /// Bytes divided by the median time.
    pub gib_per_s: f64,
    /// The time of copying the same number of bytes, with all ranks copying at once.
    pub copy_limit_us: f64,
    /// The time of the fastest call, which other programs on the machine disturb least.
    pub best_us: f64,
    /// The copy limit, from the fastest copy.
    pub copy_limit_best_us: f64,
    /// How many ranks there were.
    pub ranks: usize,
}

/// With more ranks than this, some would have no element of the smallest tensor.
const MOST_RANKS: usize = SIZES[0] / size_of::<f32>();

/// The number of ranks if neither the user nor the configuration sets it.
const RANKS: usize = 2;

/// Times every collective at every size between `ranks` ranks, or else between as many as the
/// configuration has, but at least two. Calls `tell` with each row as soon as it is measured.
pub fn collectives(
    config: &Config,
    ranks: Option<usize>,
    mut tell: impl FnMut(&CollectiveRow),
) -> Result<()> {
    let own = config.parallel.ranks().get();
    let ranks = ranks.unwrap_or(if own > 1 { own } else { RANKS });
    check(ranks)?;
    job::fits(ranks)?;
    let launcher = host::launcher(ranks);
    for size in SIZES {
        let rows = transport::collectives(&*launcher, &[size]).map_err(|f| lost(f, ranks))?;
        for row in rows {
            tell(&CollectiveRow {
                op: transport::name(row.op),
                bytes: row.bytes,
                median_us: row.median_us,
                gib_per_s: row.gib_per_s,
                copy_limit_us: row.copy_limit_us,
                best_us: row.best_us,
                copy_limit_best_us: row.copy_limit_best_us,
                ranks,
            });
        }
    }
    Ok(())
}

/// Refuses ranks without work, and tensors that do not fit into this machine's memory.
fn check(ranks: usize) -> Result<()> {
    if ranks > MOST_RANKS {
        return Err(Error::refused(
            Problem::new(format!("--ranks {ranks}: the smallest tensor has {MOST_RANKS} elements"))
                .because("every rank needs at least one of them")
                .fix(format!("--ranks {MOST_RANKS} or fewer")),
        ));
    }
    // Each rank holds its input and its output.
    let each = 2 * SIZES.into_iter().max().unwrap_or(0) as u64;
    let (needed, available) = (each * ranks as u64, machine().map(|machine| machine.available));
    match available {
        Some(available) if needed > available => Err(Error::refused(
            Problem::new(format!(
                "--ranks {ranks}: their tensors take {}, but {} are free",
                bytes(needed),
                bytes(available)
            ))
            .fix(format!("--ranks {} or fewer", available / each)),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_ranks_are_refused_with_what_would_work() {
        assert_eq!(check(2), Ok(()));
        let many = check(MOST_RANKS + 1).unwrap_err();
        assert_eq!(many.exit_code(), 2);
        assert!(many.to_string().contains("--ranks 1024 or fewer"), "{many}");
    }
}
