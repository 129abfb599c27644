//! What each subcommand does: a few lines on top of the library.

use std::path::Path;

use phalanx::config;
use phalanx::error::Result;
use phalanx::error::counted;
use phalanx::inspect::explain::{Explanation, Focus};
use phalanx::inspect::writable::can_write;
use phalanx::ir::DType;
use phalanx::models::hf::{self, Weights};
use phalanx::session::network;
use phalanx::train::eval::{self, ModelSource};
use phalanx::train::saved::Saved;
use phalanx::train::{Output, train};
use phalanx_sys::{interrupt, write_atomic};
use serde_json::json;

use crate::args::{Args, Command, Settings};
use crate::{bench, out, schedule, verify};

/// Carries out a command.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Train { settings, trace } => {
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
        Command::Explain { settings, segment, part, ranks, rank, svg } => {
            let part = part.map(Into::into);
            let (segment, drawing) = (segment.clone(), svg.is_some());
            let focus = Focus { segment, part, ranks: *ranks, rank: *rank, drawing };
            explain(settings, focus, svg.as_deref())
        }
        Command::Bench(bench) => bench::run(bench),
        Command::Schedule(asked) => schedule::run(asked),
        Command::Config => {
            out::line(config::listing().trim_end());
            Ok(())
        }
    }
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

fn explain(settings: &Settings, focus: Focus, svg: Option<&Path>) -> Result<()> {
    if let Some(file) = svg {
        can_write(file, format!("--svg {} cannot be written", file.display()))?;
    }
    let explanation = Explanation::new(&network::load(&settings.sources())?, focus)?;
    if let (Some(file), Some(drawing)) = (svg, explanation.drawing()) {
        write_atomic(file, |out| out.write_all(drawing.as_bytes()))?;
    }
    match settings.json {
        true => explanation.json().iter().for_each(out::json),
        false => out::line(explanation.text().trim_end()),
    }
    Ok(())
}
