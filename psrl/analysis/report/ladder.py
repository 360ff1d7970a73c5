"""From dense training of steps to psRL, rung by rung: what each is worth and could be at most."""

import math

import pandas as pd

from psrl.analysis.units import time_unit, times
from psrl.core.plan.policy_names import MERGED_DENSE

from .comparison import Comparison

_DENSE = "verl"
STEPS, MERGED, SHARED, PLACED = "dense, as recorded", "dense, merged", "shared", "placed and cut"
RUNGS = (STEPS, MERGED, SHARED, PLACED)
COLUMNS = ("rung", "policy", "makespan_s", "factor", "speedup", "flop_ratio", "speedup_bound")


def ladder(comparison: Comparison) -> pd.DataFrame:
    """A row per rung; empty without dense training or without a policy that shares.

    The shared rung is no run: it is the dense rung before it with the work of the policy in
    focus, that is with its `sharing` and without what placement and cuts add. Columns:

    * rung; policy, whose run it is, or whose work;
    * makespan_s, over all phases; factor, the rung before over this one; speedup, the first over
      this one;
    * flop_ratio, the FLOPs of the first over the least of this rung; speedup_bound, the first's
      makespan over `least_s` of this rung.
    """
    focus, dense = comparison.focus, [_DENSE]
    if MERGED_DENSE in comparison.policies:
        dense.append(MERGED_DENSE)
    if _DENSE not in comparison.policies or focus in dense:
        return pd.DataFrame(columns=list(COLUMNS))
    times_s = [comparison.makespan_s(policy) for policy in dense]
    times_s += [_shared_s(comparison, dense[-1], focus), comparison.makespan_s(focus)]
    policies = [*dense, focus, focus]
    names = [*RUNGS[: len(dense)], SHARED, PLACED]
    before_s = [math.nan, *times_s[:-1]]
    first_ratio = comparison.flop_ratio(_DENSE)
    first_speedup = comparison.speedup(_DENSE)
    rows = [
        {
            "rung": name,
            "policy": policy,
            "makespan_s": makespan_s,
            "factor": earlier_s / makespan_s,
            "speedup": times_s[0] / makespan_s,
            "flop_ratio": comparison.flop_ratio(policy) / first_ratio,
            "speedup_bound": comparison.bound(policy) / first_speedup,
        }
        for name, policy, makespan_s, earlier_s in zip(
            names, policies, times_s, before_s, strict=True
        )
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _shared_s(comparison: Comparison, dense: str, focus: str) -> float:
    """Time of a dense policy if its compute time shrank to the work of another."""
    return sum(
        comparison.makespan_s(dense, (phase,))
        * _sharing(comparison, dense, phase)
        / _sharing(comparison, focus, phase)
        for phase in comparison.phases
    )


def _sharing(comparison: Comparison, policy: str, phase: str) -> float:
    if policy == comparison.baseline:
        return 1.0
    return comparison.factors[policy][phase]["sharing"]


def display_ladder(rungs: pd.DataFrame) -> pd.DataFrame:
    """The ladder as texts."""
    time = time_unit(rungs["makespan_s"].max())
    return pd.DataFrame(
        {
            "rung": rungs["rung"],
            "policy": rungs["policy"],
            f"time ({time.name})": time.column(rungs["makespan_s"].tolist()),
            "factor": [times(v) for v in rungs["factor"]],
            "speed-up": [times(v) for v in rungs["speedup"]],
            "FLOP ratio": [times(v) for v in rungs["flop_ratio"]],
            "bound": [times(v) for v in rungs["speedup_bound"]],
        }
    )
