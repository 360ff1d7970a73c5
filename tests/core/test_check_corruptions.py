"""Corruptions of real plans on disk: each is refused and named, or changes nothing that runs."""

import math
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import PlanError, PsrlError
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Plan
from psrl.core.plan.tables import TABLES, Table
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import open_trace
from psrl.sim import simulate
from tests.core.cases import with_values
from tests.core.plan_corruptions import (
    BASES,
    Change,
    cell,
    put,
    swapped,
    table,
    twice,
    without,
    write_plan,
)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory with the trace and the plan of a base."""
    root = tmp_path_factory.mktemp("plans")

    def find(name: str) -> Path:
        if not (root / name).exists():
            (root / name).mkdir()
            write_plan(root / name, BASES[name])
        return root / name

    return find


def accepted(plan_path: Path, trace_path: Path) -> tuple[Plan, SampleBatch]:
    """A plan that passes what `psrl simulate` asks of it."""
    plan = Plan.load(plan_path)
    batch = plan.batch_of(open_trace(trace_path))
    check_plan(plan, batch, memory_fraction=None)
    return plan, batch


def spoiled(base: Path, target: Path, change: Change) -> Path:
    shutil.copytree(base / "plan", target)
    change(target)
    return target


def times(factor: float) -> Callable[[float], float]:
    return lambda old: old * factor


def plus(number: float) -> Callable[[float], float]:
    return lambda old: old + number


OTHER_ROW = "rank == 1"
# (base, what, change, what the refusal says)
REFUSED: list[tuple[str, str, Change, str]] = [
    # plan.json: form
    ("psrl", "older schema", put("schema_version", 1), "schema version 1, .* reads 2"),
    ("psrl", "newer schema", put("schema_version", 3), "schema version 3"),
    ("psrl", "unknown key", put("polices", "psrl"), "unknown key 'polices'"),
    ("psrl", "unknown key of a program", put("programs.0.bounds", 1), r"programs\.0\.bounds"),
    ("psrl", "unknown key of the device", put("cluster.device.mem", 1), r"cluster\.device\.mem"),
    ("psrl", "key missing", put("phases", ...), "key 'phases' is missing"),
    ("psrl", "text for a number", put("iteration", "0"), "iteration = '0'"),
    ("psrl", "fraction for a count", put("model.num_layers", 4.5), r"model\.num_layers = 4\.5"),
    ("psrl", "truth for a count", put("model.num_layers", True), r"model\.num_layers = True"),
    ("psrl", "number for truth", put("programs.0.is_update", 0), r"programs\.0\.is_update = 0"),
    ("psrl", "number for a name", put("policy", 5), "policy = 5"),
    ("psrl", "NaN in plan.json", put("predicted.gap", math.nan), "NaN is no number"),
    ("psrl", "infinity in plan.json", put("predicted.gap", math.inf), "Infinity is no number"),
    ("psrl", "no options", put("options", 1), "options = 1"),
    ("psrl", "unknown option", put("options.sead", 1), r"options\.sead'\. Did you mean 'seed'"),
    ("psrl", "option out of range", put("options.memory_fraction", 1.5), "memory_fraction = 1.5"),
    ("psrl", "calibration of another form", put("calibration", {"a": 1}), "calibration"),
    ("psrl", "negative iteration", put("iteration", -1), "iteration = -1"),
    # plan.json: another trace
    ("psrl", "other trace", put("trace_hash", "0" * 64), "made for trace 000000000000"),
    ("psrl", "hash that is none", put("trace_hash", "abc"), "trace_hash = 'abc'"),
    ("psrl", "other iteration", put("iteration", 1), "no iteration 1"),
    # plan.json: layout
    (
        "psrl",
        "tensor parallel size 3",
        put("parallel.tensor_model_parallel_size", 3),
        r"rule 11: parallel sizes tensor\(3\)",
    ),
    (
        "psrl_pp2",
        "pipeline parallel size 1",
        put("parallel.pipeline_model_parallel_size", 1),
        r"rule 11: .*pipeline\(1\)",
    ),
    (
        "psrl",
        "data parallel size 3",
        put("parallel.data_parallel_size", 3),
        r"rule 11: .*data\(3\)",
    ),
    ("psrl", "one device", put("cluster.devices_per_host", 1), "rule 11: .* 1 devices"),
    (
        "verl",
        "heads that do not divide",
        put("model.num_attention_heads", 7),
        r"rule 11: .*num_attention_heads \(7\)",
    ),
    (
        "psrl_pp2",
        "layers that do not divide",
        put("model.num_layers", 5),
        r"rule 11: .*num_layers \(5\)",
    ),
    (
        "psrl",
        "experts of a dense model",
        put("parallel.expert_model_parallel_size", 2),
        r"rule 11: .*expert",
    ),
    (
        "moe_ep2",
        "experts that do not divide",
        put("parallel.expert_model_parallel_size", 3),
        "rule 11: .*expert_model_parallel_size",
    ),
    # plan.json: phases and programs
    (
        "psrl",
        "phase missing in a program",
        put("programs.0.phases", ["reference"]),
        "rule 1: .*log_",
    ),
    (
        "psrl",
        "phase missing in the plan",
        put("phases", ["log_old_prob", "update"]),
        "rule 1: prog",
    ),
    ("psrl", "phase of no program", put("programs.0.phases", []), "rule 1: program 0 runs in none"),
    ("psrl", "phase twice", put("programs.0.phases", ["reference"] * 2), "rule 1: program 0"),
    ("psrl", "unknown phase", put("programs.0.phases", ["rollout"]), "rule 1: program 0 .*rollout"),
    (
        "psrl",
        "phases out of order",
        put("phases", ["update", "log_old_prob", "reference"]),
        "rule 1: the plan states the phases update, ",
    ),
    (
        "psrl",
        "update as a forward phase",
        put("programs.1.phases", ["reference"]),
        "rule 1: program 1 has backwards but runs in reference",
    ),
    ("psrl", "update without backwards", put("programs.1.is_update", False), "rule 1: program 1"),
    (
        "psrl",
        "backwards in a forward phase",
        put("programs.0.is_update", True),
        "rule 1: program 0",
    ),
    (
        "psrl",
        "mini-batch of another program",
        put("programs.1.mini_batch", 1),
        "rule 1: program 1 trains mini-batch 1 but holds 7 samples",
    ),
    (
        "psrl",
        "mini-batch of a forward phase",
        put("programs.0.mini_batch", 0),
        "rule 1: program 0 has no backwards but mini-batch 0",
    ),
    ("psrl", "program missing", put("programs.2", ...), r"rows of programs 0\.\.2, .* lists 2"),
    (
        "psrl",
        "program without rows",
        put("programs", lambda old: [*old, {**old[2], "mini_batch": 2}]),
        "rule 1: program 3 trains mini-batch 2 but has no samples",
    ),
    (
        "psrl",
        "programs in another order",
        put("programs", lambda old: [old[0], old[2], old[1]]),
        "rule 1: program 1 trains mini-batch 1",
    ),
    # plan.json: sharing
    ("psrl", "granularity 0", put("programs.0.granularity_tokens", 0), "rule 2: .*tokens is 0"),
    ("psrl", "granularity -1", put("programs.1.granularity_tokens", -1), "rule 2: .*tokens is -1"),
    ("psrl", "granularity 16", put("programs.0.granularity_tokens", 16), "rule 2: program 0"),
    ("psrl", "granularity of a billion", put("programs.0.granularity_tokens", 10**30), "rule 2: "),
    ("vllm_ps", "granularity 8", put("programs.0.granularity_tokens", 8), "rule [23]: program 0"),
    ("vllm_ps", "block size 0", put("programs.0.block_tokens", 0), "rule 2: .*block_tokens is 0"),
    ("vllm_ps", "block size 32", put("programs.0.block_tokens", 32), "rule 6: .*units of 32"),
    # plan.json: what times and bytes follow from
    ("psrl", "faster device", put("cluster.device.peak_flops_per_s", times(2)), "rule 12: "),
    ("psrl", "slower host", put("cluster.device.host_layer_s", times(2)), "rule 12: .*forward_s"),
    ("psrl_pp2", "slower links", put("cluster.intra_host_bytes_per_s", times(1e-3)), "rule 13: "),
    ("psrl", "larger vocabulary", put("model.vocab_size", times(2)), "rule 12: .*forward_s"),
    ("psrl", "more layers", put("model.num_layers", 8), "rule 12: .*forward_s"),
    ("psrl", "wider heads", put("model.kv_channels", 64), "rule 12: .*forward_s"),
    ("psrl", "untied embeddings", put("model.tied_embeddings", False), "rule 1[23]: "),
    ("psrl", "other precision", put("cluster.device.dtype_bytes", 4), "rule 12: .*forward_s"),
    ("psrl", "full recompute", put("parallel.recompute", "full"), "rule 3: .* 'keep'"),
    # plan.json: predictions
    *(
        ("psrl", f"other {name}", put(f"predicted.{name}", times(1.001)), rf"predicted\.{name} is")
        for name in (
            "makespan_s",
            "log_old_prob_s",
            "reference_s",
            "update_s",
            "worker_time_max_s",
            "worker_time_min_s",
            "gap",
            "placement_gap",
            "executed_tokens",
            "duplicated_tokens",
            "num_micro_batches",
            "peak_memory_bytes",
        )
    ),
    ("psrl", "bound of 1e9 seconds", put("predicted.lower_bound_s", 1e9), r"rule 1[34]: predicted"),
    ("psrl", "bound below the proven", put("predicted.lower_bound_s", times(0.9)), "rule 1[34]: "),
    ("psrl", "negative time", put("predicted.update_s", times(-1)), r"rule 13: .*update_s is -"),
    ("psrl", "unknown prediction", put("predicted.mfu", 0.5), "rule 13: predicted has .* mfu"),
    ("psrl", "prediction missing", put("predicted.gap", ...), "rule 13: predicted lacks gap"),
    ("psrl", "text for a prediction", put("predicted.gap", "0"), r"predicted\.gap = '0'"),
    # plan.json: certificates
    ("psrl", "bound without certificate", put("programs.0.bound", None), "rule 1[34]: "),
    ("psrl", "higher limit", put("programs.0.bound.limit_s", times(1.01)), "rule 1[34]: "),
    ("psrl", "other proof", put("programs.0.bound.kind", "guess"), r"bound\.kind = 'guess'"),
    ("psrl_pp2", "no recompute", put("parallel.recompute", "none"), "rule 1[34]: "),
    # assignments
    ("psrl", "sample twice", cell("assignments", "sample", 8), "rule [12]: "),
    ("psrl", "sample beyond the trace", cell("assignments", "sample", 99), "samples 7?.*99"),
    ("psrl", "negative sample", cell("assignments", "sample", -1), "rule 1: .* samples -1"),
    ("psrl", "sample left out", without("assignments", 0), "rule 1: phase log_old_prob covers 20"),
    ("psrl", "sample of another mini-batch", cell("assignments", "sample", 0), "rule 1: program 2"),
    ("psrl", "assigned to no rank", cell("assignments", "rank", 2), r"rule 1: .*ranks 0\.\.2"),
    ("psrl", "assigned to another rank", cell("assignments", "rank", 1), "rule 2: program 2"),
    ("psrl", "shares with nobody", cell("assignments", "share_key", 5), "rule [23]: program 2"),
    ("verl", "share key of another", cell("assignments", "share_key", plus(1)), "rule [23]: prog"),
    # segments
    ("psrl", "segment lost", without("segments", 3), "rule 2: program 0"),
    ("psrl", "segment twice", twice("segments", 3), "rule 2: program 0"),
    ("psrl", "segment one token shorter", cell("segments", "num_tokens", plus(-1)), "rule 2: "),
    ("psrl", "segment without tokens", cell("segments", "num_tokens", 0), "rule 2: .* 0 tokens"),
    ("psrl", "segment of 2^62 tokens", cell("segments", "num_tokens", 2**62), "rule 2: "),
    ("psrl", "segment one token later", cell("segments", "start_depth", plus(1)), "rule 2: "),
    ("psrl", "negative depth", cell("segments", "start_depth", -1), "rule 2: "),
    ("psrl", "root", cell("segments", "node", 0), r"rule 2: .* node 0; .* 1\.\."),
    ("psrl", "unknown node", cell("segments", "node", 10**6), "rule 2: .* node 1000000"),
    ("psrl", "other node", cell("segments", "node", plus(1)), "rule 2: "),
    ("psrl", "unknown micro-batch", cell("segments", "micro_batch", 9), "rule 3: "),
    (
        "psrl",
        "other micro-batch",
        cell("segments", "micro_batch", plus(1), "micro_batch == 0"),
        "rule 3: ",
    ),
    ("psrl", "segment of another rank", cell("segments", "rank", 1), "rule 2: "),
    ("psrl", "segments swapped", swapped("segments", 0, 1), "rule 3: .*pre-order: .* follows"),
    # micro_batches
    ("psrl", "micro-batch lost", without("micro_batches", 1), "rule 3: .*number 2 stands in place"),
    ("psrl", "micro-batch twice", twice("micro_batches", -1), "rule 3: .*stands in place 3"),
    ("psrl", "numbering with a gap", cell("micro_batches", "micro_batch", 7), "rule 3: .*number 7"),
    ("psrl", "unknown activation", cell("micro_batches", "activation", "offload"), "'offload'"),
    (
        "psrl",
        "dropped in a forward phase",
        cell("micro_batches", "activation", "drop", program=0),
        "rule 3: program 0, .* 'drop', not one of keep, recompute",
    ),
    ("psrl", "dropped without recompute", cell("micro_batches", "activation", "drop"), "rule 5: "),
    (
        "psrl",
        "recompute that takes no time",
        cell("micro_batches", "activation", "recompute"),
        "rule 12: .*backward_s",
    ),
    (
        "psrl",
        "fewer tokens",
        cell("micro_batches", "num_tokens", plus(-1)),
        r"rule 3: .* says \d+ and",
    ),
    (
        "psrl",
        "more pairs",
        cell("micro_batches", "pairs", plus(1)),
        r"rule 3: .*pairs, the table says",
    ),
    ("psrl", "negative pairs", cell("micro_batches", "pairs", -5), "rule 3: .*-5"),
    (
        "psrl",
        "more head tokens",
        cell("micro_batches", "head_tokens", plus(1)),
        "rule 8: .*says 15",
    ),
    ("psrl", "shorter forward", cell("micro_batches", "forward_s", times(0.5)), "rule 12: .*forw"),
    ("psrl", "longer backward", cell("micro_batches", "backward_s", times(2)), "rule 12: .*backw"),
    ("psrl", "negative time of a forward", cell("micro_batches", "forward_s", -1.0), "rule 12: "),
    ("psrl", "NaN time", cell("micro_batches", "backward_s", math.nan), "gaps|rule 12: .*nan"),
    ("psrl", "infinite time", cell("micro_batches", "forward_s", math.inf), "rule 12: .*inf"),
    ("psrl", "micro-batch of no rank", cell("micro_batches", "rank", -1), r"ranks -1\.\."),
    # schedule
    ("psrl", "op lost", without("schedule", -1), "rule 5: program 2"),
    ("psrl", "op twice", twice("schedule", 0), "rule 5: program 0"),
    ("psrl", "unknown op", cell("schedule", "op", "release"), "rule 5: program 2"),
    ("psrl", "backward for forward", cell("schedule", "op", "backward"), "rule 5: program 2"),
    (
        "psrl",
        "backward in a forward phase",
        cell("schedule", "op", "backward", program=0),
        "rule 5",
    ),
    ("psrl", "op of no micro-batch", cell("schedule", "micro_batch", 77), "rule 5: program 2"),
    ("psrl", "op of another rank", cell("schedule", "rank", 1), "rule 5: program 2"),
    (
        "psrl",
        "read before it is written",
        swapped("schedule", 0, 1),
        r"rule 6: .*block \d is released before",
    ),
    ("psrl", "backward before the forward", swapped("schedule", 16, 21), "rule 5: .*precedes"),
    ("psrl", "ancestor's backward first", swapped("schedule", 21, 20), "rule [56]: program 2"),
    ("moe_ep2", "rank with another pattern", swapped("schedule", 9, 10), "rule [56]|rule 10: "),
    # blocks
    ("psrl", "read rows not cached", without("blocks", -1), r"rule 4: .*rows \d+\.\.\d+ of"),
    ("psrl", "block twice", twice("blocks", -1), r"rule 6: .*number \d stands in place"),
    ("psrl", "numbers with a gap", cell("blocks", "block", 3), "rule 6: .*number 3 stands"),
    ("psrl", "negative number", cell("blocks", "block", -1), "rule 6: .*number -1 stands"),
    (
        "psrl",
        "block of no micro-batch",
        cell("blocks", "micro_batch", 9),
        "rule 6: .*micro-batch 9",
    ),
    ("psrl", "block of another micro-batch", cell("blocks", "micro_batch", 1), "rule [46]: "),
    ("psrl", "row below 0", cell("blocks", "start_row", -1), r"rule 6: .*rows \[-1, "),
    ("psrl", "rows that do not exist", cell("blocks", "start_row", 10), r"rule 6: .*rows \[10, "),
    ("psrl", "row 2^63 - 1", cell("blocks", "start_row", 2**63 - 1), "rule 6: .*holds rows"),
    ("psrl", "fewer rows", cell("blocks", "num_tokens", plus(-1)), "rule 6: .*allocated"),
    ("psrl", "no rows", cell("blocks", "num_tokens", 0), r"rule 6: .*in \d+ allocated"),
    ("psrl", "allocated too little", cell("blocks", "allocated_tokens", plus(-1)), "rule 6: "),
    (
        "psrl",
        "allocated too much",
        cell("blocks", "allocated_tokens", plus(1)),
        r"rule 6: .*in \d+ allocated",
    ),
    ("vllm_ps", "part of a block", cell("blocks", "allocated_tokens", plus(1)), "units of 16"),
    (
        "psrl",
        "released by no op",
        cell("blocks", "release_op", "optimizer"),
        "rule 6: .*'optimizer'",
    ),
    (
        "psrl",
        "released by a recompute",
        cell("blocks", "release_op", "recompute"),
        "rule 6: .*'recompute' of micro-batch 0",
    ),
    ("psrl", "released too early", cell("blocks", "release_op", "forward"), "rule 6: .*block 0"),
    (
        "psrl",
        "released before its last reader",
        cell("blocks", "release_micro_batch", plus(-1), program=0),
        r"rule 6: .*reads block \d at op \d, alive from \d to \d",
    ),
    ("psrl", "released by nobody", cell("blocks", "release_micro_batch", 9), "rule 6: .*batch 9"),
    (
        "vllm_ps",
        "kept to the end of a micro-batch",
        cell("blocks", "release_micro_batch", 0),
        "rule 6: .*'end' of micro-batch 0",
    ),
    ("psrl", "block of another rank", cell("blocks", "rank", 1), "rule [46]: "),
    # files
    ("psrl", "no blocks", table("blocks", lambda f: f.iloc[:0]), "rule 4: program 0"),
    ("psrl", "empty segments", table("segments", lambda f: f.iloc[:0]), "rule 2: program 0"),
    ("psrl", "table of another program", cell("segments", "program", 1), "rule 2: program 1"),
    ("psrl", "row of no program", cell("segments", "program", 3), "rows of programs 0..3"),
    ("psrl", "no schedule", lambda plan: (plan / "schedule.parquet").unlink(), "schedule.parquet"),
    ("psrl", "table in place of another", lambda plan: _copy(plan, "segments", "blocks"), "column"),
    ("psrl", "half a table", lambda plan: _halve(plan / "segments.parquet"), "damaged plan"),
]


def _kept_to_the_end(frame: pd.DataFrame) -> pd.DataFrame:
    frame["release_op"], frame["release_micro_batch"] = "end", -1
    return frame


def _copy(plan: Path, source: str, target: str) -> None:
    shutil.copy(plan / f"{source}.parquet", plan / f"{target}.parquet")


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [pytest.param(b, change, message, id=f"{b}: {what}") for b, what, change, message in REFUSED],
)
def test_refused(
    base: str, change: Change, message: str, plans: Callable[[str], Path], tmp_path: Path
) -> None:
    path = spoiled(plans(base), tmp_path / "plan", change)
    with pytest.raises(PsrlError, match=f"(?s){message}"):
        accepted(path, plans(base) / "trace")


# Changes of labels, of rows whose order means nothing, and of what is not decided.
HARMLESS: list[tuple[str, str, Change]] = [
    ("psrl", "other name of the policy", put("policy", "mine")),
    ("psrl", "other seed", put("options.seed", 5)),
    ("psrl", "other budget that the cuts were asked for", put("options.memory_fraction", 0.5)),
    ("psrl", "nothing predicted", put("predicted", {})),
    ("psrl", "other name of the device", put("cluster.device.name", "other")),
    ("psrl", "links of a single host to others", put("cluster.inter_host_latency_s", 1.0)),
    ("psrl", "more memory", put("cluster.device.memory_bytes", times(2))),
    ("verl", "share keys in the same order", table("assignments", lambda f: _shifted(f))),
    ("psrl", "segments of ranks interleaved", table("segments", lambda f: _interleaved(f))),
    ("psrl", "ops of ranks interleaved", table("schedule", lambda f: _interleaved(f))),
    ("psrl", "blocks of ranks interleaved", table("blocks", lambda f: _interleaved(f))),
    (
        "psrl",
        "ranks of micro-batches interleaved",
        table("micro_batches", lambda f: _interleaved(f)),
    ),
]


def _shifted(frame: pd.DataFrame) -> pd.DataFrame:
    frame["share_key"] = 3 * frame["share_key"] - 7
    return frame


def _interleaved(frame: pd.DataFrame) -> pd.DataFrame:
    """The last rank's rows first; each rank's in their order."""
    return frame.sort_values("rank", ascending=False, kind="stable")


@pytest.mark.parametrize(
    ("base", "change"), [pytest.param(b, change, id=f"{b}: {what}") for b, what, change in HARMLESS]
)
def test_harmless(base: str, change: Change, plans: Callable[[str], Path], tmp_path: Path) -> None:
    path = spoiled(plans(base), tmp_path / "plan", change)
    before = accepted(plans(base) / "plan", plans(base) / "trace")
    after = accepted(path, plans(base) / "trace")
    assert_same_run(after, before)


@pytest.mark.parametrize("base", ["psrl", "psrl_pp2", "moe_ep2"])
def test_blocks_may_live_longer(base: str, plans: Callable[[str], Path], tmp_path: Path) -> None:
    """Another choice of caching is a plan too, as long as its stated peak of memory is true."""
    path = spoiled(plans(base), tmp_path / "plan", table("blocks", _kept_to_the_end))
    put("predicted", {})(path)
    plan, batch = accepted(path, plans(base) / "trace")
    before = accepted(plans(base) / "plan", plans(base) / "trace")
    events = simulate(plan, batch), simulate(*before)
    for f in fields(Events):
        found, expected = (getattr(e, f.name) for e in events)
        if f.name == "kv_bytes":
            assert (found >= expected).all()
            assert (found > expected).any()
        elif f.name == "kv_gradient_bytes":
            assert (found >= expected).all()
        else:
            np.testing.assert_array_equal(found, expected, err_msg=f.name)


def assert_same_run(found: tuple[Plan, SampleBatch], expected: tuple[Plan, SampleBatch]) -> None:
    """The simulated events, and what every rank executes, are the same."""
    events = [simulate(plan, batch) for plan, batch in (found, expected)]
    for f in fields(Events):
        np.testing.assert_array_equal(*(getattr(e, f.name) for e in events), err_msg=f.name)
    assert found[0].phases == expected[0].phases
    for a, b in zip(found[0].programs, expected[0].programs, strict=True):
        assert (a.phases, a.is_update, a.mini_batch) == (b.phases, b.is_update, b.mini_batch)
        left, right = a.tree(found[1]), b.tree(expected[1])
        for name in ("parent", "start_depth", "num_tokens", "sample_node", "representative"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist()
        for rank in range(expected[0].num_ranks):
            mine, other = a.on_rank(rank), b.on_rank(rank)
            for name in ("segments", "micro_batches", "schedule", "blocks"):
                assert_same_table(getattr(mine, name), getattr(other, name))
            assert mine.assignments.sample.tolist() == other.assignments.sample.tolist()


def assert_same_table(found: Table, expected: Table) -> None:
    for f in fields(expected):
        left, right = getattr(found, f.name), getattr(expected, f.name)
        assert left.tolist() == right.tolist(), f.name


def test_there_are_enough_of_them() -> None:
    assert len({what for _, what, _, _ in REFUSED}) == len(REFUSED) >= 64


def test_a_plan_that_nobody_spoiled_passes(plans: Callable[[str], Path]) -> None:
    for name in BASES:
        plan, _ = accepted(plans(name) / "plan", plans(name) / "trace")
        assert len(plan.programs) == 3


@pytest.mark.slow
@given(name=st.sampled_from(list(BASES)), data=st.data())
def test_any_other_cell_is_refused_or_changes_nothing(
    name: str, data: st.DataObject, plans: Callable[[str], Path]
) -> None:
    """One cell of any table, to a neighbour, a far value or another word."""
    plan, batch = accepted(plans(name) / "plan", plans(name) / "trace")
    index = data.draw(st.integers(0, len(plan.programs) - 1))
    program = plan.programs[index]
    filled = [t for t in TABLES if len(getattr(program, t))]
    which = data.draw(st.sampled_from(filled))
    rows = getattr(program, which)
    column = data.draw(st.sampled_from([f.name for f in fields(rows)]))
    row = data.draw(st.integers(0, len(rows) - 1))
    old = getattr(rows, column)[row]
    kind = getattr(rows, column).dtype.kind
    if kind == "U":
        words = st.sampled_from(["forward", "backward", "recompute", "end", "keep", "drop", ""])
        new = data.draw(words.filter(lambda word: word != old))
    elif kind == "f":
        new = data.draw(st.sampled_from([math.nan, math.inf, -old, 0.0, old * (1 + 1e-6)]))
    else:
        near = st.integers(-3, 3).map(lambda step: int(old) + step)
        new = data.draw((near | st.sampled_from([-(2**63), 2**63 - 1])).filter(lambda v: v != old))
    changed = replace(program, **{which: with_values(rows, row, **{column: new})})
    programs = (*plan.programs[:index], changed, *plan.programs[index + 1 :])
    other = replace(plan, programs=programs)
    refusal = ""
    try:
        check_plan(other, batch, memory_fraction=None)
    except PlanError as error:
        refusal = error.message
    assert not refusal or refusal.startswith("rule ")
    if refusal:
        return
    before, after = simulate(plan, batch), simulate(other, batch)
    for f in fields(Events):
        if f.name not in ("kv_bytes", "kv_gradient_bytes"):
            np.testing.assert_array_equal(getattr(after, f.name), getattr(before, f.name))
    # A block may live longer as long as the stated peak remains.
    assert after.total_bytes.max() == before.total_bytes.max()
