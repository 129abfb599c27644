//! Expands turns of chunks into turns of their instances: what the ranks of a stage group do.

use std::ops::Range;

use phalanx_script as script;
use phalanx_script::Part;

use crate::flow::At;
use crate::schedule::Schedule;

impl Schedule {
    /// For each stage group: the turns of the model's instances, given the instances of each stage.
    /// Forwards go through a stage from its first instance to its last, everything else in reverse.
    pub fn instances(&self, stages: &[Range<usize>]) -> Vec<Vec<script::ScheduledRun>> {
        self.expand(stages, false)
    }

    /// The same, but a stage keeps only its input (GPipe's re-materialisation): its forward is run
    /// again before the backward, except where the backward directly follows the forward. Nothing
    /// waits for the forward of the model's last instance, so it runs only right before its
    /// backward.
    pub fn rematerialised(&self, stages: &[Range<usize>]) -> Vec<Vec<script::ScheduledRun>> {
        self.expand(stages, true)
    }

    /// Whether any forward would be run again, because its backward does not directly follow it.
    pub fn rematerialises(&self) -> bool {
        // Two instances in each stage, because the last instance of a model is never run again.
        let stages: Vec<Range<usize>> =
            (0..self.placement().stages()).map(|stage| 2 * stage..2 * stage + 2).collect();
        self.expand(&stages, true).iter().flatten().any(|turn| turn.part == Part::R)
    }

    fn expand(&self, stages: &[Range<usize>], again: bool) -> Vec<Vec<script::ScheduledRun>> {
        let mut stage_groups: Vec<Vec<script::ScheduledRun>> =
            vec![Vec::new(); self.stage_groups()];
        for (at, _) in self.all().filter(|(at, _)| !self.is_second(*at)) {
            let turns = &mut stage_groups[at.stage_group];
            let runs = |at, before: Option<&_>| self.runs(at, stages, again, before.copied());
            let own = runs(at, turns.last());
            let other = match self.is_first(at) {
                true => runs(at.next(), own.last()),
                false => Vec::new(),
            };
            // The layers of a pair take turns.
            let mut other = other.into_iter();
            turns.extend(own.into_iter().flat_map(|run| [Some(run), other.next()]).flatten());
            turns.extend(other);
        }
        stage_groups
    }

