"""What tokens, pairs and predicted rows cost, without anything that is paid per micro-batch."""

from dataclasses import dataclass

from .cost_model import CostModel

# Amount at which a cost model's fixed parts (launches, latencies) have vanished beside the slope.
_LARGE = 1e9


@dataclass(frozen=True)
class UnitCosts:
    """Seconds per computed token, per visible (query, key) pair and per predicted row."""

    token_s: float
    pair_s: float
    head_s: float


def unit_costs(cost: CostModel, num_phases: int, is_update: bool, recompute: bool) -> UnitCosts:
    """Seconds on the slowest stage, all phases of a program together.

    Args:
        num_phases: forward-only phases that run the program.
        recompute: whether the backward of an update runs the forward of the layers again.
    """

    def slope(tokens: float, pairs: float, head_tokens: float) -> float:
        forward = cost.forward_s(tokens, pairs, head_tokens)
        if not is_update:
            return num_phases * float(forward) / _LARGE
        total = forward + cost.backward_s(tokens, pairs, head_tokens)
        if recompute:
            total = total + cost.forward_s(tokens, pairs, 0.0)
        return float(total) / _LARGE

    return UnitCosts(slope(_LARGE, 0.0, 0.0), slope(0.0, _LARGE, 0.0), slope(0.0, 0.0, _LARGE))
