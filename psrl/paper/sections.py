"""Tables of the reproduction beyond the published rows: speed-ups as products, ablations, runs."""

import math
from collections.abc import Mapping, Sequence

from psrl.analysis.units import number, percent

from .results import FACTORS, NotRunError, Results

_GIB = 2**30


def sections(results: Results, titles: Mapping[str, str]) -> str:
    """Markdown behind the rows; a table whose scenarios were not run is left out."""
    parts = []
    for part in (
        _speedups,
        _schedulers,
        _micro_batches,
        _caching,
        _blocks,
        _long_samples,
        _iterations,
    ):
        try:
            parts.append(part(results))
        except NotRunError:
            continue
    names = "\n".join(f"- `{name}`: {title}" for name, title in titles.items())
    return "\n\n".join([*parts, f"## Scenarios\n\n{names}"])


def _speedups(results: Results) -> str:
    rows = []
    for scenario, mode, policy in results.runs():
        measured = results.run(scenario, mode, policy)
        if "factors" not in measured or scenario.startswith("ablation"):
            continue
        for phase in measured["factors"]:
            if phase == "reference":
                continue  # the same work as log_old_prob
            factors = results.factors(scenario, mode, "verl", policy, phase)
            flop_ratio, bound = results.bounds(scenario, mode, policy, phase)
            over_merged = results.over_merged(scenario, mode, policy, phase)
            rows.append(
                [
                    f"`{scenario}`",
                    mode,
                    policy,
                    phase,
                    f"{results.speedup(scenario, mode, 'verl', policy, phase):.2f}",
                    *(f"{factors[name]:.2f}" for name in FACTORS),
                    number(over_merged),
                    f"{flop_ratio:.2f}",
                    f"{bound:.2f}",
                ]
            )
    if not rows:
        raise NotRunError("no speed-up was measured")
    header = ["scenario", "mode", "policy", "phase", "speed-up", *FACTORS]
    text = (
        "## Every speed-up over veRL as cuts x placement x sharing\n\n"
        "`merged_dense` is veRL's training of the steps that can be merged exactly, inside their "
        "optimizer steps. FLOPs: veRL's over the least that the policy needs. Bound: veRL's time "
        "over that of this arithmetic on devices that are never idle; nothing can pass it."
    )
    return f"{text}\n\n{_table([*header, 'over merged', 'FLOPs', 'bound'], rows)}"


def _schedulers(results: Results) -> str:
    scenario, mode = "dtn_1536_schedulers", "tree_step"
    best_s = results.phase(scenario, mode, "psrl")["worker_time_max_s"]
    rows = []
    for _, _, policy in results.runs(scenario):
        found = results.phase(scenario, mode, policy)
        rows.append(
            [
                policy,
                number(found["worker_time_min_s"]),
                number(found["worker_time_max_s"]),
                f"{_quotient(found['worker_time_max_s'], found['worker_time_min_s']):.3f}",
                f"{found['worker_time_max_s'] / best_s:.2f}",
                f"{found['executed_tokens'] / 1e6:.2f}",
                percent(found["bubble_fraction"]),
            ]
        )
    header = [
        "policy",
        "min (s)",
        "max (s)",
        "max/min",
        "max / psrl's",
        "million tokens",
        "bubbles",
    ]
    return f"## Scheduler ablation (DTN tree_step, update)\n\n{_table(header, rows)}"


def _micro_batches(results: Results) -> str:
    scenario, mode = "ablation_micro_batches", "step"
    words = {
        "verl": "no sharing, whole samples",
        "sglang_ps": "sharing, whole samples, veRL's ranks",
        "sharing_agnostic": "sharing, token-wise cuts, veRL's ranks",
        "psrl": "sharing, token-wise cuts, psRL's ranks",
    }
    rows = []
    for policy, what in words.items():
        found = results.phase(scenario, mode, policy)
        factors = results.factors(scenario, mode, "verl", policy)
        rows.append(
            [
                policy,
                what,
                number(found["makespan_s"]),
                f"{results.speedup(scenario, mode, 'verl', policy):.2f}",
                *(f"{factors[name]:.2f}" for name in FACTORS),
                percent(found["bubble_fraction"]),
            ]
        )
    header = ["policy", "what", "update (s)", "speed-up", *FACTORS, "bubbles"]
    return f"## Token-wise micro-batching (WebShop step)\n\n{_table(header, rows)}"