    /// The runs of a turn, given the run before it.
    fn runs(
        &self,
        at: At,
        stages: &[Range<usize>],
        again: bool,
        before: Option<script::ScheduledRun>,
    ) -> Vec<script::ScheduledRun> {
        let turn = self.turn(at);
        let end = stages.last().map_or(0, |last| last.end);
        let run = stages.get(self.stage(at)).cloned().unwrap_or_default();
        // The instances that run with the stage's forward, and those that wait for its
        // backward.
        let waits = again && run.end == end && !run.is_empty();
        let split = if waits { run.end - 1 } else { run.end };
        let (early, late) = (run.start..split, split..run.end);
        let of = |part| {
            let microbatch = turn.microbatch;
            move |instance| script::ScheduledRun { instance, part, microbatch }
        };
        match turn.part {
            Part::F | Part::R => early.map(of(turn.part)).collect(),
            // Forward and backward.
            Part::FBW => run.clone().map(of(Part::F)).chain(run.rev().map(of(Part::BW))).collect(),
            Part::B | Part::BW => {
                let last = early.clone().next_back().map(of(Part::F));
                let second = again && before != last;
                let second = second.then(|| early.map(of(Part::R))).into_iter().flatten();
                let late = late.map(of(Part::F));
                second.chain(late).chain(run.rev().map(of(turn.part))).collect()
            }
            Part::W => run.rev().map(of(Part::W)).collect(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use crate::{NamedSchedule, Placement, Schedule, ScheduleShape, Turn};
    use phalanx_script::Part;

    /// A turn that does everything goes through its instances and back.
    #[test]
    fn everything_at_once_is_there_and_back() {
        let turn = Turn { part: Part::FBW, microbatch: 0, chunk: 0, version: 0 };
        let one = Placement::looped(1, 1).unwrap();
        let schedule = Schedule::from_lists("both", 1, one, vec![vec![turn]]).unwrap();
        let turns = schedule.instances(std::slice::from_ref(&(0..2)));
        let text: Vec<String> =
            turns[0].iter().map(|t| format!("{}{}", t.part, t.instance)).collect();
        assert_eq!(text.join(" "), "F0 F1 BW1 BW0");
    }

    /// A stage whose backward does not follow its forward at once has it once more.
    #[test]
    fn a_forward_is_run_again_before_its_backward() {
        let schedule = NamedSchedule::OneFOneB.build(ScheduleShape::new(2, 2)).unwrap();
        let turns = schedule.rematerialised(&[0..2, 2..4]);
        let text = |stage_group: usize| {
            let words: Vec<String> = (turns[stage_group].iter())
                .map(|t| format!("{}{}@{}", t.part, t.instance, t.microbatch))
                .collect();
            words.join(" ")
        };
        let first = "F0@0 F1@0 F0@1 F1@1 R0@0 R1@0 BW1@0 BW0@0 R0@1 R1@1 BW1@1 BW0@1";
        assert_eq!(text(0), first);
        assert_eq!(text(1), "F2@0 F3@0 BW3@0 BW2@0 F2@1 F3@1 BW3@1 BW2@1");
        // The last instance is never run again.
        let turns = NamedSchedule::GPipe
            .build(ScheduleShape::new(2, 2))
            .unwrap()
            .rematerialised(&[0..2, 2..4]);
        let words = turns[1].iter().map(|t| format!("{}{}@{}", t.part, t.instance, t.microbatch));
        let words: Vec<String> = words.collect();
        assert_eq!(words.join(" "), "F2@0 F2@1 R2@0 F3@0 BW3@0 BW2@0 R2@1 F3@1 BW3@1 BW2@1");
    }

    /// The layers of a pair take turns: a forward of one direction, a backward of the other.
    #[test]
    fn the_layers_of_a_pair_are_woven() {
        let schedule = NamedSchedule::DualPipe.build(ScheduleShape::new(2, 4)).unwrap();
        let text = |schedule: &Schedule| {
            let turns = schedule.instances(&[0..2, 2..4]);
            let words =
                turns[0].iter().map(|t| format!("{}{}@{}", t.part, t.instance, t.microbatch));
            words.collect::<Vec<_>>().join(" ")
        };
        let pair = "F0@0 F1@0 F2@1 F3@1 F0@2 BW3@1 F1@2 BW2@1 F2@3 BW1@0 F3@3 BW0@0";
        assert!(text(&schedule).starts_with(pair), "{}", text(&schedule));
        let apart = "F0@0 F1@0 F2@1 F3@1 F0@2 F1@2 BW3@1 BW2@1 F2@3 F3@3 BW1@0 BW0@0";
        let schedule = schedule.apart();
        assert!(text(&schedule).starts_with(apart), "{}", text(&schedule));
    }

    #[test]
    fn stages_are_passed_there_and_back() {
        let schedule = NamedSchedule::Interleaved.build(ScheduleShape::new(2, 2)).unwrap();
        let turns = schedule.instances(&[0..2, 2..3, 3..4, 4..6]);
        let text = |stage_group: usize| {
            let words: Vec<String> = (turns[stage_group].iter())
                .map(|t| format!("{}{}@{}", t.part, t.instance, t.microbatch))
                .collect();
            words.join(" ")
        };
        assert!(text(0).starts_with("F0@0 F1@0 F0@1 F1@1 F3@0"), "{}", text(0));
        assert!(text(1).contains("F4@0 F5@0 BW5@0 BW4@0"), "{}", text(1));
        assert!(text(0).ends_with("BW1@1 BW0@1"), "{}", text(0));
    }
}
