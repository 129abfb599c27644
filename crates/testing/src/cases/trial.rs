//! Tries cases: partitions them in one of two ways, runs a given check, and makes failures smaller.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_autodiff::{Joint, joint};
use phalanx_ir::{DType, OpDef};
use phalanx_spmd::{Costs, SpmdError, partition, partition_by};

use super::Case;
use super::dice::Dice;
use super::recipe::Recipe;
use super::shrink::shrunk;

/// What chooses layouts where annotations leave them open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chooser {
    /// The partitioner.
    Partitioner,
    /// Dice, among the legal strategies of each op, whatever its neighbours do.
    Random,
}

/// A case that could be partitioned.
#[derive(Debug)]
pub struct Trial {
    /// The seed, also of its numbers.
    pub seed: u64,
    /// The case.
    pub case: Case,
    /// Its joint graph for one device.
    pub whole: Joint,
    /// The same on the mesh.
    pub parts: Joint,
}

impl Trial {
    /// Makes and partitions a case.
    pub fn new(recipe: &Recipe, chooser: Chooser) -> Result<Self, SpmdError> {
        let case = recipe.case()?;
        let whole = joint(&case.forward, DType::F64)?;
        let mut dice = Dice::named(recipe.seed, &format!("choices {}", recipe.choices));
        let parts = match chooser {
            Chooser::Partitioner => {
                partition(&whole, &case.mesh, &case.annotations, &Costs::default())?
            }
            Chooser::Random => {
                partition_by(&whole, &case.mesh, &case.annotations, |n| dice.below(n))?
            }
        };
        Ok(Self { seed: recipe.seed, case, whole, parts })
    }
}

/// How many cases ran, and why others were refused.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Cases that were partitioned and checked.
    pub ran: usize,
    /// In how many of them the forward program has each op.
    pub with: BTreeMap<&'static str, usize>,
    /// The beginnings of refusal messages, with their counts.
    pub refused: BTreeMap<String, usize>,
}

impl Tally {
    fn passed(&mut self, recipe: Option<&Recipe>) {
        self.ran += 1;
        let Some(Ok(case)) = recipe.map(Recipe::case) else { return };
        let ops: BTreeSet<&str> = case.forward.instrs().iter().map(|i| i.op.name()).collect();
        ops.into_iter().for_each(|op| *self.with.entry(op).or_default() += 1);
    }
}

/// A case that fails, as small as it could be made.
#[derive(Debug)]
pub struct Found {
    /// The seed, whose case may be larger.
    pub seed: u64,
    /// How many cases had passed.
    pub after: usize,
    chooser: Chooser,
    why: String,
    /// The smallest case, and its partitioned form, if it could be partitioned.
    smallest: Smallest,
}

#[derive(Debug)]
struct Smallest {
    why: String,
    case: Case,
    parts: Option<Joint>,
}

impl Found {
    /// How many instructions the forward program of the smallest case has.
    pub fn ops(&self) -> usize {
        self.smallest.case.forward.instrs().len()
    }

    /// How many ranks the smallest case has.
    pub fn ranks(&self) -> usize {
        self.smallest.case.mesh.ranks()
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seed, Smallest { why, case, parts }) = (self.seed, &self.smallest);
        writeln!(f, "seed {seed}, chosen by {:?}: {}", self.chooser, self.why)?;
        writeln!(f, "again with PHALANX_SEEDS={seed}..{}", seed + 1)?;
        writeln!(f, "the smallest case that fails, on the mesh {}: {why}", case.mesh)?;
        write!(f, "{}", case.forward)?;
        for asked in &case.asked {
            writeln!(f, "{asked}")?;
        }
        parts.as_ref().map_or(Ok(()), |parts| write!(f, "partitioned:\n{}", parts.program))
    }
}

/// Tries the cases of seeds with a check, up to the first that fails. Panics count as failures, and
/// so does a partitioned program that the verifier refuses.
pub fn try_seeds(
    seeds: impl IntoIterator<Item = u64>,
    chooser: Chooser,
    mut check: impl FnMut(&Trial) -> Result<(), String>,
) -> Result<Tally, Box<Found>> {
    let mut tally = Tally::default();
    for seed in seeds {
        let outcome = match Recipe::new(seed) {
            Ok(recipe) => (attempt(&recipe, chooser, &mut check), Some(recipe)),
            Err(error) => (Outcome::Refused(error.to_string()), None),
        };
        match outcome {
            (Outcome::Passed, recipe) => tally.passed(recipe.as_ref()),
            (Outcome::Failed(why), Some(recipe)) => {
                return Err(Box::new(smallest(recipe, why, tally.ran, chooser, &mut check)));
            }
            (Outcome::Refused(why) | Outcome::Failed(why), _) => {
                *tally.refused.entry(why.chars().take(60).collect()).or_default() += 1;
            }
        }
    }
    Ok(tally)
}

enum Outcome {
    Passed,
    Refused(String),
    Failed(String),
}

fn attempt(
    recipe: &Recipe,
    chooser: Chooser,
    check: &mut impl FnMut(&Trial) -> Result<(), String>,
) -> Outcome {
    let tried = catch_unwind(AssertUnwindSafe(|| match Trial::new(recipe, chooser) {
        Ok(trial) => match check(&trial) {
            Ok(()) => Outcome::Passed,
            Err(why) => Outcome::Failed(why),
        },
        Err(error @ SpmdError::Verify(_)) => Outcome::Failed(error.to_string()),
        Err(error) => Outcome::Refused(error.to_string()),
    }));
    tried.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Outcome::Failed(format!("panicked: {}", text.unwrap_or("no message")))
    })
}

/// With how many different dice a smaller case is tried: earlier choices mean something else there.
const CHOICES: u64 = 16;

fn smallest(
    recipe: Recipe,
    why: String,
    after: usize,
    chooser: Chooser,
    check: &mut impl FnMut(&Trial) -> Result<(), String>,
) -> Found {
    let choices = if chooser == Chooser::Random { CHOICES } else { 1 };
    let seed = recipe.seed;
    let (small, reason) = shrunk((recipe, why.clone()), |candidate| {
        (0..choices).find_map(|choices| {
            let recipe = Recipe { choices, ..candidate.clone() };
            match attempt(&recipe, chooser, check) {
                Outcome::Failed(why) => Some((recipe, why)),
                _ => None,
            }
        })
    });
    // It was built before, so building it again succeeds.
    let case = small.case().unwrap();
    let parts = catch_unwind(|| Trial::new(&small, chooser).ok().map(|trial| trial.parts));
    let smallest = Smallest { why: reason, case, parts: parts.ok().flatten() };
    Found { seed, after, chooser, why, smallest }
}
