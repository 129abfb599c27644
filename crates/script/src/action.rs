//! Scripts: actions, lanes, buffers.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use phalanx_call::{Lane, Message, Slots, Tier};
use phalanx_ir::{Axis, DType, Program, TensorType};

use crate::key::BufferKey;
use crate::library::Placed;
use crate::names::Names;
use crate::rolling::RowWindow;
use crate::schedule::ScheduledRun;
use crate::updates::Updates;

/// What a buffer's bytes are counted as.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Category {
    /// Parameters as programs read them.
    Weights,
    /// Gradient accumulators.
    Gradients,
    /// Optimizer state, including master weights.
    Optimizer,
    /// What a forward keeps for its backward.
    Residuals,
    /// Memory that is used only within or between a few actions.
    Workspace,
    /// Buffers of collectives and messages.
    Communication,
    /// Batches and the scalars of the step.
    Inputs,
}

impl Category {
    /// Every category, in printing order.
    pub const ALL: [Category; 7] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Residuals,
        Category::Workspace,
        Category::Communication,
        Category::Inputs,
    ];

    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Residuals => "residuals",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
            Category::Inputs => "inputs",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Index of a buffer in its script.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferId(pub usize);

/// Index of a program in its script.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ProgramId(pub usize);

/// Where the contents of a buffer come from before the first action writes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Nowhere: an action writes it before any reads it, and its contents end with its last use.
    Script,
    /// Persistent: it holds state from before the script, and after it.
    State,
    /// The host writes it before each step.
    Host,
    /// An action writes it and the host reads it after the step.
    Result,
    /// A script of an endless row: the one before has left it, and this one leaves it to the next. In between it
    /// holds nothing.
    Carried,
}

/// A piece of memory of a rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Buffer {
    /// What it holds: the key that it is found by.
    pub key: BufferKey,
    /// What its bytes count as.
    pub category: Category,
    /// Its bytes, on this rank.
    pub bytes: usize,
    /// Where its first contents come from.
    pub source: Source,
    /// The tier in which it lies; programs and messages use the tier `Device`.
    pub tier: Tier,
    /// Bytes that are there for alignment alone: zero from the start, and no action writes them.
    pub padding: Vec<Range<usize>>,
}

/// Part of a buffer, from a byte offset; the length follows from the program's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    /// The buffer.
    pub buffer: BufferId,
    /// The first byte.
    pub offset: usize,
}

/// Whether a result replaces what its buffer holds or is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Write {
    Overwrite,
    Add,
}

/// One summand of a parameter's gradient: from one instance and one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Contribution {
    /// The parameter's number in the model.
    pub param: usize,
    /// The instance that read it.
    pub instance: usize,
    /// The micro-batch.
    pub microbatch: usize,
}

/// A run of a program: every port bound to a view.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// The program.
    pub program: ProgramId,
    /// For each of its inputs.
    pub inputs: Vec<View>,
    /// For each of its outputs.
    pub outputs: Vec<(View, Write)>,
    /// For each output that is a parameter's gradient, what it contributes.
    pub contributes: Vec<(usize, Contribution)>,
}

/// What an action does.
#[derive(Clone, PartialEq, Debug)]
pub enum Kind {
    /// Runs a part of a segment, or a program at the end of the step.
    Run(Run),
    /// Updates a unit from its complete gradient.
    Update {
        /// The run of the update program.
        run: Run,
        /// The unit's gradient buffer.
        gradient: BufferId,
    },
    /// Sets parts of a new gradient buffer to zero that no run contributes to.
    Clear {
        /// The run that makes the zeros.
        run: Run,
    },
    /// Sums a gradient buffer over ranks: a partial sum becomes complete, whole or in shards. The
    /// program's types say over which axes.
    Reduce {
        /// The run of the reduction.
        run: Run,
        /// The gradient buffer that is summed.
        from: BufferId,
        /// The gradient buffer that holds the sum: another one, or the same.
        into: BufferId,
    },
    /// Gathers a sharded unit into a buffer that programs read.
    Gather(Run),
    /// Ends the live range of a buffer.
    Release {
        /// The gathered unit, or the value that was sent and has arrived.
        buffer: BufferId,
    },
    /// Copies a buffer to one of the same size in another tier: a batch to the tier `Device`, state
    /// out of it. The lane says the direction.
    Copy {
        /// The source buffer.
        from: BufferId,
        /// The target buffer.
        into: BufferId,
    },
    /// Sends what a buffer holds to ranks of another stage group. It ends when they have received
    /// it.
    Send {
        /// The buffer.
        buffer: BufferId,
        /// Which elements go to which rank.
        messages: Vec<Message>,
    },
    /// Fills a buffer with what ranks of another stage group send.
    Receive {
        /// The buffer.
        buffer: BufferId,
        /// Which elements come from which rank.
        messages: Vec<Message>,
    },
}

