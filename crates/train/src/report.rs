//! Reports of a run while it goes on: for people, for programs, and in its folder.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::checkpoints::CommittedCheckpoint;
use crate::metrics::{
    EvaluationLine, GpuPart, LoadPlot, LossPlot, OneRank, RestartLine, Resumed, SavedLine, Step,
    StepLine, Summary, ZScore,
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
    pub(crate) planned: u64,
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
    evaluated: Option<f64>,
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
            return (memory.map(|used| (used, self.facts.planned)), None);
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
        self.evaluated = Some(val_loss);
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
    pub(crate) fn finish(mut self, parameters: u64, tokens_per_step: u64) -> Result<Summary> {
        self.run.as_ref().map_or(Ok(()), |run| run.write_plots(&self.plot, &self.experts))?;
        self.times.mark(Spent::Start);
        let ledger = LedgerLine::from(self.times.ledger());
        self.run.as_ref().map_or(Ok(()), |run| run.write_ledger(&ledger.to_json()))?;
        let loss = |step: Option<&(usize, f64)>| step.map_or(f64::NAN, |(_, loss)| *loss);
        let seconds = self.spent.as_secs_f64();
        let steps = self.plot.losses.len();
        // A run that was resumed under another name has no losses of the steps before.
        let taken = self.plot.losses.iter().filter(|(step, _)| *step > self.resumed_at).count();
        let tokens = tokens_per_step * taken as u64;
        let summary = Summary {
            steps,
            first_loss: loss(self.plot.losses.first()),
            last_loss: loss(self.plot.losses.last()),
            val_loss: self.evaluated,
            entropy_floor: self.plot.entropy_floor,
            parameters,
            tokens,
            seconds,
            tokens_per_s: tokens as f64 / seconds,
            gemm_rate_fraction: self.facts.gemm_seconds.map(|gemm| gemm * taken as f64 / seconds),
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
        next(&summary).iter().chain(&traced).for_each(|line| self.line(line));
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

/// What a reader wants to know when a run has ended.
fn closing(summary: &Summary, time: &str) -> Vec<String> {
    let Summary { first_loss, last_loss, tokens, seconds, tokens_per_s, .. } = summary;
    let steps = counted(summary.steps, "step");
    let mut lines = vec![
        String::new(),
        format!("{steps}, {tokens} tokens in {seconds:.1} s ({tokens_per_s:.0} tok/s)"),
    ];
    let held_out = match summary.val_loss {
        Some(loss) => format!("; on held-out data {loss:.4}"),
        None => String::new(),
    };
    lines.push(time.to_owned());
    lines.push(format!("loss {first_loss:.4} → {last_loss:.4}{held_out}"));
    if let Some(floor) = summary.entropy_floor {
        let reached = summary.val_loss.unwrap_or(*last_loss);
        lines.push(to_floor(*first_loss, reached, floor));
    }
    let files = "model.safetensors, loss.svg, metrics.jsonl, config.toml";
    lines.extend(summary.run_dir.as_ref().map(|dir| format!("in {dir}: {files}")));
    lines
}

/// Commands that a reader may want to run after a run.
fn next(summary: &Summary) -> Vec<String> {
    let Some(dir) = &summary.run_dir else { return Vec::new() };
    let mut lines = vec![
        format!("next: phalanx eval --model run:{dir}"),
        format!("      phalanx export --run {dir} --out DIR  (transformers)"),
    ];
    // Who trained on a file knows how.
    let own = "      phalanx train --set data.kind=text --set data.path=FILE  (your own text)";
    lines.extend(summary.entropy_floor.map(|_| own.to_owned()));
    lines
}

/// Where a trace is, and what to do with it.
fn where_traced(written: &Written) -> String {
    let Written { step, file, drawing, measured, replayed, predicted } = written;
    let (file, drawing) = (file.display(), drawing.display());
    format!(
        "trace of step {step}: {file} (open it in ui.perfetto.dev or chrome://tracing)\n\
         it took {measured:.2} ms, replayed from its scripts {replayed:.2} ms, predicted {predicted:.2} ms; \
         drawn: {drawing}"
    )
}

/// How far a loss has come on its way down to the entropy of the source.
fn to_floor(first: f64, reached: f64, floor: f64) -> String {
    let way = 100.0 * (first - reached) / (first - floor);
    let way = match first > floor && way >= 0.5 {
        true => format!(", {:.0}% of the way done", way.min(100.0)),
        false => String::new(),
    };
    // A few batches may happen to be easier than the source is on average.
    let left = (reached - floor).max(0.0);
    format!("the source's entropy is {floor:.4}, and no model gets below it: {left:.4} to go{way}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_did_not_fall_has_come_no_negative_way() {
        let text = to_floor(5.0, 3.0, 1.0);
        assert!(text.ends_with("2.0000 to go, 50% of the way done"), "{text}");
        for reached in [5.0, 5.001, 7.0] {
            assert!(to_floor(5.0, reached, 1.0).ends_with("to go"), "{reached}");
        }
        assert!(to_floor(5.0, 0.99, 1.0).ends_with("0.0000 to go, 100% of the way done"));
        assert!(to_floor(0.5, 0.4, 1.0).ends_with("to go"));
    }

    /// Only the synthetic source has a known entropy.
    #[test]
    fn who_trained_on_a_file_is_not_told_to() {
        let summary = Summary { steps: 1, run_dir: Some("runs/a".into()), ..Summary::default() };
        let tells = |summary: &Summary| next(summary).concat().contains("your own text");
        assert!(!tells(&summary));
        assert!(tells(&Summary { entropy_floor: Some(1.0), ..summary }));
    }

    #[test]
    fn one_step_is_no_steps() {
        let summary = Summary { steps: 1, ..Summary::default() };
        let lines = closing(&summary, "");
        assert!(lines[1].starts_with("1 step, "), "{lines:?}");
    }
}
