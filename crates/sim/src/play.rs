//! The event player.
//!
//! An action begins when its lane is free and its inputs are ready: after those that its script's
//! order names ([`HappensBefore`](phalanx_script::HappensBefore)), the one rule that executor,
//! planner and checker share. It ends its duration later. The ends of a message, and the members of
//! a collective, do not end before all of them have begun: their durations count from then on.
//!
//! The result is the longest path through these events. A cycle cannot be played; the checker of
//! all ranks refuses it beforehand, and so does [`play`].

use phalanx_call::Lane;
use phalanx_ir::ops::Op;
use phalanx_script::{Action, ActionAt, Class, Kind, Script, ScriptError, check_classes, meetings};

use crate::durations::Durations;

/// How actions get from a script to their lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IssueRule {
    /// Every lane takes its actions by itself.
    Lanes,
    /// One thread issues all actions in the order of the script, and runs those of the lane
    /// `Compute` itself. So an action also waits for those issued before it: until a program has
    /// ended, until a message or a collective has begun.
    OneThread,
}

/// When an action was issued, began and ended, in the unit of the durations.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ActionTimes {
    /// When its turn to be issued came; from here to its start it waited for others.
    pub issued: f64,
    /// When it began.
    pub started: f64,
    /// When it ended.
    pub ended: f64,
}

/// What was played.
#[derive(Clone, PartialEq, Debug)]
pub struct Playback {
    /// For each class of ranks: the times of its actions, in the order of its script.
    pub classes: Vec<Vec<ActionTimes>>,
    /// From the first issue of any rank to the last end.
    pub makespan: f64,
}

