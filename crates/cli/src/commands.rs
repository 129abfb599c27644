//! What each subcommand does: a few lines on top of the library.

use std::path::Path;

use phalanx::config;
use phalanx::error::{Error, Problem, Result, counted};
use phalanx::inspect::explain::{Explanation, Focus};
use phalanx::ir::DType;
use phalanx::models::hf::{self, Weights};
use phalanx::session::network;
use phalanx::train::eval::{self, ModelSource};
use phalanx::train::saved::Saved;
use phalanx::train::{Output, train};
use phalanx_sys::interrupt;
use serde_json::json;

use crate::args::{Args, Command, Settings};
use crate::{bench, out, schedule, verify};

/// Carries out a command.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Train { resume: Some(run), .. } => Err(no_resume(run.as_deref())),
        Command::Train { settings, trace, .. } => {
            let output = match settings.json {
                true => Output::Json,
                false => Output::People,
            };
            let loaded = network::load(&settings.sources())?;
            train(&loaded, output, trace.as_deref()).map(|_| ())
        }
        Command::Verify { settings, steps } => verify::run(settings, steps.get()),
        Command::Eval { settings, model, ids: Some(ids) } => answer(settings, model, &ids.0),
        Command::Eval { settings, model, .. } => held_out(settings, model),
        Command::Export { run, out, dtype, json } => export(run, out, (*dtype).into(), *json),
        Command::Explain { settings, segment, part, ranks, rank } => {
            let part = part.map(Into::into);
            let focus = Focus { segment: segment.clone(), part, ranks: *ranks, rank: *rank };
            explain(settings, focus)
        }
        Command::Bench(bench) => bench::run(bench),
        Command::Schedule(asked) => schedule::run(asked),
        Command::Config => {
            out::line(config::listing().trim_end());
            Ok(())
        }
    }
}

/// What can be done instead of resuming a run.
fn no_resume(run: Option<&Path>) -> Error {
    let run = run.map_or("runs/NAME".into(), |run| run.display().to_string());
    let problem = Problem::new("--resume: a run can't be resumed yet")
        .because("a run keeps its weights, but not the state of its optimizer")
        .fix(format!("start a new run from its weights: --set model.from=run:{run}"));
    Error::refused(problem)
}

fn answer(settings: &Settings, model: &ModelSource, ids: &[i32]) -> Result<()> {
    let answer = eval::answer(model, &settings.sources(), ids)?;
    if settings.json {
        out::json(&answer);
        return Ok(());
    }
    out::line(&format!("loss {:.6} over {}", answer.loss, counted(ids.len() - 1, "token")));
    let mut best: Vec<(usize, f64)> = answer.logits_last.iter().copied().enumerate().collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1));
    best.truncate(5);
    let best: Vec<String> = best.iter().map(|(id, x)| format!("{id} ({x:.3})")).collect();
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
    out::line(&format!("loss {:.6} over {} held-out tokens{floor}", result.loss, result.tokens));
    Ok(())
}

fn export(run: &Path, dir: &Path, dtype: DType, json: bool) -> Result<()> {
    let saved = Saved::open(run, &config::Sources::default())?;
    let _listening = interrupt::listen();
    saved.export(dir, dtype)?;
    let parameters: usize = saved.weights.layouts().iter().map(hf::TensorInfo::elements).sum();
    if json {
        out::json(&json!({
            "out": dir.display().to_string(),
            "parameters": parameters,
            "dtype": dtype.name(),
        }));
    } else {
        let dir = dir.display();
        out::line(&format!(
            "{dir}: config.json and model.safetensors, {parameters} parameters in {dtype}\n\
             in Python: transformers.AutoModelForCausalLM.from_pretrained(\"{dir}\")"
        ));
    }
    Ok(())
}

fn explain(settings: &Settings, focus: Focus) -> Result<()> {
    let explanation = Explanation::new(&network::load(&settings.sources())?, focus)?;
    match settings.json {
        true => explanation.json().iter().for_each(out::json),
        false => out::line(explanation.text().trim_end()),
    }
    Ok(())
}
