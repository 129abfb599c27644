//! Times collectives between ranks that are threads: one JSON row per line.
//!
//! usage: collectives [ranks] [largest MiB]

use phalanx_comm::{Options, bench};

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().ok());
    let ranks = args.next().flatten().unwrap_or(2);
    let largest = args.next().flatten().unwrap_or(64) << 20;
    let sizes: Vec<usize> = bench::SIZES.into_iter().filter(|&size| size <= largest).collect();
    match bench::collectives(ranks, &Options { bind: true, ..Options::default() }, &sizes) {
        Ok(rows) => rows.iter().for_each(print),
        Err(failure) => {
            eprintln!("{failure}");
            std::process::exit(1);
        }
    }
}

fn print(row: &bench::Row) {
    let (op, bytes, median_us) = (row.op, row.bytes, row.median_us);
    let (gib_per_s, copy_limit_us) = (row.gib_per_s, row.copy_limit_us);
    let (best_us, copy_limit_best_us) = (row.best_us, row.copy_limit_best_us);
    println!(
        "{{\"op\":\"{op}\",\"bytes\":{bytes},\"median_us\":{median_us:.2},\
         \"gib_per_s\":{gib_per_s:.3},\"copy_limit_us\":{copy_limit_us:.2},\
         \"best_us\":{best_us:.2},\"copy_limit_best_us\":{copy_limit_best_us:.2}}}"
    );
}
