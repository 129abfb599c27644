//! Reports of a run while it goes on: for people, for programs, and in its folder.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::checkpoints::CommittedCheckpoint;
use crate::closing::{PerStep, closing, next, where_traced};
use crate::metrics::{
    EvaluationLine, GpuPart, LackedRoom, LoadPlot, LossPlot, OneRank, Repeated, RestartLine,
    Resumed, SavedLine, Step, StepLine, Summary, ZScore,
};
use crate::progress::{OutputStream, Progress, wrapped};
use crate::rundir::RunDir;
use crate::start::Restart;
use crate::times::{LedgerLine, Times};
use phalanx_error::{Result, bytes, counted};
use phalanx_inspect::trace::Written;
use phalanx_recovery::Spent;
use phalanx_session::again::Again;
use phalanx_session::host::{self, GpuNow};
use phalanx_session::{StepResult, StepRoom};

/// Who reads standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Output {
    /// People: step lines, a progress bar on a terminal.
    #[default]
    People,
    /// Programs: JSON, a line each; what is for people goes to standard error.
    Json,
    /// Nobody: only the run's folder is written.
    Silent,
}

/// Facts of a run that its step lines need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) steps: usize,
    pub(crate) log_every: usize,
    pub(crate) flops_per_step: u64,
    /// Seconds that the matrix products of a step would take alone, as measured.
    pub(crate) gemm_seconds: Option<f64>,
    /// Bytes that the plans of all ranks take, and of those in this process.
    pub(crate) planned: u64,
    pub(crate) planned_here: u64,
    /// Whether `transformers` can read the model.
    pub(crate) exports: bool,
    /// If programs run on GPUs.
    pub(crate) gpu: Option<GpuPeak>,
}

/// What a step on GPUs is compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuPeak {
    /// FLOPs per second that all of them could do in the type of the run, if that is known.
    pub(crate) flops_per_s: Option<f64>,
    /// Bytes that the plans of the ranks on one GPU take.
    pub(crate) planned: u64,
}

/// Reports the progress of a run.
pub(crate) struct Report {
    output: Output,
    progress: Option<Progress>,
    /// None in a process that reports nothing, because another one of the run does.
    run: Option<RunDir>,
    facts: Facts,
    plot: LossPlot,
    /// How tokens were spread over experts.
    pub(crate) experts: LoadPlot,
    loss_z: ZScore,
    norm_z: ZScore,
    /// Time spent in steps.
    spent: Duration,
    started: Instant,
    evaluated: Option<(f64, Option<f64>)>,
    traced: Option<Written>,
    /// Steps that were taken before this program started.
    resumed_at: usize,
    /// Where the time goes.
    pub(crate) times: Times,
}

impl Report {
    pub(crate) fn new(output: Output, run: Option<RunDir>, facts: Facts, plot: LossPlot) -> Self {
        let output = if run.is_some() { output } else { Output::Silent };
        let stream = match output {
            Output::People => Some(OutputStream::Stdout),
            Output::Json => Some(OutputStream::Stderr),
            Output::Silent => None,
        };
        Self {
            output,
            progress: stream.map(|stream| Progress::new(facts.steps, stream)),
            run,
            facts,
            plot,
            experts: LoadPlot::default(),
            loss_z: ZScore::new(),
            norm_z: ZScore::new(),
            spent: Duration::ZERO,
            started: Instant::now(),
            evaluated: None,
            traced: None,
            resumed_at: 0,
            times: Times::begin(),
        }
    }

    /// The run's folder, to write to; nothing in a process that writes nothing.
    pub(crate) fn folder(&self) -> Option<&RunDir> {
        self.run.as_ref()
    }

    /// Whether a line of the metrics could not be written.
    pub(crate) fn broken(&self) -> bool {
        self.run.as_ref().is_some_and(RunDir::broken)
    }

    /// Appends a line to the metrics.
    fn append(&mut self, json: &str) -> Result<()> {
        self.run.as_mut().map_or(Ok(()), |run| run.append(json))
    }

    /// Shows a line of the header to people.
    pub(crate) fn header(&mut self, text: &str) {
        let width = self.progress.as_ref().and_then(Progress::width);
        self.line(&wrapped(&phalanx_error::printable(text), width));
    }

    /// Shows a line to people.
    pub(crate) fn line(&mut self, text: &str) {
        if let Some(progress) = &mut self.progress {
            progress.line(text);
        }
    }

    /// Compares the steps from here on with the time that their products take alone.
    pub(crate) fn compare_with(&mut self, gemm_seconds: Option<f64>) {
        self.facts.gemm_seconds = gemm_seconds;
        self.started = Instant::now();
    }

