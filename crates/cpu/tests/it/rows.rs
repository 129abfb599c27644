//! Exchanges of rows: what lies behind them is neither read nor sent.

use phalanx_comm::Communicator;
use phalanx_cpu::CpuEngine;
use phalanx_ir::{DType, Program, text, verify};
use phalanx_passes::overlap;
use phalanx_reference::RefTensor;
use phalanx_testing::cases::Dice;
use phalanx_testing::threads::Ranks;

/// Regions `[4, 3, 4]` of five rows of two numbers, in two runs. Their second dim is distributed, then the first; and then it
/// is the second again.
const EXCHANGES: &str = "mesh a=2 b=2
program rows {
  x: boundary f32[4,3,4,5,2]{0:b 2:a}
  counts: boundary i32[4,3,4,2]{0:b}
  narrow: boundary f32[4,3,4,5,2]{2:a,b}
  some: boundary i32[4,3,4,2]{2:a}
  other: boundary f32[8]
  %1 = all_to_all<a>(x, counts, from=2, to=0) : f32[4,3,4,5,2]{0:b,a}
  %2 = all_to_all<a>(%1, counts, from=0, to=2) : f32[4,3,4,5,2]{0:b 2:a}
  %3 = tanh(other) : f32[8]
  %4 = all_to_all<b>(narrow, some, from=2, to=0) : f32[4,3,4,5,2]{0:b 2:a}
  %5 = add(%4, %2) : f32[4,3,4,5,2]{0:b 2:a}
  return there: probe %1
  return back: probe %2
  return both: probe %5
  return beside: probe %3
}
";

/// The numbers of rows, and of everything else in their regions.
fn filled(counts: &[i32], behind: f64, dice: &mut Dice) -> RefTensor {
    let number = |dice: &mut Dice| dice.below(1000) as f64;
    let region = |runs: &[i32], dice: &mut Dice| {
        let end = runs.iter().sum::<i32>() as usize * 2;
        (0..10).map(|at| if at < end { number(dice) } else { behind }).collect::<Vec<f64>>()
    };
    let values: Vec<f64> = counts.chunks(2).flat_map(|runs| region(runs, dice)).collect();
    RefTensor::new(DType::F32, &[4, 3, 4, 5, 2], &values).unwrap()
}

fn zeros(shape: &[usize]) -> RefTensor {
    RefTensor::new(DType::F32, shape, &vec![0.0; shape.iter().product()]).unwrap()
}

fn run(program: &Program, counts: &[i32], seed: u64) -> Vec<RefTensor> {
    let engine = |endpoint: Box<dyn Communicator>| CpuEngine::on_rank(1, endpoint).unwrap();
    let counts = RefTensor::from_i32(&[4, 3, 4, 2], counts).unwrap();
    let rows = |dice: &mut Dice| {
        let counts: Vec<i32> = counts.values().iter().map(|&n| n as i32).collect();
        filled(&counts, f64::NAN, dice)
    };
    let (x, narrow) = (rows(&mut Dice::new(seed)), rows(&mut Dice::new(seed + 1)));
    let inputs = [x, counts.clone(), narrow, counts, zeros(&[8])];
    Ranks::new(engine).run(program, &inputs, None).unwrap()
}

#[test]
fn what_lies_behind_the_rows_is_not_touched() {
    let plain = text::parse(EXCHANGES).unwrap();
    verify(&plain).unwrap();
    let started = overlap(&plain, 4);
    assert!(started.to_string().contains("all_to_all_start<b>(narrow, some"), "{started}");
    for seed in 0..6 {
        let mut dice = Dice::new(100 + seed);
        // The first time regions are empty, then they may be full.
        let mut count = || {
            (0..4 * 3 * 4)
                .flat_map(|_| {
                    let first = dice.below(1 + seed.min(5) as usize);
                    [first as i32, dice.below(6 - first) as i32 * i32::from(seed > 0)]
                })
                .collect::<Vec<i32>>()
        };
        let counts = count();
        let of = |seed| filled(&counts, 0.0, &mut Dice::new(seed));
        let (x, narrow) = (of(seed), of(seed + 1));
        let sum: Vec<f64> = x.values().iter().zip(narrow.values()).map(|(a, b)| a + b).collect();
        let sum = RefTensor::new(DType::F32, &[4, 3, 4, 5, 2], &sum).unwrap();
        for program in [&plain, &started] {
            let found = run(program, &counts, seed);
            assert_eq!(found, [x.clone(), x.clone(), sum.clone(), zeros(&[8])], "seed {seed}");
        }
    }
}

/// A number that cannot be one of rows ends the step on all ranks with what it is.
#[test]
fn counts_that_cannot_be_are_refused() {
    let program = text::parse(EXCHANGES).unwrap();
    for (wrong, why) in [(6, "6 units of a cell that has room for 5"), (-1, "room for 5")] {
        let engine = |endpoint: Box<dyn Communicator>| CpuEngine::on_rank(1, endpoint).unwrap();
        let mut counts = [0; 4 * 3 * 4 * 2];
        counts[8] = wrong;
        let counts = RefTensor::from_i32(&[4, 3, 4, 2], &counts).unwrap();
        let rows = zeros(&[4, 3, 4, 5, 2]);
        let inputs = [rows.clone(), counts.clone(), rows, counts, zeros(&[8])];
        let error = Ranks::new(engine).run(&program, &inputs, None).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}
