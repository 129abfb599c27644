//! The named schedules, and the shapes for which they exist.

use crate::costs::{Times, TurnCosts};
use crate::error::{PipelineError, Result};
use crate::schedule::Schedule;
use crate::schedules::{
    Demand, RoundConcat, Warmup, bpipe, breadth_first, chimera, dualpipe, gpipe, interleaved,
    naive, one_f_one_b, pipedream, pipedream_2bw, round_robin, v_half, v_min, vectorised, zb_auto,
    zb_auto_outline, zb_h1, zb_h2, zb_v,
};
use crate::words::{counted, listed};

/// A schedule that has a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamedSchedule {
    /// Forward and backward of each micro-batch before the next.
    Naive,
    /// All forwards, then all backwards.
    GPipe,
    /// The same, with all stage groups in step: where there is no micro-batch, they compute on zeros.
    Vectorised,
    /// One forward, one backward, with a flush.
    OneFOneB,
    /// 1F1B whose first stages give micro-batches to the last ones.
    BPipe,
    /// Several chunks of layers per stage group, depth first.
    Interleaved,
    /// Several chunks of layers per stage group, chunk by chunk over all micro-batches.
    BreadthFirst,
    /// Zero bubble with the memory of 1F1B.
    ZbH1,
    /// Zero bubble with more memory.
    ZbH2,
    /// Zero bubble in the shape of a V.
    ZbV,
    /// Zero bubble by a search for given times and memory.
    ZbAuto,
    /// A V with half the memory of 1F1B.
    VHalf,
    /// A V with a third of the memory of 1F1B.
    VMin,
    /// Pipelines in both directions.
    Chimera,
    /// Pipelines in both directions, with forwards beside backwards.
    DualPipe,
    /// 1F1B without a flush, an update after every backward.
    PipeDream,
    /// 1F1B without a flush, an update after every batch, two versions of the weights.
    PipeDream2bw,
}

/// The size of a schedule.
#[derive(Clone, PartialEq, Debug)]
pub struct ScheduleShape {
    /// Stage groups.
    pub stage_groups: usize,
    /// Micro-batches of a step.
    pub microbatches: usize,
    /// Chunks of layers per stage group; by default as many as the schedule usually has.
    pub chunks: Option<usize>,
    /// How many forwards 1F1B starts with.
    pub warmup: Warmup,
    /// Pipelines in each direction of Chimera, and how its rounds follow each other.
    pub pairs: usize,
    /// How Chimera runs more micro-batches than stage groups.
    pub concat: RoundConcat,
    /// The memory of zb-auto, in shares: 1 is what the first stage group of 1F1B keeps.
    pub memory: f64,
    /// What a micro-batch keeps between B and W, as a part of what it keeps between F and B, for zb-auto.
    pub until_w: f64,
    /// Steps that follow each other without a flush, for PipeDream and PipeDream-2BW.
    pub steps: usize,
    /// Whether a micro-batch of PipeDream reads the same version on all stages.
    pub vertical_sync: bool,
    /// For each stage of PipeDream: how many stage groups hold it, and take micro-batches in turn. Empty: one each.
    pub holders: Vec<usize>,
}

impl ScheduleShape {
    /// This many stage groups and micro-batches, everything else by default.
    pub fn new(stage_groups: usize, microbatches: usize) -> Self {
        let (warmup, concat) = (Warmup::Pa, RoundConcat::Direct);
        ScheduleShape {
            stage_groups,
            microbatches,
            chunks: None,
            warmup,
            pairs: 1,
            concat,
            memory: 1.0,
            until_w: 1.0,
            steps: 1,
            vertical_sync: false,
            holders: Vec::new(),
        }
    }

    /// PipeDream over stages that so many stage groups hold.
    pub fn held_by(holders: &[usize], microbatches: usize) -> Self {
        let own = ScheduleShape::new(holders.iter().sum(), microbatches);
        ScheduleShape { holders: holders.to_vec(), ..own }
    }

    /// The same with this many chunks per stage group.
    pub fn chunks(self, chunks: usize) -> Self {
        ScheduleShape { chunks: Some(chunks), ..self }
    }

    /// The same with so many pipelines in each direction.
    pub fn pairs(self, pairs: usize) -> Self {
        ScheduleShape { pairs, ..self }
    }

    /// The same with another way from round to round.
    pub fn concat(self, concat: RoundConcat) -> Self {
        ScheduleShape { concat, ..self }
    }

    /// The same with another memory for zb-auto, in shares.
    pub fn memory(self, memory: f64) -> Self {
        ScheduleShape { memory, ..self }
    }

