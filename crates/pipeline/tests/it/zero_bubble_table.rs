//! The theoretical bubble rates of the zero-bubble paper (arXiv 2401.10241), from its profiled times.

use phalanx_pipeline::{NamedSchedule, ScheduleShape};

use crate::support::{build, run, same, times, total};

/// Stages, micro-batches, rates of 1F1B, ZB-H1 and ZB-H2, tF, tB, tW and the time of a hop.
type Row = (usize, usize, [f64; 3], f64, f64, f64, f64);

/// 1.5B, 6.2B, 14.6B and 28.3B, with three numbers of micro-batches each.
const ROWS: [Row; 12] = [
    (8, 24, [0.2431, 0.1585, 0.1083], 18.522, 18.086, 9.337, 0.601),
    (8, 32, [0.1985, 0.1242, 0.0837], 18.513, 18.086, 9.331, 0.626),
    (8, 64, [0.1240, 0.0674, 0.0444], 18.546, 18.097, 9.321, 0.762),
    (8, 24, [0.2347, 0.1323, 0.0698], 29.718, 29.444, 19.927, 0.527),
    (8, 32, [0.1898, 0.1045, 0.0559], 29.802, 29.428, 19.530, 0.577),
    (8, 64, [0.1091, 0.0554, 0.0294], 29.935, 29.621, 19.388, 0.535),
    (16, 48, [0.2552, 0.1397, 0.0672], 11.347, 11.248, 8.132, 0.377),
    (16, 64, [0.2082, 0.1088, 0.0516], 11.307, 11.254, 8.101, 0.379),
    (16, 128, [0.1251, 0.0576, 0.0266], 11.325, 11.308, 8.109, 0.378),
    (32, 96, [0.2646, 0.1421, 0.0641], 10.419, 10.207, 7.715, 0.408),
    (32, 128, [0.2168, 0.1106, 0.0490], 10.408, 10.204, 7.703, 0.408),
    (32, 256, [0.1352, 0.0594, 0.0257], 10.402, 10.248, 7.698, 0.460),
];

/// The column of interleaved 1F1B, in the same order, with the chunks of a stage group.
const INTERLEAVED: [(usize, f64); 12] = [
    (3, 0.1055),
    (3, 0.0818),
    (3, 0.0443),
    (4, 0.0808),
    (4, 0.0628),
    (4, 0.0320),
    (3, 0.1104),
    (3, 0.0852),
    (3, 0.0445),
    (2, 0.1493),
    (2, 0.1164),
    (2, 0.0624),
];

/// The paper counts each hop of the longest way once, (2v − 1)p − 2 of them; where links are asked for one turn
/// ahead, some of them hide, and others wait for the rounds of p micro-batches.
#[test]
fn published_rates_of_interleaved_chunks_to_four_digits() {
    for ((p, m, _, f, b, w, hop), (v, rate)) in ROWS.into_iter().zip(INTERLEAVED) {
        let (t, ideal) = (times(f, b, w), m as f64 * total(times(f, b, w)));
        let schedule =
            NamedSchedule::Interleaved.build(ScheduleShape::new(p, m).chunks(v)).unwrap();
        let still = run(&schedule, t, 0.0).makespan;
        same(still, ideal + (p - 1) as f64 * total(t) / v as f64, "without hops");
        let long = still + ((2 * v - 1) * p - 2) as f64 * hop;
        let found = (long - ideal) / long;
        assert_eq!(format!("{found:.4}"), format!("{rate:.4}"), "p {p}, m {m}, v {v}");
        // With a hop before each turn that needs one, a step takes a little longer.
        let hops = run(&schedule, t, hop).bubble_total;
        assert!((0.0..0.004).contains(&(hops - rate)), "p {p}, m {m}, v {v}: {hops}");
    }
}

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
