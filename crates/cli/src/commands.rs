//! What each subcommand does: a few lines on top of the library.

use std::path::Path;

use phalanx::config::{self, Loaded, Sources};
use phalanx::error::{Result, counted};
use phalanx::inspect::explain::{Explanation, Focus, ring_balance, step_drawing};
use phalanx::inspect::verify::sources as verification;
use phalanx::inspect::writable::can_write;
use phalanx::ir::DType;
use phalanx::models::hf::{self, Weights};
use phalanx::session::hosts::Agent;
use phalanx::session::{job, network};
use phalanx::train::doctor;
use phalanx::train::eval::{self, ModelSource};
use phalanx::train::saved::Saved;
use phalanx::train::{Output, Resume, resume, train};
use phalanx_sys::{interrupt, write_atomic};
use serde_json::json;

use crate::args::{Args, Bench, Command, Settings};
use crate::launch::{Begun, begin};
use crate::{bench, checkpoint, launch, out, schedule, shell, verify};

/// Carries out a command; gives the exit code of one that ran in other processes.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let begin = |loaded: Result<Loaded>, work: &dyn Fn(&Loaded) -> Result<()>| match begin(loaded)?
    {
        Begun::Here(loaded) => work(&loaded).map(|()| 0),
        Begun::Done(code) => Ok(code),
    };
    match &args.command {
        Command::Launch { ranks, hosts, rsh, exec, command } => {
            let hosts = hosts.as_deref().map(|file| (file, rsh.as_str()));
            launch::run(ranks.get(), hosts, *exec, command)
        }
        Command::Agent { count, first, ranks, meet, led, exec, command } => {
            let program = launch::program(*exec, command)?;
            let count = count.map_or(1, |count| count.get());
            let agent = match (first, ranks, meet) {
                _ if *led => Agent::Led,
                (Some(first), Some(ranks), Some(meet)) => {
                    launch::agent(count, *first, ranks.get(), meet)?
                }
                _ => Agent::of_slurm(count)?,
            };
            agent.run(&program)
        }
        Command::Train { settings, trace, resume: given } => {
            // A file is read once: it may be a pipe.
            let sources = settings.sources();
            let Some(resumed) = found(&sources, given.as_deref())? else {
                return begin(network::load(&sources), &|loaded| {
                    train(loaded, output(settings), trace.as_deref()).map(drop)
                });
            };
            begin(network::load(&resumed.sources(sources)), &|loaded| {
                resume(loaded, output(settings), trace.as_deref(), &resumed).map(drop)
            })
        }
        Command::Verify { settings, steps } => {
            begin(verification(&settings.sources()), &|loaded| {
                verify::run(settings, loaded, steps.get())
            })
        }
        Command::Bench(Bench::Step(settings)) => {
            begin(network::load(&settings.sources()), &|loaded| bench::step(settings, loaded))
        }
        Command::Bench(Bench::Products(settings)) => {
            begin(network::load(&settings.sources()), &|loaded| bench::products(settings, loaded))
        }
        Command::Bench(Bench::Collectives { settings, ranks }) => {
            begin(network::load(&settings.sources()), &|loaded| {
                bench::collectives(settings, loaded, ranks.map(|n| n.get()))
            })
        }
        // All else needs one process. Of several, the first does it.
        other => match job::environment()? {
            Some(own) if own.launched && own.rank > 0 => Ok(0),
            _ => alone(other).map(|()| 0),
        },
    }
}

/// Carries out a command that no other process takes part in.
fn alone(command: &Command) -> Result<()> {
    match command {
        Command::Eval { settings, model, ids: Some(ids) } => answer(settings, model, &ids.0),
        Command::Eval { settings, model, .. } => held_out(settings, model),
        Command::Export { run, to } => export(run, &to.out, to.dtype.into(), to.json),
        Command::Explain { settings, segment, part, ranks, rank, svg, ring_svg, step_svg } => {
            let part = part.map(Into::into);
            let (segment, drawing) = (segment.clone(), svg.is_some());
            let focus = Focus { segment, part, ranks: *ranks, rank: *rank, drawing };
            explain(settings, focus, [svg, ring_svg, step_svg].map(Option::as_deref))
        }
        Command::Checkpoint(asked) => checkpoint::run(asked),
        Command::Doctor { run, json } => {
            let found = doctor::examine(run)?;
            match json {
                true => out::json(&found.json),
                false => {
                    out::line(&found.sentence);
                    found.lines.iter().for_each(|line| out::line(line));
                }
            }
            Ok(())
        }
        Command::Bench(Bench::Partition { settings, layers }) => {
            bench::partition(settings, layers.map(|n| n.get()))
        }
        Command::Schedule(asked) => schedule::run(asked),
        Command::Completions { shell } => {
            shell::completions(*shell);
            Ok(())
        }
        Command::Man { command } => shell::man(command),
        Command::Config => {
            out::line(config::listing().trim_end());
            Ok(())
        }
        Command::Launch { .. }
        | Command::Agent { .. }
        | Command::Train { .. }
        | Command::Verify { .. }
        | Command::Bench(_) => {
            unreachable!("these are carried out by all processes")
        }
    }
}

