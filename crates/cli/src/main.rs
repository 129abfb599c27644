//! The `phalanx` command: the library's first user.
//!
//! Exit codes: 0 all went well; 1 something was started and then failed; 2 refused, with nothing on
//! standard output and the reason and a remedy on standard error. A panic is a bug, and is reported
//! as one.
#![forbid(unsafe_code)]

mod arg_values;
mod args;
mod bench;
mod checkpoint;
mod commands;
mod launch;
mod out;
mod plan;
mod schedule;
mod shell;
mod verify;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use args::Args;
use phalanx::error::{Error, Problem};
use phalanx::session::job;
use phalanx_sys::{CountingAllocator, interrupt, memory};

/// Counts allocations, so that `bench step` can report the memory in which the matrix library packs
/// operands.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    interrupt::survive_file_limit();
    memory::save_address_space();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version go to standard output; everything else is a refusal, on standard
            // error.
            let printed = print(&error);
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                    phalanx::train::output::note(printed);
                    ended()
                }
                _ => ExitCode::from(2),
            };
        }
    };
    std::panic::set_hook(Box::new(|info| out::error(&bug(info))));
    match std::panic::catch_unwind(|| commands::run(&args)) {
        Ok(Ok(0)) => {
            job::end(None);
            ended()
        }
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(error)) => fail(&error),
        // The panic hook has already printed what happened.
        Err(_) => {
            job::end(Some(&Error::failed(Problem::new("a bug in phalanx"))));
            ExitCode::FAILURE
        }
    }
}

/// Prints what clap says, in colours; but text with control characters is escaped first.
fn print(error: &clap::Error) -> std::io::Result<()> {
    let strange = |text: String| text.chars().any(char::is_control);
    match std::env::args_os().any(|argument| strange(argument.to_string_lossy().into_owned())) {
        true => {
            out::error(phalanx::error::printable(error.to_string().trim_end()).as_ref());
            Ok(())
        }
        false => error.print(),
    }
}

/// All went well, unless what was printed did not arrive.
fn ended() -> ExitCode {
    let Some(why) = phalanx::train::output::lost() else { return ExitCode::SUCCESS };
    out::error(&format!(
        "error: cannot write standard output: {why}\n  \
         usual fix: free some space, or send the output elsewhere; files that the command wrote are \
         complete"
    ));
    ExitCode::FAILURE
}

fn fail(error: &Error) -> ExitCode {
    // Of several processes, the one where it happened says it.
    if job::end(Some(error)) {
        out::error(&error.to_string());
    }
    ExitCode::from(error.exit_code())
}

fn bug(info: &std::panic::PanicHookInfo<'_>) -> String {
    let what = info.payload_as_str().unwrap_or("no message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    format!(
        "error: this is a bug in phalanx: {what}\n  at {place}\n  \
         usual fix: please report this line together with the command and the configuration"
    )
}
