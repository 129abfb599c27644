//! The theoretical bubble rates of the zero-bubble paper (arXiv 2401.10241), from its profiled times.

use phalanx_pipeline::NamedSchedule;

use crate::support::{build, run, times};

/// Stages, micro-batches, rates of 1F1B, ZB-H1 and ZB-H2, tF, tB, tW and the time of a hop.
type Row = (usize, usize, [f64; 3], f64, f64, f64, f64);

/// All rows of 1.5B and 6.2B, and the first of 14.6B and of 28.3B.
const ROWS: [Row; 8] = [
    (8, 24, [0.2431, 0.1585, 0.1083], 18.522, 18.086, 9.337, 0.601),
    (8, 32, [0.1985, 0.1242, 0.0837], 18.513, 18.086, 9.331, 0.626),
    (8, 64, [0.1240, 0.0674, 0.0444], 18.546, 18.097, 9.321, 0.762),
    (8, 24, [0.2347, 0.1323, 0.0698], 29.718, 29.444, 19.927, 0.527),
    (8, 32, [0.1898, 0.1045, 0.0559], 29.802, 29.428, 19.530, 0.577),
    (8, 64, [0.1091, 0.0554, 0.0294], 29.935, 29.621, 19.388, 0.535),
    (16, 48, [0.2552, 0.1397, 0.0672], 11.347, 11.248, 8.132, 0.377),
    (32, 96, [0.2646, 0.1421, 0.0641], 10.419, 10.207, 7.715, 0.408),
];

#[test]
fn published_rates_to_four_digits() {
    for (p, m, rates, f, b, w, hop) in ROWS {
        for (named, rate) in [NamedSchedule::OneFOneB, NamedSchedule::ZbH1, NamedSchedule::ZbH2]
            .into_iter()
            .zip(rates)
        {
            let found = run(&build(named, p, m), times(f, b, w), hop).bubble_total;
            let digits = |rate: f64| format!("{rate:.4}");
            assert_eq!(digits(found), digits(rate), "{named}, p {p}, m {m}: {found}");
        }
    }
}
