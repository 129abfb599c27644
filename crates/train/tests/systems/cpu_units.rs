//! Units of the processor: each multiplies alike in every layout, and close to what the library does.

use phalanx_cpu::products::UnitSet;
use phalanx_session::Session;
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;

use crate::support::{agrees, llama, models, settings};

fn precision(dtype: &str) -> [String; 2] {
    [format!("precision.compute={dtype}"), format!("precision.weights={dtype}")]
}

/// Two threads of each rank share packed operands.
#[test]
fn layouts_agree_on_every_unit() {
    let layouts = ["parallel.dp=2", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2"];
    for (i, unit) in UnitSet::here().iter().enumerate() {
        for (j, dtype) in ["f32", "bf16"].into_iter().enumerate() {
            let mut sets = precision(dtype).to_vec();
            sets.push(format!("run.cpu_units=[\"{}\"]", unit.name()));
            sets.extend(["run.threads=2", layouts[(2 * i + j) % 4]].map(str::to_owned));
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            agrees(&format!("{sets:?}"), &llama(&sets), None);
        }
    }
}

/// The losses of some steps with these units.
fn losses(dtype: &str, units: &str) -> Vec<f64> {
    let mut sets = precision(dtype).to_vec();
    sets.push(format!("run.cpu_units={units}"));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let loaded = llama(&sets);
    let network = Network::new(&loaded).unwrap();
    let own = settings(&loaded, None);
    let mut session = Session::new(&models(&loaded), own, &*network.start()).unwrap();
    let mut loader = corpus::training(&loaded, &corpus::open(&loaded).unwrap()).unwrap();
    let step = |_| {
        let batch = loader.next_batch().unwrap();
        with_step_data(batch, |data| session.step(data, 0.01)).unwrap().loss
    };
    (0..12).map(step).collect()
}

/// Units round differently, and so a run goes another way in its last bits; losses that differ by more than
/// the rounding of a type would be a mistake.
#[test]
fn training_goes_alike_on_every_unit() {
    for (dtype, near) in [("f32", 1e-4), ("bf16", 3e-2)] {
        let library = losses(dtype, "[]");
        assert!(library[11] < library[0], "it learns");
        for unit in UnitSet::here().iter() {
            let own = losses(dtype, &format!("[\"{}\"]", unit.name()));
            for (step, (own, library)) in own.iter().zip(&library).enumerate() {
                let off = (own - library).abs() / library;
                assert!(off < near, "{dtype}, {}, step {step}: {own}, {library}", unit.name());
            }
        }
    }
}
