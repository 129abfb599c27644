//! Shows a training step before it runs: its programs, its script, its memory, and what its ranks
//! move.

mod balance;
mod holdings;
mod holdings_svg;
mod largest;
mod moved;
mod ranks;
mod step;

use std::collections::BTreeMap;
use std::fmt::Write;

use phalanx_call::foreign_at_once;
use phalanx_ir::{Mesh, Model};
use phalanx_script::traffic::of_action;
use phalanx_script::{
    Action, BufferId, Category, Compiled, Kind, Lane, MemoryPlan, Moved, Part, Route, Script,
    ScriptKey, traffic,
};
use serde_json::{Value, json};

pub use self::balance::ring_balance;
use self::holdings::Holdings;
use self::largest::Row;
pub use self::step::step_drawing;
use phalanx_config::Loaded;
use phalanx_error::counted;
use phalanx_error::{Error, Problem, Result};
use phalanx_session::host;
use phalanx_session::network::{Network, describe_step};
use phalanx_session::{Bound, Command, Lowered, Planner, Reply, Rooms, Settings};

/// How many buffers the memory table lists.
const LARGEST: usize = 12;

/// What to show.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Focus {
    /// Only the programs of this segment.
    pub segment: Option<String>,
    /// Only this part of each segment.
    pub part: Option<Part>,
    /// The grid of ranks, instead of programs and script.
    pub ranks: bool,
    /// The rank whose script is shown.
    pub rank: usize,
    /// Draws what each rank holds.
    pub drawing: bool,
}

/// A step, explained.
pub struct Explanation {
    model: Model,
    compiled: Compiled,
    script: Script,
    /// The script that takes the mean over replicas, if there is one, and when it runs.
    average: Option<(Script, String)>,
    memory: MemoryPlan,
    /// Bytes outside the arena that this machine's kernels use, over all threads.
    kernel_scratch: usize,
    focus: Focus,
    /// The mesh of all ranks.
    mesh: Mesh,
    /// The rank's place in the mesh of its programs.
    place: usize,
    /// What this rank moves in a step.
    moved: BTreeMap<Route, Moved>,
    /// How much room there is for rows of experts, where it is bounded.
    rooms: Option<Rooms>,
    header: String,
    /// What each rank holds, as an SVG, if it was asked for.
    drawing: Option<String>,
}

impl Explanation {
    /// Builds the step of a configuration, and compiles it, without memory and without weights.
    pub fn new(loaded: &Loaded, focus: Focus) -> Result<Self> {
        let network = Network::new(loaded)?;
        let models = network.models(&loaded.config, false)?;
        let lowered = Lowered::new(&models, Settings::new(&loaded.config)?)?;
        check_rank(focus.rank, lowered.ranks())?;
        let planner = Planner::new(&lowered)?;
        let mut plan = planner.plan(focus.rank)?;
        let planned = plan.take(ScriptKey::Train).expect("a session trains");
        let replicas = lowered.settings.parallel.replicas;
        let average = plan.take(ScriptKey::Average).zip(replicas);
        let average = average.map(|(own, replicas)| (own.script, replicas.describe()));
        let (model, script, memory) = (models.train, planned.script, planned.memory);
        let kernel_scratch = kernel_scratch(&lowered)?;
        let compiled = lowered.compiled_of(focus.rank).clone();
        let described = network.describe(&loaded.config, model.elements());
        let drawing = match focus.drawing {
            true => {
                let holdings = Holdings::new(&lowered, &planner)?;
                Some(holdings_svg::svg(&holdings, &described, &lowered.describe()))
            }
            false => None,
        };
        let rooms = planner.rooms()?;
        let about_rooms = rooms.as_ref().map(|own| format!("# {}\n", own.describe()));
        let header = format!(
            "# {described}\n# a step: {}\n{}\n",
            describe_step(&loaded.config),
            about_rooms.unwrap_or_default() + &moved::about_rows(&script)
        );
        let moved = traffic(&script);
        let (mesh, place) = (lowered.whole_mesh()?, lowered.at(focus.rank).rank);
        let explanation = Self {
            model,
            compiled,
            script,
            average,
            memory,
            kernel_scratch,
            focus,
            mesh,
            place,
            moved,
            rooms,
            header,
            drawing,
        };
        explanation.check_focus()?;
        Ok(explanation)
    }

    /// The drawing of what each rank holds, if it was asked for.
    pub fn drawing(&self) -> Option<&str> {
        self.drawing.as_deref()
    }

    /// The text for people.
    pub fn text(&self) -> String {
        let mut text = self.header.clone();
        if self.focus.ranks {
            text += &ranks::text(&self.mesh, self.moved.keys());
            return text + &moved::table(&self.moved, self.focus.rank);
        }
        for (segment, part) in self.programs() {
            let program = self.compiled.program(segment, part);
            let instances = self.instances(segment).join(", ");
            let program = moved::program_text(program, self.place);
            let _ = writeln!(text, "# {part} of {instances}\n{program}");
        }
        if self.is_whole() {
            text += &script_text(&self.script, "");
            text += &moved::table(&self.moved, self.focus.rank);
            if let Some((script, when)) = &self.average {
                text += &script_text(script, &format!(" ({when})"));
                text += &moved::table(&traffic(script), self.focus.rank);
            }
            text += &self.memory_text();
        }
        text
    }

