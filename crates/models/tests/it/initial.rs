//! Initial values: the same in every layout, and of the right distribution.

use phalanx_ir::{Init, Param};
use phalanx_models::initial_values;

fn param(name: &str, init: Init) -> Param {
    Param { name: name.to_owned(), shape: vec![300, 400], init, decay: true, dealt: 1 }
}

fn whole(param: &Param, seed: u64) -> Vec<f64> {
    initial_values(param, seed, 0..param.elements()).collect()
}

#[test]
fn a_shard_is_a_slice_of_the_whole() {
    for init in [Init::Normal(0.02), Init::Uniform(0.5), Init::Constant(1.0)] {
        let param = param("blocks.1.attn.q", init);
        let all = whole(&param, 7);
        // Ranks that hold uneven ranges of rows, in any order.
        for range in [80_000..120_000, 0..1, 1..399, 399..80_000, 5..5] {
            let part: Vec<f64> = initial_values(&param, 7, range.clone()).collect();
            assert_eq!(part, all[range]);
        }
        // A rank that holds some columns makes a range of each row.
        let columns: Vec<f64> = (0..300)
            .flat_map(|row| initial_values(&param, 7, row * 400 + 100..row * 400 + 200))
            .collect();
        let expected: Vec<f64> = all.chunks(400).flat_map(|r| r[100..200].to_vec()).collect();
        assert_eq!(columns, expected);
    }
}

#[test]
fn names_and_seeds_make_different_values() {
    let q = param("attn.q", Init::Normal(1.0));
    let k = param("attn.k", Init::Normal(1.0));
    assert_ne!(whole(&q, 1), whole(&k, 1));
    assert_ne!(whole(&q, 1), whole(&q, 2));
    assert_eq!(whole(&q, 1), whole(&q, 1));
}

#[test]
fn moments_follow_the_distribution() {
    let n = 120_000.0f64;
    let moments = |values: &[f64]| {
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    };
    // Four standard errors of the mean and of the deviation.
    let (mean, std) = moments(&whole(&param("w", Init::Normal(0.02)), 3));
    assert!(mean.abs() < 4.0 * 0.02 / n.sqrt(), "{mean}");
    assert!((std / 0.02 - 1.0).abs() < 4.0 / (2.0 * n).sqrt(), "{std}");

    let values = whole(&param("w", Init::Uniform(0.5)), 3);
    assert!(values.iter().all(|v| (-0.5..0.5).contains(v)));
    let (mean, std) = moments(&values);
    assert!(mean.abs() < 4.0 * 0.5 / (3.0 * n).sqrt(), "{mean}");
    assert!((std * 3.0f64.sqrt() / 0.5 - 1.0).abs() < 0.01, "{std}");

    assert!(whole(&param("w", Init::Constant(0.25)), 3).iter().all(|&v| v == 0.25));
}
