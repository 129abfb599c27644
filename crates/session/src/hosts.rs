//! Starts the processes of a job on several hosts: an agent on each, by a remote shell.
//!
//! The agent is this program, started there under the same path and in the same folder. It starts the
//! host's ranks and watches them as a launcher does. Its standard input is a line to the launcher: first
//! comes the job's token, which is never an argument, because all users of a host see those; then
//! requests to stop; and its end says that the launcher is gone, so that no rank outlives it.

use std::ffi::{OsStr, OsString};
use std::io::BufRead;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use phalanx_comm::HostShare;
use phalanx_comm::{BadEnvironment, BadHostFile, Token, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_sys::interrupt;

use crate::launch::{
    Control, INTERRUPT, Launched, Orders, WatchedProcesses, new_token, start_ranks,
};

/// The usual remote shell. It must not ask for a password: nobody could answer.
pub const REMOTE_SHELL: &str = "ssh -o BatchMode=yes";

/// The exit code of remote shells that did not reach their host.
const UNREACHED: i32 = 255;

/// Starts a program as this many processes on the hosts that a file lists, and waits for all. Gives the
/// exit code of the job.
pub fn launch_on_hosts(ranks: usize, file: &Path, shell: &str, program: &Launched) -> Result<u8> {
    let shares = read_hosts(file, ranks)?;
    let words: Vec<&str> = shell.split_whitespace().collect();
    let [shell, options @ ..] = &words[..] else {
        let problem = Problem::new("the name of the remote shell is empty");
        return Err(Error::refused(problem.fix(format!("leave --rsh out: it is {REMOTE_SHELL}"))));
    };
    let own = std::env::current_exe().and_then(|file| Ok((file, std::env::current_dir()?)));
    let (own, folder) = own.map_err(|error| {
        Error::refused(Problem::new(format!("this program does not know where it is: {error}")))
    })?;
    let (token, orders) = (new_token()?, Orders::default());
    let _listening = interrupt::listen_for_others();
    let mut hosts = WatchedProcesses::new(program, &orders);
    for share in &shares {
        let mut command = Command::new(shell);
        command.args(options).arg(&share.host);
        command.arg(remote_command(share, &own, &folder, program));
        command.stdin(Stdio::piped());
        hosts.start(command, share.host.clone(), Control::Lines(None))?;
        hosts.tell(&token.hex());
    }
    hosts.watch()
}

/// What an agent does on its host.
#[derive(Clone, Debug)]
pub struct Agent {
    /// The ranks that it starts.
    pub share: HostShare,
    /// Whether a launcher speaks to it over its standard input.
    pub is_led: bool,
}

impl Agent {
    /// The agent of a host of a Slurm step, where every host has this many ranks.
    pub fn of_slurm(count: usize) -> Result<Self> {
        let share = HostShare::of_slurm(&|name| std::env::var(name).ok(), count);
        let share = share.map_err(|BadEnvironment { problem, fix }| {
            Error::refused(Problem::new(problem).fix(fix))
        })?;
        Ok(Self { share, is_led: false })
    }

    /// Starts the host's ranks, and waits for them.
    pub fn run(&self, program: &Launched) -> Result<u8> {
        let orders = Arc::new(Orders::default());
        let token = match self.is_led {
            true => follow(orders.clone())?,
            false => {
                let (host, port) = &self.share.meet;
                let given = std::env::var(names::TOKEN).ok();
                let known =
                    |text: String| Token::from_hex(&text).unwrap_or_else(|| Token::of(&text));
                given.map_or_else(|| Token::of(&format!("{host}:{port}")), known)
            }
        };
        let (share, local) = (&self.share, self.share.first..self.share.first + self.share.count);
        let variables = |rank| share.variables(rank, &token);
        start_ranks(local, share.ranks, variables, program, &orders)
    }
}

/// Reads the token, and from then on what the launcher says.
fn follow(orders: Arc<Orders>) -> Result<Token> {
    let mut lines = std::io::BufReader::new(std::io::stdin()).lines();
    let token = lines.next().and_then(|line| Token::from_hex(line.ok()?.trim()));
    let token = token.ok_or_else(|| {
        let problem = Problem::new("the standard input of an agent does not begin with a token");
        Error::refused(problem.fix("agents with --led are started by phalanx launch --hosts"))
    })?;
    let listen = move || {
        for line in lines.map_while(std::io::Result::ok) {
            if line.trim() == INTERRUPT {
                orders.interrupts.fetch_add(1, Ordering::Relaxed);
            }
        }
        orders.gone.store(true, Ordering::Relaxed);
    };
    let started = std::thread::Builder::new().name("launcher".to_owned()).spawn(listen);
    started.map_err(|error| Error::refused(Problem::new(format!("no thread: {error}"))))?;
    Ok(token)
}

/// The shares of the hosts of a file.
fn read_hosts(file: &Path, ranks: usize) -> Result<Vec<HostShare>> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let problem = Problem::io("cannot read the hosts in", file, &error);
        Error::refused(problem.fix("give a file with a host on each line: name slots=4"))
    })?;
    HostShare::of_file(&text, ranks, any_port()).map_err(|BadHostFile { line, problem, fix }| {
        let place = match line {
            Some(line) => format!("{}, line {line}", file.display()),
            None => file.display().to_string(),
        };
        Error::refused(Problem::new(format!("{place}: {problem}")).fix(fix))
    })
}

/// A port that another job hardly has, below those that systems give out by themselves.
fn any_port() -> u16 {
    10_000 + (std::process::id() % 22_000) as u16
}

/// The line that a remote shell runs.
fn remote_command(share: &HostShare, own: &Path, folder: &Path, program: &Launched) -> OsString {
    let (host, port) = &share.meet;
    let mut line = OsString::from("cd ");
    line.push(quoted(folder.as_os_str()));
    line.push(" && exec ");
    line.push(quoted(own.as_os_str()));
    line.push(format!(
        " agent --led --first {} -n {} --ranks {} --meet {host}:{port}",
        share.first, share.count, share.ranks
    ));
    let words = match program.is_own {
        true => vec![],
        false => vec![program.file.clone()],
    };
    line.push(if program.is_own { " --" } else { " --exec" });
    for word in words.iter().chain(&program.args) {
        line.push(" ");
        line.push(quoted(word));
    }
    line
}

/// A word as a shell reads it back.
fn quoted(word: &OsStr) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut bytes = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => bytes.extend_from_slice(b"'\\''"),
            byte => bytes.push(byte),
        }
    }
    bytes.push(b'\'');
    OsString::from_vec(bytes)
}

/// How a job ends whose agent on a host has failed before all others.
pub(crate) fn remote_outcome(host: &str, code: Option<i32>) -> Result<u8> {
    match code {
        Some(UNREACHED) => Err(Error::failed(
            Problem::new(format!("the remote shell did not reach {host}"))
                .because("what it said is above")
                .fix(format!(
                    "try `ssh {host} true`: it must work without a password; --rsh names another shell"
                )),
        )),
        Some(127 | 126) => Err(Error::failed(
            Problem::new(format!("{host} cannot run this program"))
                .fix("install it there under the same path, or use a file system that all hosts share"),
        )),
        // The agent has said why.
        code => Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_from_a_shell() {
        for word in ["a b", "it's", "$HOME `x` \\ \"q\"", "", "é\n;"] {
            let line = [OsStr::new("printf %s "), &quoted(OsStr::new(word))].join(OsStr::new(""));
            let output = Command::new("sh").arg("-c").arg(line).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
