#!/usr/bin/env bash
# The whole road on a CPU: replay a recorded trace, compare policies for an 8-GPU cluster, execute
# the chosen plan and the dense one with Megatron-core, and compare their results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

trace=examples/traces/tau_bench_airline
runs=${RUNS_DIR:-runs}
mkdir -p "$runs"

echo "1. Replay: 52 recorded tau-bench episodes of 13 tasks, and how much their samples share"
psrl trace stats "$trace"

echo
echo "2. Compare policies: Qwen2.5-7B on 8 H100, simulated"
psrl compare --trace "$trace" --cluster examples/clusters/8xh100.toml \
    --policies verl vllm_ps sglang_ps dfs_cut quick psrl --run-dir "$runs/demo" --if-exists overwrite

echo
echo "3. Execute on this CPU: a slice of the trace, a small Qwen2.5, two processes"
rm -rf "$runs/demo-slice"
psrl trace slice "$trace" --out "$runs/demo-slice" --groups 2 --trajectories 2 --steps 6
psrl compare --trace "$runs/demo-slice" --cluster examples/clusters/2cpu.toml \
    --policies verl psrl --execute verl psrl --warmup 1 --run-dir "$runs/demo-cpu" --if-exists overwrite

echo
echo "Open $runs/demo/report.html and $runs/demo-cpu/report.html"
