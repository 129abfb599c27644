//! Checks all ranks together: every message that is sent is received, and there is no cycle of
//! waits.
//!
//! [`check`](crate::check()) sees only one rank. Whether the scripts of ranks match can only be
//! seen by comparing them. A channel delivers in order, so the messages that a rank puts into it
//! and those that its peer takes out must be the same ones one after the other. Ranks that
//! communicate in a program must run it in the same order. And all waits must end: an action has a
//! beginning and an end, and
//!
//! - it begins after those that it waits for have ended ([`HappensBefore`]);
//! - it begins after the one issued before it has begun, and if that is not a message, has ended:
//!   an engine may issue from a single thread, and a faster engine waits for less;
//! - a message ends on both sides after it has begun on both, and a collective on all ranks after it
//!   has begun on all.
//!
//! Nothing else delays an action, so if these rules have no cycle the step ends, however slow any
//! rank is; and if they have one, it never ends.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use phalanx_call::{Block, Message, traffic};
use phalanx_ir::Axis;

use crate::action::{Kind, Script};
use crate::check::contents;
use crate::cycle::cycle;
use crate::error::ScriptError;
use crate::names::Names;
use crate::order::HappensBefore;

/// Ranks that do the same, each on its part of the data: those of one stage group. The script of
/// one of them represents all; only their messages differ.
#[derive(Clone, Debug)]
pub struct Class<'a> {
    /// The script of one rank.
    pub script: &'a Script,
    /// Its order.
    pub order: &'a HappensBefore,
    /// The other ranks.
    pub others: Vec<ClassMember>,
}

/// A rank that is represented by another rank's script.
#[derive(Clone, Debug)]
pub struct ClassMember {
    /// The rank.
    pub rank: usize,
    /// For each action that sends or receives: this rank's own messages.
    pub messages: Vec<(usize, Vec<Message>)>,
}

/// Checks the scripts of all ranks: each one alone, then that they match.
pub fn check_together(scripts: &[Script]) -> Result<(), ScriptError> {
    let orders =
        scripts.iter().map(HappensBefore::of).collect::<Result<Vec<HappensBefore>, _>>()?;
    scripts.iter().try_for_each(contents)?;
    let class = |(script, order)| Class { script, order, others: Vec::new() };
    let classes: Vec<Class<'_>> = scripts.iter().zip(&orders).map(class).collect();
    check_classes(&classes)
}

/// Checks that scripts match which are each known to be correct, one for each class of ranks that
/// do the same.
///
/// What is true for the classes is true for all ranks: a rank waits for another rank in an action
/// of its class, so a cycle of ranks would also be a cycle of classes.
pub fn check_classes(classes: &[Class<'_>]) -> Result<(), ScriptError> {
    let mut waits = Waits::of(classes);
    let all = Classes::of(classes)?;
    for members in all.meetings()? {
        waits.meet(&members);
    }
    match waits.cycle() {
        None => Ok(()),
        Some(cycle) => Err(ScriptError::Deadlock {
            cycle: cycle.into_iter().map(|at| all.describe(at)).collect(),
        }),
    }
}

/// The actions that take part in the same message, or in the same call of a collective: none of them
/// ends before all of them have begun.
pub fn meetings(classes: &[Class<'_>]) -> Result<Vec<Vec<ActionAt>>, ScriptError> {
    Classes::of(classes)?.meetings()
}

/// An action of one of several classes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ActionAt {
    /// The index of its class.
    pub class: usize,
    /// Its index in the script of the class.
    pub action: usize,
}

fn apart(rank: usize, why: impl Into<String>, help: &str) -> ScriptError {
    ScriptError::Apart { rank, why: why.into(), help: help.to_owned() }
}

/// One end of a message.
struct End<'a> {
    at: ActionAt,
    message: &'a Message,
}

/// The classes, and which of them a rank is in.
struct Classes<'a> {
    classes: &'a [Class<'a>],
    of_rank: HashMap<usize, usize>,
}

