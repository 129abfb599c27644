#!/usr/bin/env bash
# Packs what is needed to test and measure on a machine that has a GPU but no Rust: run it where Rust is.
#
#   tools/gpu/pack.sh FOLDER        # then copy FOLDER to the machine with the GPU, and there:
#   FOLDER/run.sh                   # tests, layouts and numbers; the last thing it prints is a table
#
# Binaries are stripped. With BENCH_ONLY=1 the tests are left out.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,7p' "$0"; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."

copy() { # from, to
  cp -f "$1" "$2" && strip --strip-all "$2"
}

# The files that cargo built for a package's tests: `Executable tests/it/main.rs (target/release/deps/it-0123)`.
tests() { # package, targets...
  local package=$1
  shift
  cargo test --release --locked --no-run -p "$package" "$@" 2>&1 |
    sed -nE 's/^ *Executable .*\((.*)\)$/\1/p'
}

cargo build --release --locked -p phalanx-cli
copy "${CARGO_TARGET_DIR:-target}/release/phalanx" "$out/phalanx"
if [ -z "${BENCH_ONLY:-}" ]; then
  # The folders are where tests look for them.
  mkdir -p "$out"/{binaries,docs,tests,crates/models,crates/train,crates/cuda}
  rm -f "$out"/binaries/*
  i=0
  for file in $(tests phalanx-cuda --lib --tests); do
    i=$((i + 1))
    copy "$file" "$out/binaries/cuda-$i"
  done
  copy "$(tests phalanx-models --test it)" "$out/binaries/models"
  copy "$(tests phalanx-train --test systems)" "$out/binaries/train"
  cp -r tests/fixtures "$out/tests/"
  cp docs/composition.md "$out/docs/"
fi
cp tools/gpu/{run.sh,rows.sh,beside_torch.py,kernels.py,experts.toml} "$out/"
du -sh "$out"
