//! Starting an agent on another host by a remote shell.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use phalanx_comm::Token;
use phalanx_error::{Error, Problem, Result};
use phalanx_sys::process::end_with_parent;

use super::link::Link;
use crate::launch::Launched;

/// The usual remote shell. It must not ask for a password: nobody could answer.
pub const REMOTE_SHELL: &str = "ssh -o BatchMode=yes";

/// The exit code of remote shells that did not reach their host.
const UNREACHED: i32 = 255;

/// A remote shell, and what it runs on a host.
pub(super) struct RemoteShell {
    words: Vec<String>,
    line: OsString,
    token: Token,
}

impl RemoteShell {
    pub(super) fn new(shell: &str, program: &Launched, token: Token) -> Result<Self> {
        let words: Vec<String> = shell.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            let problem = Problem::new("the name of the remote shell is empty");
            let fix = format!("leave --rsh out: it is {REMOTE_SHELL}");
            return Err(Error::refused(problem.fix(fix)));
        }
        let own = std::env::current_exe().and_then(|file| Ok((file, std::env::current_dir()?)));
        let (own, folder) = own.map_err(|error| {
            Error::refused(Problem::new(format!("this program does not know where it is: {error}")))
        })?;
        Ok(Self { words, line: remote_line(own, folder, program), token })
    }

    /// Starts an agent on a host. The token goes through its input, because all users of a host see the
    /// arguments of a process.
    pub(super) fn start(&self, host: &str) -> Result<(Child, Link)> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(host).arg(&self.line);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C of the terminal reaches this process alone, which passes it on.
        command.process_group(0);
        end_with_parent(&mut command);
        let told = |error: std::io::Error| {
            Error::refused(Problem::io("cannot start", self.words[0].as_ref(), &error))
        };
        let mut child = command.spawn().map_err(told)?;
        let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(told(std::io::Error::other("it has no input and output")));
        };
        // If it has ended already, that is noticed by waiting for it.
        let _ = writeln!(input, "{}", self.token.hex());
        let link = Link::new(output, input).map_err(told)?;
        Ok((child, link))
    }
}

/// The line that a remote shell runs.
fn remote_line(own: PathBuf, folder: PathBuf, program: &Launched) -> OsString {
    let mut line = OsString::from("cd ");
    line.push(quoted(folder.as_os_str()));
    line.push(" && exec ");
    line.push(quoted(own.as_os_str()));
    line.push(" agent --led");
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

/// Why a job ends whose remote shell to a host has ended before an agent was there.
pub(super) fn shell_ended(host: &str, code: Option<i32>) -> Error {
    Error::failed(match code {
        Some(UNREACHED) => Problem::new(format!("the remote shell did not reach {host}"))
            .because("what it said is above")
            .fix(format!(
                "try `ssh {host} true`: it must work without a password; --rsh names another shell"
            )),
        Some(127 | 126) => Problem::new(format!("{host} cannot run this program"))
            .fix("install it there under the same path, or use a file system that all hosts share"),
        code => {
            let how =
                code.map_or("by a signal".to_owned(), |code| format!("with exit code {code}"));
            Problem::new(format!(
                "the remote shell to {host} ended {how} before an agent was there"
            ))
            .because("what it or the agent said is above, if anything")
            .fix("see whether it runs a command there: it gets the host and one command line")
        }
    })
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
