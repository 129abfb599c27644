//! Evaluation in every shape of ranks and every order of positions: the loss that one rank finds, before and after a step.

use phalanx_config::Loaded;
use phalanx_session::Session;
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;

use crate::support::{gpt, llama, settings, try_cnn};

/// The losses of a batch before and after a step with another one.
fn losses(loaded: &Loaded) -> [f64; 2] {
    let network = Network::new(loaded).unwrap();
    let models = network.models(&loaded.config, true).unwrap();
    let mut session = Session::new(&models, settings(loaded, None), &*network.start()).unwrap();
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let mut evaluated = |session: &mut Session| {
        with_step_data(loader.next_batch().unwrap(), |data| session.evaluate(data)).unwrap()
    };
    let before = evaluated(&mut session);
    let mut others = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    with_step_data(others.next_batch().unwrap(), |data| session.step(data, 0.01)).unwrap();
    [before, evaluated(&mut session)]
}

fn evaluates_like_one_rank(model: &dyn Fn(&[&str]) -> Loaded, layouts: &[&str]) {
    let expected = losses(&model(&[]));
    for layout in layouts {
        let sets: Vec<&str> = layout.split_whitespace().collect();
        for (found, expected) in losses(&model(&sets)).into_iter().zip(expected) {
            let off = (found - expected).abs() / expected;
            assert!(off <= 1e-12, "{layout}: {found}, expected {expected}");
        }
    }
}

const LAYOUTS: [&str; 12] = [
    "parallel.cp=4 parallel.cp_kind=ring parallel.cp_order=block",
    "parallel.cp=4 parallel.cp_kind=ring parallel.cp_order=zigzag",
    "parallel.cp=3 parallel.cp_kind=ring parallel.cp_order=striped",
    "parallel.cp=2 parallel.cp_kind=ring parallel.cp_order=striped parallel.pp=2 parallel.dp=2",
    "parallel.cp=4 parallel.cp_kind=allgather parallel.cp_order=zigzag",
    "parallel.cp=2 parallel.cp_kind=rsa",
    "parallel.tp=4 parallel.tp_kind=2d parallel.stream=true",
    "parallel.tp=4 parallel.tp_kind=2d parallel.cp=2 parallel.cp_kind=ring",
    "parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2",
    "parallel.tp=8 parallel.tp_kind=3d parallel.stream=true",
    "parallel.tp=4 parallel.tp_kind=gspmd",
    "parallel.dp=2 parallel.sync=dataparallel",
];

#[test]
fn shapes_and_orders_evaluate_like_one_rank() {
    // Adam divides what rounding leaves of the gradient of key biases by eps, which must not be tiny.
    let own = ["train.seq_len=7", "model.dropout=0.2", "optim.eps=1e-6", "train.microbatches=2"];
    let with =
        |model: fn(&[&str]) -> Loaded| move |sets: &[&str]| model(&[&own[..], sets].concat());
    evaluates_like_one_rank(&with(gpt), &LAYOUTS);
    let own = ["train.seq_len=7", "train.microbatches=2"];
    evaluates_like_one_rank(&|sets| llama(&[&own[..], sets].concat()), &LAYOUTS);
}

#[test]
fn divided_images_evaluate_like_one_rank() {
    let cnn = |sets: &[&str]| try_cnn(sets).unwrap_or_else(|error| panic!("{error}"));
    evaluates_like_one_rank(
        &cnn,
        &["parallel.tp=3 parallel.sp=true", "parallel.tp=2 parallel.dp=2"],
    );
}