    /// The same with another ratio of what is kept until W and until B.
    pub fn until_w(self, until_w: f64) -> Self {
        ScheduleShape { until_w, ..self }
    }

    /// The same for so many steps without a flush between them.
    pub fn steps(self, steps: usize) -> Self {
        ScheduleShape { steps, ..self }
    }

    /// The same with one version per micro-batch on all stages, or not.
    pub fn vertical_sync(self, vertical_sync: bool) -> Self {
        ScheduleShape { vertical_sync, ..self }
    }

    /// The same with another warm-up.
    pub fn warmup(self, warmup: Warmup) -> Self {
        ScheduleShape { warmup, ..self }
    }
}

impl NamedSchedule {
    /// Every schedule, the simplest first.
    pub const ALL: [NamedSchedule; 17] = [
        NamedSchedule::Naive,
        NamedSchedule::GPipe,
        NamedSchedule::Vectorised,
        NamedSchedule::OneFOneB,
        NamedSchedule::BPipe,
        NamedSchedule::Interleaved,
        NamedSchedule::BreadthFirst,
        NamedSchedule::ZbH1,
        NamedSchedule::ZbH2,
        NamedSchedule::ZbV,
        NamedSchedule::ZbAuto,
        NamedSchedule::VHalf,
        NamedSchedule::VMin,
        NamedSchedule::Chimera,
        NamedSchedule::DualPipe,
        NamedSchedule::PipeDream,
        NamedSchedule::PipeDream2bw,
    ];

