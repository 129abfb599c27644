//! Another engine and another transport under whole sessions, without a change above the seams.
//!
//! The engine is asynchronous, its memory cannot be addressed by the host, and it wants scratch memory of
//! its own. Its ranks share no memory: they talk over byte streams.

use phalanx_comm::{Launcher, Options, Streams};
use phalanx_config::DeviceKind;
use phalanx_cpu::CpuEngine;
use phalanx_error::Result;
use phalanx_ir::DType;
use phalanx_script::StateKind;
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::host::{self, rank_engine};
use phalanx_session::network::Network;
use phalanx_session::{Backend, BatchSource, EngineBackend, Lowered, Prepared, Size, StepData};
use phalanx_testing::Remote;

use crate::support::{llama, models, settings};

pub(crate) fn backend() -> Box<dyn Backend> {
    Box::new(EngineBackend {
        launcher: |size: Size| -> Box<dyn Launcher> {
            Box::new(Streams { ranks: size.ranks, options: Options::default() })
        },
        engine: |size: Size, endpoint| {
            Ok(Remote::new(move || rank_engine(size.threads, endpoint).unwrap()))
        },
        requirements: Box::new(|units| {
            let own = host::requirements_of(DeviceKind::Cpu, units);
            Remote::<CpuEngine>::requirements_around(own)
        }),
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
            let settings = settings(&loaded, None);
            let requirements = backend.requirements(settings.units);
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

/// Ranks that feed themselves for several steps take those that are asked for one by one.
#[test]
fn steps_at_once_are_steps_one_by_one() {
    struct Batches<'a>(&'a [phalanx_data::Batch]);
    impl BatchSource for Batches<'_> {
        fn with(
            &self,
            step: u64,
            run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>,
        ) -> Result<()> {
            with_step_data(&self.0[step as usize - 1], |data| run(data, 0.01 * step as f64))
        }
    }
    let loaded = llama(&["parallel.dp=2", "parallel.zero=2", "train.microbatches=2"]);
    let corpus = corpus::open(&loaded).unwrap();
    let mut loader = corpus::training(&loaded, &corpus).unwrap();
    let batches: Vec<_> = (0..4).map(|_| loader.next_batch().unwrap().clone()).collect();
    let run = |counts: &[u64]| {
        let network = Network::new(&loaded).unwrap();
        let prepared = Prepared::new(&models(&loaded), settings(&loaded, None)).unwrap();
        let mut session = prepared.start(&*network.start()).unwrap();
        let taken = counts.iter().map(|count| session.take(*count, &Batches(&batches)).unwrap());
        let taken: Vec<_> = taken.flatten().collect();
        assert_eq!(session.steps(), 4);
        (taken, session.params().unwrap())
    };
    assert_eq!(run(&[4]), run(&[1, 1, 1, 1]));
    assert_eq!(run(&[1, 3]), run(&[4]));
}

/// Whatever of a state is written is what is read, in its own type, on every rank that holds it.
#[test]
fn state_is_written_where_it_is_read() {
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"];
    let shards = ["parallel.dp=2", "parallel.tp=2", "parallel.zero=3"];
    let loaded = llama(&[&bf16[..], &shards].concat());
    let network = Network::new(&loaded).unwrap();
    let prepared = Prepared::new(&models(&loaded), settings(&loaded, None)).unwrap();
    let mut session = prepared.start(&*network.start()).unwrap();
    let kinds = [
        (StateKind::Weights, DType::Bf16),
        (StateKind::Master, DType::F32),
        (StateKind::Optimizer(1), DType::F32),
    ];
    for param in 0..session.parameters().len() {
        let whole = 0..session.parameters()[param].elements();
        let some = whole.end / 3..whole.end - whole.end / 4;
        for (kind, dtype) in kinds {
            let (found, before) = session.read(param, kind, whole.clone()).unwrap();
            assert_eq!(found, dtype);
            // Optimizer state is written at the start.
            let zero = before.iter().all(|byte| *byte == 0);
            assert!(zero || !matches!(kind, StateKind::Optimizer(_)));
            let new: Vec<u8> = (0..some.len() * dtype.size()).map(|i| (i % 100) as u8).collect();
            session.write(param, kind, some.clone(), &new).unwrap();
            let (_, after) = session.read(param, kind, whole.clone()).unwrap();
            let [from, to] = [some.start, some.end].map(|at| at * dtype.size());
            assert_eq!((&after[..from], &after[to..]), (&before[..from], &before[to..]));
            assert_eq!(after[from..to], new);
        }
        session.write(param, StateKind::Optimizer(9), some.clone(), &[]).unwrap_err();
        session.write(param, StateKind::Weights, some, &[1, 2, 3]).unwrap_err();
    }
}
