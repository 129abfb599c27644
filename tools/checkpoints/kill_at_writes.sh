#!/usr/bin/env bash
# Kills a run that saves (kill -9, by strace) at its first, second, … call of each kind that changes files, until no thread makes so many.
# After every kill the newest checkpoint must be whole, and the run must go on from it to the bits of one that was not disturbed.
# strace counts by thread: the k-th call is that of the thread which makes it first, so not every thread's calls are all hit.
#
#   PHALANX=target/release/phalanx tools/checkpoints/kill_at_writes.sh
set -uo pipefail
PHALANX=$(realpath "${PHALANX:-target/release/phalanx}")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"
ARGS=(--preset tiny)
for key in model.layers=1 model.width=16 model.heads=2 model.kv_heads=1 model.ffn=24 model.vocab=32 train.seq_len=16 train.batch_size=8 \
  run.threads=1 parallel.dp=2 parallel.zero=1 run.checkpoint_every=2 run.keep=2 optim.schedule=constant optim.warmup_steps=0; do
  ARGS+=(--set "$key")
done
"$PHALANX" train "${ARGS[@]}" --set train.steps=7 --set run.name=whole >log 2>&1 || { cat log; exit 1; }
EQUAL=0 EARLY=0 BAD=0
for call in mkdir write pwrite64 ftruncate fsync rename unlinkat; do
  for ((k = 1; ; k++)); do
    rm -rf runs/a
    { strace -f -qq -o /dev/null -e trace=$call -e inject=$call:signal=KILL:when=$k \
      "$PHALANX" train "${ARGS[@]}" --set train.steps=6 --set run.name=a >log 2>&1; } 2>/dev/null
    [ $? = 137 ] || break
    if ! ls runs/a/checkpoints 2>/dev/null | grep -qE '^step-[0-9]+$'; then
      EARLY=$((EARLY + 1))
    elif "$PHALANX" checkpoint check runs/a >log 2>&1 && "$PHALANX" train --resume runs/a --set train.steps=7 >log 2>&1 &&
      cmp runs/a/model.safetensors runs/whole/model.safetensors >log 2>&1; then
      EQUAL=$((EQUAL + 1))
    else
      BAD=$((BAD + 1))
      echo "FAILED: $call $k"
      tail -3 log
    fi
  done
  echo "$call: killed at $((k - 1)) calls"
done
echo "$EQUAL went on with the same bits, $EARLY had no checkpoint yet, $BAD failed"
[ $BAD = 0 ]