    /// The same as JSON objects, to be printed a line each.
    pub fn json(&self) -> Vec<Value> {
        let communication = || json!({"communication": moved::rows(&self.moved)});
        if self.focus.ranks {
            return vec![ranks::json(&self.mesh, self.moved.keys()), communication()];
        }
        let mut lines: Vec<Value> = (self.programs().into_iter())
            .map(|(segment, part)| {
                let program = self.compiled.program(segment, part);
                json!({"program": {
                    "segment": self.model.segments()[segment].name,
                    "part": part.to_string(),
                    "instances": self.instances(segment),
                    "flops": program.flops(),
                    "text": program.to_string(),
                    "collectives": moved::program_json(program, self.place),
                }})
            })
            .collect();
        if self.is_whole() {
            lines.extend(actions_json(&self.script).map(|action| json!({"action": action})));
            lines.push(communication());
            lines.extend(self.rooms.as_ref().map(|Rooms { even, bounds }| {
                let bound = |own: &Bound| json!({"rows": own.rows, "arena": own.arena});
                let bounds: Vec<Value> = bounds.iter().map(bound).collect();
                json!({"rooms": {"even": even, "bounds": bounds}})
            }));
            if let Some((script, when)) = &self.average {
                let actions: Vec<Value> = actions_json(script).collect();
                let communication = moved::rows(&traffic(script));
                lines.push(json!({"average": {
                    "when": when, "actions": actions, "communication": communication,
                }}));
            }
            let peaks: serde_json::Map<String, Value> = (Category::ALL.into_iter())
                .map(|c| (c.name().to_owned(), json!(self.memory.peak(c))))
                .collect();
            let largest: Vec<Value> = (self.largest().into_iter())
                .map(|Row { name, category, bytes, count }| {
                    json!({
                        "buffer": name, "category": category.name(), "bytes": bytes, "count": count,
                    })
                })
                .collect();
            lines.push(json!({"memory": {
                "arena": self.memory.arena, "peaks": peaks, "largest": largest,
                "kernel_scratch_bytes": self.kernel_scratch,
                "foreign_bytes": self.foreign().map_or(0, |(bytes, _)| bytes),
            }}));
        }
        lines
    }

    /// The programs to show: by default, those of every segment that the script runs.
    fn programs(&self) -> Vec<(usize, Part)> {
        let all = [Part::F, Part::B, Part::W, Part::BW, Part::FBW];
        let script = &self.script;
        let runs = |segment, part| {
            let program = self.compiled.program(segment, part);
            script.programs.iter().any(|e| e.program() == program)
        };
        let mut shown = Vec::new();
        for (segment, forward) in self.model.segments().iter().enumerate() {
            if (self.focus.segment.as_ref()).is_some_and(|name| *name != forward.name) {
                continue;
            }
            let chosen = all.into_iter().filter(|&part| match self.focus.part {
                Some(wanted) => part == wanted,
                None => self.focus.segment.is_some() || runs(segment, part),
            });
            shown.extend(chosen.map(|part| (segment, part)));
        }
        shown
    }

    fn instances(&self, segment: usize) -> Vec<&str> {
        let instances = self.model.instances().iter();
        let instances = instances.filter(|i| i.segment == segment);
        instances.map(|i| i.name.as_str()).collect()
    }

    fn memory_text(&self) -> String {
        let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        let arena = self.memory.arena;
        let mut text = format!("# memory: an arena of {arena} bytes ({:.2} MiB)\n", mib(arena));
        let _ = writeln!(text, "  {:<15}{:>14}{:>10}", "category", "peak bytes", "MiB");
        for category in Category::ALL {
            let bytes = self.memory.peak(category);
            let _ = writeln!(text, "  {:<15}{bytes:>14}{:>10.2}", category.name(), mib(bytes));
        }
        if let Some((bytes, program)) = self.foreign() {
            let amount = mib(bytes);
            let _ = writeln!(
                text,
                "\n  operands that other ranks sent: {bytes} bytes ({amount:.2} MiB) of the workspace at once, in {program}"
            );
        }
        let rows = self.largest();
        let width = 2 + rows.iter().map(|row| row.name.len()).fold(24, usize::max);
        let head = ["largest buffers", "category", "bytes each", "count"];
        let _ =
            writeln!(text, "\n  {:<width$}{:<15}{:>14}{:>8}", head[0], head[1], head[2], head[3]);
        for Row { name, category, bytes, count } in rows {
            let _ = writeln!(text, "  {name:<width$}{:<15}{bytes:>14}{count:>8}", category.name());
        }
        let scratch = self.kernel_scratch;
        let _ = writeln!(text, "\n  outside the arena");
        let _ = writeln!(text, "  {:<width$}{:<15}{scratch:>14}", "scratch of the kernels", "");
        let _ = writeln!(
            text,
            "  the matrix library also packs operands into its own blocks; only a run can measure \
            them: phalanx bench step"
        );
        text
    }

