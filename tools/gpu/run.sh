#!/usr/bin/env bash
# Runs what tools/gpu/pack.sh packed, on a machine with a GPU. Needs the driver and CUDA's libraries (docs/gpu.md).
#
#   run.sh [tests] [new] [layouts] [numbers]     # tests, layouts and numbers if none is named
#
# `new` are the layouts of ops that no GPU has run yet; `layouts` has them, too. ONLY=EXPRESSION leaves out rows whose
# names the expression does not match, and QUICK=1 the numbers of LLaMA.
# Every part adds lines to a table, which is printed last; the exit status is 1 if one of them failed. Logs are
# written beside the table, in $OUT or ./gpu-results.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${OUT:-$PWD/gpu-results}
mkdir -p "$results"
export PHALANX_CACHE=${PHALANX_CACHE:-$results/cache}
table="$results/table.txt"
: > "$table"
failed=0

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
  printf '%-58s %-7s %s\n' "$1" "$2" "$3" >> "$table"
  printf '%-58s %-7s %s\n' "$1" "$2" "$3"
  [ "$2" = ok ] || failed=1
}

# Whether a row is asked for.
wanted() { [[ -z ${ONLY:-} || $1 =~ $ONLY ]]; }

# Runs a test binary; the row says how many tests ran, and a test that was skipped is a failure here.
tests() { # name, folder of the package, arguments...
  wanted "$1" || return 0
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
  wanted "$1" || return 0
  local name=$1 log sets=()
  shift
  log="$results/verify-${name//[^a-z0-9]/-}.json"
  for set in "$@"; do sets+=(--set "$set"); done
  if "$here/phalanx" verify --preset "${PRESET:-tiny}" --steps 3 --json --set run.device=cuda "${sets[@]}" > "$log" 2> "$log.err"; then
    row "verify: $name" ok "largest difference of a gradient $(sed -nE 's/.*"grad_max_rel":([^,}]*).*/\1/p' "$log")"
  else
    row "verify: $name" FAILED "$(tail -1 "$log.err" | cut -c1-150)"
  fi
}

field() { sed -nE "s/.*\"$1\":([^,}]*).*/\1/p" "$2"; }

bench() { # name, preset, settings...
  wanted "$1" || return 0
  local name=$1 preset=$2 log sets=()
  shift 2
  log="$results/bench-${name//[^a-z0-9]/-}.json"
  for set in run.device=cuda precision.compute=bf16 precision.weights=bf16 precision.grads=bf16 "$@"; do
    sets+=(--set "$set")
  done
  if "$here/phalanx" bench step --json --preset "$preset" "${sets[@]}" > "$log" 2> "$log.err"; then
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
  [ -s "$2" ] && [ -s "$3" ] || return
  local ratio
  ratio=$(awk "BEGIN { printf \"%.3f\", $(field median_ms "$3") / $(field median_ms "$2") }")
  awk "BEGIN { exit !($ratio <= 1.25) }" && row "ratio: $1" ok "$ratio of one rank's step" || row "ratio: $1" FAILED "$ratio of one rank's step; at most 1.25"
}

# Layouts of ops that were added since a GPU was there: rows packed by expert, learned noise, encoders and decoders,
# pipelines that do not drain, blocks of operands that come one by one.
new() {
  local few=(model.layers=2 train.batch_size=8) t5=(model.kind=t5 model.kv_heads=8 model.layers=2)
  PRESET=tiny-moe verify "dropless experts" model.capacity=0 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, tp 2" model.capacity=0 parallel.tp=2 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, dp 4, ep 2" model.capacity=0 parallel.dp=4 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, bf16" model.capacity=0 precision.compute=bf16 precision.weights=bf16 "${few[@]}"
  PRESET=tiny-moe verify "noisy top-k" model.router=noisy "${few[@]}"
  PRESET=tiny-moe verify "noisy top-k, dp 4, ep 2" model.router=noisy parallel.dp=4 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "pyramid of experts" model.late_experts=16 model.late_layers=1 model.residual_experts=true "${few[@]}"
  PRESET=tiny-moe verify "weights come to tokens, dp 4, ep 2" parallel.dp=4 parallel.ep=2 parallel.expert_exchange=weights "${few[@]}"
  verify "encoder and decoder" "${t5[@]}"
  verify "encoder and decoder, tp 2, sp" parallel.tp=2 parallel.sp=true "${t5[@]}"
  verify "encoder and decoder, pp 4" parallel.pp=4 train.microbatches=4 "${t5[@]}"
  for schedule in pipedream pipedream-2bw; do
    verify "pp 2, $schedule, steps in rows" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=$schedule
    verify "encoder and decoder, pp 2, $schedule" parallel.pp=2 train.microbatches=4 parallel.schedule=$schedule "${t5[@]}"
  done
  PRESET=mnist-cnn verify "convolutions, dp 2, ZeRO-3" train.batch_size=8 parallel.dp=2 parallel.zero=3
  verify "2D, tp 4, streamed" parallel.tp=4 parallel.tp_kind=2d parallel.stream=true
  verify "3D, tp 8, streamed" parallel.tp=8 parallel.tp_kind=3d parallel.stream=true
  verify "tp 2, sp, streamed" parallel.tp=2 parallel.sp=true parallel.stream=true
}

