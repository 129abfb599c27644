#!/usr/bin/env bash
# Times collectives over TCP between two network namespaces of this machine, Phalanx and Open MPI in turns (needs root, `ip`
# and Open MPI). Each namespace is a host with its own address; the cable between them is a veth pair.
#
#   cargo build --release && tools/bench/namespaces.sh --rounds 3
#
# With CONGESTION=reno (or another that the kernel has) both programs find that as the host's congestion control.
set -euo pipefail
cd "$(dirname "$0")/../.."
PHALANX=${CARGO_TARGET_DIR:-target}/release/phalanx
A=phxbench$$a B=phxbench$$b
WORK=$(mktemp -d)
end() {
  ip netns del "$A" 2>/dev/null || true
  ip netns del "$B" 2>/dev/null || true
  rm -rf "$WORK"
}
trap end EXIT
ip netns add "$A"
ip netns add "$B"
ip link add vetha netns "$A" type veth peer name vethb netns "$B"
for pair in "$A vetha 10.213.78.1" "$B vethb 10.213.78.2"; do
  read -r ns device address <<<"$pair"
  ip -n "$ns" addr add "$address/24" dev "$device"
  ip -n "$ns" link set "$device" up
  ip -n "$ns" link set lo up
  [ -z "${CONGESTION:-}" ] || ip netns exec "$ns" sysctl -qw "net.ipv4.tcp_congestion_control=$CONGESTION"
done
# A remote shell that enters the namespace of an address, with a host name and a core of its own: each host would bind its
# first rank to the first core, which is the same here.
cat >"$WORK/rsh" <<SHELL
#!/bin/sh
host=\$1
shift
case \$host in 10.213.78.1) ns=$A core=0;; *) ns=$B core=1;; esac
exec taskset -c \$core ip netns exec \$ns unshare --uts sh -c "hostname \$ns; \$*"
SHELL
chmod +x "$WORK/rsh"
printf '10.213.78.1 slots=1\n10.213.78.2 slots=1\n' >"$WORK/hosts"
MPIRUN="mpirun.openmpi --allow-run-as-root --bind-to none --mca plm_rsh_agent $WORK/rsh --host 10.213.78.1,10.213.78.2"
MPIRUN+=" --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include 10.213.78.0/24"
export MPICC=mpicc.openmpi
python3 tools/bench/collectives.py \
  --ours "$PHALANX launch -n 2 --hosts $WORK/hosts --rsh $WORK/rsh --" \
  --mpirun "$WORK/rsh 10.213.78.1 exec $MPIRUN" "$@"
