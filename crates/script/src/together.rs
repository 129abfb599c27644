//! The checker of all ranks together: what one sends another one takes, and nobody waits in a circle.
//!
//! [`check`](crate::check()) sees what one rank does. Whether ranks fit each other shows only side by side. A channel
//! delivers in order, so the messages that a rank puts into it and those that its peer takes out must
//! be the same ones one after the other. Ranks that communicate in a program must run it in the same
//! order. And the waits must end: of an action there is a beginning and an end, and
//!
//! - it begins after those that it waits for have ended ([`HappensBefore`]);
//! - it begins after the one issued before it has begun, and if that is not a message, has ended: an
//!   engine may issue from a single thread, and whoever is quicker waits for less;
//! - a message ends on both sides after it has begun on both, and a collective on all ranks after it
//!   has begun on all.
//!
//! Nothing else decides when something happens, so if these have no circle the step ends, however
//! slow any rank is; and if they have one, it never does.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_call::{Block, Lane, Message, traffic};
use phalanx_ir::Axis;

use crate::action::{Kind, Script};
use crate::check::contents;
use crate::circle::circle;
use crate::error::ScriptError;
use crate::order::HappensBefore;

/// Checks the scripts of all ranks: each by itself, then that they fit each other.
pub fn check_together(scripts: &[Script]) -> Result<(), ScriptError> {
    let mut waits = Waits::of(scripts)?;
    scripts.iter().try_for_each(contents)?;
    let mut ranks = BTreeSet::new();
    if let Some(twice) = scripts.iter().find(|script| !ranks.insert(script.rank)) {
        return Err(apart(twice.rank, "it has two scripts", "give every rank one script"));
    }
    for (send, receive) in messages(scripts)? {
        waits.meet(&[send, receive]);
    }
    for members in collectives(scripts)? {
        waits.meet(&members);
    }
    match waits.circle() {
        None => Ok(()),
        Some(circle) => Err(ScriptError::Deadlock {
            circle: circle.into_iter().map(|at| describe(scripts, at)).collect(),
        }),
    }
}

/// An action: the number of its script, and its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct At {
    script: usize,
    action: usize,
}

fn describe(scripts: &[Script], at: At) -> String {
    let script = &scripts[at.script];
    format!("rank {}, action {} ({})", script.rank, at.action, script.actions[at.action].label)
}

fn apart(rank: usize, why: impl Into<String>, help: &str) -> ScriptError {
    ScriptError::Apart { rank, why: why.into(), help: help.to_owned() }
}

/// One end of a message.
struct End<'a> {
    at: At,
    message: &'a Message,
}