    /// Reports a step that took `time`.
    pub(crate) fn step(&mut self, step: Step, time: Duration) -> Result<()> {
        self.spent += time;
        // A step contains its products. If it was faster than they were alone, other programs
        // disturbed their measurement, so the step's time is the better bound.
        let seconds = time.as_secs_f64();
        self.facts.gemm_seconds = self.facts.gemm_seconds.map(|gemm| gemm.min(seconds));
        self.plot.losses.push((step.step, step.loss));
        let json = step.to_json();
        self.append(&json)?;
        self.print(&json);
        let (loss_z, grad_norm_z) = (self.loss_z.push(step.loss), self.norm_z.push(step.grad_norm));
        let last = self.facts.steps;
        if let Some(progress) = &self.progress {
            progress.advance(step.step, &format!("loss {:.4}", step.loss));
        }
        let first = step.step == self.resumed_at + 1;
        if first || step.step == last || step.step.is_multiple_of(self.facts.log_every) {
            let rate = self.facts.flops_per_step as f64 / seconds;
            let left = (last - step.step) as f64 / (step.step - self.resumed_at) as f64;
            let (memory, gpu) = self.used(rate);
            let line = StepLine {
                step,
                steps: last,
                loss_z,
                grad_norm_z,
                flops_per_s: Some(rate),
                gemm_rate_fraction: self.facts.gemm_seconds.map(|gemm| gemm / seconds),
                memory,
                gpu,
                eta: (step.step < last).then(|| self.started.elapsed().mul_f64(left)),
            };
            let colour = self.progress.as_ref().is_some_and(Progress::colour);
            let width = self.progress.as_ref().and_then(Progress::width);
            self.line(&line.text(colour, width));
        }
        Ok(())
    }

    /// Memory that is used beside what was planned, and what a GPU does.
    fn used(&self, rate: f64) -> (Option<(u64, u64)>, Option<GpuPart>) {
        let Some(GpuPeak { flops_per_s, planned }) = self.facts.gpu else {
            let memory = phalanx_sys::memory::resident_bytes();
            return (memory.map(|used| (used, self.facts.planned_here)), None);
        };
        let mfu = flops_per_s.map(|peak| rate / peak);
        match host::gpu_now() {
            Ok(GpuNow { used, clock_mhz, watts }) => {
                (Some((used, planned)), Some(GpuPart { mfu, clock_mhz, watts }))
            }
            Err(_) => (None, Some(GpuPart { mfu, ..GpuPart::default() })),
        }
    }

    /// Reports an evaluation.
    pub(crate) fn evaluation(&mut self, evaluation: EvaluationLine) -> Result<()> {
        let EvaluationLine { after_step, val_loss, val_accuracy } = evaluation;
        self.plot.held_out.push((after_step, val_loss));
        self.evaluated = Some((val_loss, val_accuracy));
        let json = evaluation.to_json();
        self.append(&json)?;
        self.print(&json);
        let floor = match self.plot.entropy_floor {
            Some(floor) => {
                format!("  ({:+.4} from the entropy floor {floor:.4})", val_loss - floor)
            }
            None => String::new(),
        };
        let right = val_accuracy.map(|share| format!(", accuracy {:.2}%", 100.0 * share));
        self.line(&format!("held-out loss {val_loss:.4}{}{floor}", right.unwrap_or_default()));
        Ok(())
    }

    /// Reports that the run goes on after a step, with the steps before it.
    pub(crate) fn resumed(&mut self, at_step: u64, earlier: &[Step]) -> Result<()> {
        self.resumed_at = at_step as usize;
        self.plot.losses = earlier.iter().map(|step| (step.step, step.loss)).collect();
        let json = Resumed { at_step }.to_json();
        self.append(&json)?;
        self.print(&json);
        Ok(())
    }

    /// Reports that ranks were started again and go on after a step, with the steps before it.
    pub(crate) fn restarted(
        &mut self,
        restart: &Restart,
        at_step: u64,
        earlier: &[Step],
    ) -> Result<()> {
        let Again { restarts, lost: (rank, cause, phase), first, .. } = &restart.again;
        self.resumed_at = first.0 as usize;
        self.plot.losses = earlier.iter().map(|step| (step.step, step.loss)).collect();
        let own = earlier.iter().filter(|step| step.step > self.resumed_at);
        self.spent = own.map(|step| Duration::from_secs_f64(step.step_ms / 1e3)).sum();
        let from = restart.from();
        let line = RestartLine {
            restarts: *restarts,
            rank: *rank,
            cause: cause.clone(),
            phase: phase.clone(),
            from,
            at_step,
        };
        let json = line.to_json();
        self.append(&json)?;
        self.print(&json);
        self.line(&format!(
            "restart {restarts}: rank {rank} {cause}; after step {at_step} from {from}"
        ));
        Ok(())
    }

    /// Reports a checkpoint.
    pub(crate) fn saved(&mut self, saved: &CommittedCheckpoint) -> Result<()> {
        let (step, size) = (saved.step, bytes(saved.bytes));
        let line = SavedLine { after_step: step, path: saved.path.display().to_string() };
        let json = line.to_json();
        self.append(&json)?;
        self.print(&json);
        self.line(&format!("checkpoint after step {step}: {} ({size})", line.path));
        Ok(())
    }

