//! How fast a rank multiplies the shapes of a configuration's layers, beside the peak of its units.

use phalanx_config::{DeviceKind, Loaded};
use serde::Serialize;

use crate::floor::{self, Effort};
use phalanx_error::Result;
use phalanx_session::network::Network;
use phalanx_session::products::Pass;
use phalanx_session::{Lowered, Settings, host, job};

/// What multiplies, and the rates of all products of a rank's layers.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct ProductBench {
    /// What multiplies: a unit of the processor, or the library.
    pub unit: Option<String>,
    /// The most that all threads of a rank could do together.
    pub peak_gflops: Option<f64>,
    /// The distinct products.
    pub products: Vec<ProductRow>,
}

/// One product.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct ProductRow {
    /// F, dX or dW.
    pub pass: &'static str,
    /// Tokens of a micro-batch on the rank.
    pub rows: usize,
    /// Width of the layer's input.
    pub from: usize,
    /// Width of its output.
    pub to: usize,
    /// How many of them there are in a micro-batch.
    pub count: usize,
    /// How long one takes: the median of some rounds.
    pub median_us: f64,
    /// The rate of each rank.
    pub gflops: f64,
    /// The rate as a part of the peak.
    pub of_peak: Option<f64>,
}

/// Times the products of a configuration's layers on all ranks at once.
pub fn products(loaded: &Loaded) -> Result<ProductBench> {
    let config = &loaded.config;
    job::fits(config.parallel.ranks().get())?;
    let models = Network::new(loaded)?.models(config, false)?;
    let lowered = Lowered::new(&models, Settings::new(config)?)?;
    let (compute, device) = (config.precision.compute.into(), config.run.device);
    let backend = host::own_machine(device);
    let times = floor::times(&lowered, &*backend, compute, Effort::CAREFUL)?;
    let cpu = device == DeviceKind::Cpu;
    let peak = cpu.then(|| host::product_peak(config.run.cpu_units, compute)).flatten();
    let peak = peak.map(|(unit, rate)| (unit, rate * config.run.threads.get() as f64));
    let row = |time: floor::ProductTime| {
        let product = time.product;
        let rate = product.flops() as f64 / time.seconds;
        ProductRow {
            pass: match product.pass {
                Pass::Forward => "F",
                Pass::InputGradient => "dX",
                Pass::WeightGradient => "dW",
            },
            rows: product.rows,
            from: product.from,
            to: product.to,
            count: time.count,
            median_us: 1e6 * time.seconds,
            gflops: 1e-9 * rate,
            of_peak: peak.as_ref().map(|(_, peak)| rate / peak),
        }
    };
    Ok(ProductBench {
        products: times.into_iter().map(row).collect(),
        peak_gflops: peak.as_ref().map(|(_, peak)| 1e-9 * peak),
        unit: peak.map(|(unit, _)| unit),
    })
}
