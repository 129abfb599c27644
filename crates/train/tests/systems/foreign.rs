//! Another engine and another transport under whole sessions, without a change above the seams.
//!
//! The engine is asynchronous, its memory cannot be addressed by the host, and it wants scratch memory of
//! its own. Its ranks share no memory: they talk over byte streams.

use phalanx_comm::{Launcher, Options, Streams};
use phalanx_cpu::CpuEngine;
use phalanx_testing::Remote;
use phalanx_train::corpus::{self, with_step_data};
use phalanx_train::host::{self, rank_engine};
use phalanx_train::network::Network;
use phalanx_train::session::{Backend, EngineBackend, Lowered, Prepared, Size};

use crate::support::{llama, models, settings};

pub(crate) fn backend() -> Box<dyn Backend> {
    Box::new(EngineBackend {
        launcher: |size: Size| -> Box<dyn Launcher> {
            Box::new(Streams { ranks: size.ranks, options: Options::default() })
        },
        engine: |threads, endpoint| {
            Ok(Remote::new(move || rank_engine(threads, endpoint).unwrap()))
        },
        requirements: Remote::<CpuEngine>::requirements_around(host::requirements()),
    })
}

/// The same steps to the last bit: losses, norms, parameters, and what was moved.
#[test]
fn the_same_bits_as_on_threads() {
    for sets in [
        &["parallel.dp=2", "parallel.zero=3", "parallel.tp=2", "parallel.sp=true"][..],
        &["parallel.pp=2", "parallel.cp=2", "train.microbatches=2", "parallel.schedule=zb-h1"],
        &["parallel.dp=2", "parallel.zero=2", "parallel.pp=2", "train.microbatches=4"],
    ] {
        let loaded = llama(&[&["model.layers=2", "precision.compute=f32"][..], sets].concat());
        let network = Network::new(&loaded).unwrap();
        let run = |backend: &dyn Backend| {
            let requirements = backend.requirements();
            let settings = settings(&loaded, None);
            let lowered = Lowered::for_engine(&models(&loaded), settings, requirements).unwrap();
            let prepared = Prepared::of(&lowered, backend).unwrap();
            let mut session = prepared.start(&*network.start()).unwrap();
            let corpus = corpus::open(&loaded).unwrap();
            let mut loader = corpus::training(&loaded, &corpus).unwrap();
            let mut numbers = Vec::new();
            for _ in 0..3 {
                let batch = loader.next_batch().unwrap();
                let step = with_step_data(batch, |data| session.step(data, 0.01)).unwrap();
                numbers.push([step.loss, step.grad_norm].map(f64::to_bits));
            }
            let moved: Vec<_> = session.measure().unwrap().into_iter().map(|m| m.moved).collect();
            (numbers, session.params().unwrap(), moved)
        };
        assert_eq!(run(&*host::threads()), run(&*backend()), "{sets:?}");
    }
}
