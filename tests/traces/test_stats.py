"""Shapes and totals of statistics, against a token-by-token count."""

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given

from psrl.core.cost.arithmetic import Work, model_flops
from psrl.core.cost.presets import MODELS
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.traces.stats import LEVELS, sharing_stats, total_stats
from tests.traces.random_batches import step_batches
from tests.traces.test_derived import token_paths


def by_power(counts: Counter[int]) -> list[int]:
    """Counted values 1, 2..3, 4..7, ... up to the largest."""
    bins = [0] * max((value.bit_length() for value in counts), default=0)
    for value, weight in counts.items():
        bins[value.bit_length() - 1] += weight
    return bins


@pytest.mark.slow
@given(step_batches())
def test_shape_of_the_overall_tree(batch: SampleBatch) -> None:
    paths = token_paths(batch)
    readers = Counter(path[: t + 1] for path in paths for t in range(len(path)))
    children = defaultdict(set)
    for prefix in readers:
        children[prefix[:-1]].add(prefix)
    shape = sharing_stats(batch)["overall"]
    assert shape["unique_tokens_by_readers"] == by_power(Counter(readers.values()))
    depths = Counter(len(prefix) - 1 for prefix in readers)
    logical = Counter(t for path in paths for t in range(len(path)))
    for name, counted in (("unique", depths), ("logical", logical)):
        at_zero, later = counted.pop(0), by_power(counted)
        assert shape[f"{name}_tokens_by_depth"] == [at_zero, *later]
        total = at_zero + counted.total()
        mean = sum(depth * n for depth, n in counted.items()) / total
        assert shape[f"mean_depth_{name}"] == pytest.approx(mean)
    forks = [len(below) for prefix, below in children.items() if prefix and len(below) > 1]
    assert shape["num_forks"] == len(forks)
    assert sum(shape["forks_by_branches"]) == len(forks)
    assert shape["num_leaves"] == sum(prefix not in children for prefix in readers)


@pytest.mark.slow
@given(step_batches(), step_batches())
def test_totals_of_iterations_that_share_nothing(first: SampleBatch, second: SampleBatch) -> None:
    model = MODELS["qwen2.5-0.5b"]
    parts = [sharing_stats(batch, model) for batch in (first, second)]
    total = total_stats(parts, model)
    for name in ("num_samples", "logical_tokens", "unique_tokens", "loss_tokens", "num_groups"):
        assert total[name] == parts[0][name] + parts[1][name]
    for level in LEVELS:
        entry = total[level]
        logical, unique = (
            total["logical_tokens"],
            sum(part[level]["unique_tokens"] for part in parts),
        )
        assert entry["prefix_match_rate"] == pytest.approx(1 - unique / logical)
        for name in ("unique_tokens_by_depth", "unique_tokens_by_readers"):
            assert sum(entry[name]) == unique
        bounds = [part[level]["speedup_bound_flops"] for part in parts]
        assert min(bounds) - 1e-9 <= entry["speedup_bound_flops"] <= max(bounds) + 1e-9
    assert total_stats(parts[:1]) is parts[0]


def test_flops_count_weights_pairs_and_logits() -> None:
    model = MODELS["qwen2.5-0.5b"]
    assert (
        model_flops(model, Work(10, 0, 0), "reference") == 20 * 24 * model.active_layer_parameters
    )
    assert model_flops(model, Work(0, 10, 0), "reference") == 40 * 24 * 896
    assert model_flops(model, Work(0, 0, 10), "reference") == 20 * 151936 * 896
    assert model_flops(model, Work(1, 0, 2), "update") == 3 * model_flops(
        model, Work(1, 0, 2), "reference"
    )
    assert model_flops(model, Work(0, 2, 0), "update") == 7 * model_flops(
        model, Work(0, 1, 0), "reference"
    )
    batch = make_batch([[1, 2, 3], [1, 2, 4]], [[(1, 2)], [(1, 2)]])
    level: dict[str, Any] = sharing_stats(batch, model)["overall"]
    assert (level["logical_pairs"], level["unique_pairs"]) == (12, 9)
    assert (level["logical_head_tokens"], level["unique_head_tokens"]) == (2, 1)
    dense, shared = (
        model_flops(model, work, "reference") for work in (Work(6, 12, 2), Work(4, 9, 1))
    )
    assert level["speedup_bound_flops"] == dense / shared


def test_a_small_tree_by_hand() -> None:
    """Depths 0, 1, 2..3 and 4; the first two tokens have three and two readers."""
    stats = sharing_stats(make_batch([[1, 2, 3, 4, 5], [1, 2, 6], [1]], [[]] * 3))
    shape = stats["overall"]
    assert shape["unique_tokens_by_depth"] == [1, 1, 3, 1]
    assert shape["logical_tokens_by_depth"] == [3, 2, 3, 1]
    assert shape["unique_tokens_by_readers"] == [4, 2]
    assert shape["mean_depth_unique"] == pytest.approx((0 + 1 + 2 + 3 + 4 + 2) / 6)
    assert shape["mean_depth_logical"] == pytest.approx((3 * 0 + 2 * 1 + 2 + 3 + 4 + 2) / 9)
    assert (shape["num_leaves"], shape["num_forks"], shape["max_branches"]) == (2, 1, 2)
    assert [stats[f"sample_tokens_{name}"] for name in ("min", "median", "max")] == [1, 3.0, 5]
    assert stats["sample_tokens_p90"] == pytest.approx(3 + 0.8 * 2)


def test_no_samples_have_no_tokens() -> None:
    stats = sharing_stats(make_batch([], []))
    assert [stats[f"sample_tokens_{name}"] for name in ("min", "median", "p90", "max")] == [0] * 4
    assert stats["overall"]["unique_tokens_by_depth"] == [0]
