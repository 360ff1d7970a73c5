"""What would make a plan fit: the smallest helpful changes of a set-up, tried out."""

from collections.abc import Callable

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.run.config import Setup

_GIB = 2**30
_MAX_HALVINGS = 6
_NUM_REFINEMENTS = 2


def least_bytes(memory: MemoryModel, num_tokens: int) -> int:
    """Bytes on some device in any plan that trains a sample of so many tokens.

    When its last token runs backward, every other token of its path is in the same micro-batch,
    with layer inputs at least, or its keys and values and their gradients are cached.
    """
    cached = memory.kv_bytes_per_token + memory.kv_gradient_bytes_per_token
    held = min(memory.recompute_bytes_per_token, memory.activation_bytes_per_token)
    return memory.static_bytes + num_tokens * min(cached, held)


def smallest_changes(
    setup: Setup,
    needed_bytes: int,
    longest_tokens: int,
    peak_bytes_of: Callable[[Setup], int],
) -> str:
    """A sentence for the user with changes that fit, each tried out.

    Args:
        longest_tokens: tokens of the longest sample to train; 0 if none is trained.
        needed_bytes: peak of the plan that does not fit.
        peak_bytes_of: most bytes on a device when planned with another set-up.
    """
    memory_model = MemoryModel(setup.model, setup.cluster, setup.parallel)
    last_stage = setup.parallel.pipeline_model_parallel_size - 1
    static_bytes = memory_model.static_bytes_on(last_stage, is_update=longest_tokens > 0)
    if static_bytes > _limit_bytes(setup):
        least = static_bytes / setup.planning.memory_fraction
        return (
            f"weights, gradients and optimizer alone need {static_bytes / _GIB:.2f} GiB: raise "
            f"tensor or pipeline parallel size, or use devices with more than {least / _GIB:.2f} "
            "GiB; planning.max_tokens_per_micro_batch cannot help"
        )
    certain_bytes = least_bytes(memory_model, longest_tokens)
    if certain_bytes > _limit_bytes(setup):
        least = certain_bytes / setup.planning.memory_fraction
        return (
            f"the longest sample has {longest_tokens} tokens and alone needs "
            f"{(certain_bytes - static_bytes) / _GIB:.2f} GiB beside {static_bytes / _GIB:.2f} GiB "
            "of weights, gradients and optimizer, however it is cut: raise tensor or pipeline "
            f"parallel size, or use devices with more than {least / _GIB:.2f} GiB"
        )
    device_bytes = needed_bytes / setup.planning.memory_fraction
    memory = f"use devices with at least {device_bytes / _GIB:.2f} GiB"
    full = setup.model_copy(
        update={"parallel": setup.parallel.model_copy(update={"recompute": "full"})}
    )
    may_recompute = setup.parallel.recompute != "full"
    changes = []
    budget = _largest_budget(setup, peak_bytes_of)
    if budget:
        changes.append(f"set planning.max_tokens_per_micro_batch to {budget}")
    if may_recompute and peak_bytes_of(full) <= _limit_bytes(setup):
        changes.append("set parallel.recompute to full")
    if may_recompute and not changes:
        budget = _largest_budget(full, peak_bytes_of)
        if budget:
            changes.append(
                "set parallel.recompute to full and planning.max_tokens_per_micro_batch to "
                f"{budget}"
            )
    if changes:
        return f"{', or '.join(changes)} (tried: it fits); or {memory}"
    return (
        "no smaller planning.max_tokens_per_micro_batch fits, with or without "
        f"parallel.recompute = full: raise a parallel size, or {memory}"
    )


def _largest_budget(setup: Setup, peak_bytes_of: Callable[[Setup], int]) -> int:
    """The largest budget found below the set-up's that fits; 0 if none does."""

    def fits(budget: int) -> bool:
        planning = setup.planning.model_copy(update={"max_tokens_per_micro_batch": budget})
        changed = setup.model_copy(update={"planning": planning})
        return peak_bytes_of(changed) <= _limit_bytes(setup)

    too_large = setup.planning.max_tokens_per_micro_batch
    for _ in range(_MAX_HALVINGS):
        budget = too_large // 2
        if budget < 1:
            return 0
        if fits(budget):
            break
        too_large = budget
    else:
        return 0
    for _ in range(_NUM_REFINEMENTS):
        middle = (budget + too_large) // 2
        if budget < middle < too_large and fits(middle):
            budget = middle
        else:
            too_large = middle
    return budget


def _limit_bytes(setup: Setup) -> int:
    return int(setup.cluster.device.memory_bytes * setup.planning.memory_fraction)
