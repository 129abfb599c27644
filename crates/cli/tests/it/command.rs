//! Running the command in a folder of its own.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use serde_json::Value;

/// Settings of four narrow layers, which pipelines of up to six stages can be made of.
pub(crate) const FOUR_LAYERS: [&str; 8] = [
    "model.layers=4",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=24",
    "model.vocab=32",
    "train.seq_len=8",
    "run.threads=1",
];

/// Settings that make a run of a second or less, on one rank.
pub(crate) const SMALL: &[&str] = &[
    "--set",
    "model.layers=1",
    "--set",
    "model.width=16",
    "--set",
    "model.heads=2",
    "--set",
    "model.kv_heads=1",
    "--set",
    "model.ffn=24",
    "--set",
    "model.vocab=32",
    "--set",
    "train.seq_len=16",
    "--set",
    "train.batch_size=8",
    "--set",
    "run.threads=1",
    "--set",
    "parallel.dp=1",
];

/// What a command did.
pub(crate) struct Done {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Done {
    /// Standard output as JSON, a line each.
    pub(crate) fn json(&self) -> Vec<Value> {
        let lines = self.out.lines();
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Asserts that all went well.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.err);
        self
    }

    /// Asserts a refusal: exit code 2, nothing on standard output, these words on standard error.
    pub(crate) fn refused(&self, words: &[&str]) {
        assert_eq!((self.code, self.out.as_str()), (2, ""), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "`{word}` is not in: {}", self.err);
        }
    }
}

/// Runs `phalanx` with these arguments in `dir`.
pub(crate) fn phalanx(dir: &Path, args: &[&[&str]]) -> Done {
    let output: Output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .current_dir(dir)
        .args(args.concat())
        .env_remove("NO_COLOR")
        .output()
        .unwrap();
    Done {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Starts a long run, whose JSON comes line by line, and waits for its first step.
#[cfg(target_os = "linux")]
pub(crate) fn first_step(run: &mut Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("\"step\":1,"), "{line}");
    (child, out)
}

/// Runs `phalanx` under a shell, which first does `before`, such as setting a limit. What hangs is ended
/// after a minute, with code 124.
#[cfg(target_os = "linux")]
pub(crate) fn under(dir: &Path, before: &str, args: &[&[&str]]) -> Done {
    let script = format!("{before}\nexec timeout 60 \"$0\" \"$@\"");
    let output = Command::new("bash")
        .current_dir(dir)
        .args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")])
        .args(args.concat())
        .env_remove("NO_COLOR")
        .output()
        .unwrap();
    Done {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs a shell's command in `dir`; says whether it went well.
#[cfg(target_os = "linux")]
pub(crate) fn shell(dir: &Path, command: &str) -> bool {
    Command::new("bash").current_dir(dir).args(["-c", command]).status().unwrap().success()
}

/// A small finished run in `dir`, as `run`.
pub(crate) fn small_run(dir: &Path) {
    let settings = ["--set", "train.steps=3", "--set", "run.name=a"];
    phalanx(dir, &[&["train"], SMALL, &settings]).ok();
}

/// The command as another build would be: with another number of its linker, or, where linkers leave none, other bytes.
pub(crate) fn another_build() -> Vec<u8> {
    let mut bytes = std::fs::read(env!("CARGO_BIN_EXE_phalanx")).unwrap();
    bytes.push(0);
    // A note of kind 3 by `GNU`; the number follows its name.
    let kind_and_name = b"\x03\0\0\0GNU\0";
    let found = bytes.windows(kind_and_name.len()).position(|window| window == kind_and_name);
    if let Some(at) = found {
        bytes[at + kind_and_name.len()] ^= 1;
    }
    bytes
}
