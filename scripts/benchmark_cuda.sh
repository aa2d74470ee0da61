#!/usr/bin/env bash
# The decode table on one CUDA GPU for both ends of the sizes, within 8 minutes; JSON and Markdown in a directory.
#     bash scripts/benchmark_cuda.sh [directory]
set -euo pipefail
out=$(realpath -m "${1:-runs/benchmarks}")
mkdir -p "$out"
cd "$(dirname "$0")/.."
for size in 30m 1m; do
  python scripts/benchmark_decode.py model=$size device=cuda 'modes=[eager,cuda_graph]' 'batch_sizes=[1,8,64]' \
    repeats=10 placements=3 minutes=2 out="$out/decode-$size.json"
  # Compiling takes most of a minute per arm, so here the arms and the cases are few.
  python scripts/benchmark_decode.py model=$size device=cuda 'modes=[compile]' 'batch_sizes=[1]' 'dtypes=[bfloat16]' \
    'arms=[baseline,baseline_again,all_taper_folded,no_norms]' repeats=30 minutes=1 out="$out/decode-$size-compiled.json"
done
