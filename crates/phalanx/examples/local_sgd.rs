//! What replicas that train by themselves save and what it costs: bytes and losses against the steps between two means.
//!
//! `cargo run --release -p phalanx --example local_sgd -- docs/plots/local_sgd.svg`

use std::fmt::Write;

use phalanx::data::MarkovCorpus;
use phalanx::models::hf::GptSpec;
use phalanx::{Data, Gpt, LocalSgd, Mlp, Optimizer, Table, Trainer};

/// Steps from one mean to the next.
const EVERY: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// What a problem gave for each of them.
pub struct Curve {
    /// Bytes that all ranks moved, counted by the transport, divided by the steps.
    pub bytes: Vec<f64>,
    /// The loss of the mean of the replicas, after the last step.
    pub losses: Vec<f64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (convex, language) = (convex(512)?, language(256)?);
    for (i, every) in EVERY.iter().enumerate() {
        println!(
            "H {every:2}  convex {:8.0} bytes a step, loss {:.5}   language {:8.0} bytes a step, loss {:.4}",
            convex.bytes[i], convex.losses[i], language.bytes[i], language.losses[i]
        );
    }
    match std::env::args().nth(1) {
        Some(path) => Ok(std::fs::write(path, picture(&convex, &language))?),
        None => Ok(()),
    }
}

/// Least squares: 16 numbers to find, four replicas of four samples, each with samples of its own.
pub fn convex(steps: usize) -> Result<Curve, Box<dyn std::error::Error>> {
    let every = |every| {
        let trainer = Trainer::new(Mlp::regression(16, [], 1)).data(table()).batch(16);
        let trainer = trainer.optimizer(Optimizer::sgd(0.0)).lr(0.1);
        measured(trainer, every, steps, table().into())
    };
    curve(every)
}

/// A small language model on a source of known entropy.
pub fn language(steps: usize) -> Result<Curve, Box<dyn std::error::Error>> {
    let spec = GptSpec {
        layers: 1,
        width: 32,
        heads: 2,
        ffn: 64,
        vocab: 32,
        context: 16,
        norm_eps: 1e-5,
        tied: false,
    };
    let every = |every| {
        let corpus = |tokens| MarkovCorpus::new(0, 32, tokens);
        let trainer = Trainer::new(Gpt::new(spec.clone())).data(corpus(1 << 20)?).batch(16);
        let trainer = trainer.seq_len(16).optimizer(Optimizer::sgd(0.9)).lr(0.1);
        measured(trainer, every, steps, corpus(1 << 13)?.into())
    };
    curve(every)
}

/// Four replicas: bytes of a step, and the loss of their mean at the end.
fn measured(
    trainer: Trainer<'_>,
    every: usize,
    steps: usize,
    data: Data,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let how = LocalSgd { every, average_state: false, ..LocalSgd::default() };
    let trainer = trainer.clip(None).steps(steps).threads(1).mesh("dp=4").local_sgd(how);
    let mut training = trainer.build()?;
    training.fit(steps)?;
    let bytes = training.moved()? as f64 / steps as f64;
    Ok((bytes, training.evaluate(data)?.loss))
}

fn curve(
    every: impl Fn(usize) -> Result<(f64, f64), Box<dyn std::error::Error>>,
) -> Result<Curve, Box<dyn std::error::Error>> {
    let all = EVERY.into_iter().map(every).collect::<Result<Vec<_>, _>>()?;
    let (bytes, losses) = all.into_iter().unzip();
    Ok(Curve { bytes, losses })
}

/// Points near a plane in 16 dims, by a simple generator.
fn table() -> Table {
    const ROWS: usize = 256;
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for _ in 0..ROWS {
        let row: Vec<f32> = (0..16).map(|_| draw()).collect();
        let plane: f32 = row.iter().enumerate().map(|(i, x)| x * (i as f32 / 8.0 - 1.0)).sum();
        y.push(plane + 0.3 * draw());
        x.extend(row);
    }
    Table::new(ROWS).input("x", x).target("y", y)
}

