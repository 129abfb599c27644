//! `phalanx completions` and `phalanx man`: help for shells and for `man`, made from the arguments.

use clap::{Command, CommandFactory};
use phalanx::error::{Error, Problem, Result};

use crate::args::Args;
use crate::out;

/// Prints a script that completes the arguments of `phalanx` in a shell.
pub(crate) fn completions(shell: clap_complete::Shell) {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "phalanx", &mut text);
    out::line(String::from_utf8_lossy(&text).trim_end());
}

/// Prints the manual page of `phalanx`, or of one of its commands.
pub(crate) fn man(names: &[String]) -> Result<()> {
    let mut all = Args::command();
    all.build();
    let mut command = &all;
    for name in names {
        command = command.find_subcommand(name).ok_or_else(|| unknown(command, name))?;
    }
    let mut text = Vec::new();
    match clap_mangen::Man::new(command.clone()).render(&mut text) {
        Ok(()) => out::line(String::from_utf8_lossy(&text).trim_end()),
        // Memory takes what is written to it.
        Err(error) => out::error(&format!("error: {error}")),
    }
    Ok(())
}

fn unknown(command: &Command, name: &str) -> Error {
    let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    let problem = Problem::new(format!("there is no command `{name}`"));
    Error::refused(match known.is_empty() {
        true => problem.fix(format!("leave `{name}` out")),
        false => problem.because(format!("commands: {}", known.join(", "))),
    })
}
