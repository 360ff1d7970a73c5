"""The sentences of the report, each computed from the numbers, whoever wins."""

import math
from typing import Any

import pandas as pd

from psrl.analysis.units import bytes_unit, number, percent, time_unit, times
from psrl.core.plan.policy_names import MERGED_DENSE

from .comparison import FACTORS, Comparison

_SAME = 0.005  # ratios closer to 1 than this are called equal


def workload_sentence(comparison: Comparison) -> str:
    """Trace, samples and tokens, model, devices and layout."""
    setup, trace = comparison.setup, comparison.trace
    metrics = comparison.metrics[comparison.baseline]
    cluster, parallel = setup.cluster, setup.parallel
    hosts = f"{cluster.num_hosts:,} host" + ("s" if cluster.num_hosts > 1 else "")
    recompute = ", full recompute" if parallel.recompute == "full" else ""
    return (
        f"{metrics['num_samples']:,} samples of {trace['source']} (sampling mode "
        f"{trace['sampling_mode']}, licence {trace['licence']}): "
        f"{metrics['logical_tokens']:,} logical tokens, {metrics['unique_tokens']:,} of them "
        f"unique ({percent(metrics['prefix_match_rate'])} prefix match rate). "
        f"{setup.model.name} on {cluster.num_devices:,} x {cluster.device.name} ({hosts}): "
        f"tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size}{recompute}."
    )


def gain_sentence(comparison: Comparison) -> str:
    """Speed-up of the policy in focus, its bounds, and the fastest policy if another is."""
    focus, base = comparison.focus, comparison.baseline
    if focus == base:
        return f"{base} is the only or the fastest policy of this run: there is no gain to report."
    mine_s, base_s = comparison.makespan_s(focus), comparison.makespan_s(base)
    unit = time_unit(max(mine_s, base_s))
    taken = f"{unit.text(mine_s)} against {unit.text(base_s)}"
    speedup = comparison.speedup(focus)
    if abs(speedup - 1) < _SAME:
        text = f"{focus} takes as long as {base} ({taken})"
    elif speedup > 1:
        text = f"{focus} is {times(speedup)} as fast as {base} end to end ({taken})"
    else:
        text = f"{focus} is slower than {base}: {times(speedup)} its speed end to end ({taken})"
    if {"update"} < set(comparison.phases):
        text += (
            f", {times(comparison.speedup(focus, ('update',)))} in the update and "
            f"{times(comparison.speedup(focus, comparison.forward_phases))} in the forward phases"
        )
    text += (
        f"; it needs {times(comparison.flop_ratio(focus))} fewer FLOPs, and no plan of that work "
        f"gains more than {times(comparison.bound(focus))}"
    )
    over_merged = comparison.over_merged(focus)
    if not math.isnan(over_merged):
        text += f". Over dense training of the merged steps it gains {times(over_merged)}"
    fastest = min(comparison.policies, key=comparison.makespan_s)
    best = comparison.speedup(fastest)
    if best > speedup * (1 + _SAME):
        text += f". The fastest policy is {fastest} at {times(best)}"
    return text + "."


_REASONS = {
    "rewritten": "do not continue the step before: their history was rewritten",
    "trained_again": "train a token again that the step before trains",
    "other_mini_batch": "are trained by another optimizer step than the step before",
    "branched": "branch off where another step continues",
}


def merging_sentence(comparison: Comparison) -> str:
    """How many steps merge into whole trajectories exactly, and why the others do not.

    Raises:
        ValueError: if the samples are whole trajectories already.
    """
    counts = comparison.merging
    if counts is None:
        raise ValueError("nothing to merge")
    num_steps, appended = counts["num_steps"], counts["appended"]
    if not num_steps:
        return "No sample has a step before it, so there is nothing to merge."
    reasons = [
        f"{counts[name]:,} of {num_steps:,} steps {text}"
        for name, text in _REASONS.items()
        if counts[name]
    ]
    why = "; ".join(reasons)
    if not appended:
        return f"Merging the steps is not possible: {why}."
    text = (
        f"{appended:,} of {num_steps:,} steps continue the one before and merge into "
        f"{counts['num_merged_samples']:,} samples that train the same tokens in the same "
        f"contexts: {MERGED_DENSE} trains those"
    )
    return f"{text}. The others cannot merge: {why}." if reasons else f"{text}."


def ladder_sentence(rungs: pd.DataFrame) -> str:
    """The rungs of `ladder` and their factors."""
    steps = rungs.to_dict("records")
    climbed = ", then ".join(f"{times(row['factor'])} {row['rung']}" for row in steps[1:])
    total = times(steps[-1]["speedup"])
    return f"From {steps[0]['rung']} to {steps[-1]['policy']}: {climbed}; together {total}."