layouts() {
  new
  verify "one rank"
  verify "tp 2" parallel.tp=2
  verify "tp 2, sp" parallel.tp=2 parallel.sp=true
  verify "cp 2" parallel.cp=2
  for zero in 1 2 3; do verify "dp 2, ZeRO-$zero" parallel.dp=2 parallel.zero=$zero; done
  for schedule in naive gpipe vectorised 1f1b interleaved breadth-first zb-h1 zb-h2 zb-v; do
    verify "pp 2, $schedule" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=$schedule
  done
  verify "pp 2, vectorised, twice around, ZeRO-3" parallel.pp=2 parallel.chunks=2 parallel.dp=2 parallel.zero=3 train.microbatches=4 model.layers=4 parallel.schedule=vectorised
  verify "tp 2, dp 2, pp 2" parallel.tp=2 parallel.dp=2 parallel.pp=2 train.microbatches=4
  for order in block zigzag striped; do
    verify "ring attention, cp 4, $order" parallel.cp=4 parallel.cp_kind=ring parallel.cp_order=$order
  done
  verify "all-gather KV, cp 4" parallel.cp=4 parallel.cp_kind=allgather
  verify "all-gather KV, cp 4, zigzag" parallel.cp=4 parallel.cp_kind=allgather parallel.cp_order=zigzag
  verify "ring attention, cp 2, tp 2, pp 2" parallel.cp=2 parallel.cp_kind=ring parallel.tp=2 parallel.pp=2 train.microbatches=4
  verify "2D, tp 4" parallel.tp=4 parallel.tp_kind=2d
  verify "2.5D, tp 8" parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2
  verify "3D, tp 8" parallel.tp=8 parallel.tp_kind=3d
  verify "local SGD, dp 2" parallel.dp=2 parallel.sync=local-sgd parallel.sync_every=2
  verify "local SGD, dp 2, tp 2, momenta kept" parallel.dp=2 parallel.tp=2 parallel.sync=local-sgd parallel.sync_every=2 parallel.sync_momentum=keep
  verify "averaging, dp 2, pp 2" parallel.dp=2 parallel.pp=2 parallel.sync=average parallel.sync_every=0 train.microbatches=4
  verify "DataParallel, dp 2" parallel.dp=2 parallel.sync=dataparallel
  verify "DataParallel, dp 2, tp 2, lamb" parallel.dp=2 parallel.tp=2 parallel.sync=dataparallel optim.kind=lamb
  verify "Ring Self-Attention, cp 2" parallel.cp=2 parallel.cp_kind=rsa
  for schedule in dualpipe chimera bpipe pipedream pipedream-2bw; do
    verify "pp 4, $schedule" parallel.pp=4 train.microbatches=8 model.layers=4 parallel.schedule=$schedule
  done
  PRESET=tiny-moe verify "experts"
  PRESET=tiny-moe verify "experts, tp 2" parallel.tp=2
  PRESET=tiny-moe verify "experts, dp 4, ep 2" parallel.dp=4 parallel.ep=2
  PRESET=mnist-cnn verify "convolutions" train.batch_size=8
  PRESET=mnist-cnn verify "convolutions, tp 2" train.batch_size=8 parallel.tp=2
  PRESET=mnist-cnn verify "convolutions, heights on 4 ranks" train.batch_size=8 parallel.tp=4 parallel.sp=true
  PRESET=mnist-cnn verify "convolutions, uneven heights on 3 ranks, features" train.batch_size=8 parallel.tp=3 parallel.sp=true 'parallel.tp_plan=["fc1.* columns","fc2.weight rows"]'
  verify "2D, tp 16, streamed" parallel.tp=16 parallel.tp_kind=2d parallel.stream=true
  verify "2.5D, tp 8, streamed" parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2 parallel.stream=true
  verify "2D, tp 4, ZeRO-3, ring, recomputation" parallel.tp=4 parallel.tp_kind=2d parallel.dp=2 parallel.zero=3 parallel.cp=2 parallel.cp_kind=ring train.recompute=full
  verify "GSPMD's 2-D recipe, tp 4" parallel.tp=4 parallel.tp_kind=gspmd
  verify "GSPMD's 2-D recipe, tp 8, 4 rows, streamed" parallel.tp=8 parallel.tp_kind=gspmd parallel.tp_rows=4 parallel.stream=true
  verify "pp 2, zb-h2, post-validation" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=zb-h2 parallel.post_validation=true
  verify "adafactor, tp 2, ZeRO-2" parallel.tp=2 parallel.dp=2 parallel.zero=2 optim.kind=adafactor
  for kind in adamw adam sgd lion lamb; do
    verify "$kind, tp 2, ZeRO-2" parallel.tp=2 parallel.dp=2 parallel.zero=2 optim.kind=$kind
  done
  for layout in "" parallel.tp=2 parallel.dp=2,parallel.zero=3 parallel.cp=2,parallel.cp_kind=ring parallel.cp=2,parallel.cp_kind=rsa parallel.pp=2,train.microbatches=4 parallel.tp=4,parallel.tp_kind=2d,parallel.stream=true parallel.dp=2,parallel.sync=dataparallel precision.initial_scale_power=24,precision.hysteresis=1,parallel.dp=2; do
    verify "f16 ${layout:-one rank}" precision.compute=f16 precision.weights=f16 ${layout//,/ }
  done
  for layout in "" parallel.tp=2,parallel.dp=2,parallel.zero=2 parallel.pp=2,train.microbatches=4; do
    verify "bf16, split masters ${layout:-one rank}" precision.compute=bf16 precision.weights=bf16 precision.masters=split ${layout//,/ }
    verify "bf16, residual stream of f32 ${layout:-one rank}" precision.compute=bf16 precision.weights=bf16 precision.residual=f32 ${layout//,/ }
  done
  verify "tf32, tp 2" precision.compute=f32 precision.tf32=true parallel.tp=2
  local log="$results/launch.json"
  for layout in parallel.tp=2 parallel.dp=2,parallel.zero=3 parallel.pp=2,train.microbatches=4; do
    local sets=()
    for set in ${layout//,/ }; do sets+=(--set "$set"); done
    if "$here/phalanx" launch -n 2 -- verify --preset tiny --steps 3 --json --set run.device=cuda "${sets[@]}" > "$log" 2> "$log.err"; then
      row "verify: two processes, $layout" ok "largest difference of a gradient $(field grad_max_rel "$log")"
    else
      row "verify: two processes, $layout" FAILED "$(tail -1 "$log.err" | cut -c1-150)"
    fi
  done
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
  [ -z "${QUICK:-}" ] || return
  bench "llama-0.95b" llama-0.95b train.microbatches=1
  bench "llama-0.95b, split masters" llama-0.95b train.microbatches=1 precision.masters=split
  bench "llama-0.95b, gradients of f32" llama-0.95b train.microbatches=1 precision.grads=f32
  bench "llama-0.95b, gradients and residual stream of f32" llama-0.95b train.microbatches=1 precision.grads=f32 precision.residual=f32
}

# Of packages that mostly test other things, only the tests that need a GPU.
all_tests() {
  local binary name filter
  for binary in "$here"/binaries/*; do
    name=$(basename "$binary") filter=()
    case $name in
      models) filter=(cuda) ;;
      train) filter=(gpu) ;;
    esac
    tests "$name" "$here/crates/${name%-*}" "${filter[@]}"
  done
}

find_libraries
[ $# -gt 0 ] || set -- tests layouts numbers
for part in "$@"; do
  case $part in
    tests) all_tests ;;
    new) new ;;
    layouts) layouts ;;
    numbers) numbers ;;
    *) echo "unknown part $part"; exit 2 ;;
  esac
done
echo
cat "$table"
exit $failed
