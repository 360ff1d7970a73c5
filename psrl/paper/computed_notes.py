"""Reasons that speak of our own runs, computed from them: each says what holds, either way."""

from .results import Results

_SAME = 0.005  # ratios closer to 1 than this are called equal


def prefix_first(results: Results) -> str:
    """What prefix-match-first does with the tasks of an optimizer step."""
    run = results.run("dtn_1536_schedulers", "tree_step", "prefix_match_first")
    steps = run["tasks_on_ranks"]
    tasks, whole = (sum(step[name] for step in steps) for name in ("tasks", "whole_tasks"))
    empty, ranks = [step["empty_ranks"] for step in steps], steps[0]["ranks"]
    text = (
        f"In the {len(steps)} optimizer step(s), {whole} of {tasks} tasks stay whole on one of "
        f"{ranks} ranks"
    )
    if not any(empty):
        return f"{text}, and no rank stays empty: ranks differ by what their tasks cost."
    low, high = min(empty), max(empty)
    many = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{text}, which leaves {many} ranks of a step without any sample; the published fastest "
        "worker has some, so its policy must have spread tasks."
    )


def our_cuts(results: Results) -> str:
    """How fine the cuts of DTN's update are, and what cuts alone gain."""
    cuts = results.run("dtn_1536", "step", "psrl")["micro_batches"]
    factor = results.factors("dtn_1536", "step", "verl")["cuts"]
    text = (
        f"Our planner cuts DTN's update into {cuts['per_rank']:.0f} micro-batches per rank of "
        f"{cuts['mean_tokens']:,.0f} tokens on average"
    )
    if factor > 1.0 + _SAME:
        return f"{text}; that alone, which needs no sharing at all, gains {factor:.2f}x (cuts)."
    return f"{text}; that alone gains nothing (cuts {factor:.2f}x)."


def small_ps(results: Results) -> str:
    """How strong the baselines with prefix sharing are on few data-parallel ranks."""
    gain = results.speedup("webshop_8", "step", "verl", policy="sglang_ps")
    lead = results.speedup("webshop_8", "step", "sglang_ps")
    text = (
        f"SGLang-PS is {gain:.2f} times as fast as veRL on WebShop step in our reading, and psRL "
        f"{lead:.2f} times as fast as SGLang-PS"
    )
    possible = 5.2 / 2.5
    if gain > possible:
        return (
            f"{text}. The published variants cannot be so strong: psRL leads them by up to 2.5 and "
            f"veRL by at most 5.2, which leaves them about {possible:.1f}."
        )
    return f"{text}; the published gains (2.5 over them, at most 5.2 over veRL) allow that."


def short_search(results: Results) -> str:
    """Whether Search's samples are too short for 16 ranks."""
    cuts = results.factors("search_64", "step", "verl")["cuts"]
    short, long = (results.speedup(s, "step", "verl") for s in ("search_64", "search_8_long"))
    text = (
        f"Public Search samples are short: on 64 GPUs cuts are worth {cuts:.2f}x and the gain is "
        f"{short:.2f}, on 8 GPUs at 8x length it is {long:.2f}"
    )
    if cuts < 1.0 - _SAME and long > short:
        return (
            f"{text}. Launches, pipeline and optimizer step outweigh so little work; the published "
            "samples must be longer."
        )
    return f"{text}; their length does not explain the difference."


def step_tokens(results: Results) -> str:
    """Why WebShop's update takes longer on step samples."""
    step, traj = (
        results.run("webshop_8", mode, "verl")["metrics"]["logical_tokens"]
        for mode in ("step", "traj")
    )
    tokens = step / traj
    taken = results.phase_s("webshop_8", "step", "verl") / results.phase_s(
        "webshop_8", "traj", "verl"
    )
    text = (
        f"The row says more than 5.0. Step samples have {tokens:.2f} times the tokens of traj "
        f"samples here and take {taken:.2f} times as long"
    )
    if taken < tokens * (1.0 - _SAME):
        return f"{text}: a token of the shorter samples costs less."
    return f"{text}: a token of the shorter samples costs no less."


def short_rollout(results: Results) -> str:
    """How much of an iteration training is, and with it the gain of training."""
    iteration = results.run("webshop_8", "step", "verl")["iteration"]
    share = iteration["training_s"] / iteration["synchronous_s"]
    return (
        "The row says up to 2.1. Which workload reaches it and how long its rollout takes is "
        f"unknown; training is {100 * share:.0f} % of veRL's WebShop step iteration here. With a "
        "rollout as long as veRL's training no gain would reach 2."
    )