def why_sentence(comparison: Comparison, factors: pd.DataFrame) -> str:
    """The three factors of the policy in focus, the largest one named."""
    mine = factors[factors["policy"] == comparison.focus]
    if mine.empty:
        return "There is no speed-up to explain: only the baseline was run."
    entry = mine.iloc[0]
    product = " x ".join(f"{times(entry[f])} {f}" for f in FACTORS)
    text = (
        f"The {times(entry['speedup'])} of {comparison.focus} in the {entry['phases']} phase is "
        f"{product}"
    )
    largest = max(FACTORS, key=lambda f: float(entry[f]))
    if entry[largest] > 1 + _SAME:
        text += f"; most of it comes from {largest}"
    losing = [f for f in FACTORS if entry[f] < 1 - _SAME]
    if losing:
        text += f"; {' and '.join(losing)} cost time"
    return text + "."


def memory_sentence(comparison: Comparison) -> str:
    """Peak of the policy in focus against the device, and every policy that does not fit."""
    focus, base = comparison.focus, comparison.baseline
    device = comparison.setup.cluster.device
    peaks = {p: int(m["peak_memory_bytes"]) for p, m in comparison.metrics.items()}
    peak, limit = peaks[focus], device.memory_bytes
    unit = bytes_unit(max(*peaks.values(), limit))
    of_device = f"the {unit.text(limit)} of one {device.name}"
    if peak <= limit:
        text = (
            f"{focus} fits: it peaks at {unit.text(peak)}, {percent(peak / limit)} of {of_device}"
        )
    else:
        text = (
            f"{focus} does not fit: it peaks at {unit.text(peak)}, "
            f"{unit.text(peak - limit)} above {of_device}"
        )
    phases = comparison.metrics[focus]["phases"]
    fullest = max(comparison.phases[::-1], key=lambda p: phases[p]["peak_memory_bytes"])
    text += f" (in {fullest})"
    if focus != base:
        text += f", and {times(peak / peaks[base])} the peak of {base} ({unit.text(peaks[base])})"
    over = [p for p in peaks if peaks[p] > limit and p != focus]
    if over:
        text += f". Out of memory: {', '.join(over)}"
    elif len(peaks) > 1 and peak > limit:
        text += ". All other policies fit"
    return text + "."


def balance_sentence(comparison: Comparison) -> str:
    """Slowest over fastest rank and bubbles in the main phase, beside the baseline's."""
    phase = comparison.main_phase

    def of(policy: str) -> str:
        entry = comparison.metrics[policy]["phases"][phase]
        bubbles = f"{percent(entry['bubble_fraction'])} of the device time is bubbles"
        if math.isinf(entry["worker_time_max_over_min"]):
            return f"a rank has nothing to do, and {bubbles}"
        ratio = times(entry["worker_time_max_over_min"])
        return f"the slowest rank works {ratio} as long as the fastest, and {bubbles}"

    text = f"In the {phase} phase of {comparison.focus} {of(comparison.focus)}"
    if comparison.focus != comparison.baseline:
        text += f"; with {comparison.baseline} {of(comparison.baseline)}"
    return text + "."


def certainty_sentence(comparison: Comparison, predicted: pd.DataFrame) -> str:
    """What stands behind the times: executed runs, or nothing but a data sheet."""
    device = comparison.setup.cluster.device.name
    calibration = comparison.setup.calibration
    if predicted.empty and calibration is not None:
        stated = "; ".join(
            f"{row.group} {number(row.mean_percent)} %"
            for row in calibration.errors
            if row.headline
        )
        return (
            f"These times are predictions of a calibration ({', '.join(calibration.sources)}); its "
            f"mean error on measurements held out is: {stated or 'not stated'}."
        )
    if predicted.empty:
        return (
            "These times are predictions of a roofline model (data-sheet peaks of the "
            f"{device} times assumed efficiencies); no measurement stands behind them, so they "
            "have no stated error. Ratios between policies are safer to use than seconds."
        )
    errors = predicted["error"].abs()
    worst = predicted.to_dict("records")[int(errors.to_numpy().argmax())]
    measured = time_unit(worst["measured_s"]).text(worst["measured_s"])
    return (
        f"The simulated times differ from the executed ones by {percent(errors.mean())} on "
        f"average and by {percent(errors.max())} at most ({worst['policy']}, {worst['phase']}, "
        f"which took {measured})."
    )


