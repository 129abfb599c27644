//! Facts of the build that `phalanx --version` prints: the commit, if it is known, the target and
//! the profile.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // This file must be one of the repository's: a copy of the sources inside another project would
    // otherwise claim that project's commit.
    let own = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let commit = git(&["rev-parse", "--short=9", "HEAD"]).filter(|_| own);
    // The log of HEAD grows with every commit and every checkout.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|_| own);
    if let Some(log) = log.filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    let known = |name| std::env::var(name).unwrap_or_else(|_| "unknown".to_owned());
    let commit = commit.map_or("commit unknown".to_owned(), |commit| format!("commit {commit}"));
    let facts = format!("{commit}, {}, {}", known("TARGET"), known("PROFILE"));
    println!("cargo::rustc-env=PHALANX_BUILD={facts}");
}

/// The first line that git prints; `None` without git or outside a repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().next().map(str::to_owned);
    line.filter(|line| output.status.success() && !line.is_empty())
}
