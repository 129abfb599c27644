//! Programs that use the library, as processes: this one, started again for each rank.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use phalanx::{Processes, RanksAs, Report, Trainer};

use crate::examples::processes as example;

const STEPS: usize = 30;

/// A number that every bit of the losses and weights decides. It is short, so that lines of two processes
/// do not mix.
fn bits(report: &Report) -> String {
    let mut all = DefaultHasher::new();
    report.losses.iter().for_each(|loss| loss.to_bits().hash(&mut all));
    for param in &report.params {
        let values = report.param(&param.name).unwrap().to_f64();
        values.iter().for_each(|value| value.to_bits().hash(&mut all));
    }
    assert_eq!(report.losses.len(), STEPS);
    format!("bits {:016x}", all.finish())
}

/// The program of these tests: it trains as it was started, and each process says what it has.
#[test]
fn program() {
    let Ok(asked) = std::env::var("PHALANX_TEST_PROGRAM") else { return };
    let ranks = if asked == "threads" { RanksAs::Threads } else { Processes(2) };
    let report = example::run(STEPS, ranks).unwrap();
    println!("\n{} {}", if phalanx::is_first() { "first" } else { "other" }, bits(&report));
}

/// Starts the program, with these variables.
fn start(variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ARGS).env("PHALANX_TEST_PROGRAM", "processes");
    command.envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

const ARGS: [&str; 4] = ["--exact", "processes::program", "--nocapture", "--test-threads=1"];

/// What the processes of ranks said, the first one first.
fn said(outputs: &[Output]) -> Vec<String> {
    let mut lines = Vec::new();
    for output in outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let out = String::from_utf8_lossy(&output.stdout);
        // The words of the test harness may come before it on the same line.
        lines.extend(out.lines().filter_map(|line| {
            let at = line.find("first bits").or(line.find("other bits"))?;
            Some(line[at..].to_owned())
        }));
    }
    lines.sort();
    lines
}

/// What two ranks must say.
fn expected() -> Vec<String> {
    let threads = bits(&example::run(STEPS, RanksAs::Threads).unwrap());
    ["first", "other"].map(|who| format!("{who} {threads}")).to_vec()
}

#[test]
fn a_program_starts_itself_as_processes_with_the_bits_of_threads() {
    let alone = start(&[]).wait_with_output().unwrap();
    assert_eq!(said(&[alone]), expected());
}

#[test]
fn a_program_that_is_started_by_hand_trains_to_its_end() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let by_hand = ["0", "1"].map(|rank| {
        let place = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", &*port)];
        start(&[&[("RANK", rank), ("WORLD_SIZE", "2")][..], &place].concat())
    });
    let by_hand = by_hand.map(|child| child.wait_with_output().unwrap());
    assert_eq!(said(&by_hand), expected());
}

#[test]
fn processes_must_be_as_many_as_ranks() {
    let table = phalanx::Table::new(2).input("x", vec![0.0, 1.0]).target("y", vec![0.0, 1.0]);
    let trainer = Trainer::new(phalanx::Mlp::regression(1, [], 1)).data(table).batch(2);
    let error = trainer.ranks(Processes(3)).run().map(drop).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(text.contains("the mesh needs 1") && text.contains("Processes(1)"), "{text}");
}
