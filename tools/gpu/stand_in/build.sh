#!/usr/bin/env bash
# Builds libraries that stand in for NVIDIA's, so that the CUDA engine runs on a machine without a GPU: slowly, but
# with its own kernels, compiled for the processor, and all of its own code around them.
#
#   tools/gpu/stand_in/build.sh FOLDER
#   LD_LIBRARY_PATH=FOLDER cargo test --release -p phalanx-cuda
#
# Needs a C++ compiler ($CXX, or g++), also when kernels are compiled. There is no cuDNN, NCCL and NVML among them:
# attention runs on the engine's own kernels, and ranks exchange through the memory that stands in for a GPU's.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,9p' "$0"; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")"
flags=(-std=c++17 -O2 -fPIC -shared -Wall)
{ echo 'R"KERNEL('; split -C 8000 --filter 'cat; echo ")KERNEL\""; echo "R\"KERNEL("' kernel.h; echo ')KERNEL"'; } > "$out/kernel.h.inc"
"${CXX:-g++}" "${flags[@]}" driver.cpp -o "$out/libcuda.so.1" -ldl
"${CXX:-g++}" "${flags[@]}" -I "$out" nvrtc.cpp -o "$out/libnvrtc.so.13"
"${CXX:-g++}" "${flags[@]}" -O3 -march=native -Wno-return-type-c-linkage cublaslt.cpp -o "$out/libcublasLt.so.13" -L "$out" -l:libcuda.so.1
rm "$out/kernel.h.inc"