    /// Reports that a step was taken again, if it was: because the step before was clipped after all, or because rows of
    /// experts found no room. In the end there was room for so many times the even share.
    pub(crate) fn taken_again(
        &mut self,
        at_step: usize,
        result: StepResult,
        slack: Option<f64>,
    ) -> Result<()> {
        if let Some(slack) = slack.filter(|_| result.room.repeats > 0) {
            self.lacked(at_step, result.room, slack)?;
        }
        if !result.repeated {
            return Ok(());
        }
        let json = Repeated { at_step }.to_json();
        self.append(&json)?;
        self.print(&json);
        let before = at_step - 1;
        self.line(&format!("step {at_step} was done twice: step {before} was clipped after all"));
        Ok(())
    }

    fn lacked(&mut self, at_step: usize, room: StepRoom, slack: f64) -> Result<()> {
        let StepRoom { repeats, lacking, .. } = room;
        let json = LackedRoom { at_step, lacking, repeats, room: slack }.to_json();
        self.append(&json)?;
        self.print(&json);
        let (rows, times) = (counted(lacking as usize, "row"), counted(repeats, "time"));
        self.line(&format!(
            "step {at_step} lacked room for {rows} of experts and changed nothing; taken again {times}, at last with room for {slack:.2} times the even share"
        ));
        Ok(())
    }

    /// The losses of the steps so far.
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.plot.losses.iter().map(|(_, loss)| *loss).collect()
    }

    /// Reports that `steps` steps are about to be repeated on one rank.
    pub(crate) fn replay_begins(&mut self, steps: usize) {
        let first =
            if steps == 1 { "first step".to_owned() } else { format!("first {steps} steps") };
        self.line(&format!("\nthe {first} once more, on one rank:"));
        if let Some(progress) = &self.progress {
            progress.restart(steps);
        }
    }

    /// Reports a repeated step, with the loss that it had on many ranks.
    pub(crate) fn replayed(&mut self, step: usize, of: usize, loss: f64, many: f64) {
        if let Some(progress) = &self.progress {
            progress.advance(step, &format!("loss {loss:.4} on one rank"));
        }
        if step == 1 || step == of || step.is_multiple_of(self.facts.log_every) {
            self.line(&format!("step {step}/{of}  loss {loss:.6} on one rank, {many:.6} on all"));
        }
    }

    /// Reports how far one rank and many ranks differ.
    pub(crate) fn one_rank(&mut self, compared: OneRank, bound: f64) -> Result<()> {
        let json = compared.to_json();
        self.append(&json)?;
        self.print(&json);
        let OneRank { steps, loss_max_rel } = compared;
        let steps = counted(steps, "step");
        self.line(&format!(
            "one rank and all ranks agree to {loss_max_rel:.1e} over {steps} ({bound:e} is allowed)"
        ));
        Ok(())
    }

    /// Remembers where the trace of a step is.
    pub(crate) fn traced(&mut self, written: Written) {
        self.traced = Some(written);
    }

    /// Writes the plot, and reports the whole run.
    pub(crate) fn finish(mut self, parameters: u64, train: PerStep) -> Result<Summary> {
        self.run.as_ref().map_or(Ok(()), |run| run.write_plots(&self.plot, &self.experts))?;
        self.times.mark(Spent::Start);
        let ledger = LedgerLine::from(self.times.ledger());
        self.run.as_ref().map_or(Ok(()), |run| run.write_ledger(&ledger.to_json()))?;
        let loss = |step: Option<&(usize, f64)>| step.map_or(f64::NAN, |(_, loss)| *loss);
        let seconds = self.spent.as_secs_f64();
        let steps = self.plot.losses.len();
        // A run that was resumed under another name has no losses of the steps before.
        let taken = self.plot.losses.iter().filter(|(step, _)| *step > self.resumed_at).count();
        let summary = Summary {
            steps,
            first_loss: loss(self.plot.losses.first()),
            last_loss: loss(self.plot.losses.last()),
            val_loss: self.evaluated.map(|(loss, _)| loss),
            val_accuracy: self.evaluated.and_then(|(_, accuracy)| accuracy),
            entropy_floor: self.plot.entropy_floor,
            parameters,
            taken: train.times(taken as u64, seconds),
            seconds,
            gemm_rate_fraction: (self.facts.gemm_seconds.filter(|_| taken > 0))
                .map(|gemm| gemm * taken as f64 / seconds),
            planned_bytes: Some(self.facts.planned),
            peak_rss_bytes: phalanx_sys::memory::peak_resident_bytes(),
            run_dir: self.run.as_ref().map(|run| run.path().display().to_string()),
            trace: self.traced.as_ref().map(|written| written.file.display().to_string()),
            ledger,
        };
        let json = summary.to_json();
        self.append(&json)?;
        if let Some(progress) = &mut self.progress {
            progress.finish();
        }
        let traced = self.traced.take().map(|written| where_traced(&written));
        let time = self.times.ledger().line();
        closing(&summary, &time).iter().for_each(|line| self.header(line));
        // Not broken: people copy them.
        next(&summary, self.facts.exports).iter().chain(&traced).for_each(|line| self.line(line));
        self.print(&json);
        Ok(summary)
    }

    /// Prints a line for programs. A closed pipe does not stop the run.
    fn print(&self, json: &str) {
        if self.output == Output::Json {
            let mut out = std::io::stdout().lock();
            crate::output::note(writeln!(out, "{json}").and_then(|()| out.flush()));
        }
    }
}