/// Plays the scripts of all ranks, one for each class of ranks that do the same.
///
/// # Panics
/// If there are not as many durations as actions.
pub fn play(
    classes: &[Class<'_>],
    durations: &Durations,
    rule: IssueRule,
) -> Result<Playback, ScriptError> {
    let fits = |(class, own): (&Class<'_>, &Vec<_>)| class.script.actions.len() == own.len();
    let same = classes.len() == durations.actions.len() && classes.len() == durations.begins.len();
    assert!(
        same && classes.iter().zip(&durations.actions).all(fits),
        "every action of every class has a duration"
    );
    let meetings = meetings(classes)?;
    let mut player = Player::new(classes, durations, &meetings);
    player.order(classes, durations, rule);
    match player.run() {
        true => Ok(player.playback(classes)),
        // It says which actions wait for each other.
        false => {
            Err(check_classes(classes).expect_err("what cannot be played has a cycle of waits"))
        }
    }
}

/// Whether the thread that issues an action is occupied until the action ends.
pub fn holds_thread(script: &Script, action: &Action) -> bool {
    match (&action.kind, action.lane) {
        // Nothing is called for it.
        (Kind::Release { .. }, _) => false,
        (Kind::Send { .. } | Kind::Receive { .. }, _) | (_, Lane::Disk) => false,
        (_, Lane::Compute) => true,
        // A single collective is only started.
        _ => action.run().is_none_or(|run| {
            let instrs = script.programs[run.program.0].program().instrs();
            !matches!(instrs, [one] if matches!(one.op, Op::Collective(_)))
        }),
    }
}

/// Events, and how long after others they happen. Action n is issued as event 3n, begins as 3n + 1 and
/// ends as 3n + 2; after them come the moments at which actions meet.
struct Player {
    /// For each class: the number of its first action among all.
    firsts: Vec<usize>,
    /// For each event: those that come after it, and how much later at least.
    after: Vec<Vec<(usize, f64)>>,
    /// How many events each one waits for.
    waits: Vec<usize>,
    times: Vec<f64>,
}

impl Player {
    fn new(classes: &[Class<'_>], durations: &Durations, meetings: &[Vec<ActionAt>]) -> Self {
        let mut firsts = vec![0];
        for class in classes {
            firsts.push(firsts[firsts.len() - 1] + class.script.actions.len());
        }
        let events = 3 * firsts[classes.len()] + meetings.len();
        let (after, waits) = (vec![Vec::new(); events], vec![0; events]);
        let times = vec![f64::NEG_INFINITY; events];
        let mut player = Self { firsts, after, waits, times };
        for (number, class) in classes.iter().enumerate() {
            for action in 0..class.script.actions.len() {
                let at = ActionAt { class: number, action };
                let [issued, begins, ends] = player.events(at);
                player.times[issued] = durations.begins[number];
                player.wait(issued, begins, 0.0);
                player.wait(begins, ends, durations.of(at).work);
                for before in class.order.direct(action) {
                    let [_, _, ended] = player.events(ActionAt { action: before, ..at });
                    player.wait(ended, begins, 0.0);
                }
            }
        }
        for (number, members) in meetings.iter().enumerate() {
            let moment = 3 * player.firsts[classes.len()] + number;
            for &at in members {
                let [_, begins, ends] = player.events(at);
                player.wait(begins, moment, 0.0);
                player.wait(moment, ends, durations.of(at).work);
            }
        }
        player
    }

    /// What the order of issue adds.
    fn order(&mut self, classes: &[Class<'_>], durations: &Durations, rule: IssueRule) {
        for (number, class) in classes.iter().enumerate() {
            let mut lanes: [Option<usize>; Lane::ALL.len()] = [None; Lane::ALL.len()];
            for (action, own) in class.script.actions.iter().enumerate() {
                let at = ActionAt { class: number, action };
                let [issued, begins, _] = self.events(at);
                let earlier = lanes[own.lane as usize].replace(action);
                if let Some(before) = earlier.filter(|_| !own.lane.ends_in_order()) {
                    let [_, began, _] = self.events(ActionAt { action: before, ..at });
                    self.wait(began, begins, 0.0);
                }
                let (IssueRule::OneThread, Some(before)) = (rule, action.checked_sub(1)) else {
                    continue;
                };
                let last = ActionAt { action: before, ..at };
                let what = &class.script.actions[before];
                let [was_issued, began, ended] = self.events(last);
                let free = match what.kind {
                    Kind::Release { .. } => was_issued,
                    _ if holds_thread(class.script, what) => ended,
                    _ => began,
                };
                self.wait(free, issued, durations.of(last).issue);
            }
        }
    }

    fn events(&self, at: ActionAt) -> [usize; 3] {
        let number = 3 * (self.firsts[at.class] + at.action);
        [number, number + 1, number + 2]
    }

    /// `later` happens at least so long after `earlier`.
    fn wait(&mut self, earlier: usize, later: usize, long: f64) {
        self.after[earlier].push((later, long));
        self.waits[later] += 1;
    }

    /// Finds when every event happens; whether all of them do.
    fn run(&mut self) -> bool {
        let mut ready: Vec<usize> = (0..self.waits.len()).filter(|&e| self.waits[e] == 0).collect();
        let mut done = 0;
        while let Some(event) = ready.pop() {
            done += 1;
            let now = self.times[event];
            for (later, long) in std::mem::take(&mut self.after[event]) {
                self.times[later] = self.times[later].max(now + long);
                self.waits[later] -= 1;
                if self.waits[later] == 0 {
                    ready.push(later);
                }
            }
        }
        done == self.waits.len()
    }

    fn playback(&self, classes: &[Class<'_>]) -> Playback {
        let class = |(number, class): (usize, &Class<'_>)| {
            let times = |action: usize| {
                let [issued, started, ended] =
                    self.events(ActionAt { class: number, action }).map(|event| self.times[event]);
                ActionTimes { issued, started, ended }
            };
            (0..class.script.actions.len()).map(times).collect()
        };
        let classes: Vec<Vec<ActionTimes>> = classes.iter().enumerate().map(class).collect();
        let all = || classes.iter().flatten();
        let first = all().map(|times| times.issued).fold(f64::INFINITY, f64::min);
        let last = all().map(|times| times.ended).fold(f64::NEG_INFINITY, f64::max);
        let makespan = (last - first).max(0.0);
        Playback { classes, makespan }
    }
}
