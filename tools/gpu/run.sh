#!/usr/bin/env bash
# Runs what tools/gpu/pack.sh packed, on a machine with a GPU. Needs the driver and CUDA's libraries (docs/gpu.md).
#
#   run.sh [tests] [new] [layouts] [numbers]     # tests, layouts and numbers if none is named
#
# `new` is what no GPU has run yet: numbers first, then layouts; `layouts` are all others (rows.sh). ONLY=EXPRESSION
# leaves out rows whose names the expression does not match, and QUICK=1 the numbers of LLaMA. Rows that would begin
# after $LIMIT seconds are left out and said so; $JOBS layouts (4) run at once, numbers alone.
# Every part adds lines to a table, which is printed last; the exit status is 1 if one of them failed. Logs are
# written beside the table, in $OUT or ./gpu-results.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${OUT:-$PWD/gpu-results}
mkdir -p "$results"
export PHALANX_CACHE=${PHALANX_CACHE:-$results/cache}
table="$results/table.txt"
# Each row has a file, so that rows which run at once stay in their order.
rows=$(mktemp -d)
trap 'rm -rf "$rows"' EXIT
count=0

# Where CUDA's libraries are if the loader does not know: beside the toolkit, or in Python's packages.
find_libraries() {
  local folders=()
  for folder in /usr/local/cuda*/targets/x86_64-linux/lib /usr/local/cuda*/lib64; do
    [ -d "$folder" ] && folders+=("$folder")
  done
  while read -r folder; do folders+=("$folder"); done < <(
    python3 -c 'import glob, site, sys
for root in site.getsitepackages() + [site.getusersitepackages()]:
    print(*glob.glob(root + "/nvidia/*/lib"), sep="\n")' 2> /dev/null | sed '/^$/d')
  export LD_LIBRARY_PATH="$(IFS=:; echo "${folders[*]}")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

row() { # what, result, details
  printf '%-66s %-7s %s\n' "$1" "$2" "$3" | tee -a "$rows/$(printf %04d $count)"
}

# Whether a row is asked for, and there is time for it. It gets the next place in the table.
wanted() {
  [[ -z ${ONLY:-} || $1 =~ $ONLY ]] || return 1
  count=$((count + 1))
  [ $SECONDS -lt "${LIMIT:-1000000}" ] && return 0
  row "$1" LATE "not begun: the time was over"
  return 1
}

# Rows of layouts run beside each other, in any order.
beside() { # command...
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-4}" ]; do wait -n; done
  "$@" &
}

# Runs a test binary; the row says how many tests ran, and a test that was skipped is a failure here.
tests() { # name, folder of the package, arguments...
  wanted "tests: $1" || return 0
  wait
  local name=$1 log="$results/test-$1.log" start=$SECONDS
  shift
  CARGO_MANIFEST_DIR=$1 "$here/binaries/$name" --test-threads "${TEST_THREADS:-4}" "${@:2}" > "$log" 2>&1
  local status=$? summary
  summary=$(sed -nE 's/^test result: [a-zA-Z]+\. ([0-9]+) passed; ([0-9]+) failed.*/\1 passed, \2 failed/p' "$log" | tail -1)
  if [ $status -ne 0 ]; then
    row "tests: $name" FAILED "${summary:-status $status}: $(grep -m3 -E '^    [a-z_:]+$' "$log" | tr -s ' \n' ' ')"
  elif grep -q SKIPPED "$log"; then
    row "tests: $name" SKIPPED "$(grep -m1 SKIPPED "$log" | cut -c1-120)"
  else
    row "tests: $name" ok "$summary, $((SECONDS - start)) s"
  fi
}

verify() { # name, settings...
  wanted "verify: $1" && beside verify_alone "$@"
}

verify_alone() { # name, settings...
  local name=$1 log sets=() launch=()
  shift
  log="$results/verify-${name//[^a-z0-9]/-}.json"
  for set in "$@"; do sets+=(--set "$set"); done
  [ -z "${PROCESSES:-}" ] || launch=(launch -n "$PROCESSES" --)
  if "$here/phalanx" "${launch[@]}" verify --preset "${PRESET:-tiny}" --steps 3 --json --set run.device=cuda "${sets[@]}" > "$log" 2> "$log.err"; then
    row "verify: $name" ok "largest difference of a gradient $(sed -nE 's/.*"grad_max_rel":([^,}]*).*/\1/p' "$log")"
  else
    row "verify: $name" FAILED "$(tail -1 "$log.err" | cut -c1-150)"
  fi
}

field() { sed -nE "s/.*\"$1\":([^,}]*).*/\1/p" "$2"; }

bench() { # name, preset or file, settings...
  wanted "step: $1" || return 0
  wait
  local name=$1 model=(--preset "$2") log sets=()
  [ ! -e "$2" ] || model=("$2")
  shift 2
  log="$results/bench-${name//[^a-z0-9]/-}.json"
  for set in run.device=cuda precision.compute=bf16 precision.weights=bf16 precision.grads=bf16 "$@"; do
    sets+=(--set "$set")
  done
  if "$here/phalanx" bench step --json "${model[@]}" "${sets[@]}" > "$log" 2> "$log.err"; then
    row "step: $name" ok "$(printf '%.1f ms, %.0f tok/s, %.1f%% MFU, %.1f GiB, first step after %.1f s' \
      "$(field median_ms "$log")" "$(field tokens_per_s "$log")" "$(awk "BEGIN { print 100 * $(field mfu "$log") }")" \
      "$(awk "BEGIN { print $(field peak_device_bytes "$log") / 2^30 }")" "$(field start_s "$log")")"
    local off
    off=$(awk "BEGIN { d = $(field planned_device_bytes "$log") / $(field peak_device_bytes "$log") - 1; printf \"%.2f\", 100 * (d < 0 ? -d : d) }")
    awk "BEGIN { exit !($off <= 1) }" && row "memory: $name" ok "planned and taken differ by $off%" ||
      row "memory: $name" FAILED "planned and taken differ by $off%; at most 1%"
  else
    row "step: $name" FAILED "$(tail -1 "$log.err" | cut -c1-150)"
  fi
}

# Two ranks on one GPU beside one rank: the ratio may be at most 1.25.
ratio() { # name, log of one rank, log of two
  [ -s "$2" ] && [ -s "$3" ] && wanted "ratio: $1" || return 0
  local ratio
  ratio=$(awk "BEGIN { printf \"%.3f\", $(field median_ms "$3") / $(field median_ms "$2") }")
  awk "BEGIN { exit !($ratio <= 1.25) }" && row "ratio: $1" ok "$ratio of one rank's step" || row "ratio: $1" FAILED "$ratio of one rank's step; at most 1.25"
}

numbers() {
  bench "gpt2-124m" gpt2-124m train.microbatches=1
  bench "gpt2-124m tp 2" gpt2-124m train.microbatches=1 parallel.tp=2
  bench "gpt2-124m zero-3" gpt2-124m train.microbatches=1 parallel.dp=2 parallel.zero=3
  bench "gpt2-124m pp 2" gpt2-124m train.microbatches=4 parallel.pp=2
  local one="$results/bench-gpt2-124m.json"
  ratio "tp 2" "$one" "$results/bench-gpt2-124m-tp-2.json"
  ratio "ZeRO-3 2" "$one" "$results/bench-gpt2-124m-zero-3.json"
  ratio "pp 2" "$one" "$results/bench-gpt2-124m-pp-2.json"
  [ -z "${QUICK:-}" ] || return 0
  bench "llama-0.95b" llama-0.95b train.microbatches=1
  bench "llama-0.95b, split masters" llama-0.95b train.microbatches=1 precision.masters=split
  bench "llama-0.95b, gradients of f32" llama-0.95b train.microbatches=1 precision.grads=f32
  bench "llama-0.95b, gradients and residual stream of f32" llama-0.95b train.microbatches=1 precision.grads=f32 precision.residual=f32
}

# Experts in a loop of PyTorch, in turns with ours; and what a step's grouped products take.
experts() {
  bench "experts 0.4b" "$here/experts.toml"
  if wanted "experts 0.4b beside PyTorch's loop"; then
    wait
    local log="$results/experts-torch.log" ratio
    if ! python3 -c 'import torch' 2> "$log"; then
      row "experts 0.4b beside PyTorch's loop" ABSENT "there is no PyTorch here"
    elif python3 "$here/beside_torch.py" "$here/phalanx" --rounds 2 --preset experts > "$log" 2>&1; then
      ratio=$(sed -nE 's/^experts: ([0-9.]+) of compiled.*/\1/p' "$log")
      row "experts 0.4b beside PyTorch's loop" "$(awk "BEGIN { print $ratio >= 1.5 ? \"ok\" : \"FAILED\" }")" "$(tail -1 "$log"); at least 1.5"
    else
      row "experts 0.4b beside PyTorch's loop" FAILED "$(tail -1 "$log" | cut -c1-150)"
    fi
  fi
  wanted "kernels: experts 0.4b" || return 0
  local trace="$results/experts-trace.json" found
  if "$here/phalanx" train "$here/experts.toml" --set run.device=cuda --set precision.compute=bf16 --set precision.weights=bf16 \
    --set precision.grads=bf16 --set train.steps=5 --set run.dir="$results/runs" --trace "$trace" > "$trace.log" 2>&1 &&
    python3 "$here/kernels.py" "$trace" > "$results/experts-kernels.txt"; then
    found=$(awk '/tensor_/ { printf "%s%s ms in %d × %s", between, $1, $3, $4 $5; between = "; " }' "$results/experts-kernels.txt")
    row "kernels: experts 0.4b" ok "$(sed -n 1p "$results/experts-kernels.txt"): ${found:-no product of packed rows}"
  else
    row "kernels: experts 0.4b" FAILED "$(tail -1 "$trace.log" | cut -c1-150)"
  fi
}

# Gradients of weights on a queue of their own, in turns with one queue.
queues() {
  local preset round one two
  for preset in llama-0.95b gpt2-124m; do
    for round in 1 2; do
      bench "$preset, one queue, $round" "$preset" train.microbatches=1
      PHALANX_QUEUES=2 bench "$preset, two queues, $round" "$preset" train.microbatches=1
    done
    one=$(median "$preset, one queue") two=$(median "$preset, two queues")
    [ -n "$one" ] && [ -n "$two" ] && wanted "queues: $preset" || continue
    row "queues: $preset" ok "$(awk "BEGIN { printf \"two queues take %.4f of one queue's step\", $two / $one }")"
  done
}

# The mean of the medians of a row's rounds.
median() { # name
  local logs=("$results/bench-${1//[^a-z0-9]/-}--1.json" "$results/bench-${1//[^a-z0-9]/-}--2.json")
  [ -s "${logs[0]}" ] && [ -s "${logs[1]}" ] || return 0
  awk "BEGIN { print ($(field median_ms "${logs[0]}") + $(field median_ms "${logs[1]}")) / 2 }"
}

# What no GPU has run yet, what matters most first.
new() {
  all_tests cuda packed_rows a_second_queue every_op
  experts
  queues
  bench "gpt2-124m, f16" gpt2-124m train.microbatches=1 precision.compute=f16 precision.weights=f16 precision.grads=f32
  new_layouts
}

# Of packages that mostly test other things, only the tests that need a GPU. Or those of one package, by their names.
all_tests() { # package, names...
  local binary name filter
  for binary in "$here"/binaries/*; do
    name=$(basename "$binary") filter=("${@:2}")
    [[ $name == "${1:-}"* ]] || continue
    case $name in
      models) filter=(cuda) ;;
      train) filter=(gpu) ;;
    esac
    tests "$name" "$here/crates/${name%-*}" "${filter[@]}"
  done
}

. "$here/rows.sh"
find_libraries
[ $# -gt 0 ] || set -- tests new layouts numbers
for part in "$@"; do
  case $part in
    tests) all_tests ;;
    new) new ;;
    layouts) layouts ;;
    numbers) numbers ;;
    *) echo "unknown part $part"; exit 2 ;;
  esac
done
wait
cat "$rows"/* > "$table"
echo
cat "$table"
! grep -qE ' (FAILED|SKIPPED|LATE|ABSENT) ' "$table"
