"""Our value of every published row: the same few questions asked of the measurements."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .notes import NOTES, RATIO_NOTES, Note, note_text
from .results import NotRunError, Results
from .table import Published, Row

SMALL = ("alfworld_8", "webshop_8", "search_8")
DTN = ("dtn_1536", "dtn_1536_step_rt", "dtn_1536_schedulers")
_GIB = 2**30

# (scenario, mode, the system that psRL is compared with)
SpeedupKey = tuple[str, str, str]
Speedups = dict[SpeedupKey, float]


@dataclass(frozen=True)
class Rule:
    """How a row is answered.

    Attributes:
        kind: "ratio", "absolute", or "input" where our workload was made to match.
        value: in the row's own unit.
        factors: the speed-up as cuts x placement x sharing, for rows that are one.
    """

    kind: str
    value: Callable[[Results], float]
    factors: Callable[[Results], dict[str, float]] | None = None


def _match(scenario: str, mode: str) -> Rule:
    return Rule("input", lambda r: r.match_rate(scenario, mode))


def _time(policy: str, phase: str) -> Rule:
    return Rule("absolute", lambda r: r.phase_s("dtn_1536", "step", policy, phase))


def _throughput(scenario: str, policy: str = "psrl") -> Rule:
    return Rule(
        "absolute", lambda r: float(r.phase(scenario, "step", policy)["logical_tokens_per_s"])
    )


def _speedup(scenario: str, over: str) -> Rule:
    return Rule(
        "ratio",
        lambda r: r.speedup(scenario, "step", over),
        lambda r: r.factors(scenario, "step", over),
    )


def _worker(policy: str, end: str) -> Rule:
    return Rule(
        "absolute",
        lambda r: float(
            r.phase("dtn_1536_schedulers", "tree_step", policy)[f"worker_time_{end}_s"]
        ),
    )


def _peak(scenario: str, mode: str, policy: str) -> Rule:
    return Rule("absolute", lambda r: r.peak_bytes(scenario, mode, policy) / _GIB)


def _pool(scenario: str, mode: str, policy: str) -> Rule:
    return Rule("absolute", lambda r: r.pool_peak_bytes(scenario, mode, policy) / _GIB)


def _update_shares(results: Results, traj: bool) -> list[float]:
    return [
        results.iteration(*key)["update_share"]
        for key in results.runs(*SMALL, *DTN)
        if key[2] == "verl" and (key[1] == "traj") == traj
    ]


def _psrl_runs(results: Results, *scenarios: str) -> list[tuple[str, str]]:
    return [(s, mode) for s, mode, policy in results.runs(*scenarios) if policy == "psrl"]


def _speedups(results: Results) -> Speedups:
    runs = _psrl_runs(results, *SMALL, *DTN)
    return {(*run, "verl"): results.speedup(*run, "verl") for run in runs}


def _over_ps(results: Results) -> Speedups:
    return {
        (*run, ps): results.speedup(*run, ps)
        for run in _psrl_runs(results, "search_8", "webshop_8")
        for ps in ("vllm_ps", "sglang_ps")
    }


def _ps_memory(results: Results) -> list[float]:
    return [
        results.pool_peak_bytes(s, mode, policy) / results.peak_bytes(s, mode, "verl")
        for s, mode, policy in results.runs(*SMALL, "dtn_1536")
        if policy in ("vllm_ps", "sglang_ps")
    ]


def _end_to_end(results: Results) -> float:
    def iteration_s(run: tuple[str, str], policy: str) -> float:
        return results.iteration(*run, policy)["synchronous_s"]

    runs = _psrl_runs(results, *SMALL, "dtn_1536")
    return max(iteration_s(run, "verl") / iteration_s(run, "psrl") for run in runs)


def _extreme(values: Callable[[Results], Speedups], is_largest: bool) -> Rule:
    """The smallest or largest of many speed-ups, with its factors."""

    def chosen(results: Results) -> tuple[float, SpeedupKey]:
        by_value = sorted((value, key) for key, value in values(results).items())
        return by_value[-1 if is_largest else 0]

    return Rule("ratio", lambda r: chosen(r)[0], lambda r: r.factors(*chosen(r)[1]))


RULES: dict[str, Rule] = {
    "pm-alf": _match("alfworld_8", "step"),
    "pm-web": _match("webshop_8", "step"),
    "pm-dtn": _match("dtn_1536", "step"),
    "pm-dtn-tree": _match("dtn_1536_schedulers", "tree_step"),
    "share-struct-lo": Rule("ratio", lambda r: min(_update_shares(r, traj=False))),
    "share-struct-hi": Rule("ratio", lambda r: max(_update_shares(r, traj=False))),
    "share-linear-lo": Rule("ratio", lambda r: min(_update_shares(r, traj=True))),
    "share-linear-hi": Rule("ratio", lambda r: max(_update_shares(r, traj=True))),
    "web-growth": Rule(
        "ratio",
        lambda r: r.phase_s("webshop_8", "step", "verl") / r.phase_s("webshop_8", "traj", "verl"),
    ),
    "speed-lo": _extreme(_speedups, is_largest=False),
    "speed-hi": _extreme(_speedups, is_largest=True),
    "ps-lo": _extreme(_over_ps, is_largest=False),
    "ps-hi": _extreme(_over_ps, is_largest=True),
    "dtn-tps": _throughput("dtn_1536"),
    "dtn-tps-sg": _throughput("dtn_1536", "sglang_ps"),
    "dtn-tps-verl": _throughput("dtn_1536", "verl"),
    "dtn-olp-verl": _time("verl", "log_old_prob"),
    "dtn-olp": _time("psrl", "log_old_prob"),
    "dtn-ref-verl": _time("verl", "reference"),
    "dtn-ref": _time("psrl", "reference"),
    "dtn-upd-verl": _time("verl", "update"),
    "dtn-upd": _time("psrl", "update"),
    "e2e": Rule("ratio", _end_to_end),
    "web-iter": Rule(
        "absolute", lambda r: r.iteration("webshop_8", "step", "verl")["synchronous_s"]
    ),
    "mem-ps-lo": Rule("ratio", lambda r: min(_ps_memory(r))),
    "mem-ps-hi": Rule("ratio", lambda r: max(_ps_memory(r))),
    "mem-alf-vllm": _pool("alfworld_8", "step_s", "vllm_ps"),
    "mem-alf-verl": _peak("alfworld_8", "step_s", "verl"),
    "mem-dtn-verl": _peak("dtn_1536", "step", "verl"),
    "mem-dtn": _peak("dtn_1536", "step", "psrl"),
    "scale-search": _throughput("search_64"),
    "scale-search-verl": _speedup("search_64", "verl"),
    "scale-search-sg": _speedup("search_64", "sglang_ps"),
    "scale-dtn": _throughput("dtn_12288"),
    "scale-dtn-verl": _speedup("dtn_12288", "verl"),
    "scale-dtn-sg": _speedup("dtn_12288", "sglang_ps"),
    "len8-search": _throughput("search_8_long"),
    "len8-search-x": _speedup("search_8_long", "verl"),
    "len8-dtn": _throughput("dtn_1536_long"),
    "sched-psrl-min": _worker("psrl", "min"),
    "sched-psrl-max": _worker("psrl", "max"),
    "sched-agn-min": _worker("sharing_agnostic", "min"),
    "sched-agn-max": _worker("sharing_agnostic", "max"),
    "sched-pmf-min": _worker("prefix_match_first", "min"),
    "sched-pmf-max": _worker("prefix_match_first", "max"),
    "sched-bf-max": _worker("balance_first", "max"),
    "dbc-step": _peak("dtn_1536", "step", "psrl"),
    "dbc-step-off": _pool("dtn_1536", "step", "psrl"),
    "dbc-rt": _peak("dtn_1536_step_rt", "step_rt", "psrl"),
    "dbc-rt-off": _pool("dtn_1536_step_rt", "step_rt", "psrl"),
    "dbc-tree": _peak("dtn_1536_schedulers", "tree_step", "psrl"),
    "dbc-tree-off": _pool("dtn_1536_schedulers", "tree_step", "psrl"),
}

# Quotients of two published rows: what absolute times and bytes leave when the unknown GPU cancels.
QUOTIENTS: tuple[tuple[str, str, str, str], ...] = (
    ("x-olp", "DTN step, log-old-prob: veRL over psRL", "dtn-olp-verl", "dtn-olp"),
    ("x-ref", "DTN step, reference: veRL over psRL", "dtn-ref-verl", "dtn-ref"),
    ("x-upd", "DTN step, update: veRL over psRL", "dtn-upd-verl", "dtn-upd"),
    ("x-sg", "DTN step, update: SGLang-PS over veRL", "dtn-tps-sg", "dtn-tps-verl"),
    ("uf-verl", "DTN step, veRL: update over reference", "dtn-upd-verl", "dtn-ref-verl"),
    ("uf-psrl", "DTN step, psRL: update over reference", "dtn-upd", "dtn-ref"),
    ("grow-dtn", "DTN, psRL tokens/s: 12,288 over 1,536 GPUs", "scale-dtn", "dtn-tps"),
    ("len-dtn", "DTN, psRL tokens/s: 8x length over 1x", "len8-dtn", "dtn-tps"),
    ("spread-psrl", "DTN tree_step, worker max over min: psRL", "sched-psrl-max", "sched-psrl-min"),
    ("spread-agn", "the same: sharing-agnostic", "sched-agn-max", "sched-agn-min"),
    ("spread-pmf", "the same: prefix-match-first", "sched-pmf-max", "sched-pmf-min"),
    ("max-agn", "slowest worker: sharing-agnostic over psRL", "sched-agn-max", "sched-psrl-max"),
    ("max-pmf", "slowest worker: prefix-match-first over psRL", "sched-pmf-max", "sched-psrl-max"),
    ("max-bf", "slowest worker: balance-first over psRL", "sched-bf-max", "sched-psrl-max"),
    ("mem-x", "DTN step, peak memory: psRL over veRL", "mem-dtn", "mem-dtn-verl"),
    ("mem-alf", "ALFWorld step_s, peak memory: vLLM-PS over veRL", "mem-alf-vllm", "mem-alf-verl"),
    ("dbc", "DTN step, peak memory: with over without caching", "dbc-step", "dbc-step-off"),
)
_QUOTIENT_FACTORS = {"x-olp": "log_old_prob", "x-ref": "reference", "x-upd": "update"}


def reproduced_rows(published: Iterable[Published], results: Results) -> list[Row]:
    """Every published row with our value, then the quotients of rows."""
    by_id = {p.id: p for p in published}
    rows = {p.id: row_of(p, results) for p in by_id.values()}
    quotients = []
    for name, what, above, below in QUOTIENTS:
        p = Published.quotient(name, what, by_id[above], by_id[below])
        top, bottom = rows[above], rows[below]
        missing = top.missing or bottom.missing
        ours = None
        if top.ours is not None and bottom.ours is not None:
            ours = top.ours / bottom.ours if bottom.ours else math.inf
        phase, factors = _QUOTIENT_FACTORS.get(name), None
        if phase is not None and ours is not None:
            factors = results.factors("dtn_1536", "step", "verl", phase=phase)
        note = _note(RATIO_NOTES.get(name, ""), results)
        quotients.append(Row(p, "ratio", ours, factors, note, missing))
    return [*rows.values(), *quotients]


def row_of(published: Published, results: Results) -> Row:
    """A published row with our value, or with the reason why there is none."""
    rule = RULES.get(published.id)
    if rule is None:
        return Row(published, "absolute", None, None, "", "no rule for this row")
    note = _note(NOTES.get(published.id, ""), results)
    try:
        ours = rule.value(results)
        factors = rule.factors(results) if rule.factors else None
    except NotRunError as reason:
        return Row(published, rule.kind, None, None, note, str(reason))
    return Row(published, rule.kind, ours, factors, note, "")


def _note(note: Note, results: Results) -> str:
    """The note, or nothing where it speaks of runs that were not chosen."""
    try:
        return note_text(note, results)
    except NotRunError:
        return ""
