#!/usr/bin/env bash
# Installs Open MPI, MPICH and Slurm on a Debian or Ubuntu machine (needs root), and runs what needs them: the suite that
# every transport must pass and a training run under both mpirun, a training run under srun with two slurmd on this
# machine, one agent on each of them, and torchrun if it is there. Every run must have the bits of threads.
#
#   tools/hosts/check.sh            all of it
#   tools/hosts/check.sh openmpi    one part: openmpi, mpich, slurm or torchrun
#   NO_INSTALL=1 tools/hosts/check.sh …    with what is installed already
#   PHALANX=… SUITE=… tools/hosts/check.sh …    with a command and a test binary of `phalanx-comm` that are built already
#
# Processes that it starts are ended by their numbers. Nothing outside this machine is reached except the package archive.
set -euo pipefail
cd "$(dirname "$0")/../.."
ROOT=$PWD
PARTS=("$@")
[ $# -gt 0 ] || PARTS=(openmpi mpich slurm torchrun)
WORK=$(mktemp -d)
STARTED=()
FAILED=0

end() {
  for id in "${STARTED[@]}"; do kill "$id" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$WORK"
}
trap end EXIT

say() { echo "== $*"; }

install() {
  [ -z "${NO_INSTALL:-}" ] || return 0
  say "installing $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >"$WORK/apt.log" 2>&1 ||
    { tail -5 "$WORK/apt.log"; say "could not install $*"; return 1; }
}

# ok NAME COMMAND…: runs a command, and says how it ended.
ok() {
  local name=$1 start=$SECONDS
  shift
  if timeout 600 "$@" >"$WORK/log" 2>&1; then
    say "ok: $name ($((SECONDS - start)) s)"
  else
    say "FAILED: $name: $*"
    tail -25 "$WORK/log"
    FAILED=1
  fi
}

if [ -z "${PHALANX:-}" ] || [ -z "${SUITE:-}" ]; then
  say "building"
  cargo build --release --quiet
  PHALANX=${CARGO_TARGET_DIR:-$ROOT/target}/release/phalanx
  SUITE=$(cargo test --release --quiet -p phalanx-comm --test it --no-run --message-format=json |
    sed -nE 's/.*"executable":"([^"]+\/it-[^"]+)".*/\1/p' | tail -1)
fi
LAYOUTS=("parallel.dp=2 parallel.zero=2" "parallel.tp=2 parallel.sp=true" "parallel.pp=2 train.microbatches=4")

# trained FOLDER LAYOUT COMMAND…: trains with `COMMAND… phalanx train`, and on threads, and compares weights.
trained() {
  local folder=$1 layout=$2 sets=()
  shift 2
  mkdir -p "$folder"
  for key in $layout run.threads=1 train.batch_size=16 train.steps=3; do sets+=(--set "$key"); done
  (cd "$folder" && rm -rf runs &&
    "$@" train --preset tiny "${sets[@]}" --set run.name=there &&
    env -u RANK -u WORLD_SIZE "$PHALANX" train --preset tiny "${sets[@]}" --set run.ranks=threads --set run.name=threads &&
    cmp runs/there/model.safetensors runs/threads/model.safetensors)
}
export -f trained
export PHALANX

# layouts NAME COMMAND…: every layout with this command.
layouts() {
  local name=$1
  shift
  for layout in "${LAYOUTS[@]}"; do
    ok "$name trains with the bits of threads: $layout" bash -c 'trained "$@"' trained \
      "$WORK/run" "$layout" "$@"
  done
}

mpi() {
  local kind=$1 run=("mpirun.$1")
  if [ "$kind" = openmpi ]; then
    install openmpi-bin libopenmpi-dev || return 0
    # More ranks than cores: a rank that waits lets others run. Every rank may use all cores.
    run+=(--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --mca btl self,vader,tcp)
  else
    install mpich libmpich-dev || return 0
  fi
  export MPICC=mpicc.$kind
  PHALANX_TEST_MPI=1 ok "$kind conforms" "${run[@]}" -n 8 "$SUITE" --exact mpi::rank --nocapture --test-threads=1
  grep -h "conform over" "$WORK/log" || true
  layouts "mpirun ($kind)" "$ROOT/tools/hosts/with.sh" "${run[*]} -n 2 $PHALANX" "--set run.ranks=mpi"
  unset MPICC
}

slurm() {
  install slurmctld slurmd slurm-client munge || return 0
  local host
  host=$(hostname -s)
  mkdir -p "$WORK/slurm/state" "$WORK/slurm/spool1" "$WORK/slurm/spool2"
  head -c 1024 /dev/urandom >"$WORK/slurm/munge.key"
  chmod 755 "$WORK" "$WORK/slurm"; chmod 400 "$WORK/slurm/munge.key"
  cat >"$WORK/slurm/slurm.conf" <<CONF
ClusterName=phalanx
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$WORK/slurm/munge.socket
CredType=cred/munge
SlurmctldPort=16817
SlurmctldPidFile=$WORK/slurm/ctld.pid
SlurmdPidFile=$WORK/slurm/slurmd-%n.pid
StateSaveLocation=$WORK/slurm/state
SlurmdSpoolDir=$WORK/slurm/spool-%n
SlurmctldLogFile=$WORK/slurm/ctld.log
SlurmdLogFile=$WORK/slurm/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
  export SLURM_CONF=$WORK/slurm/slurm.conf
  munged --foreground --force --key-file="$WORK/slurm/munge.key" --socket="$WORK/slurm/munge.socket" \
    --pid-file="$WORK/slurm/munge.pid" --log-file="$WORK/slurm/munge.log" --seed-file="$WORK/slurm/munge.seed" >"$WORK/slurm/munge.out" 2>&1 &
  STARTED+=($!)
  sleep 1
  slurmctld -D >"$WORK/slurm/ctld.out" 2>&1 &
  STARTED+=($!)
  for node in n1 n2; do
    slurmd -D -N "$node" >"$WORK/slurm/$node.out" 2>&1 &
    STARTED+=($!)
  done
  for _ in $(seq 60); do
    [ "$(sinfo -h -o %D -t idle 2>/dev/null)" = 2 ] && break
    sleep 1
  done
  sinfo
  [ "$(sinfo -h -o %D -t idle 2>/dev/null)" = 2 ] || { tail -5 "$WORK"/slurm/*.log; say "Slurm did not start"; FAILED=1; return 0; }
  # Both nodes are this host, whose name is not n1: the meeting point is given.
  export MASTER_ADDR=127.0.0.1
  MASTER_PORT=21100 layouts "srun, a task for each rank" "$ROOT/tools/hosts/with.sh" "srun -N 2 -n 2 --overcommit $PHALANX" ""
  MASTER_PORT=21200 layouts "srun, an agent on each node" "$ROOT/tools/hosts/with.sh" \
    "srun -N 2 -n 2 --ntasks-per-node=1 --overcommit $PHALANX agent -n 1 --" ""
  unset MASTER_ADDR
  if command -v mpicc.mpich >/dev/null && srun --mpi=list 2>&1 | grep -q pmi2; then
    MPICC=mpicc.mpich layouts "srun --mpi=pmi2 (MPICH)" "$ROOT/tools/hosts/with.sh" "srun --mpi=pmi2 -N 2 -n 2 --overcommit $PHALANX" "--set run.ranks=mpi"
  fi
}

torchrun_() {
  local torchrun=${TORCHRUN:-torchrun}
  command -v "$torchrun" >/dev/null || { say "no torchrun: skipped (TORCHRUN names it)"; return 0; }
  layouts torchrun "$ROOT/tools/hosts/with.sh" "$torchrun --no-python --nproc-per-node 2 $PHALANX" ""
}

for part in "${PARTS[@]}"; do
  case $part in
    openmpi | mpich) mpi "$part" ;;
    slurm) slurm ;;
    torchrun) torchrun_ ;;
    *) echo "unknown part: $part (openmpi, mpich, slurm, torchrun)" >&2; exit 2 ;;
  esac
done
[ $FAILED = 0 ] && say "all went well" || say "something FAILED"
exit $FAILED
