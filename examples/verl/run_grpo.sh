#!/usr/bin/env bash
# Train with veRL and psRL: MODEL=/path/to/Qwen2.5-7B DATA=/path/to/parquets run_grpo.sh [override ...]
# On several hosts see docs/verl.md: the variable must be exported before `ray start`.
set -euo pipefail

: "${MODEL:?a Hugging Face directory of a Qwen2, Qwen3 or Qwen3-MoE model}"
: "${DATA:?a directory with train.parquet and test.parquet in the format of veRL}"
export MODEL DATA
export VERL_USE_EXTERNAL_MODULES=psrl.integrations.verl.plugin

cd "$(dirname "${BASH_SOURCE[0]}")"
exec python3 -m verl.trainer.main_ppo --config-path="$PWD" --config-name=psrl_grpo "$@"
