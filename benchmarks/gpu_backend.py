"""What only a GPU can say about the backend, in one run of a few minutes.

    python -m benchmarks.gpu_backend --output benchmarks/results/gpu_backend.json

Stage `equality`: gradients, loss and logprobs of shared execution beside dense execution in
bfloat16 and float32, for every recompute mode and several cuts, next to the noise floor: dense
execution beside itself in another cut. Stage `speed`: both phases of a 1.5B model with random
weights on samples of a recorded tau-bench run, dense and shared alternating. The file is written
after every row; what the time budget no longer allows is listed in it. `--dry-run` goes through
all of it on a CPU with a tiny model.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.cost.presets import MODELS
from psrl.kernels.benchmark.table import device_name

from .gpu_equality import equality
from .gpu_run import Report, Run, Scale
from .gpu_speed import speed
from .run import environment

GRACE_S = 60.0


def real_scale() -> Scale:
    """Sizes for a GPU with 80 GB or more."""
    preset = MODELS["qwen2.5-1.5b"]
    # Heads as in the timed model, so that the same kernels run, with fewer other weights.
    narrow = {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1536, "vocab_size": 8192}
    qwen2 = preset.model_copy(update={"name": "qwen2.5-like", "tied_embeddings": False} | narrow)
    return Scale(
        device=torch.device("cuda"),
        models=(qwen2, qk_norm_variant(qwen2)),
        speed_model=preset,
        equality_slice=(2, 3, 4),
        speed_slice=(4, 4, 6),
        cuts=(1, 6, 48),
        dense_cuts=(3, 8),
        speed_cuts=(2, 3),
        dense_tokens=(16384, 8192),
        repeats=5,
    )


def dry_scale() -> Scale:
    """Sizes for one core of a CPU."""
    narrow = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    tiny = MODELS["qwen2.5-tiny"].model_copy(update=narrow | heads)
    return Scale(
        device=torch.device("cpu"),
        models=(qk_norm_variant(tiny),),
        speed_model=tiny,
        equality_slice=(1, 1, 2),
        speed_slice=(1, 2, 2),
        cuts=(1, 3),
        dense_cuts=(1, 2),
        speed_cuts=(2,),
        dense_tokens=(6000, 3000),
        repeats=1,
    )


def qk_norm_variant(model: ModelSpec) -> ModelSpec:
    """The same shape with Qwen3's QK norm and a tied head."""
    changes = {"name": "qwen3-like", "qk_layernorm": True, "qkv_bias": False}
    return model.model_copy(update=changes | {"tied_embeddings": True})


def measure(scale: Scale, output: Path, budget_s: float, dry_run: bool) -> Report:
    """All stages, in the process group of this rank."""
    report = Report(device_name(scale.device), dry_run, budget_s, environment())
    run = Run(report, output, scale)
    with model_parallel(ParallelConfig(), budget_s + GRACE_S):
        for stage in (equality, speed):
            start_s = time.perf_counter()
            stage(run)
            report.seconds[stage.__name__] = round(time.perf_counter() - start_s, 1)
            run.save()
            print(f"{stage.__name__}: {report.seconds[stage.__name__]} s", file=sys.stderr)
    report.complete = not report.skipped
    run.save()
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 if nothing is skipped and every gradient is within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=420, help="start no row after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        parser.error("no GPU is there; pass --dry-run to try the script on a CPU")
    scale = dry_scale() if options.dry_run else real_scale()
    settings = (options.output, options.budget_s, options.dry_run)
    (report,) = run_ranks(measure, 1, scale, *settings, timeout_s=options.budget_s + GRACE_S)
    state = "passed" if report.passed else "FAILED"
    left_out = "" if report.complete else f", but incomplete ({len(report.skipped)} skipped)"
    print(f"{state}{left_out}: {options.output}", file=sys.stderr)
    return 0 if report.passed and report.complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