/// One thing that a rank does.
#[derive(Clone, PartialEq, Debug)]
pub struct Action {
    /// A description for errors, traces and pictures: `blocks.3 BW mb 0`.
    pub label: String,
    /// Where it is issued.
    pub lane: Lane,
    /// What it does.
    pub kind: Kind,
    /// Earlier actions that it waits for, besides those that follow from its buffers.
    pub after: Vec<usize>,
}

/// A program of a script, and the ranks that run it.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    /// The program, and where its values lie.
    pub placed: Placed,
    /// The ranks that run it together, in the order of its mesh.
    pub ranks: Arc<[usize]>,
}

impl Entry {
    /// The program.
    pub fn program(&self) -> &Program {
        &self.placed.program
    }

    /// Where its values lie.
    pub fn slots(&self) -> &Slots {
        &self.placed.slots
    }

    /// The place of a rank in the program's mesh.
    ///
    /// # Panics
    /// If the rank does not run the program.
    pub fn place(&self, rank: usize) -> usize {
        let place = self.ranks.iter().position(|&r| r == rank);
        place.expect("a script has programs that its own rank runs")
    }
}

/// What a rank does in a step: actions over buffers and programs.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Script {
    /// The rank that runs it.
    pub rank: usize,
    /// The ranks of its stage group, in the order of the group's mesh: all ranks if there is only
    /// one group.
    pub ranks: Arc<[usize]>,
    /// The buffers.
    pub buffers: Vec<Buffer>,
    /// The distinct programs.
    pub programs: Vec<Entry>,
    /// The actions, in order of issue.
    pub actions: Vec<Action>,
    /// The turns of the schedule, each with the number of its action.
    pub turns: Vec<(usize, ScheduledRun)>,
    /// The gradient buffers.
    pub accumulators: Vec<Accumulator>,
    /// When weights are updated, if that is more than once, or if runs read older ones.
    pub updates: Option<Updates>,
    /// The weights, if they have versions.
    pub versioned: Vec<VersionedBuffer>,
    /// Which script of an endless row it is, if it is one.
    pub window: Option<RowWindow>,
    /// What the numbers in contributions stand for.
    pub names: Names,
}

/// A gradient buffer: what it must hold when its unit is updated.
#[derive(Clone, PartialEq, Debug)]
pub struct Accumulator {
    /// The buffer.
    pub buffer: BufferId,
    /// The element type that is added in.
    pub dtype: DType,
    /// For each update: every summand that this rank adds.
    pub complete: Vec<Vec<Contribution>>,
    /// For each update: what other stage groups add, which comes in messages.
    pub brought: Vec<Vec<Contribution>>,
    /// Whether the script before has left it complete, for an update of its own before those.
    pub left: bool,
    /// Axes along which other ranks add their summands: the stage groups that share a parameter.
    pub shared: BTreeSet<Axis>,
}

/// A buffer that holds a version of a unit's weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VersionedBuffer {
    /// The buffer.
    pub buffer: BufferId,
    /// The unit's number.
    pub unit: usize,
    /// How many updates before the script it was the newest, and how many before its end the one that it then holds.
    pub age: usize,
}

impl Script {
    /// An empty script of one rank of a stage group.
    ///
    /// # Panics
    /// If the rank is not in `ranks`.
    pub fn of_rank(rank: usize, ranks: Arc<[usize]>) -> Self {
        assert!(ranks.contains(&rank), "rank {rank} is not in its stage group {ranks:?}");
        Self { rank, ranks, ..Self::default() }
    }