/// The sends and receives that belong together.
fn messages(scripts: &[Script]) -> Result<Vec<(At, At)>, ScriptError> {
    let mut channels: BTreeMap<(usize, usize, u32), [Vec<End<'_>>; 2]> = BTreeMap::new();
    for (index, script) in scripts.iter().enumerate() {
        for (action, done) in script.actions.iter().enumerate() {
            let (side, messages) = match &done.kind {
                Kind::Send { messages, .. } => (0, messages),
                Kind::Receive { messages, .. } => (1, messages),
                _ => continue,
            };
            for message in messages {
                let [from, to] = match side {
                    0 => [script.rank, message.peer],
                    _ => [message.peer, script.rank],
                };
                let ends = channels.entry((from, to, message.channel)).or_default();
                ends[side].push(End { at: At { script: index, action }, message });
            }
        }
    }
    let mut pairs = Vec::new();
    for ((from, to, channel), [sent, taken]) in channels {
        let way = format!("on channel {channel} from rank {from} to rank {to}");
        for (number, (a, b)) in sent.iter().zip(&taken).enumerate() {
            if !fits(a.message, b.message) {
                let (sends, takes) = (describe(scripts, a.at), describe(scripts, b.at));
                let (x, y) = (content(a.message), content(b.message));
                return Err(apart(
                    to,
                    format!("message {number} {way} is {x} for {sends}, but {y} for {takes}"),
                    "take messages in the order in which they are sent, with the same blocks",
                ));
            }
            pairs.push((a.at, b.at));
        }
        let (sends, takes) = (sent.len(), taken.len());
        if sends != takes {
            let why = format!("{sends} messages are sent {way}, but {takes} are received");
            let help = "every send needs its receive, and every receive its send";
            return Err(apart(if sends < takes { to } else { from }, why, help));
        }
    }
    Ok(pairs)
}

/// Whether what is sent is what is taken: the same value, block by block, wherever it lies.
fn fits(sent: &Message, taken: &Message) -> bool {
    let shape = |block: &Block| (block.rows, block.len);
    (&sent.value, sent.dtype) == (&taken.value, taken.dtype)
        && sent.blocks.iter().map(shape).eq(taken.blocks.iter().map(shape))
}

fn content(message: &Message) -> String {
    let shape = |block: &Block| format!("{} x {}", block.rows, block.len);
    let blocks: Vec<String> = message.blocks.iter().map(shape).collect();
    format!("`{}` as {} [{}]", message.value, message.dtype, blocks.join(", "))
}

/// The actions in which ranks communicate by a program, those of one call together.
fn collectives(scripts: &[Script]) -> Result<Vec<Vec<At>>, ScriptError> {
    // By the ranks that take part: for each of them, what it does with the others, in its order.
    let mut groups: BTreeMap<Vec<usize>, BTreeMap<usize, Vec<At>>> = BTreeMap::new();
    for (index, script) in scripts.iter().enumerate() {
        let groups_of: Vec<Vec<Vec<usize>>> =
            (0..script.programs.len()).map(|program| partners(script, program)).collect();
        for (action, run) in script.actions.iter().enumerate() {
            let Some(run) = run.run() else { continue };
            for group in &groups_of[run.program.0] {
                let calls = groups.entry(group.clone()).or_default();
                calls.entry(script.rank).or_default().push(At { script: index, action });
            }
        }
    }
    let mut found = Vec::new();
    for (group, mut calls) in groups {
        let lists: Vec<Vec<At>> =
            group.iter().map(|rank| calls.remove(rank).unwrap_or_default()).collect();
        let most = lists.iter().map(Vec::len).max().unwrap_or(0);
        for number in 0..most {
            found.push(one_call(scripts, &group, &lists, number)?);
        }
    }
    Ok(found)
}

/// The groups of ranks that a rank communicates with in one of its programs.
fn partners(script: &Script, program: usize) -> Vec<Vec<usize>> {
    let entry = &script.programs[program];
    let (mesh, place) = (entry.program.mesh(), entry.place(script.rank));
    let routes = traffic::of_program(&entry.program, place);
    let axes: BTreeSet<Vec<Axis>> = routes.into_keys().map(|route| route.axes).collect();
    let group = |axes: &Vec<Axis>| -> Vec<usize> {
        mesh.group(place, axes).iter().filter_map(|&p| entry.ranks.get(p).copied()).collect()
    };
    axes.iter().map(group).filter(|group| group.len() > 1).collect()
}

/// The same call of every rank of a group: the same program, on the same lane.
fn one_call(
    scripts: &[Script],
    group: &[usize],
    lists: &[Vec<At>],
    number: usize,
) -> Result<Vec<At>, ScriptError> {
    let mut members: Vec<At> = Vec::new();
    for (&rank, list) in group.iter().zip(lists) {
        let Some(&at) = list.get(number) else {
            let why = format!(
                "it communicates {} times with the ranks {group:?}, of which others do so more often",
                list.len()
            );
            return Err(apart(rank, why, "let every rank of a group run the same programs"));
        };
        let what = |at: At| {
            let (script, action) = (&scripts[at.script], &scripts[at.script].actions[at.action]);
            let program = action.run().map(|run| &script.programs[run.program.0].program);
            (action.lane, program)
        };
        if let Some(&first) = members.first().filter(|first| what(**first) != what(at)) {
            let (a, b) = (describe(scripts, first), describe(scripts, at));
            let why = format!("call {number} of the ranks {group:?} is {a}, but also {b}");
            return Err(apart(
                rank,
                why,
                "let the ranks of a group run programs in the same order",
            ));
        }
        members.push(at);
    }
    Ok(members)
}

/// What must have happened before the beginnings and ends of actions.
struct Waits {
    /// By script: the number of its first action among all.
    firsts: Vec<usize>,
    /// By event: those that it waits for. Action n begins as event 2n and ends as event 2n + 1;
    /// behind them are the moments at which actions meet.
    on: Vec<Vec<usize>>,
}

impl Waits {
    fn of(scripts: &[Script]) -> Result<Self, ScriptError> {
        let mut firsts = Vec::with_capacity(scripts.len() + 1);
        let mut total = 0;
        for script in scripts {
            firsts.push(total);
            total += script.actions.len();
        }
        firsts.push(total);
        let mut waits = Self { firsts, on: vec![Vec::new(); 2 * total] };
        for (index, script) in scripts.iter().enumerate() {
            let order = HappensBefore::of(script)?;
            for action in 0..script.actions.len() {
                let [begins, ends] = waits.events(At { script: index, action });
                waits.on[ends].push(begins);
                for &before in order.direct(action) {
                    let [_, ended] = waits.events(At { script: index, action: before });
                    waits.on[begins].push(ended);
                }
                if let Some(before) = action.checked_sub(1) {
                    let inline = !matches!(script.actions[before].lane, Lane::Send | Lane::Receive);
                    let issued = waits.events(At { script: index, action: before });
                    waits.on[begins].push(issued[usize::from(inline)]);
                }
            }
        }
        Ok(waits)
    }

    /// The beginning and the end of an action.
    fn events(&self, at: At) -> [usize; 2] {
        let number = self.firsts[at.script] + at.action;
        [2 * number, 2 * number + 1]
    }

    /// None of these actions ends before all of them have begun.
    fn meet(&mut self, actions: &[At]) {
        let moment = self.on.len();
        self.on.push(Vec::new());
        for &at in actions {
            let [begins, ends] = self.events(at);
            self.on[moment].push(begins);
            self.on[ends].push(moment);
        }
    }

    /// Actions each of which waits for the next, and the last for the first; none if all can end.
    fn circle(&self) -> Option<Vec<At>> {
        let mut circle: Vec<At> =
            circle(&self.on)?.into_iter().filter_map(|e| self.action(e)).collect();
        circle.dedup();
        if circle.len() > 1 && circle.first() == circle.last() {
            circle.pop();
        }
        Some(circle)
    }

    /// The action that begins or ends with an event; none where actions meet.
    fn action(&self, event: usize) -> Option<At> {
        let number = event / 2;
        let script = self.firsts.partition_point(|&first| first <= number).checked_sub(1)?;
        (script + 1 < self.firsts.len())
            .then(|| At { script, action: number - self.firsts[script] })
    }
}
