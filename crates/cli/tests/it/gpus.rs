//! What goes wrong with a GPU, its libraries or its kernels' cache, over libraries that stand in for NVIDIA's.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{Done, SMALL};

/// Builds the libraries that stand in for NVIDIA's; nothing, and a line about it, without a C++ compiler.
fn stand_in(dir: &Path, test: &str) -> Option<PathBuf> {
    let folder = dir.join("stand_in");
    let compiler = std::env::var_os("CXX").unwrap_or("g++".into());
    if Command::new(compiler).arg("--version").output().is_err() {
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: it needs a C++ compiler");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/gpu/stand_in/build.sh");
    assert!(Command::new(script).arg(&folder).status().unwrap().success());
    Some(folder)
}

/// The encoder's result and its cotangent go from one stage to the next, between ranks on one GPU.
#[test]
fn an_encoder_and_a_decoder_run_on_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(all) = stand_in(dir, "an_encoder_and_a_decoder_run_on_kernels") else { return };
    let sets = [
        "run.device=cuda",
        "model.kind=t5",
        "model.layers=1",
        "model.width=16",
        "model.heads=4",
        "model.kv_heads=4",
        "model.ffn=24",
        "model.vocab=29",
        "train.seq_len=8",
        "train.batch_size=4",
        "train.microbatches=2",
        "parallel.pp=2",
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .current_dir(dir)
        .args(["verify", "--preset", "tiny", "--steps", "1", "--json"])
        .args(sets.iter().flat_map(|set| ["--set", set]))
        .env("LD_LIBRARY_PATH", all)
        .env("PHALANX_CACHE", dir.join("cache"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("{\"ok\":true"), "{text}");
}

/// Trains a small model for two steps on the GPU that these libraries show.
fn train(dir: &Path, libraries: &Path, more: &[(&str, &str)]) -> Done {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .current_dir(dir)
        .args(["train", "--set", "run.device=cuda", "--set", "train.steps=2"])
        .args(SMALL)
        .env("LD_LIBRARY_PATH", libraries)
        .env("PHALANX_CACHE", dir.join("cache"))
        .env_remove("NO_COLOR")
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    Done { code: output.status.code().unwrap_or(-1), out, err }
}

#[test]
fn what_is_missing_is_said_with_files_and_packages() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(all) = stand_in(dir, "what_is_missing_is_said_with_files_and_packages") else {
        return;
    };
    let with = |files: &[&str]| {
        let folder = dir.join(format!("with{}", files.len()));
        fs::create_dir(&folder).unwrap();
        for file in files {
            fs::copy(all.join(file), folder.join(file)).unwrap();
        }
        train(dir, &folder, &[])
    };
    let always = ["run.device", "LD_LIBRARY_PATH", "nearest that work"];
    with(&[]).refused(&[&["libcuda.so.1", "NVIDIA's driver"], &always[..]].concat());
    with(&["libcuda.so.1"]).refused(&[&["libnvrtc.so.13", "cuda-nvrtc"], &always[..]].concat());
    with(&["libcuda.so.1", "libnvrtc.so.13"])
        .refused(&[&["libcublasLt.so.13", "libcublas"], &always[..]].concat());
    // A driver that lacks a function is too old.
    let old = dir.join("old");
    fs::create_dir(&old).unwrap();
    fs::copy(all.join("libnvrtc.so.13"), old.join("libcuda.so.1")).unwrap();
    train(dir, &old, &[]).refused(&["the CUDA driver has no function", "newer", "570"]);
}

#[test]
fn a_gpu_that_cannot_be_used_is_refused_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let test = "a_gpu_that_cannot_be_used_is_refused_before_the_first_step";
    let Some(all) = stand_in(dir, test) else { return };
    let failing = |plan: &str| train(dir, &all, &[("STAND_IN_FAIL", plan)]);
    failing("cuInit=35").refused(&["run.device", "driver", "570 or newer", "restart"]);
    failing("cuInit=100").refused(&["run.device", "nvidia-smi", "CUDA_VISIBLE_DEVICES"]);
    failing("cuDevicePrimaryCtxRetain=46")
        .refused(&["another program has the GPU", "nvidia-smi -c"]);
    // The arena alone would fit.
    train(dir, &all, &[("STAND_IN_MEMORY", "30000000")]).refused(&[
        "the plan takes",
        "the GPU has",
        "workspaces of libraries and the next batch take 36.0 MiB",
    ]);
}

#[test]
fn a_step_that_fails_names_its_program_and_a_damaged_cache_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let test = "a_step_that_fails_names_its_program_and_a_damaged_cache_is_made_again";
    let Some(all) = stand_in(dir, test) else { return };
    let losses = |done: Done| -> Vec<String> {
        let done = done.ok();
        let of = |line: &str| line.split("  ").nth(1).map(str::to_owned);
        let steps =
            (done.err + &done.out).lines().filter(|l| l.starts_with("step ")).map(of).collect();
        let steps: Option<Vec<String>> = steps;
        steps.unwrap()
    };
    let first = losses(train(dir, &all, &[]));
    assert!(first.len() >= 2, "{first:?}");
    let failed = train(dir, &all, &[("STAND_IN_FAIL", "cuLaunchKernel=700@60")]);
    let named = failed.err.contains("program `") && !failed.err.contains("program `GPU`");
    assert!(failed.code != 0 && named && failed.err.contains("(status 700)"), "{}", failed.err);
    for kept in fs::read_dir(dir.join("cache/kernels")).unwrap() {
        let path = kept.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    assert_eq!(losses(train(dir, &all, &[])), first);
}
