//! docs/from_pytorch.md: its two programs train alike, and the page shows what is run here.

use phalanx::{DType, Ddp, Optimizer, Table, TensorPlan, Trainer, Training, Zero};

use crate::examples::custom_model::trigram;

const BATCH: usize = 4;
const SEQ: usize = 8;

/// What `tools/oracle/from_pytorch.py` prints: the losses of five steps in f64.
const PYTORCH: [f64; 5] =
    [4.318288659157156, 2.16579824730369, 0.985200990799721, 0.398309518361981, 0.163066085523592];

/// The training loop of the page.
fn five_steps(trainer: Trainer<'_>) -> Result<Vec<f64>, phalanx::Error> {
    let positions = 0..(BATCH * SEQ) as i32;
    let ids = positions.clone().map(|i| (13 * i + 5) % 32).collect();
    let targets = positions.map(|i| if i % 5 == 0 { -100 } else { (i * i + 3) % 32 }).collect();
    let mut training = trainer
        .data(Table::new(BATCH).ids("ids", ids).labels("targets", targets))
        .batch(BATCH)
        .optimizer(Optimizer::adamw()) // betas 0.9 and 0.95; a decay of 0.1, of matrices alone
        .lr(0.01)
        .clip(Some(0.5))
        .threads(1)
        .build()?;
    set_weights(&mut training)?;
    training.fit(5)?;
    Ok(training.losses().to_vec())
}

fn set_weights(training: &mut Training<'_>) -> Result<(), phalanx::Error> {
    let number = |i: usize| ((37 * i + 11) % 101) as f32 / 128.0 - 50.0 / 128.0;
    for (name, elements) in
        [("present", 32 * 32), ("past", 32 * 32), ("up", 32 * 128), ("head", 128 * 32)]
    {
        training.set_param(name, &(0..elements).map(number).collect::<Vec<f32>>())?;
    }
    Ok(())
}

#[test]
fn a_program_trains_like_the_same_program_in_pytorch_on_any_ranks() {
    let model = || trigram(DType::F64, BATCH, SEQ).unwrap();
    let half = || trigram(DType::F64, BATCH / 2, SEQ).unwrap();
    let split = || TensorPlan::new("tp").columns("up").rows("head");
    let layouts = [
        Trainer::of_model(model()),
        Trainer::of_model(half()).microbatches(2),
        Trainer::of_model(model()).mesh("dp=4").strategy(Ddp::default()),
        Trainer::of_model(model()).mesh("dp=2 tp=2").strategy(Zero::stage(3)).strategy(split()),
    ];
    for (number, layout) in layouts.into_iter().enumerate() {
        let losses = five_steps(layout).unwrap();
        for (own, theirs) in losses.iter().zip(PYTORCH) {
            assert!((own - theirs).abs() <= 1e-12 * theirs, "{number}: {losses:?}");
        }
    }
}

/// Every line of a program on the page is a line of a program that is run.
#[test]
fn the_page_shows_programs_that_are_run() {
    let page = include_str!("../../../../docs/from_pytorch.md");
    let rust = [include_str!("from_pytorch.rs"), include_str!("../../examples/custom_model.rs")];
    let python = [include_str!("../../../../tools/oracle/from_pytorch.py")];
    for (language, sources) in [("rust", &rust[..]), ("python", &python[..])] {
        let known =
            |line: &str| sources.iter().any(|text| text.lines().any(|own| own.trim() == line));
        let blocks: Vec<&str> = page.split(&format!("```{language}\n")).skip(1).collect();
        assert!(!blocks.is_empty(), "{language}");
        for line in blocks.iter().flat_map(|block| block.split("```").next()).flat_map(str::lines) {
            let line = line.trim();
            assert!(line.is_empty() || known(line), "{language}: {line}");
        }
    }
}