impl<'a> Classes<'a> {
    fn of(classes: &'a [Class<'a>]) -> Result<Self, ScriptError> {
        let mut of_rank = HashMap::new();
        for (number, class) in classes.iter().enumerate() {
            let others = class.others.iter().map(|other| other.rank);
            for rank in others.chain([class.script.rank]) {
                if of_rank.insert(rank, number).is_some() {
                    let help = "give every rank one script";
                    return Err(apart(rank, "it has two scripts", help));
                }
            }
        }
        Ok(Self { classes, of_rank })
    }

    fn meetings(&self) -> Result<Vec<Vec<ActionAt>>, ScriptError> {
        let messages = self.messages()?.into_iter().map(|(send, receive)| vec![send, receive]);
        Ok(messages.chain(self.collectives()?).collect())
    }

    fn describe(&self, at: ActionAt) -> String {
        let script = self.classes[at.class].script;
        format!("rank {}, action {} ({})", script.rank, at.action, script.actions[at.action].label)
    }

    /// Every message of every rank: both of its ends, where they occur.
    fn ends(&self) -> BTreeMap<(usize, usize, u32), [Vec<End<'a>>; 2]> {
        let mut channels: BTreeMap<(usize, usize, u32), [Vec<End<'a>>; 2]> = BTreeMap::new();
        let mut add = |rank: usize, at: ActionAt, messages: &'a [Message]| {
            let side = match self.classes[at.class].script.actions[at.action].kind {
                Kind::Send { .. } => 0,
                _ => 1,
            };
            for message in messages {
                let [from, to] = match side {
                    0 => [rank, message.peer],
                    _ => [message.peer, rank],
                };
                let ends = channels.entry((from, to, message.channel)).or_default();
                ends[side].push(End { at, message });
            }
        };
        for (class, known) in self.classes.iter().enumerate() {
            for (action, done) in known.script.actions.iter().enumerate() {
                if let Kind::Send { messages, .. } | Kind::Receive { messages, .. } = &done.kind {
                    add(known.script.rank, ActionAt { class, action }, messages);
                }
            }
            for other in &known.others {
                for (action, messages) in &other.messages {
                    add(other.rank, ActionAt { class, action: *action }, messages);
                }
            }
        }
        channels
    }

    /// The matching pairs of sends and receives.
    fn messages(&self) -> Result<BTreeSet<(ActionAt, ActionAt)>, ScriptError> {
        let mut pairs = BTreeSet::new();
        for ((from, to, channel), [sent, taken]) in self.ends() {
            let way = format!("on channel {channel} from rank {from} to rank {to}");
            for (number, (a, b)) in sent.iter().zip(&taken).enumerate() {
                if !fits(a.message, b.message) {
                    let (sends, takes) = (self.describe(a.at), self.describe(b.at));
                    let names = |end: &End<'_>| &self.classes[end.at.class].script.names;
                    let (x, y) = (content(a.message, names(a)), content(b.message, names(b)));
                    return Err(apart(
                        to,
                        format!("message {number} {way} is {x} in {sends}, but {y} in {takes}"),
                        "receive messages in the order in which they are sent, with the same \
                        blocks",
                    ));
                }
                pairs.insert((a.at, b.at));
            }
            let (sends, takes) = (sent.len(), taken.len());
            if sends != takes {
                let why = format!("{sends} messages are sent {way}, but {takes} are received");
                let help = "every send needs a receive, and every receive a send";
                return Err(apart(if sends < takes { to } else { from }, why, help));
            }
        }
        Ok(pairs)
    }

    /// The actions in which ranks communicate in a program, grouped by call.
    fn collectives(&self) -> Result<Vec<Vec<ActionAt>>, ScriptError> {
        // For each set of classes: the ranks of one such group, and for each class the calls it
        // makes with the others, in order.
        type Calls = (Vec<usize>, BTreeMap<usize, Vec<ActionAt>>);
        let mut groups: BTreeMap<Vec<usize>, Calls> = BTreeMap::new();
        for (class, known) in self.classes.iter().enumerate() {
            let script = known.script;
            let groups_of: Vec<Vec<Vec<usize>>> =
                (0..script.programs.len()).map(|program| partners(script, program)).collect();
            for (action, run) in script.actions.iter().enumerate() {
                let Some(run) = run.run() else { continue };
                for group in &groups_of[run.program.0] {
                    let classes = self.classes_of(script.rank, group)?;
                    let entry = groups.entry(classes);
                    let (_, calls) = entry.or_insert_with(|| (group.clone(), BTreeMap::new()));
                    calls.entry(class).or_default().push(ActionAt { class, action });
                }
            }
        }
        let mut found = Vec::new();
        for (classes, (group, calls)) in groups {
            let lists: Vec<&[ActionAt]> = classes
                .iter()
                .map(|class| calls.get(class).map_or(&[][..], Vec::as_slice))
                .collect();
            let most = lists.iter().map(|list| list.len()).max().expect("a group has a class");
            for number in 0..most {
                found.push(self.one_call(&classes, &group, &lists, number)?);
            }
        }
        Ok(found)
    }

    /// The classes that the ranks of a group are in.
    fn classes_of(&self, rank: usize, group: &[usize]) -> Result<Vec<usize>, ScriptError> {
        let mut classes = BTreeSet::new();
        for member in group {
            let Some(&class) = self.of_rank.get(member) else {
                let why = format!(
                    "it communicates with the ranks {group:?}, but rank {member} has no script"
                );
                return Err(apart(rank, why, "give every rank one script"));
            };
            classes.insert(class);
        }
        Ok(classes.into_iter().collect())
    }

    /// The same call of every class of a group: the same program, on the same lane.
    fn one_call(
        &self,
        classes: &[usize],
        group: &[usize],
        lists: &[&[ActionAt]],
        number: usize,
    ) -> Result<Vec<ActionAt>, ScriptError> {
        let mut members: Vec<ActionAt> = Vec::new();
        for (&class, list) in classes.iter().zip(lists) {
            let rank = self.classes[class].script.rank;
            let Some(&at) = list.get(number) else {
                let why = format!(
                    "it communicates {} times with the ranks {group:?}, but others of them do so \
                    more often",
                    list.len()
                );
                return Err(apart(rank, why, "let every rank of a group run the same programs"));
            };
            let what = |at: ActionAt| {
                let script = self.classes[at.class].script;
                let action = &script.actions[at.action];
                let program = action.run().map(|run| script.programs[run.program.0].placed.hash);
                (action.lane, program)
            };
            if let Some(&first) = members.first().filter(|first| what(**first) != what(at)) {
                let (a, b) = (self.describe(first), self.describe(at));
                let why = format!(
                    "call {number} of the ranks {group:?} is {a} on one, but {b} on another"
                );
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
}

/// Whether a sent message equals a received one: the same value, block by block, wherever it lies.
fn fits(sent: &Message, taken: &Message) -> bool {
    let shape = |block: &Block| (block.rows, block.len);
    (&sent.value, sent.dtype) == (&taken.value, taken.dtype)
        && sent.blocks.iter().map(shape).eq(taken.blocks.iter().map(shape))
}

fn content(message: &Message, names: &Names) -> String {
    let shape = |block: &Block| format!("{} x {}", block.rows, block.len);
    let blocks: Vec<String> = message.blocks.iter().map(shape).collect();
    format!("`{}` as {} [{}]", names.value(&message.value), message.dtype, blocks.join(", "))
}

/// The groups of ranks that a rank communicates with in one of its programs.
fn partners(script: &Script, program: usize) -> Vec<Vec<usize>> {
    let entry = &script.programs[program];
    let (mesh, place) = (entry.program().mesh(), entry.place(script.rank));
    let routes = traffic::of_program(entry.program(), place);
    let axes: BTreeSet<Vec<Axis>> = routes.into_keys().map(|route| route.axes).collect();
    let group = |axes: &Vec<Axis>| -> Vec<usize> {
        mesh.group(place, axes).iter().map(|&place| entry.ranks[place]).collect()
    };
    axes.iter().map(group).filter(|group| group.len() > 1).collect()
}

/// What the beginnings and ends of actions wait for.
struct Waits {
    /// For each class: the number of its first action among all.
    firsts: Vec<usize>,
    /// For each event: those that it waits for. Action n begins as event 2n and ends as event 2n +
    /// 1; after them come events at which actions meet.
    on: Vec<Vec<usize>>,
}

impl Waits {
    fn of(classes: &[Class<'_>]) -> Self {
        let mut firsts = Vec::with_capacity(classes.len() + 1);
        let mut total = 0;
        for class in classes {
            firsts.push(total);
            total += class.script.actions.len();
        }
        firsts.push(total);
        let mut waits = Self { firsts, on: vec![Vec::new(); 2 * total] };
        for (number, class) in classes.iter().enumerate() {
            for action in 0..class.script.actions.len() {
                let [begins, ends] = waits.events(ActionAt { class: number, action });
                waits.on[ends].push(begins);
                for before in class.order.direct(action) {
                    let [_, ended] = waits.events(ActionAt { class: number, action: before });
                    waits.on[begins].push(ended);
                }
                if let Some(before) = action.checked_sub(1) {
                    let inline = class.script.actions[before].lane.ends_in_order();
                    let issued = waits.events(ActionAt { class: number, action: before });
                    waits.on[begins].push(issued[usize::from(inline)]);
                }
            }
        }
        waits
    }

    /// The beginning and the end of an action.
    fn events(&self, at: ActionAt) -> [usize; 2] {
        let number = self.firsts[at.class] + at.action;
        [2 * number, 2 * number + 1]
    }

    /// None of these actions ends before all of them have begun.
    fn meet(&mut self, actions: &[ActionAt]) {
        let moment = self.on.len();
        self.on.push(Vec::new());
        for &at in actions {
            let [begins, ends] = self.events(at);
            self.on[moment].push(begins);
            self.on[ends].push(moment);
        }
    }

    /// A cycle of actions, each of which waits for the next; none if all can end.
    fn cycle(&self) -> Option<Vec<ActionAt>> {
        let mut cycle: Vec<ActionAt> =
            cycle(&self.on)?.into_iter().filter_map(|e| self.action(e)).collect();
        cycle.dedup();
        if cycle.len() > 1 && cycle.first() == cycle.last() {
            cycle.pop();
        }
        Some(cycle)
    }

    /// The action that begins or ends with an event; none where actions meet.
    fn action(&self, event: usize) -> Option<ActionAt> {
        let number = event / 2;
        let class = self.firsts.partition_point(|&first| first <= number).checked_sub(1)?;
        (class + 1 < self.firsts.len())
            .then(|| ActionAt { class, action: number - self.firsts[class] })
    }
}
