//! `phalanx bench`: each benchmark as JSON or as a few readable lines.

use phalanx::bench;
use phalanx::config::{DeviceKind, Loaded};
use phalanx::error::Result;
use phalanx::error::{bytes, counted};
use phalanx::session::network;

use crate::args::Settings;
use crate::out;

/// Times full steps.
pub(crate) fn step(settings: &Settings, loaded: &Loaded) -> Result<()> {
    if loaded.config.run.device == DeviceKind::Cuda {
        return gpu_step(settings, loaded);
    }
    let result = bench::step(out::noted(loaded))?;
    if settings.json {
        out::json(&result);
        return Ok(());
    }
    let known = |amount: Option<u64>| amount.map_or("unknown".to_owned(), bytes);
    out::line(&format!(
        "step            {:.1} ms (median), {:.1} ms (best)\n\
         tokens          {:.0} per second\n\
         memory          {} at most\n\
         kernel scratch  {} outside the plan\n\
         GEMM packing    {} at most in a block, {} allocated in a step\n\
         in products     {:.1}% of the step\n\
         floor           {:.1} ms, {:.1}% of the step\n\
         ranks           {}, busy {}",
        result.median_ms,
        result.best_ms,
        result.tokens_per_s,
        known(result.peak_rss_bytes),
        bytes(result.kernel_scratch_bytes),
        known(result.gemm_packing_bytes),
        known(result.gemm_packing_bytes_per_step),
        100.0 * result.gemm_fraction,
        result.floor_ms,
        100.0 * result.floor_fraction,
        result.ranks,
        match (result.busy_ms, result.busy_fraction) {
            (Some(ms), Some(share)) =>
                format!("for {ms:.1} ms in all, {:.1}% of their cores", 100.0 * share),
            _ => "time not measured (needs run.threads = 1)".to_owned(),
        },
    ));
    Ok(())
}

/// Times full steps on a GPU.
fn gpu_step(settings: &Settings, loaded: &Loaded) -> Result<()> {
    let result = bench::gpu_step(out::noted(loaded))?;
    if settings.json {
        out::json(&result);
        return Ok(());
    }
    let of_peak = result
        .mfu
        .map_or(String::new(), |mfu| format!(", {:.1}% of what it can do in bf16", 100.0 * mfu));
    out::line(&format!(
        "step            {:.1} ms (median), {:.1} ms (best)\n\
         tokens          {:.0} per second\n\
         products        {:.1} TFLOP/s{of_peak}\n\
         GPU memory      {} in all, {} of it arenas and workspaces\n\
         first step      after {:.1} s\n\
         ranks           {} on {}",
        result.median_ms,
        result.best_ms,
        result.tokens_per_s,
        result.tflops,
        bytes(result.peak_device_bytes),
        bytes(result.planned_device_bytes),
        result.start_s,
        result.ranks,
        result.gpu,
    ));
    Ok(())
}

/// Times products alone.
pub(crate) fn products(settings: &Settings, loaded: &Loaded) -> Result<()> {
    let result = bench::products(out::noted(loaded))?;
    if settings.json {
        out::json(&result);
        return Ok(());
    }
    if let (Some(unit), Some(peak)) = (&result.unit, result.peak_gflops) {
        out::line(&format!("multiplied by {unit}; peak of a rank {peak:.0} GFLOP/s"));
    }
    let head = ["rows", "from", "to", "each", "µs", "GFLOP/s", "of peak"];
    out::line(&format!(
        "    {:>8}{:>8}{:>8}{:>6}{:>12}{:>10}{:>9}",
        head[0], head[1], head[2], head[3], head[4], head[5], head[6]
    ));
    for row in &result.products {
        let share = row.of_peak.map_or(String::new(), |share| format!("{:.0}%", 100.0 * share));
        out::line(&format!(
            "{:<4}{:>8}{:>8}{:>8}{:>6}{:>12.0}{:>10.1}{share:>9}",
            row.pass, row.rows, row.from, row.to, row.count, row.median_us, row.gflops
        ));
    }
    Ok(())
}

/// Times collectives.
pub(crate) fn collectives(
    settings: &Settings,
    loaded: &Loaded,
    ranks: Option<usize>,
) -> Result<()> {
    let mut told = false;
    bench::collectives(&loaded.config, ranks, |row| {
        if settings.json {
            return out::json(row);
        }
        if !std::mem::replace(&mut told, true) {
            let head = ["op", "bytes", "µs", "GiB/s", "of copying"];
            out::line(&format!(
                "{}\n{:<16}{:>10}{:>12}{:>9}{:>12}",
                counted(row.ranks, "rank"),
                head[0],
                head[1],
                head[2],
                head[3],
                head[4]
            ));
        }
        let share = 100.0 * row.copy_limit_us / row.median_us;
        out::line(&format!(
            "{:<16}{:>10}{:>12.2}{:>9.2}{share:>11.0}%",
            row.op, row.bytes, row.median_us, row.gib_per_s
        ));
    })
}

/// Times planning.
pub(crate) fn partition(settings: &Settings, layers: Option<usize>) -> Result<()> {
    let sources = settings.sources();
    let sources = match layers {
        Some(layers) => sources.set(format!("model.layers={layers}")),
        None => sources,
    };
    let result = bench::partition(&network::load(&sources)?)?;
    if settings.json {
        out::json(&result);
        return Ok(());
    }
    out::line(&format!(
        "{:.1} ms from the configuration to the script of one rank\n\
         model     {:.1} ms, {}\n\
         programs  {:.1} ms, {}\n\
         script    {:.1} ms, {}\n\
         memory    {:.1} ms more",
        result.ms,
        result.model_ms,
        counted(result.layers, "layer"),
        result.programs_ms,
        counted(result.ranks, "rank"),
        result.script_ms,
        counted(result.actions, "action"),
        result.memory_ms,
    ));
    Ok(())
}