/// Who reads what a run prints.
fn output(settings: &Settings) -> Output {
    if settings.json { Output::Json } else { Output::People }
}

/// The run that is to go on: as it was asked for, or because torchrun or Slurm has started its job again.
fn found(sources: &Sources, given: Option<&Path>) -> Result<Option<Resume>> {
    let runs = || sources.run_dir();
    match given {
        Some(given) => Resume::find(given, runs).map(Some),
        None => Ok(Resume::of_requeued(runs)?.map(|(resumed, text)| {
            if !job::is_later_rank() {
                out::error(&format!("note: {text}"));
            }
            resumed
        })),
    }
}

fn answer(settings: &Settings, model: &ModelSource, ids: &[i32]) -> Result<()> {
    let answer = eval::answer(model, &settings.sources(), ids)?;
    if settings.json {
        out::json(&answer);
        return Ok(());
    }
    let (loss, tokens) = (shown_loss(answer.loss), counted(ids.len() - 1, "token"));
    out::line(&format!("{loss} over {tokens}"));
    let mut best: Vec<(usize, f64)> = answer.logits_last.iter().copied().enumerate().collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1));
    best.truncate(5);
    let name = |id: usize| match u8::try_from(id) {
        Ok(byte) if answer.is_text => format!("{id} {}", character(byte)),
        _ => id.to_string(),
    };
    let best: Vec<String> = best.iter().map(|(id, x)| format!("{} ({x:.3})", name(*id))).collect();
    out::line(&format!("most likely next tokens, by logit: {}", best.join(", ")));
    Ok(())
}

fn held_out(settings: &Settings, model: &ModelSource) -> Result<()> {
    let result = eval::held_out(model, &settings.sources())?;
    if settings.json {
        out::json(&result);
        return Ok(());
    }
    let floor = match result.entropy_floor {
        Some(floor) => {
            format!(", {:.4} above the source's entropy {floor:.4}", result.loss - floor)
        }
        None => String::new(),
    };
    if let Some(share) = result.accuracy {
        let (loss, right) = (result.loss, 100.0 * share);
        let images = result.tokens;
        out::line(&format!("loss {loss:.6}, accuracy {right:.2}% over {images} held-out images"));
        return Ok(());
    }
    let (loss, tokens) = (shown_loss(result.loss), result.tokens);
    out::line(&format!("{loss} over {tokens} held-out tokens{floor}"));
    Ok(())
}

/// A mean cross-entropy, with the number of equally likely tokens that it amounts to.
fn shown_loss(loss: f64) -> String {
    let perplexity = loss.exp();
    let digits = if perplexity < 1000.0 { 3 } else { 0 };
    format!("loss {loss:.6} (perplexity {perplexity:.digits$})")
}

/// A byte of text in quotes. Bytes of longer characters have no picture of their own.
fn character(byte: u8) -> String {
    match byte {
        b' '..=b'~' => format!("'{}'", char::from(byte)),
        b'\n' | b'\t' | b'\r' | 0 => format!("'{}'", char::from(byte).escape_default()),
        _ => format!("0x{byte:02x}"),
    }
}

fn export(run: &Path, dir: &Path, dtype: DType, json: bool) -> Result<()> {
    let saved = Saved::open(run, &config::Sources::default())?;
    let _listening = interrupt::listen();
    let copied = saved.export(dir, dtype)?;
    let parameters: usize = saved.weights.layouts().iter().map(hf::TensorInfo::elements).sum();
    if json {
        out::json(&json!({
            "out": dir.display().to_string(),
            "parameters": parameters,
            "dtype": dtype.name(),
        }));
    } else {
        let dir = dir.display();
        let beside = match copied.is_empty() {
            true => "no tokenizer: copy it from where your token ids come from".to_owned(),
            false => format!("copied from the folder of model.from: {}", copied.join(", ")),
        };
        out::line(&format!(
            "{dir}: config.json and model.safetensors, {parameters} parameters in {dtype}\n\
             {beside}\n\
             in Python: transformers.AutoModelForCausalLM.from_pretrained(\"{dir}\")"
        ));
    }
    Ok(())
}

fn explain(settings: &Settings, focus: Focus, [svg, ring, step]: [Option<&Path>; 3]) -> Result<()> {
    for (flag, file) in [("--svg", svg), ("--ring-svg", ring), ("--step-svg", step)] {
        let Some(file) = file else { continue };
        can_write(file, format!("{flag} {} cannot be written", file.display()))?;
    }
    let loaded = network::load(&settings.sources())?;
    let explanation = Explanation::new(out::noted(&loaded), focus)?;
    if let Some(file) = ring {
        let drawing = ring_balance(&loaded.config)?;
        write_atomic(file, |out| out.write_all(drawing.as_bytes()))?;
    }
    if let Some(file) = step {
        let drawing = step_drawing(&loaded)?;
        write_atomic(file, |out| out.write_all(drawing.as_bytes()))?;
    }
    if let (Some(file), Some(drawing)) = (svg, explanation.drawing()) {
        write_atomic(file, |out| out.write_all(drawing.as_bytes()))?;
    }
    match settings.json {
        true => explanation.json().iter().for_each(out::json),
        false => out::line(explanation.text().trim_end()),
    }
    Ok(())
}
