//! Your own model in two halves, on two ranks that both work: 8 micro-batches follow each other.
//!
//! `cargo run --release -p phalanx --example pipe`

use phalanx::ir::{Builder, DType, Init, IrError, Model};
use phalanx::models::Chain;
use phalanx::{Category, NamedSchedule, Report, Table, Trainer};

const ROWS: usize = 8; // of a micro-batch
const BATCH: usize = 8 * ROWS;
const WIDTH: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(150).map(|_| ())
}

/// Trains on one rank, then on two with GPipe, and with 1F1B, which keeps less.
pub fn run(steps: usize) -> Result<Vec<Report>, Box<dyn std::error::Error>> {
    let mut reports: Vec<Report> = Vec::new();
    for (mesh, order) in [("pp=1", "1f1b"), ("pp=2", "gpipe"), ("pp=2", "1f1b")] {
        let report = fit(mesh, order.parse()?, steps)?;
        let (first, last) = (report.first_loss(), report.last_loss());
        let kept = report.bytes(Category::Residuals);
        println!("loss {first:.4} → {last:.4}  {kept:>6} bytes kept  {}", report.layout);
        let one = reports.first().map_or(last, Report::last_loss);
        if last >= first || (last - one).abs() > 1e-3 * one {
            return Err(format!("loss {first} → {last}, and {one} on one rank").into());
        }
        reports.push(report);
    }
    Ok(reports)
}

fn fit(mesh: &str, order: NamedSchedule, steps: usize) -> Result<Report, phalanx::Error> {
    let x: Vec<f32> = (0..2 * BATCH).map(|i| (i as f32 * 0.61).sin()).collect();
    let y = x.chunks(2).map(|pair| pair[0] * pair[1]).collect();
    let data = Table::new(BATCH).input("x", x).target("y", y);
    let trainer = Trainer::of_model(halves()?).data(data).batch(BATCH).lr(1e-2).steps(steps);
    trainer.mesh(mesh).schedule(order).threads(1).run()
}

/// Each segment can be in another stage; one returns `h`, and the next reads it.
fn halves() -> Result<Model, IrError> {
    let a = Builder::new("first", DType::F32);
    let x = a.data("x", DType::F32, [ROWS, 2]).matmul(a.param("in", [2, WIDTH])).tanh();
    a.output("h", x.matmul(a.param("up", [WIDTH, WIDTH])).tanh());

    let b = Builder::new("second", DType::F32);
    let h = b.boundary("h", [ROWS, WIDTH]).matmul(b.param("mix", [WIDTH, WIDTH])).tanh();
    let y = h.matmul(b.param("out", [WIDTH, 1]));
    b.loss("loss", y.squared_error(b.data("y", DType::F32, [ROWS, 1])) * b.scalar("inv_tokens"));

    let mut chain = Chain::new("halves");
    chain.once(a, |_| Init::Normal(0.4))?;
    chain.once(b, |_| Init::Normal(0.2))?;
    Ok(chain.finish())
}
