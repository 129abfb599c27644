//! Whole sessions on a GPU: every layout beside one rank on the CPU, long runs, and the same bits again. What
//! needs a GPU says so where there is none.

use std::io::Write;

use phalanx_comm::{Launcher, Options, Threads};
use phalanx_config::{DeviceKind, Loaded};
use phalanx_cuda::{CudaEngine, GpuLink};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::host;
use phalanx_session::network::Network;
use phalanx_session::{Backend, EngineBackend, Lowered, Prepared, Size};

use crate::support::{gpt, llama, models, settings};

/// Whether there is a GPU. If not, the test that asks is skipped.
pub(crate) fn is_here(test: &str) -> bool {
    let found = host::require(DeviceKind::Cuda);
    if let Err(why) = &found {
        let _ =
            writeln!(std::io::stderr(), "SKIPPED {test}: {}", why.to_string().replace('\n', " "));
    }
    found.is_ok()
}

/// Ranks that share a GPU and exchange as `link` says.
pub(crate) fn backend(link: GpuLink) -> Box<dyn Backend> {
    Box::new(EngineBackend {
        launcher: |size: Size| -> Box<dyn Launcher> {
            Box::new(Threads { ranks: size.ranks, options: Options::default() })
        },
        engine: move |_, endpoint| Ok(CudaEngine::linked(endpoint, link)?),
        requirements: Box::new(|units| host::requirements_of(DeviceKind::Cuda, units)),
    })
}

/// The losses of some steps, the parameters after them, and what each rank moved.
fn trained(loaded: &Loaded, backend: &dyn Backend, steps: usize) -> Trained {
    let network = Network::new(loaded).unwrap();
    let settings = settings(loaded, None);
    let requirements = backend.requirements(settings.units);
    let made = Lowered::for_engine(&models(loaded), settings, requirements);
    let mut session =
        Prepared::of(&made.unwrap(), backend).unwrap().start(&*network.start()).unwrap();
    let corpus = corpus::open(loaded).unwrap();
    let mut loader = corpus::training(loaded, &corpus).unwrap();
    let mut losses = Vec::new();
    for _ in 0..steps {
        let batch = loader.next_batch().unwrap();
        losses.push(with_step_data(batch, |data| session.step(data, 0.01)).unwrap().loss);
    }
    let moved = session.measure().unwrap().into_iter().map(|m| format!("{:?}", m.moved)).collect();
    Trained { losses, params: format!("{:?}", session.params().unwrap()), moved }
}

#[derive(PartialEq, Debug)]
struct Trained {
    losses: Vec<f64>,
    params: String,
    moved: Vec<String>,
}

/// Layouts of every kind.
const LAYOUTS: [&[&str]; 8] = [
    &["parallel.tp=2", "parallel.sp=true"],
    &["parallel.dp=2", "parallel.zero=3", "parallel.tp=2"],
    &["parallel.cp=2", "parallel.dp=2", "parallel.zero=1"],
    &["parallel.cp=2", "parallel.cp_kind=ring"],
    &["parallel.cp=2", "parallel.cp_kind=ring", "parallel.cp_order=striped", "parallel.tp=2"],
    &["parallel.tp=4", "parallel.tp_kind=2d"],
    &["parallel.pp=2", "train.microbatches=4", "parallel.schedule=zb-h1"],
    &["parallel.pp=2", "train.microbatches=4", "parallel.dp=2", "parallel.zero=2"],
];

#[test]
fn a_hundred_steps_follow_the_cpu() {
    if !is_here("a_hundred_steps_follow_the_cpu") {
        return;
    }
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"];
    let f16 = ["precision.compute=f16", "precision.weights=f16"];
    let cases: [(&[&str], f64); 4] = [
        (&["precision.compute=f64"], 1e-9),
        (&["precision.compute=f32"], 1e-3),
        (&bf16, 5e-2),
        (&f16, 5e-2),
    ];
    for model in [llama, gpt] {
        for (sets, bound) in cases {
            let loaded = model(sets);
            let cpu = trained(&loaded, &*host::threads(), 100).losses;
            let gpu = trained(&loaded, &*backend(GpuLink::Auto), 100).losses;
            for (step, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
                let off = (cpu - gpu).abs() / cpu.abs();
                assert!(off <= bound, "{sets:?}, step {}: {cpu} and {gpu}, {off:e}", step + 1);
            }
            assert!(gpu[99] < gpu[0], "{sets:?}: the loss went from {} to {}", gpu[0], gpu[99]);
        }
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    if !is_here("two_runs_have_the_same_bits") {
        return;
    }
    let bf16 = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"];
    for layout in LAYOUTS.into_iter().chain([&[][..]]) {
        let loaded = gpt(&[&bf16[..], layout].concat());
        let run = || trained(&loaded, &*backend(GpuLink::Auto), 5);
        assert_eq!(run(), run(), "{layout:?}");
    }
}

/// Through the GPU's memory and through the host's: the same bits, and the same bytes counted.
#[test]
fn every_link_has_the_same_bits() {
    if !is_here("every_link_has_the_same_bits") {
        return;
    }
    for layout in LAYOUTS {
        for precision in ["precision.compute=f32", "precision.compute=f64"] {
            let loaded = llama(&[&[precision][..], layout].concat());
            let run = |link| trained(&loaded, &*backend(link), 3);
            assert_eq!(run(GpuLink::Device), run(GpuLink::Host), "{layout:?} {precision}");
        }
    }
}