    /// Adds a buffer.
    pub fn buffer(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() - 1)
    }

    /// Adds a program that the ranks of the stage group run, or finds the same one.
    pub fn program(&mut self, placed: Placed) -> ProgramId {
        let ranks = match placed.program.mesh().ranks() {
            1 => [self.rank].into(),
            _ => self.ranks.clone(),
        };
        self.program_of(placed, ranks)
    }

    /// Adds a program that these ranks run together, or finds the same one.
    pub fn program_of(&mut self, placed: Placed, ranks: Arc<[usize]>) -> ProgramId {
        let same = |e: &Entry| e.placed.hash == placed.hash && e.ranks == ranks;
        if let Some(found) = self.programs.iter().position(same) {
            return ProgramId(found);
        }
        self.programs.push(Entry { placed, ranks });
        ProgramId(self.programs.len() - 1)
    }

    /// The type that the first run which reads a buffer reads it as; none if no run does.
    pub fn read_type(&self, buffer: BufferId) -> Option<&TensorType> {
        self.actions.iter().filter_map(Action::run).find_map(|run| {
            let program = self.programs[run.program.0].program();
            let at = run.inputs.iter().position(|view| view.buffer == buffer)?;
            Some(program.ty(program.inputs()[at].value))
        })
    }

    /// The type that the first run which writes a buffer writes it as; none if no run does.
    pub fn written_type(&self, buffer: BufferId) -> Option<&TensorType> {
        self.actions.iter().filter_map(Action::run).find_map(|run| {
            let program = self.programs[run.program.0].program();
            let at = run.outputs.iter().position(|(view, _)| view.buffer == buffer)?;
            Some(program.ty(program.outputs()[at].value))
        })
    }

    /// The buffer that holds this.
    pub fn find(&self, key: &BufferKey) -> Option<BufferId> {
        self.buffers.iter().position(|b| b.key == *key).map(BufferId)
    }

    /// What a buffer holds, as text.
    pub fn name(&self, buffer: BufferId) -> String {
        self.buffers[buffer.0].key.describe(&self.names).to_string()
    }
}

impl Action {
    /// The run, if the action runs a program.
    pub fn run(&self) -> Option<&Run> {
        match &self.kind {
            Kind::Run(run)
            | Kind::Update { run, .. }
            | Kind::Clear { run }
            | Kind::Reduce { run, .. }
            | Kind::Gather(run) => Some(run),
            _ => None,
        }
    }

    /// The run, to change it.
    pub fn run_mut(&mut self) -> Option<&mut Run> {
        match &mut self.kind {
            Kind::Run(run)
            | Kind::Update { run, .. }
            | Kind::Clear { run }
            | Kind::Reduce { run, .. }
            | Kind::Gather(run) => Some(run),
            _ => None,
        }
    }

    /// Buffers that the action reads.
    pub fn reads(&self) -> Vec<BufferId> {
        match (&self.kind, self.run()) {
            (_, Some(run)) => {
                let added = run.outputs.iter().filter(|(_, w)| *w == Write::Add);
                run.inputs.iter().chain(added.map(|(v, _)| v)).map(|v| v.buffer).collect()
            }
            (Kind::Send { buffer, .. } | Kind::Copy { from: buffer, .. }, _) => vec![*buffer],
            _ => vec![],
        }
    }

    /// Buffers that the action writes.
    pub fn writes(&self) -> Vec<BufferId> {
        match (&self.kind, self.run()) {
            (_, Some(run)) => run.outputs.iter().map(|(v, _)| v.buffer).collect(),
            (Kind::Receive { buffer, .. } | Kind::Copy { into: buffer, .. }, _) => vec![*buffer],
            _ => vec![],
        }
    }

    /// The buffer whose live range the action ends: it waits for all uses, and leaves nothing
    /// there.
    pub fn ends(&self) -> Option<BufferId> {
        match self.kind {
            Kind::Release { buffer } => Some(buffer),
            _ => None,
        }
    }
}
