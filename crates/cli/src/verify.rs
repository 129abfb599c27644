//! `phalanx verify`: the comparison as a table.

use phalanx::config::Loaded;
use phalanx::error::{Error, Problem, Result};
use phalanx::error::{bytes, counted};
use phalanx::inspect::verify::{self, Mismatch, Verified};

use crate::args::Settings;
use crate::out;

/// The most mismatches that the error names.
const NAMED: usize = 8;

/// Compares, prints, and fails if something differs.
pub(crate) fn run(settings: &Settings, loaded: &Loaded, steps: usize) -> Result<()> {
    let found = verify::verify(out::noted(loaded), steps)?;
    match settings.json {
        true => out::json(&found),
        false => out::line(&table(&found, steps)),
    }
    match found.ok {
        true => Ok(()),
        false => Err(Error::failed(problem(&found))),
    }
}

fn table(found: &Verified, steps: usize) -> String {
    let mut lines = vec![
        format!("{}, compared with: {}", counted(steps, "step"), found.reference),
        String::new(),
        format!("  loss           {:.1e} relative", found.loss_max_rel),
        format!("  gradient norm  {:.1e} relative", found.grad_norm_max_rel),
        format!("  gradients      {:.1e} of the largest entry, step 1", found.grad_max_rel),
        format!("  parameters     {:.1e} ({})", found.param_max_rel, found.worst_param),
    ];
    lines.extend(
        found
            .routing_flips
            .map(|flips| format!("  routing        {} elsewhere", counted(flips, "token"))),
    );
    lines.extend(
        found
            .scale_flips
            .map(|flips| format!("  loss scale     {} with another", counted(flips, "step"))),
    );
    lines.push(String::new());
    if !found.comm.is_empty() {
        let head = ["communication", "over", "calls", "predicted", "measured"];
        lines.push(format!(
            "  {:<15} {:<10} {:>8} {:>14} {:>14}",
            head[0], head[1], head[2], head[3], head[4]
        ));
        lines.extend(found.comm.iter().map(|row| {
            format!(
                "  {:<15} {:<10} {:>8} {:>14} {:>14}{}",
                row.op,
                row.axes.join(","),
                row.count,
                row.bytes_predicted,
                row.bytes_measured,
                mark(row.bytes_predicted == row.bytes_measured),
            )
        }));
        lines.push(String::new());
    }
    lines.push(format!("  {:<15} {:>14} {:>14}", "memory", "predicted", "measured"));
    lines.extend(found.memory.iter().map(|row| {
        format!(
            "  {:<15} {:>14} {:>14}{}",
            row.category,
            row.predicted,
            row.measured,
            mark(row.predicted == row.measured)
        )
    }));
    let planned: usize = found.memory.iter().map(|row| row.predicted).sum();
    lines.push(String::new());
    lines.push(match found.ok {
        true => format!("all agree; {} on the largest rank", bytes(planned as u64)),
        false => "they differ".to_owned(),
    });
    lines.join("\n")
}

fn mark(agrees: bool) -> &'static str {
    if agrees { "" } else { "  differs" }
}

fn problem(found: &Verified) -> Problem {
    let mut reasons = Vec::new();
    let numbers = [
        ("loss", found.loss_max_rel),
        ("gradient norm", found.grad_norm_max_rel),
        ("gradients", found.grad_max_rel),
        ("parameters", found.param_max_rel),
    ];
    let worst = numbers.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((what, error)) = worst {
        reasons.push(format!("largest difference: {what}, {error:.1e}"));
    }
    if let Some(flips) = found.routing_flips.filter(|flips| *flips > 0) {
        reasons.push(format!("{} went to other places", counted(flips, "token")));
    }
    if let Some(flips) = found.scale_flips.filter(|flips| *flips > 0) {
        reasons.push(format!("{} had another loss scale, or were skipped", counted(flips, "step")));
    }
    for Mismatch { rank, what, predicted, measured } in found.mismatches.iter().take(NAMED) {
        reasons.push(format!("rank {rank}: {what}: {predicted} predicted, {measured} measured"));
    }
    if let Some(more) = found.mismatches.len().checked_sub(NAMED).filter(|more| *more > 0) {
        reasons.push(format!("and {more} more"));
    }
    let problem = Problem::new("training in this layout differs from training on one rank");
    reasons.into_iter().fold(problem, Problem::because)
}