    /// The name in configurations and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            NamedSchedule::Naive => "naive",
            NamedSchedule::GPipe => "gpipe",
            NamedSchedule::Vectorised => "vectorised",
            NamedSchedule::OneFOneB => "1f1b",
            NamedSchedule::BPipe => "bpipe",
            NamedSchedule::Interleaved => "interleaved",
            NamedSchedule::BreadthFirst => "breadth-first",
            NamedSchedule::ZbH1 => "zb-h1",
            NamedSchedule::ZbH2 => "zb-h2",
            NamedSchedule::ZbV => "zb-v",
            NamedSchedule::ZbAuto => "zb-auto",
            NamedSchedule::VHalf => "v-half",
            NamedSchedule::VMin => "v-min",
            NamedSchedule::Chimera => "chimera",
            NamedSchedule::DualPipe => "dualpipe",
            NamedSchedule::PipeDream => "pipedream",
            NamedSchedule::PipeDream2bw => "pipedream-2bw",
        }
    }

    /// How many chunks a stage group has by default.
    pub const fn usual_chunks(self) -> usize {
        match self {
            NamedSchedule::Interleaved | NamedSchedule::BreadthFirst => 2,
            named if named.is_vee() => 2,
            _ => 1,
        }
    }

    /// Whether a stage group may hold any number of chunks.
    pub const fn takes_chunks(self) -> bool {
        matches!(
            self,
            NamedSchedule::Interleaved | NamedSchedule::BreadthFirst | NamedSchedule::Vectorised
        )
    }

    /// Whether the model goes through the stage groups and back, so that each holds two chunks.
    pub const fn is_vee(self) -> bool {
        matches!(self, NamedSchedule::ZbV | NamedSchedule::VHalf | NamedSchedule::VMin)
    }

    /// Whether pipelines go in both directions, so that each stage is held several times.
    pub const fn goes_both_ways(self) -> bool {
        matches!(self, NamedSchedule::Chimera | NamedSchedule::DualPipe)
    }

    /// Whether weights are updated without a flush, so that gradients belong to older weights.
    pub const fn is_asynchronous(self) -> bool {
        matches!(self, NamedSchedule::PipeDream | NamedSchedule::PipeDream2bw)
    }

    /// Whether weight gradients are turns of their own, in some places at least.
    pub const fn splits(self) -> bool {
        let flat =
            matches!(self, NamedSchedule::ZbH1 | NamedSchedule::ZbH2 | NamedSchedule::ZbAuto);
        self.is_vee() || flat || matches!(self, NamedSchedule::DualPipe)
    }

    /// The schedule of this shape. zb-auto is searched for stages whose parts all take as long.
    pub fn build(self, shape: ScheduleShape) -> Result<Schedule> {
        self.build_for(shape, &TurnCosts::even(Times { f: 1.0, b: 1.0, w: 1.0 }, 0.0)?)
    }

    /// A schedule for checks of settings: what [`NamedSchedule::build`] refuses is refused, and stages, chunks and numbers of turns are
    /// the same; but nothing is searched.
    pub fn outline(self, shape: ScheduleShape) -> Result<Schedule> {
        if self != NamedSchedule::ZbAuto {
            return self.build(shape);
        }
        let ScheduleShape { stage_groups: p, microbatches: m, memory, .. } = shape;
        self.legal(p, m, shape.chunks.unwrap_or(self.usual_chunks()), &shape)?;
        zb_auto_outline(p, m, memory)
    }

    /// The schedule of this shape; zb-auto is searched for these times, others do not depend on them.
    pub fn build_for(self, shape: ScheduleShape, costs: &TurnCosts) -> Result<Schedule> {
        let ScheduleShape { stage_groups: p, microbatches: m, warmup, .. } = shape;
        let v = shape.chunks.unwrap_or(self.usual_chunks());
        self.legal(p, m, v, &shape)?;
        match self {
            NamedSchedule::Naive => naive(p, m),
            NamedSchedule::GPipe => gpipe(p, m),
            NamedSchedule::Vectorised => vectorised(p, m, v),
            NamedSchedule::OneFOneB => one_f_one_b(p, m, warmup),
            NamedSchedule::BPipe => bpipe(p, m),
            NamedSchedule::Interleaved => interleaved(p, m, v),
            NamedSchedule::BreadthFirst => breadth_first(p, m, v),
            NamedSchedule::ZbH1 => zb_h1(p, m),
            NamedSchedule::ZbH2 => zb_h2(p, m),
            NamedSchedule::ZbV => zb_v(p, m),
            NamedSchedule::ZbAuto => {
                let (stages, hop) = (costs.stage_times(p)?, costs.hop());
                let ScheduleShape { memory, until_w, .. } = shape;
                zb_auto(m, &Demand { stages, hop, memory, until_w })
            }
            NamedSchedule::VHalf => v_half(p, m),
            NamedSchedule::VMin => v_min(p, m),
            NamedSchedule::Chimera => chimera(p, m, shape.pairs, shape.concat),
            NamedSchedule::DualPipe => dualpipe(p, m),
            NamedSchedule::PipeDream if shape.holders.iter().any(|count| *count != 1) => {
                round_robin(&shape.holders, m, shape.steps, shape.vertical_sync)
            }
            NamedSchedule::PipeDream => pipedream(p, m, shape.steps, shape.vertical_sync),
            NamedSchedule::PipeDream2bw => pipedream_2bw(p, m, shape.steps),
        }
    }

    fn legal(self, p: usize, m: usize, v: usize, shape: &ScheduleShape) -> Result<()> {
        let ScheduleShape { warmup, pairs, concat, memory, until_w, steps, vertical_sync, .. } =
            *shape;
        let refuse = |what: String, why: &str, nearest: String| {
            Err(PipelineError::Shape { what, why: why.to_owned(), nearest })
        };
        for (count, what) in [(p, "stage"), (m, "micro-batch"), (v, "chunk"), (steps, "step")] {
            if count == 0 {
                let why = "a pipeline needs at least one stage, one chunk and one micro-batch";
                return refuse(
                    format!("{self} cannot have {}", counted(0, what)),
                    why,
                    counted(1, what),
                );
            }
        }
        // These are built with as many micro-batches as fill them, and then shortened.
        let fills =
            matches!(self, NamedSchedule::ZbH2 | NamedSchedule::ZbV | NamedSchedule::DualPipe);
        let built = match self {
            _ if fills => m.max(p.saturating_mul(2)),
            NamedSchedule::Vectorised => m.saturating_add(p),
            _ => m.saturating_mul(shape.steps),
        };
        if p.saturating_mul(v).saturating_mul(built) > MOST_TURNS {
            let [stages, chunks, batches] =
                [counted(p, "stage"), counted(v, "chunk"), counted(m, "micro-batch")];
            return refuse(
                format!("{self} is too long with {stages} × {chunks} × {batches}"),
                "a schedule is a list of turns, and this list would be too large for memory",
                match (self, built > m) {
                    (NamedSchedule::Vectorised, _) if most_square(p, v) => {
                        format!("{}, or fewer", counted(MOST_TURNS / (p * v) - p, "micro-batch"))
                    }
                    (_, true) => {
                        format!("{}, or fewer", counted((MOST_TURNS / (2 * v)).isqrt(), "stage"))
                    }
                    _ => short_enough(p, m.saturating_mul(steps), v),
                },
            );
        }
        if self == NamedSchedule::ZbAuto && p.saturating_mul(m) > MOST_SEARCHED {
            return refuse(
                format!(
                    "zb-auto cannot search {} × {}",
                    counted(p, "stage"),
                    counted(m, "micro-batch")
                ),
                "thousands of schedules are tried, and with more turns that takes minutes",
                format!(
                    "{}, or zb-h1",
                    counted(MOST_SEARCHED / p.min(MOST_SEARCHED), "micro-batch")
                ),
            );
        }
        match self {
            _ if self.is_vee() && v != 2 => refuse(
                format!("{self} cannot have {}", counted(v, "chunk")),
                "each stage group holds two chunks, one on each side of the V",
                "2 chunks; or interleaved, which takes any number".to_owned(),
            ),
            _ if v > 1 && !self.takes_chunks() && !self.is_vee() => refuse(
                format!("{self} cannot have {v} chunks"),
                "each stage group holds one stage",
                format!("1 chunk; or interleaved or breadth-first with {v}"),
            ),
            _ if warmup == Warmup::Pb && self != NamedSchedule::OneFOneB => refuse(
                format!("{self} cannot have the warm-up pb"),
                "only 1f1b has a choice of warm-up",
                "warm-up pa; or 1f1b".to_owned(),
            ),
            _ if (pairs, concat) != (1, RoundConcat::Direct) && self != NamedSchedule::Chimera => {
                refuse(
                    format!("{self} cannot have pairs or a concatenation"),
                    "only chimera has a choice of pipelines",
                    "1 pair and direct; or chimera".to_owned(),
                )
            }
            _ if (memory, until_w) != (1.0, 1.0) && self != NamedSchedule::ZbAuto => refuse(
                format!("{self} cannot have a memory"),
                "only zb-auto is searched for a memory; the others have their own",
                "zb-auto".to_owned(),
            ),
            _ if !(memory > 0.0 && memory.is_finite() && (0.0..=f64::MAX).contains(&until_w)) => {
                refuse(
                    format!(
                        "zb-auto cannot have a memory of {memory} shares and M_W/M_B = {until_w}"
                    ),
                    "both are numbers, and there must be some memory",
                    "1 share and 1".to_owned(),
                )
            }
            _ if vertical_sync && self != NamedSchedule::PipeDream => refuse(
                format!("{self} cannot have vertical sync"),
                "only pipedream has a choice of versions",
                "pipedream".to_owned(),
            ),
            _ if !shape.holders.is_empty() && self != NamedSchedule::PipeDream => refuse(
                format!("{self} cannot have holders that take micro-batches in turn"),
                "only pipedream deals micro-batches to the holders of a stage",
                "one holder for each stage; or pipedream".to_owned(),
            ),
            _ if !shape.holders.is_empty() && shape.holders.iter().sum::<usize>() != p => refuse(
                format!(
                    "the holders {} are not {}",
                    listed(&shape.holders),
                    counted(p, "stage group")
                ),
                "each stage group holds one stage",
                counted(shape.holders.iter().sum(), "stage group"),
            ),
            _ if steps != 1 && !self.is_asynchronous() => refuse(
                format!("{self} cannot have {}", counted(steps, "step")),
                "it drains after each step",
                "1 step; or pipedream-2bw".to_owned(),
            ),
            NamedSchedule::Vectorised if v > 1 && m < p => refuse(
                format!(
                    "{self} cannot go around {v} times with {} on {}",
                    counted(m, "micro-batch"),
                    counted(p, "stage")
                ),
                "the first stage would wait for what has not come around yet",
                format!("{}, or 1 chunk", counted(p, "micro-batch")),
            ),
            NamedSchedule::PipeDream2bw if m < p => refuse(
                format!(
                    "{self} cannot have {} for {}",
                    counted(m, "micro-batch"),
                    counted(p, "stage")
                ),
                "a stage would need a version of the weights before it is made",
                format!("{}; or pipedream, which updates after each", counted(p, "micro-batch")),
            ),
            _ => Ok(()),
        }
    }
}

/// Whether so many stages are short enough with one micro-batch that fills them.
fn most_square(p: usize, v: usize) -> bool {
    p.saturating_mul(v).saturating_mul(p.saturating_add(1)) <= MOST_TURNS
}

/// The nearest sizes that are not too long: one number changed, if that is enough.
fn short_enough(p: usize, m: usize, v: usize) -> String {
    let room = |others: usize| MOST_TURNS / others;
    match (room(p.saturating_mul(v)), room(m.saturating_mul(v))) {
        (0, 0) => format!("stages × chunks × micro-batches of {MOST_TURNS} or less"),
        (0, stages) => format!("{}, or fewer", counted(stages, "stage")),
        (batches, _) => format!("{}, or fewer stages", counted(batches, "micro-batch")),
    }
}

/// Stages times micro-batches: 512 stage groups with 4096 micro-batches are allowed, and take a
/// second and a gigabyte to show.
const MOST_TURNS: usize = 1 << 21;

/// Stages times micro-batches that zb-auto is searched for.
const MOST_SEARCHED: usize = 1 << 14;