def _caching(results: Results) -> str:
    runs = (
        ("dtn_1536", "step"),
        ("dtn_1536_step_rt", "step_rt"),
        ("dtn_1536_schedulers", "tree_step"),
    )
    rows = []
    for scenario, mode in runs:
        dynamic = results.run(scenario, mode, "psrl")["memory"]
        everything = results.run(scenario, mode, "psrl")["blocks"]["adaptive everything"]["memory"]
        rows.append(
            [
                mode,
                number(dynamic["whole_logits_peak_bytes"] / _GIB),
                number(dynamic["chunked_logits_peak_bytes"] / _GIB),
                number(dynamic["peak_kv_bytes"] / _GIB),
                number(everything["whole_logits_peak_bytes"] / _GIB),
                number(everything["peak_kv_bytes"] / _GIB),
                number(results.pool_peak_bytes(scenario, mode, "psrl") / _GIB),
            ]
        )
    header = [
        "mode", "dynamic", "dynamic, chunked head", "its K/V", "everything cached", "its K/V",
        "pool of 0.9",
    ]  # fmt: skip
    text = (
        "## Dynamic block caching (DTN, psRL, GiB per GPU)\n\n"
        "K/V counts keys, values and their gradients. What is really cached is small either way: "
        "DTN holds 4 kB per token and GPU. Only a pool sized beforehand can give the published gap."
    )
    return f"{text}\n\n{_table(header, rows)}"


def _blocks(results: Results) -> str:
    found = results.run("ablation_blocks", "step", "psrl")["blocks"]
    rows = []
    for text, one in found.items():
        blocks = one["blocks"]
        rows.append(
            [
                text,
                number(one["update_s"]),
                number(blocks["peak_cached_bytes"] / 2**20),
                f"{blocks['num_blocks']:,}",
                f"{blocks['internal_fragmentation']:.2%}",
                f"{blocks['hit_rate_lost']:.2%}",
                f"{blocks['cache_hit_rate']:.2%}",
                number(blocks["extra_s"]),
            ]
        )
    header = [
        "blocks, cache", "update (s)", "peak cached (MiB)", "blocks", "padding", "matches lost",
        "found", "extra (s)",
    ]  # fmt: skip
    return f"## Block size and caching (WebShop step, psRL's plan)\n\n{_table(header, rows)}"


def _long_samples(results: Results) -> str:
    rows = []
    for scenario, mode, policy in results.runs("dtn_1536_long", "search_8_long"):
        memory = results.run(scenario, mode, policy)["memory"]
        rows.append(
            [
                f"`{scenario}`",
                policy,
                number(memory["whole_logits_peak_bytes"] / _GIB),
                number(memory["chunked_logits_peak_bytes"] / _GIB),
                "yes" if results.fits(scenario, mode, policy) else "out of memory",
            ]
        )
    header = ["scenario", "policy", "peak (GiB)", "with chunked head", "fits the device"]
    text = (
        "## 8x length: will it fit\n\n"
        "The paper says that every DTN baseline runs out of memory. A baseline holds whole samples "
        "in a micro-batch; psRL cuts them."
    )
    return f"{text}\n\n{_table(header, rows)}"


def _iterations(results: Results) -> str:
    rows = []
    for scenario, mode, policy in results.runs():
        measured = results.run(scenario, mode, policy)
        if policy not in ("verl", "psrl") or "iteration" not in measured:
            continue
        if scenario.startswith("ablation"):
            continue
        it = measured["iteration"]
        rows.append(
            [
                f"`{scenario}`",
                mode,
                policy,
                number(it["rollout_s"]),
                number(it["training_s"]),
                number(it["synchronous_s"]),
                percent(it["update_share"]),
                number(it["one_step_off_s"]),
            ]
        )
    header = [
        "scenario", "mode", "policy", "rollout (s)", "training (s)", "iteration (s)",
        "update share", "one step off (s)",
    ]  # fmt: skip
    return f"## End-to-end iteration\n\n{_table(header, rows)}"


def _quotient(above: float, below: float) -> float:
    """Infinite where a worker had nothing to do."""
    return above / below if below else math.inf


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