/// Three panels: bytes of a step relative to those of H = 1 beside 1/H, and the loss of each problem.
pub fn picture(convex: &Curve, language: &Curve) -> String {
    let relative = |curve: &Curve| -> Vec<f64> {
        curve.bytes.iter().map(|bytes| (bytes / curve.bytes[0]).log2()).collect()
    };
    let ideal: Vec<f64> = EVERY.iter().map(|&every| -(every as f64).log2()).collect();
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"900\" height=\"300\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"900\" height=\"300\" fill=\"#ffffff\"/>\n",
    );
    let bytes = [("1/H", ideal, 'l'), ("least squares", relative(convex), 'o')];
    let bytes = bytes.into_iter().chain([("language", relative(language), 'x')]).collect();
    let share = |power: f64| format!("1/{:.0}", (-power).exp2());
    panel(&mut svg, 0, "bytes of a step, relative to H = 1", bytes, &share);
    let loss = |loss: f64| format!("{loss:.3}");
    // From zero, or noise would look like a trend.
    let losses = vec![("", convex.losses.clone(), 'o'), ("", vec![0.0], 'l')];
    panel(&mut svg, 1, "least squares: loss at the end", losses, &loss);
    let losses = vec![("", language.losses.clone(), 'x')];
    panel(&mut svg, 2, "language: loss at the end", losses, &loss);
    svg.push_str("</svg>\n");
    svg
}

/// A panel: what is drawn for each number of steps, as points, or as a line.
fn panel(
    svg: &mut String,
    index: usize,
    title: &str,
    curves: Vec<(&str, Vec<f64>, char)>,
    name: &dyn Fn(f64) -> String,
) {
    let all = curves.iter().flat_map(|(_, values, _)| values.iter().copied());
    let (low, high) = all.fold((f64::MAX, f64::MIN), |(l, h), y| (l.min(y), h.max(y)));
    let room = (high - low).max(1e-9);
    let left = 60.0 + 300.0 * index as f64;
    let x = |i: usize| left + 210.0 * i as f64 / (EVERY.len() - 1) as f64;
    let y = |value: f64| 245.0 - 180.0 * (value - low) / room;
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"28\" font-weight=\"bold\">{title}</text>");
    let _ = writeln!(
        svg,
        "<path d=\"M{left} 55V255H{}\" fill=\"none\" stroke=\"#5a5a5a\"/>",
        left + 220.0
    );
    for (i, every) in EVERY.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"272\" text-anchor=\"middle\">{every}</text>",
            x(i)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"290\" text-anchor=\"middle\">H: steps from mean to mean</text>",
        left + 105.0
    );
    for value in [low, (low + high) / 2.0, high] {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            y(value) + 4.0,
            name(value)
        );
    }
    for (nth, (label, values, mark)) in curves.iter().enumerate() {
        for (i, &value) in values.iter().enumerate() {
            let (x, y) = (x(i), y(value));
            let _ = match mark {
                'o' => writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"none\" stroke=\"#15457f\" stroke-width=\"2\"/>"
                ),
                'x' => writeln!(
                    svg,
                    "<path d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\" stroke=\"#c4570a\" stroke-width=\"2\"/>",
                    x - 4.0,
                    y - 4.0
                ),
                _ => Ok(()),
            };
        }
        if *mark == 'l' {
            let (last, end) = (values.len() - 1, values[values.len() - 1]);
            let _ = writeln!(
                svg,
                "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"#5a5a5a\" stroke-dasharray=\"5 4\"/>",
                x(0),
                y(values[0]),
                x(last),
                y(end)
            );
        }
        let sign = if *mark == 'o' {
            "○ "
        } else if *mark == 'x' {
            "× "
        } else {
            "- - "
        };
        if !label.is_empty() {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{}\">{sign}{label}</text>",
                left + 120.0,
                70 + 18 * nth
            );
        }
    }
}
