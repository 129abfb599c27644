//! Chimera (Li and Hoefler, SC 2021): pipelines in both directions through the same stage groups.
//!
//! Every stage group holds a stage of a pipeline that goes down and one of a pipeline that goes up, so
//! where one direction waits the other works. With f pairs of pipelines, each of the 2f takes its share of the
//! micro-batches, and the 2f copies of a stage sum their gradients. For m = p a step takes
//! m·min(tF, tB) + (m + p/f − 2)·max(tF, tB); a stage group keeps at most p micro-batches, but 2f copies of weights,
//! gradients and optimizer state.
//!
//! The order comes from slots of equal length: stage s runs its forward number q at s + 2q and its backward at
//! p − 1 − s + 2q, where q counts what its pipeline has started. Two directions never want the same slot, as one
//! number is either a forward or a backward. [`RoundConcat`] says how more than p micro-batches follow each other.

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::placement::{HeldStage, Placement};
use crate::schedule::Schedule;
use crate::turn::Turn;
use crate::words::counted;

/// How Chimera runs more micro-batches than stage groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RoundConcat {
    /// Rounds of p micro-batches follow each other. Between rounds a group waits (p − 2)·tF if tB = 2tF.
    #[default]
    Direct,
    /// Two forwards, then their two backwards: no waiting between rounds if tB = 2tF, and up to twice the
    /// memory.
    Doubling,
    /// As doubling, with every micro-batch in two halves: the memory of direct rounds, and smaller products.
    Halving,
}

impl RoundConcat {
    /// Every way.
    pub const ALL: [RoundConcat; 3] =
        [RoundConcat::Direct, RoundConcat::Doubling, RoundConcat::Halving];

    /// The word in configurations and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            RoundConcat::Direct => "direct",
            RoundConcat::Doubling => "doubling",
            RoundConcat::Halving => "halving",
        }
    }

    /// In how many pieces each micro-batch is cut.
    pub const fn pieces(self) -> usize {
        match self {
            RoundConcat::Direct | RoundConcat::Doubling => 1,
            RoundConcat::Halving => 2,
        }
    }
}

/// Chimera of `m` micro-batches over `p` stage groups, with `pairs` pipelines in each direction.
pub fn chimera(p: usize, m: usize, pairs: usize, concat: RoundConcat) -> Result<Schedule> {
    legal(p, m, pairs, concat)?;
    let pieces = concat.pieces();
    let placement = Placement::both_ways(p, pairs)?;
    let pipelines = 2 * pairs;
    let list = |group: usize| {
        let mut turns: Vec<(usize, Turn)> = Vec::new();
        for microbatch in 0..pieces * m {
            let chunk = microbatch % pipelines;
            let Some(HeldStage { stage, .. }) = placement.held(group, chunk) else { continue };
            let number = match concat {
                RoundConcat::Direct => rounds(p, pairs, microbatch / pipelines),
                RoundConcat::Doubling | RoundConcat::Halving => {
                    doubled(p, pieces * m, microbatch / 2)
                }
            };
            let turn = |part| Turn { part, microbatch, chunk, version: 0 };
            turns.push((stage + 2 * number.forward, turn(Part::F)));
            turns.push((p - 1 - stage + 2 * number.backward, turn(Part::BW)));
        }
        turns.sort_by_key(|(slot, turn)| (*slot, turn.microbatch));
        turns.into_iter().map(|(_, turn)| turn).collect()
    };
    let lists = (0..p).map(list).collect();
    Ok(Schedule::from_lists("chimera", pieces * m, placement, lists)?.in_pieces(pieces))
}

/// Which of its pipeline's starts a micro-batch's forward and backward are.
struct Number {
    forward: usize,
    backward: usize,
}

/// Rounds of forwards and backwards; `own` counts the micro-batches of one pipeline.
fn rounds(p: usize, pairs: usize, own: usize) -> Number {
    let (round, at) = (own / (p / (2 * pairs)), own % (p / (2 * pairs)));
    let forward = p * round + at;
    Number { forward, backward: forward + p / 2 }
}

/// p/2 pairs of forwards, then two backwards and a pair of forwards in turn; `m` counts the micro-batches of
/// both directions, `own` those of one.
fn doubled(p: usize, m: usize, own: usize) -> Number {
    let (fill, pair) = (p / 2, own / 2);
    let mixed = (m / 4).saturating_sub(fill);
    let forward = if pair < fill { pair } else { 3 * pair - 2 * fill + 2 };
    let backward = fill + own + pair.min(mixed);
    Number { forward, backward }
}

fn legal(p: usize, m: usize, pairs: usize, concat: RoundConcat) -> Result<()> {
    let refuse = |what: String, why: &str, nearest: String| {
        Err(PipelineError::Shape {
            what: format!("chimera cannot have {what}"),
            why: why.to_owned(),
            nearest,
        })
    };
    if !p.is_multiple_of(2) {
        let why = "the pipelines of both directions meet between two stage groups";
        let fewer = if p > 1 { format!("{} or ", p - 1) } else { String::new() };
        return refuse(counted(p, "stage"), why, format!("{fewer}{} stages", p + 1));
    }
    if pairs == 0 || !(p / 2).is_multiple_of(pairs) {
        let most = (1..=p / 2).filter(|pairs| (p / 2).is_multiple_of(*pairs));
        let fits: Vec<String> = most.map(|pairs| pairs.to_string()).collect();
        let why = "pipelines of one direction start at equal distances in half of the stage groups";
        return refuse(format!("{} over {p} stages", counted(pairs, "pair")), why, fits.join(", "));
    }
    if concat != RoundConcat::Direct && pairs > 1 {
        let why = "pairs of forwards are worked out for one pipeline in each direction";
        return refuse(
            format!("{pairs} pairs with doubling or halving"),
            why,
            "1 pair, or direct".to_owned(),
        );
    }
    let (unit, why) = match concat {
        RoundConcat::Direct => (2 * pairs, "every pipeline takes as many micro-batches"),
        RoundConcat::Doubling => (4, "both directions take micro-batches by twos"),
        RoundConcat::Halving => (2, "both directions take as many micro-batches"),
    };
    match m % unit {
        0 => Ok(()),
        rest => {
            let (below, above) = (m - rest, m - rest + unit);
            let below = if below == 0 { String::new() } else { format!("{below} or ") };
            refuse(counted(m, "micro-batch"), why, format!("{below}{above} micro-batches"))
        }
    }
}