    /// The most that other ranks sent and that is there at once inside a program, and which program that is.
    fn foreign(&self) -> Option<(usize, &str)> {
        let runs = self.script.actions.iter().filter_map(|action| action.run());
        let programs = runs.map(|run| self.script.programs[run.program.0].program());
        let of_each = programs.map(|p| (foreign_at_once(p, |_| true), p.name.as_str()));
        // Of equal ones the first.
        let largest = of_each.fold((0, ""), |most, own| if own.0 > most.0 { own } else { most });
        Some(largest).filter(|(bytes, _)| *bytes > 0)
    }

    fn largest(&self) -> Vec<Row> {
        largest::largest(&self.model, &self.compiled, &self.script, &self.memory, LARGEST)
    }

    /// Whether script and memory are shown too.
    fn is_whole(&self) -> bool {
        self.focus.segment.is_none() && self.focus.part.is_none()
    }

    fn check_focus(&self) -> Result<()> {
        let known: Vec<&str> = (self.model.segments().iter()).map(|s| s.name.as_str()).collect();
        match &self.focus.segment {
            Some(name) if !known.contains(&name.as_str()) => Err(Error::refused(
                Problem::new(format!("{} has no segment `{name}`", self.model.name))
                    .fix(format!("--segment {}", known.join(" | "))),
            )),
            _ => Ok(()),
        }
    }
}

/// A script in words, an action in three lines.
fn script_text(script: &Script, when: &str) -> String {
    let actions = script.actions.len();
    let mut text = format!("# script of rank {}{when}: {actions} actions\n", script.rank);
    for (index, action) in script.actions.iter().enumerate() {
        let Action { label, lane: on, .. } = action;
        let moves = moved::action_text(&of_action(script, action));
        let _ = writeln!(text, "{index:4}  {:<8}{label}{moves}", lane(*on));
        let _ = writeln!(text, "        reads  {}", names(script, &action.reads()).join(" "));
        let _ = writeln!(text, "        writes {}", names(script, &action.writes()).join(" "));
    }
    text.push('\n');
    text
}

fn actions_json(script: &Script) -> impl Iterator<Item = Value> {
    script.actions.iter().enumerate().map(|(index, action)| {
        json!({
            "index": index,
            "label": action.label,
            "lane": lane(action.lane),
            "kind": kind(&action.kind),
            "reads": names(script, &action.reads()),
            "writes": names(script, &action.writes()),
            "moves": moved::rows(&of_action(script, action)),
        })
    })
}

fn check_rank(rank: usize, ranks: usize) -> Result<()> {
    match rank < ranks {
        true => Ok(()),
        false => Err(Error::refused(
            Problem::new(format!(
                "there is no rank {rank}: the step has {}",
                counted(ranks, "rank")
            ))
            .fix(match ranks {
                1 => "leave --rank out".to_owned(),
                _ => format!("--rank 0 to {}", ranks - 1),
            }),
        )),
    }
}

fn lane(lane: Lane) -> String {
    format!("{lane:?}").to_lowercase()
}

fn kind(kind: &Kind) -> &'static str {
    match kind {
        Kind::Run(_) => "run",
        Kind::Update { .. } => "update",
        Kind::Reduce { .. } => "reduce",
        Kind::Clear { .. } => "clear",
        Kind::Gather(_) => "gather",
        Kind::Release { .. } => "release",
        Kind::Copy { .. } => "copy",
        Kind::Send { .. } => "send",
        Kind::Receive { .. } => "receive",
    }
}

/// Names of buffers, each once.
fn names(script: &Script, buffers: &[BufferId]) -> Vec<String> {
    let mut seen: Vec<BufferId> = Vec::new();
    for buffer in buffers {
        if !seen.contains(buffer) {
            seen.push(*buffer);
        }
    }
    seen.into_iter().map(|buffer| script.name(buffer)).collect()
}

/// Bytes outside the arena that this machine's kernels use on one rank, over its threads. For
/// programs on several ranks it is known only once the ranks are connected.
fn kernel_scratch(lowered: &Lowered) -> Result<usize> {
    if lowered.ranks() > 1 {
        return Ok(0);
    }
    let mut ranks = host::threads_of(lowered.settings.device).launch(&Planner::new(lowered)?)?;
    let answers = ranks.ask(Command::Measure)?;
    let beside = |answer: &Reply| match answer {
        Reply::Measured(measured) => measured.scratch_bytes,
        _ => 0,
    };
    Ok(answers.iter().map(beside).sum())
}