def failed_checks(comparison: Comparison) -> list[dict[str, Any]]:
    """Exactness checks outside their tolerance."""
    return [
        c for c in comparison.exactness if not c["largest_relative_difference"] <= c["tolerance"]
    ]


def exactness_sentence(comparison: Comparison) -> str:
    """Whether sharing changed a result.

    Raises:
        ValueError: if that was not checked.
    """
    checks, failed = comparison.exactness, failed_checks(comparison)
    if not checks:
        raise ValueError("no exactness checks")
    if failed:
        names = ", ".join(
            f"{c['quantity']} by {c['largest_relative_difference']:.1e} (tolerance "
            f"{c['tolerance']:.0e})"
            for c in failed
        )
        return f"Sharing changed the result: {names}."
    worst = max(checks, key=lambda c: float(c["largest_relative_difference"] / c["tolerance"]))
    return (
        f"Sharing changed nothing beyond rounding: all {len(checks)} quantities agree, the worst "
        f"({worst['quantity']}) to {worst['largest_relative_difference']:.1e} relative "
        f"(tolerance {worst['tolerance']:.0e})."
    )


def run_sentence(comparison: Comparison, policy: str) -> str:
    """Which plan to run, and on what; or that none of them fits."""
    limit = comparison.setup.cluster.device.memory_bytes
    peak = comparison.metrics[policy]["peak_memory_bytes"]
    if peak > limit:
        unit = bytes_unit(peak)
        return (
            f"No policy of this run fits its devices: the plan of {policy} peaks at "
            f"{unit.text(peak)}, {unit.text(peak - limit)} above the device's {unit.text(limit)}."
        )
    num_devices = comparison.setup.cluster.num_devices
    where = f"{num_devices:,} devices, one process each" if num_devices > 1 else "one device"
    text = f"The plan of {policy} is ready to run on {where}"
    if policy == comparison.baseline:
        return f"{text}; no other policy is faster and fits."
    return (
        f"{text}, {times(comparison.speedup(policy))} as fast as {comparison.baseline} by "
        "prediction; run the baseline's plan as well to measure it."
    )


def recommended_policy(comparison: Comparison) -> str:
    """The fastest policy that fits on the device; the fastest of all if none fits."""
    limit = comparison.setup.cluster.device.memory_bytes
    metrics = comparison.metrics
    fitting = [p for p in comparison.policies if metrics[p]["peak_memory_bytes"] <= limit]
    candidates = fitting or list(comparison.policies)
    fastest = min(candidates, key=comparison.makespan_s)
    focus = comparison.focus
    close = comparison.makespan_s(focus) <= comparison.makespan_s(fastest) * (1 + _SAME)
    return focus if focus in candidates and close else fastest


def assumptions(comparison: Comparison) -> list[str]:
    """What the predicted times rest on."""
    setup = comparison.setup
    device, cluster, planning = setup.cluster.device, setup.cluster, setup.planning
    bandwidth = (cluster.intra_host_bytes_per_s / 1e9, cluster.inter_host_bytes_per_s / 1e9)
    if setup.calibration is not None:
        return [
            f"Calibrated coefficients on {device.name}: {', '.join(setup.calibration.sources)}.",
            f"A micro-batch computes at most {planning.max_tokens_per_micro_batch:,} tokens; plans "
            f"may use {percent(planning.memory_fraction)} of the device memory.",
        ]
    return [
        f"{device.name}: {number(device.peak_flops_per_s / 1e12)} TFLOP/s dense, "
        f"{percent(device.gemm_efficiency)} of it reached by matrix products and "
        f"{percent(device.attention_efficiency)} by attention; "
        f"{number(device.memory_bandwidth_bytes_per_s / 1e12)} TB/s memory, "
        f"{percent(device.bandwidth_efficiency)} of it reached.",
        f"The host launches one layer's forward in {number(device.host_layer_s * 1e3)} ms, and a "
        f"layer takes the {'longer' if device.host_overlaps else 'sum'} of host and device time.",
        f"Links carry {number(bandwidth[0])} GB/s inside a host and {number(bandwidth[1])} GB/s "
        "between hosts, per device and direction, without contention.",
        f"A micro-batch computes at most {planning.max_tokens_per_micro_batch:,} tokens; plans "
        f"may use {percent(planning.memory_fraction)} of the device memory.",
        f"End to end means {', '.join(comparison.phases)}, one iteration of training.",
    ]


NOT_MODELLED = (
    "rollout, environment and reward time; weight synchronisation and checkpoints",
    "data loading, Python start-up and compilation, the first iteration's warm-up",
    "memory fragmentation and the workspaces of libraries",
    "slow devices, clock throttling, network contention and failures",
)
